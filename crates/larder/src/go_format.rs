//! Formats values as Go does, for messages that must equal kubelet's.

use std::fmt::Write as _;
use std::time::Duration;

/// Quotes like Go's `%q`.
pub fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            c if c < ' ' || c == '\u{7f}' => {
                let _ = write!(quoted, "\\x{:02x}", u32::from(c));
            }
            c if !is_printable(c) && u32::from(c) > 0xffff => {
                let _ = write!(quoted, "\\U{:08x}", u32::from(c));
            }
            c if !is_printable(c) => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Close to Go's `unicode.IsPrint` for what can reach an image name: controls, separators other than the ASCII
/// space, format and private-use characters are not printable.
fn is_printable(c: char) -> bool {
    !(c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(u32::from(c),
            0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x202a..=0x202e
            | 0x2060..=0x206f | 0xe000..=0xf8ff | 0xfeff | 0xfff0..=0xfffb | 0xfffe | 0xffff | 0xe0000..=0x0010_ffff))
}

/// A duration as Go's `Duration.String`: `0s`, `1.5s`, `2m3s`, `1h0m0s`, `15ms`, `1.5µs`.
pub fn duration(d: Duration) -> String {
    let nanos = d.as_nanos();
    if nanos == 0 {
        return "0s".into();
    }
    if nanos < 1_000_000_000 {
        let (unit, name) = match nanos {
            ..1_000 => (1, "ns"),
            1_000..1_000_000 => (1_000, "µs"),
            _ => (1_000_000, "ms"),
        };
        return format!("{}{name}", fraction(nanos, unit));
    }
    let seconds = d.as_secs();
    let last = fraction(nanos - u128::from(seconds / 60 * 60) * 1_000_000_000, 1_000_000_000);
    match (seconds / 3600, seconds / 60 % 60) {
        (0, 0) => format!("{last}s"),
        (0, minutes) => format!("{minutes}m{last}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{last}s"),
    }
}

/// `value / unit` with as many decimals as needed.
fn fraction(value: u128, unit: u128) -> String {
    let (whole, rest) = (value / unit, value % unit);
    if rest == 0 {
        return whole.to_string();
    }
    let digits = unit.ilog10() as usize;
    format!("{whole}.{}", format!("{rest:0digits$}").trim_end_matches('0'))
}

/// The duration cut to whole milliseconds, as kubelet does before it prints one.
pub fn truncated_to_millis(d: Duration) -> Duration {
    Duration::from_millis(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Several errors as one text: the unique texts in order, bracketed if there is more than one (`[a, b]`).
pub(crate) fn aggregate<'a>(errors: impl IntoIterator<Item = &'a str>) -> String {
    let mut unique: Vec<&str> = Vec::new();
    for error in errors {
        if !unique.contains(&error) {
            unique.push(error);
        }
    }
    match unique.as_slice() {
        [one] => (*one).to_owned(),
        many => format!("[{}]", many.join(", ")),
    }
}

/// Bytes with three significant digits in powers of 1000, as crictl and docker print them: `4.26MB`.
pub fn bytes(size: u64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    #[allow(clippy::cast_precision_loss)] // three digits are shown
    let mut value = size as f64;
    let mut unit = 0;
    // 999.5 would be rounded to four digits.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    let number = format!("{value:.decimals$}");
    let number = if decimals > 0 { number.trim_end_matches('0').trim_end_matches('.') } else { &number };
    format!("{number}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_in_go() {
        for (nanos, text) in [
            (0, "0s"),
            (1, "1ns"),
            (1_500, "1.5µs"),
            (15_000_000, "15ms"),
            (1_234_000_000, "1.234s"),
            (60_000_000_000, "1m0s"),
            (123_000_000_000, "2m3s"),
            (123_500_000_000, "2m3.5s"),
            (3_600_000_000_000, "1h0m0s"),
            (5_445_000_000_000, "1h30m45s"),
        ] {
            assert_eq!(duration(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn quoting_escapes_as_in_go() {
        assert_eq!(quote("busybox:1.36"), r#""busybox:1.36""#);
        assert_eq!(quote("a\"b\\c\n\u{1}\u{7f}ü\u{200b}"), r#""a\"b\\c\n\x01\x7fü\u200b""#);
    }

    #[test]
    fn equal_errors_are_printed_once() {
        assert_eq!(aggregate(["a"]), "a");
        assert_eq!(aggregate(["a", "a"]), "a");
        assert_eq!(aggregate(["a", "b", "a"]), "[a, b]");
    }
}
