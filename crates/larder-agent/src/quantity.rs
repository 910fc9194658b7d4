//! Durations and sizes as people write them: `90s`, `1h30m`, `1.5h`, `300ms` as in Go, `7d`, `500MB`, `10GiB`, `10Gi`.

use std::time::Duration;

use larder::config::{DurationError, GoDuration};

/// The longest duration that is accepted, a year; a longer one is a typing error.
pub const LONGEST: Duration = Duration::from_secs(8760 * 3600);

/// The end of an error.
const EXAMPLES: &str = "write it like 90s, 5m, 1h30m or 7d";

/// Reads a duration. Negative ones are refused, and those above [`LONGEST`]; a whole number without
/// a unit is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let is_seconds = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let days = text.strip_suffix('d').filter(|days| !days.is_empty());
    let days = days.filter(|days| days.bytes().all(|byte| byte.is_ascii_digit()));
    let written = match days {
        // More than that are too long anyway.
        Some(days) => format!("{}h", days.parse::<u32>().map_or(u64::MAX, |days| u64::from(days) * 24)),
        None if is_seconds => format!("{text}s"),
        None => text.to_owned(),
    };
    if text.strip_prefix('-').is_some_and(|text| parse_duration(text).is_ok()) {
        return Err(format!("{text:?} must not be negative; {EXAMPLES}"));
    }
    let duration = match GoDuration::parse(&written) {
        Ok(written) => written.to_std(),
        Err(DurationError::TooLong) => Some(Duration::MAX),
        Err(_) => None,
    };
    match duration {
        Some(duration) if duration <= LONGEST => Ok(duration),
        Some(_) => Err(format!("{text:?} is too long; the maximum is 8760h (one year)")),
        None => Err(format!("{text:?} is not a duration; {EXAMPLES}")),
    }
}

/// Units of sizes; longer ones first.
const SIZE_UNITS: [(&str, u64); 14] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("ki", 1 << 10),
    ("mi", 1 << 20),
    ("gi", 1 << 30),
    ("ti", 1 << 40),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
    ("", 1),
];

/// Reads a size in bytes: `500MB`, `10GiB`, `10Gi`, or a bare number.
pub fn parse_size(text: &str) -> Result<u64, String> {
    read_size(text)?.ok_or_else(|| format!("{text:?} is out of range: a size is from 1B to 1024PiB"))
}

/// Reads a size in bytes as [`parse_size`] does; `None` if it is below one byte, or above 1024 PiB.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // checked
pub(crate) fn read_size(text: &str) -> Result<Option<u64>, String> {
    if text.strip_prefix('-').is_some_and(|size| read_size(size).is_ok()) {
        return Ok(None);
    }
    let wrong = || format!("{text:?} is not a size; write it like 500MB or 10GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let (_, unit) = SIZE_UNITS.iter().find(|(known, _)| *known == unit).ok_or_else(wrong)?;
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * *unit as f64;
    Ok((1.0..=(1_u64 << 60) as f64).contains(&bytes).then_some(bytes as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_families_of_units() {
        for (text, bytes) in
            [("1", 1), ("500MB", 500_000_000), ("1.5Gi", 3 << 29), ("10GiB", 10 << 30), ("2kb", 2000)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "-1", "0", "GiB", "1X", "1..5G", "99999999TiB", "1e3"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        for text in ["-1", "0", "-5GiB", "99999999TiB"] {
            let wrong = parse_size(text).unwrap_err();
            assert!(wrong.ends_with("is out of range: a size is from 1B to 1024PiB"), "{wrong}");
        }
    }

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, millis) in [
            ("0", 0),
            ("5", 5000),
            ("0s", 0),
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            ("300ms", 300),
            ("2m3s", 123_000),
            ("1d", 86_400_000),
            ("7d", 604_800_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_with_an_example() {
        for text in ["", "5.", "-1s", "1x", "s", "1..5s", "1e3s", "1m 3s"] {
            assert!(parse_duration(text).expect_err(text).contains("1h30m"), "{text}");
        }
    }

    #[test]
    fn more_than_a_year_is_refused_with_the_bound() {
        assert_eq!(parse_duration("8760h"), Ok(LONGEST));
        let endless = format!("{}h", "9".repeat(400));
        for text in ["-1s", "-5", "-7d", "-1h30m"] {
            assert!(parse_duration(text).expect_err(text).contains("must not be negative"), "{text}");
        }
        for text in [
            "99999999999d",
            "366d",
            "8760h1s",
            "100000000h",
            "5000000000000000h",
            "99999999999999999999999h",
            &endless,
        ] {
            assert!(parse_duration(text).expect_err(text).contains("8760h"), "{text}");
        }
    }
}
