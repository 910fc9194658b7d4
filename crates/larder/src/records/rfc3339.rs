//! Times in pull records: UTC, whole seconds.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use jiff::SignedDuration;
use jiff::civil::{DateTime, datetime};
use jiff::fmt::temporal::Pieces;

const EPOCH: DateTime = datetime(1970, 1, 1, 0, 0, 0, 0);

/// Seconds since 1970, in UTC. It prints as `2024-10-21T12:26:40Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Rfc3339Time(pub i64);

impl Rfc3339Time {
    /// Reads RFC 3339: `2024-10-21T12:26:40Z`, also with an offset or decimals, which are cut off. `None` if the text
    /// is not such a time.
    pub fn parse(text: &str) -> Option<Rfc3339Time> {
        let pieces = Pieces::parse(text).ok()?;
        // ISO 8601 has other separators and time zones by name; RFC 3339 has not.
        let is_rfc_3339 = text.as_bytes().get(10) == Some(&b'T') && pieces.time_zone_annotation().is_none();
        let time = pieces.date().to_datetime(pieces.time().filter(|_| is_rfc_3339)?);
        let seconds = time.duration_since(EPOCH).as_nanos().div_euclid(1_000_000_000);
        Some(Rfc3339Time(i64::try_from(seconds).ok()? - i64::from(pieces.to_numeric_offset()?.seconds())))
    }
}

/// Times before 1970 and the sub-second part are cut off.
impl From<SystemTime> for Rfc3339Time {
    fn from(time: SystemTime) -> Rfc3339Time {
        let since = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Rfc3339Time(i64::try_from(since).unwrap_or(i64::MAX))
    }
}

/// A time after the year 9999 prints as its last second.
impl fmt::Display for Rfc3339Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = EPOCH.saturating_add(SignedDuration::from_secs(self.0));
        write!(f, "{}", time.strftime("%Y-%m-%dT%H:%M:%SZ"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_are_read_with_offsets_and_decimals() {
        let noon = Rfc3339Time::parse("2024-10-21T12:00:00Z").unwrap();
        assert_eq!(noon, Rfc3339Time(1_729_512_000));
        assert_eq!(Rfc3339Time::parse("2024-10-21T14:00:00+02:00"), Some(noon));
        assert_eq!(Rfc3339Time::parse("2024-10-21T12:00:00.999999Z"), Some(noon));
        assert_eq!(Rfc3339Time(0).to_string(), "1970-01-01T00:00:00Z");
        assert_eq!(Rfc3339Time::parse("2000-02-29T00:00:00Z").unwrap().to_string(), "2000-02-29T00:00:00Z");
    }

    #[test]
    fn an_invalid_time_is_refused() {
        for text in [
            "yesterday",
            "2024-10-21",
            "2024-10-21T12:00:00",
            "2024-13-01T00:00:00Z",
            "2023-02-29T00:00:00Z",
            "2024-10-21T24:00:00Z",
            "2024-10-21T12:00:00.Z",
            "2024-10-21T12:00:00+2:00",
            "2024-10-21T12:00:00 Z",
            "é024-10-21T12:00:00Z",
        ] {
            assert_eq!(Rfc3339Time::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn printed_values_are_read_back(seconds in 0_i64..253_402_300_800) {
            prop_assert_eq!(Rfc3339Time::parse(&Rfc3339Time(seconds).to_string()), Some(Rfc3339Time(seconds)));
        }

        #[test]
        fn no_text_panics(text in "[-0-9TZ:+.]{0,30}|.*") {
            let _ = Rfc3339Time::parse(&text);
        }
    }
}
