//! Moments as people say them: `2 hours ago`.

use std::time::Duration;

use jiff::Timestamp;

/// The moment of an RFC 3339 text, as seen at `now`. Empty if it is no moment; a later one is "just now".
pub fn ago(moment: &str, now: Timestamp) -> String {
    let Ok(then) = moment.parse::<Timestamp>() else { return String::new() };
    match Duration::try_from(now.duration_since(then)) {
        Ok(age) => since(age),
        Err(_) => "just now".to_owned(),
    }
}

/// A duration that has passed, in the largest unit that has at least two, as docker prints it.
pub fn since(age: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    let seconds = age.as_secs();
    let (count, unit) = match seconds {
        0 => return "just now".to_owned(),
        1..MINUTE => (seconds, "second"),
        MINUTE..HOUR => (seconds / MINUTE, "minute"),
        HOUR.. if seconds < 2 * DAY => (seconds / HOUR, "hour"),
        _ if seconds < 14 * DAY => (seconds / DAY, "day"),
        _ if seconds < 60 * DAY => (seconds / (7 * DAY), "week"),
        _ if seconds < 730 * DAY => (seconds / (30 * DAY), "month"),
        _ => (seconds / (365 * DAY), "year"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_one_unit() {
        let now: Timestamp = "2026-11-23T12:00:00Z".parse().unwrap();
        for (moment, text) in [
            ("2026-11-23T12:00:00Z", "just now"),
            ("2026-11-23T12:00:01Z", "just now"),
            ("2026-11-23T11:59:59Z", "1 second ago"),
            ("2026-11-23T11:58:30Z", "1 minute ago"),
            ("2026-11-23T10:00:00.5+00:00", "1 hour ago"),
            ("2026-11-22T00:00:00Z", "36 hours ago"),
            ("2026-11-20T12:00:00Z", "3 days ago"),
            ("2026-11-01T12:00:00Z", "3 weeks ago"),
            ("2026-05-01T12:00:00Z", "6 months ago"),
            ("1970-01-01T00:00:00Z", "56 years ago"),
            ("soon", ""),
            ("2026-11-23T12:00:00Z\nr.example/forged", ""),
        ] {
            assert_eq!(ago(moment, now), text, "{moment}");
        }
    }
}
