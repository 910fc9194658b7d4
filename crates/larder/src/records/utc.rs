//! Times as the records write them: UTC, whole seconds.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

const DAY: i64 = 86_400;

/// Seconds since 1970, in UTC. It prints as `2024-10-21T12:26:40Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Utc(pub i64);

impl Utc {
    /// Reads RFC 3339: `2024-10-21T12:26:40Z`, also with an offset or decimals, which are cut off. `None` if the text
    /// is no such time.
    pub fn parse(text: &str) -> Option<Utc> {
        if !text.is_ascii() {
            return None;
        }
        let (date, rest) = text.split_once('T')?;
        let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
        let (clock, rest) = rest.split_at_checked(8)?;
        let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
        let in_range = (1..=12).contains(&month)
            && (1..=days_in(year, month)).contains(&day)
            && hour < 24
            && minute < 60
            && second < 60;
        let zone = match rest.strip_prefix('.') {
            None => rest,
            Some(decimals) => {
                let zone = decimals.trim_start_matches(|c: char| c.is_ascii_digit());
                (zone.len() < decimals.len()).then_some(zone)?
            }
        };
        let seconds = days_from_civil(year, month, day) * DAY + hour * 3600 + minute * 60 + second;
        in_range.then_some(Utc(seconds - offset(zone)?))
    }
}

/// Times before 1970 and the sub-second part are cut off.
impl From<SystemTime> for Utc {
    fn from(time: SystemTime) -> Utc {
        let since = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Utc(i64::try_from(since).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = civil_from_days(self.0.div_euclid(DAY));
        let second = self.0.rem_euclid(DAY);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
    }
}

fn numbers(text: &str, separator: char, digits: [usize; 3]) -> Option<[i64; 3]> {
    let mut parts = text.split(separator);
    let mut found = [0; 3];
    for (number, digits) in found.iter_mut().zip(digits) {
        let part = parts.next().filter(|part| part.len() == digits)?;
        *number = part.bytes().all(|b| b.is_ascii_digit()).then(|| part.parse().ok()).flatten()?;
    }
    parts.next().is_none().then_some(found)
}

/// Seconds east of Greenwich.
fn offset(zone: &str) -> Option<i64> {
    if zone == "Z" {
        return Some(0);
    }
    let sign = if zone.starts_with('-') { -1 } else { 1 };
    let clock = zone.strip_prefix(['+', '-'])?;
    let [hours, minutes, _] = numbers(&format!("{clock}:00"), ':', [2, 2, 2])?;
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

/// Days since 1970. Years are counted from March, so that the leap day is the last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_are_read_with_offsets_and_decimals() {
        let noon = Utc::parse("2024-10-21T12:00:00Z").unwrap();
        assert_eq!(noon, Utc(1_729_512_000));
        assert_eq!(Utc::parse("2024-10-21T14:00:00+02:00"), Some(noon));
        assert_eq!(Utc::parse("2024-10-21T12:00:00.999999Z"), Some(noon));
        assert_eq!(Utc(0).to_string(), "1970-01-01T00:00:00Z");
        assert_eq!(Utc::parse("2000-02-29T00:00:00Z").unwrap().to_string(), "2000-02-29T00:00:00Z");
    }

    #[test]
    fn what_is_no_time_is_refused() {
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
            assert_eq!(Utc::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(seconds in 0_i64..253_402_300_800) {
            prop_assert_eq!(Utc::parse(&Utc(seconds).to_string()), Some(Utc(seconds)));
        }

        #[test]
        fn no_text_panics(text in "[-0-9TZ:+.]{0,30}|.*") {
            let _ = Utc::parse(&text);
        }
    }
}
