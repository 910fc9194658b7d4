//! The deadline that a caller sends, and the error after it.

use std::convert::Infallible;
use std::time::Duration;

use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Response};

use crate::status;

/// Most digits of a gRPC timeout.
const MOST_DIGITS: usize = 8;

/// The timeout in the `grpc-timeout` header of a request. `None` without one, or if it is malformed, as gRPC
/// requires.
pub fn deadline_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > MOST_DIGITS || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(3600 * count)),
        "M" => Some(Duration::from_secs(60 * count)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// The response of a call, or `DeadlineExceeded` after the timeout; then the call is dropped.
///
/// The timeout covers the response up to its headers: a stream that has begun is ended by its caller.
pub async fn within(
    limit: Option<Duration>,
    call: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Response<Body> {
    let answered = match limit {
        None => Some(call.await),
        Some(limit) => tokio::time::timeout(limit, call).await.ok(),
    };
    match answered {
        Some(Ok(response)) => response,
        None => status::deadline().into_http(),
    }
}

#[cfg(test)]
mod tests {
    use std::future;
    use std::sync::Arc;

    use tonic::codegen::http::HeaderValue;
    use tonic::{Code, Status};

    use super::*;

    fn read(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_bytes(text.as_bytes()).unwrap());
        deadline_of(&headers)
    }

    #[test]
    fn each_unit_of_grpc_is_read() {
        let cases = [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("4S", Duration::from_secs(4)),
            ("1m", Duration::from_millis(1)),
            ("5u", Duration::from_micros(5)),
            ("6n", Duration::from_nanos(6)),
            ("0n", Duration::ZERO),
            ("99999999H", Duration::from_secs(99_999_999 * 3600)),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn an_invalid_timeout_counts_as_none() {
        assert_eq!(deadline_of(&HeaderMap::new()), None);
        for text in
            ["", "1", "m", "1s", "+1S", "-1S", "1.5S", "1 S", "123456789S", "1mm", "\u{e9}S", "1\u{e9}"]
        {
            assert_eq!(read(text), None, "{text:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_takes_too_long_is_dropped_and_answered() {
        let held = Arc::new(());
        let inside = Arc::clone(&held);
        let call = async move {
            future::pending::<()>().await;
            drop(inside);
            Ok(Response::default())
        };
        let response = within(Some(Duration::from_millis(1)), call).await;
        let status = Status::from_header_map(response.headers()).expect("a status");
        assert_eq!((status.code(), status.message()), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert_eq!(Arc::strong_count(&held), 1, "the call is dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_in_time_is_answered() {
        let call = async {
            tokio::time::sleep(Duration::from_millis(9)).await;
            Ok(Response::default())
        };
        let response = within(Some(Duration::from_millis(10)), call).await;
        assert!(Status::from_header_map(response.headers()).is_none());
    }
}
