//! The trace that work belongs to: what a span says of a failure, and the header fields that continue the trace in
//! another process. Without a source, which only a program that exports traces sets, no request has such fields.

use std::fmt::Display;
use std::sync::OnceLock;

use tracing::Span;

/// Header fields of W3C Trace Context, and `baggage`.
pub type TraceHeaders = Vec<(&'static str, String)>;

static SOURCE: OnceLock<fn() -> TraceHeaders> = OnceLock::new();

/// Sets what returns the fields of the current trace. The first source stays.
pub fn set_source(source: fn() -> TraceHeaders) {
    let _ = SOURCE.set(source);
}

/// The fields for a request to another process of this node.
pub fn headers() -> TraceHeaders {
    SOURCE.get().map(|source| source()).unwrap_or_default()
}

/// The fields for a request to a registry: `baggage` stays on the node.
pub fn headers_for_others() -> TraceHeaders {
    let mut headers = headers();
    headers.retain(|(name, _)| *name != "baggage");
    headers
}

/// Marks a span as failed. It must have the fields `error.type` and `otel.status_description`.
pub fn fail(span: &Span, error_type: impl Display, message: impl Display) {
    if !span.is_disabled() {
        span.record("error.type", tracing::field::display(error_type));
        span.record("otel.status_description", tracing::field::display(message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_get_no_baggage() {
        assert_eq!(headers(), []);
        let field = |name| (name, "x".to_owned());
        set_source(|| ["traceparent", "baggage"].map(|name| (name, "x".to_owned())).to_vec());
        assert_eq!(headers(), [field("traceparent"), field("baggage")]);
        assert_eq!(headers_for_others(), [field("traceparent")]);
    }
}
