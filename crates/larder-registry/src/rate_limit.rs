//! The wait that a registry requests: `Retry-After` and the spellings of `RateLimit`. Pure.

use std::time::{Duration, SystemTime};

use reqwest::header::HeaderMap;

use super::budget::RegistryQuota;

/// The requested wait from now, if any.
///
/// A rejection (429 or 503) requests it with `Retry-After` or the end of its window; any other response with a
/// remaining quota of 0 and the end of the window.
pub(crate) fn requested_wait(status: u16, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    read(status, headers, now).map(|wait| wait.min(LONGEST))
}

/// A wait of more than a year is not intended.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

fn read(status: u16, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let refused = matches!(status, 429 | 503);
    if refused && let Some(wait) = text("retry-after").and_then(|after| retry_after(after, text("date"), now))
    {
        return Some(wait);
    }
    let quota = RateLimitHeaders::read(&text, now);
    (refused || quota.remaining == Some(0)).then_some(quota.reset)?
}

/// The quota that a response reports, if any.
pub(crate) fn reported_quota(headers: &HeaderMap, now: SystemTime) -> Option<RegistryQuota> {
    let quota = RateLimitHeaders::read(&|name| headers.get(name)?.to_str().ok(), now);
    quota.remaining.map(|remaining| RegistryQuota { remaining, limit: quota.limit })
}

/// Seconds, or a date. A date counts from the server's own clock if the response has its time.
fn retry_after(after: &str, date: Option<&str>, now: SystemTime) -> Option<Duration> {
    if let Some(seconds) = seconds(after) {
        return Some(seconds);
    }
    let until = httpdate::parse_http_date(after.trim()).ok()?;
    let from = date.and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(now);
    Some(until.duration_since(from).unwrap_or_default())
}

#[derive(Debug, Default)]
struct RateLimitHeaders {
    limit: Option<u64>,
    remaining: Option<u64>,
    reset: Option<Duration>,
}

impl RateLimitHeaders {
    fn read<'a>(text: &impl Fn(&str) -> Option<&'a str>, now: SystemTime) -> RateLimitHeaders {
        let mut quota = RateLimitHeaders::default();
        // `limit=10, remaining=0, reset=5`, and later `"default";r=0;t=5`.
        for item in text("ratelimit").unwrap_or_default().split([',', ';']) {
            match item.trim().split_once('=') {
                Some(("limit" | "q", value)) => quota.limit = number(value),
                Some(("remaining" | "r", value)) => quota.remaining = number(value),
                Some(("reset" | "t", value)) => quota.reset = seconds(value),
                _ => {}
            }
        }
        for prefix in ["ratelimit", "x-ratelimit"] {
            // `0;w=21600`: the window's length after the semicolon does not say when it ends.
            let field = |name: &str| text(&format!("{prefix}-{name}"))?.split(';').next();
            quota.limit = quota.limit.or_else(|| number(field("limit")?));
            quota.remaining = quota.remaining.or_else(|| number(field("remaining")?));
            quota.reset = quota.reset.or_else(|| reset(field("reset")?, now));
        }
        quota
    }
}

/// Seconds from now, or since 1970.
fn reset(text: &str, now: SystemTime) -> Option<Duration> {
    const SURELY_A_DATE: u64 = 1_000_000_000;
    match number(text)? {
        date if date >= SURELY_A_DATE => {
            let until = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(date))?;
            Some(until.duration_since(now).unwrap_or_default())
        }
        _ => seconds(text),
    }
}

fn seconds(text: &str) -> Option<Duration> {
    number(text).map(Duration::from_secs)
}

fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use reqwest::header::{HeaderName, HeaderValue};

    const NOW: u64 = 1_790_000_000;

    fn wait(status: u16, fields: &[(&str, &str)]) -> Option<u64> {
        let headers: HeaderMap = fields
            .iter()
            .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap()))
            .collect();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(NOW);
        requested_wait(status, &headers, now).map(|wait| wait.as_secs())
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(wait(429, &[("retry-after", "12")]), Some(12));
        assert_eq!(wait(503, &[("retry-after", " 3 ")]), Some(3));
        assert_eq!(wait(429, &[]), None);
        assert_eq!(wait(500, &[("retry-after", "12")]), None, "only refusals ask to wait");
        let date = |seconds| httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(wait(429, &[("retry-after", &date(NOW + 20))]), Some(20));
        assert_eq!(wait(429, &[("retry-after", &date(NOW - 20))]), Some(0));
        let server_is_an_hour_late = [("retry-after", date(NOW - 3590)), ("date", date(NOW - 3600))];
        let fields: Vec<(&str, &str)> =
            server_is_an_hour_late.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(wait(429, &fields), Some(10));
    }

    #[test]
    fn a_used_up_quota_asks_to_wait_until_its_window_ends() {
        for (fields, expected) in [
            (&[("ratelimit-remaining", "0"), ("ratelimit-reset", "7")][..], Some(7)),
            (&[("ratelimit-remaining", "1"), ("ratelimit-reset", "7")], None),
            (&[("ratelimit-remaining", "0;w=21600"), ("ratelimit-limit", "100;w=21600")], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1790000009")], Some(9)),
            (&[("ratelimit", "limit=10, remaining=0, reset=5")], Some(5)),
            (&[("ratelimit", "\"default\";r=0;t=6")], Some(6)),
            (&[("ratelimit", "\"default\";r=3;t=6")], None),
        ] {
            assert_eq!(wait(200, fields), expected, "{fields:?}");
        }
        assert_eq!(wait(429, &[("ratelimit-reset", "4")]), Some(4));
    }

    #[test]
    fn a_response_reports_its_quota() {
        for (fields, expected) in [
            (
                &[("ratelimit-remaining", "76;w=21600"), ("ratelimit-limit", "100;w=21600")][..],
                Some((76, Some(100))),
            ),
            (&[("x-ratelimit-remaining", "5")], Some((5, None))),
            (&[("ratelimit", "limit=10, remaining=3, reset=5")], Some((3, Some(10)))),
            (&[("ratelimit-limit", "100")], None),
            (&[], None),
        ] {
            let headers: HeaderMap = fields
                .iter()
                .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_static(value)))
                .collect();
            let quota = reported_quota(&headers, SystemTime::UNIX_EPOCH);
            assert_eq!(quota.map(|quota| (quota.remaining, quota.limit)), expected, "{fields:?}");
        }
    }

    proptest! {
        #[test]
        fn no_header_panics(a in "[ -~]{0,40}", b in "[0-9;=,a-z ]{0,40}", c in "[0-9]{0,30}") {
            let wait = wait(429, &[("retry-after", &a), ("ratelimit", &b), ("ratelimit-reset", &c), ("date", &a)]);
            prop_assert!(wait.is_none_or(|wait| wait <= LONGEST.as_secs()));
        }
    }
}
