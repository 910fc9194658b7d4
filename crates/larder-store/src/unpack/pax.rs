//! Extended headers (PAX) that tar-core reads less strictly or not at all.

use larder_erofs::ErofsTime;

/// PAX values that tar-core does not return, or not strictly.
#[derive(Default)]
pub(super) struct PaxValues {
    pub(super) mtime: Option<ErofsTime>,
    pub(super) size: Option<u64>,
}

/// Reads the records of an extended header. `None` if anything is malformed: tar-core skips over such things.
pub(super) fn strict_pax(mut records: &[u8]) -> Option<PaxValues> {
    let mut values = PaxValues::default();
    while !records.is_empty() {
        let space = records.iter().position(|byte| *byte == b' ')?;
        let length: usize = number(&records[..space])?;
        let record = records.get(space + 1..length)?;
        let record = record.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        match key {
            // As Go does: the header's value stays.
            _ if value.is_empty() => {}
            b"mtime" => values.mtime = Some(pax_time(value)?),
            b"size" => values.size = Some(number(value)?),
            b"uid" | b"gid" => {
                number::<u64>(value)?;
            }
            _ => {}
        }
        records = &records[length..];
    }
    Some(values)
}

fn number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(text).ok()?.parse().ok())?
}

/// `-1.25` and the like. Digits beyond nanoseconds are dropped; the fraction of a [`ErofsTime`] counts upwards.
fn pax_time(text: &[u8]) -> Option<ErofsTime> {
    let (negative, text) = text.strip_prefix(b"-").map_or((false, text), |rest| (true, rest));
    let dot = text.iter().position(|byte| *byte == b'.').unwrap_or(text.len());
    let seconds: i64 = number(&text[..dot])?;
    let fraction = text.get(dot + 1..).unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let nanos =
        (0..9).fold(0, |nanos, place| nanos * 10 + u32::from(fraction.get(place).unwrap_or(&b'0') - b'0'));
    match (negative, nanos) {
        (false, nanos) => Some(ErofsTime { seconds, nanos }),
        (true, 0) => Some(ErofsTime { seconds: -seconds, nanos: 0 }),
        (true, nanos) => Some(ErofsTime { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_fractions_and_may_lie_before_1970() {
        let time = |seconds, nanos| Some(ErofsTime { seconds, nanos });
        for (text, expected) in [
            ("0", time(0, 0)),
            ("1700000000.5", time(1_700_000_000, 500_000_000)),
            ("1.0123456789", time(1, 12_345_678)),
            ("-1", time(-1, 0)),
            ("-1.25", time(-2, 750_000_000)),
            ("-0.25", time(-1, 750_000_000)),
            ("1.", time(1, 0)),
            ("", None),
            ("-", None),
            ("+1", None),
            ("1e5", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(pax_time(text.as_bytes()), expected, "{text}");
        }
    }
}
