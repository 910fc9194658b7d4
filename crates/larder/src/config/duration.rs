//! Signed durations in Go's notation: kubelet parses negative ones and rejects them in validation.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, de};

use crate::go_format;

/// Units and their nanoseconds. `ms` stands before `m`, so that the longer one is found first.
const UNITS: [(&str, i128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Nanoseconds, as Go's `time.Duration`: at most about 292 years either way. It prints as Go prints it: `1h30m0s`,
/// `-1s`, `0s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct GoDuration {
    nanos: i64,
}

/// Why a duration is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DurationError {
    /// Not numbers with units.
    #[error("not a duration; use a form like 90s, 5m or 1h30m")]
    Form,
    /// Beyond kubelet's range.
    #[error("too long; the maximum is about 292 years")]
    TooLong,
}

impl GoDuration {
    /// Nothing.
    pub(crate) const ZERO: GoDuration = GoDuration { nanos: 0 };

    /// This many seconds.
    pub(crate) const fn from_secs(seconds: u32) -> GoDuration {
        GoDuration { nanos: seconds as i64 * 1_000_000_000 }
    }

    /// Reads what Go's `time.ParseDuration` reads: `90s`, `1h30m`, `1.5h`, `-300ms`, `0`.
    pub fn parse(text: &str) -> Result<GoDuration, DurationError> {
        let (sign, mut rest) = match text.strip_prefix('-') {
            Some(rest) => (-1, rest),
            None => (1, text.strip_prefix('+').unwrap_or(text)),
        };
        if rest == "0" {
            return Ok(GoDuration::ZERO);
        }
        if rest.is_empty() {
            return Err(DurationError::Form);
        }
        let mut nanos: i128 = 0;
        while !rest.is_empty() {
            let (part, after) = part(rest)?;
            nanos = nanos.checked_add(part).ok_or(DurationError::TooLong)?;
            rest = after;
        }
        let nanos = i64::try_from(sign * nanos).map_err(|_| DurationError::TooLong)?;
        Ok(GoDuration { nanos })
    }

    /// Returns the duration without a sign; `None` if it is negative.
    pub fn to_std(self) -> Option<Duration> {
        u64::try_from(self.nanos).ok().map(Duration::from_nanos)
    }

    /// Returns true below zero.
    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }
}

/// The nanoseconds of the first number with its unit, and what follows.
fn part(text: &str) -> Result<(i128, &str), DurationError> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or(DurationError::Form)?;
    let (number, rest) = text.split_at(end);
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && decimals.is_empty()) || decimals.contains('.') {
        return Err(DurationError::Form);
    }
    let (unit, size) = UNITS.iter().find(|(unit, _)| rest.starts_with(unit)).ok_or(DurationError::Form)?;
    let whole: i128 = match whole.trim_start_matches('0') {
        "" => 0,
        digits if digits.len() > 19 => return Err(DurationError::TooLong),
        digits => digits.parse().map_err(|_| DurationError::Form)?,
    };
    // Finer than a nanosecond nothing counts.
    let decimals = &decimals[..decimals.len().min(18)];
    let fraction = match decimals {
        "" => 0,
        digits => {
            digits.parse::<i128>().map_err(|_| DurationError::Form)? * size / 10_i128.pow(power(digits))
        }
    };
    Ok((whole * size + fraction, &rest[unit.len()..]))
}

fn power(digits: &str) -> u32 {
    u32::try_from(digits.len()).unwrap_or(0)
}

impl TryFrom<Duration> for GoDuration {
    type Error = DurationError;

    fn try_from(duration: Duration) -> Result<GoDuration, DurationError> {
        let nanos = i64::try_from(duration.as_nanos()).map_err(|_| DurationError::TooLong)?;
        Ok(GoDuration { nanos })
    }
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_negative() {
            f.write_str("-")?;
        }
        f.write_str(&go_format::duration(Duration::from_nanos(self.nanos.unsigned_abs())))
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        GoDuration::parse(&text).map_err(|error| de::Error::custom(format!("{text:?}: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read_and_printed_as_in_go() {
        for (text, printed) in [
            ("0", "0s"),
            ("-0", "0s"),
            ("90s", "1m30s"),
            ("+5m", "5m0s"),
            ("-1s", "-1s"),
            ("1h30m", "1h30m0s"),
            ("1.5h", "1h30m0s"),
            (".5s", "500ms"),
            ("5.s", "5s"),
            ("1ns", "1ns"),
            ("0.9999999999ns", "0s"),
            ("1.0000000000000000000001s", "1s"),
            ("00000000000000000000000001m", "1m0s"),
            ("-2562047h47m16.854775808s", "-2562047h47m16.854775808s"),
        ] {
            assert_eq!(GoDuration::parse(text).map(|d| d.to_string()).as_deref(), Ok(printed), "{text}");
        }
    }

    #[test]
    fn input_that_go_refuses_is_refused() {
        for text in ["", "-", "5", "s", ".s", "1..5s", "1x", "1m 3s", " 1s", "1e3s", "--1s", "1s-"] {
            assert_eq!(GoDuration::parse(text), Err(DurationError::Form), "{text}");
        }
        for text in ["2562047h47m16.854775808s", "99999999999999999999h", "9223372036854775808ns"] {
            assert_eq!(GoDuration::parse(text), Err(DurationError::TooLong), "{text}");
        }
    }

    proptest! {
        #[test]
        fn printed_values_are_read_back(nanos: i64) {
            let duration = GoDuration { nanos };
            prop_assert_eq!(GoDuration::parse(&duration.to_string()), Ok(duration));
        }

        #[test]
        fn no_text_panics(text in "[-+0-9.hmsnuµ]{0,40}|.*") {
            let _ = GoDuration::parse(&text);
        }
    }
}
