//! Durations on the command line, written as Go and Kubernetes write them: `90s`, `1h30m`, `1.5h`, `300ms`.

use std::time::Duration;

/// Units and their nanoseconds. `ms` stands before `m`, so that the longer one is found first.
const UNITS: [(&str, f64); 8] =
    [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("μs", 1e3), ("ms", 1e6), ("h", 3.6e12), ("m", 6e10), ("s", 1e9)];

/// Reads a duration. Negative ones are refused; `0` needs no unit.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration: write it like 90s, 5m or 1h30m");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut rest, mut nanos) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, tail) = rest.split_at(digits);
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let (unit, size) = UNITS.iter().find(|(unit, _)| tail.starts_with(unit)).ok_or_else(wrong)?;
        nanos += number * size;
        rest = &tail[unit.len()..];
    }
    if text.is_empty() {
        return Err(wrong());
    }
    Duration::try_from_secs_f64(nanos / 1e9).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            ("300ms", 300),
            ("2m3s", 123_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_with_an_example() {
        for text in ["", "5", "-1s", "1x", "s", "1..5s", "1e3s", "1m 3s", "99999999999999999999999h"] {
            assert!(parse(text).expect_err(text).contains("1h30m"), "{text}");
        }
    }
}
