//! The trace context of calls: read from requests, and written to those that follow from them.

use std::sync::LazyLock;

use larder::trace_context::TraceHeaders;
use opentelemetry::propagation::{Extractor, Injector, TextMapCompositePropagator, TextMapPropagator};
use opentelemetry::trace::{SpanContext, TraceContextExt as _};
use opentelemetry::{Context, ContextGuard};
use opentelemetry_sdk::propagation::{BaggagePropagator, TraceContextPropagator};
use tonic::codegen::http::{HeaderMap, HeaderName};

static PROPAGATOR: LazyLock<TextMapCompositePropagator> = LazyLock::new(|| {
    TextMapCompositePropagator::new(vec![
        Box::new(TraceContextPropagator::new()),
        Box::new(BaggagePropagator::new()),
    ])
});

struct Incoming<'a>(&'a HeaderMap);

impl Extractor for Incoming<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct Outgoing(TraceHeaders);

impl Injector for Outgoing {
    fn set(&mut self, key: &str, value: String) {
        let name = ["traceparent", "tracestate", "baggage"].into_iter().find(|name| *name == key);
        if let Some(name) = name.filter(|_| !value.is_empty()) {
            self.0.push((name, value));
        }
    }
}

/// Makes the caller's span the parent of spans that begin before the guard is dropped.
pub(super) fn enter_remote(headers: &HeaderMap) -> ContextGuard {
    PROPAGATOR.extract_with_context(&Context::new(), &Incoming(headers)).attach()
}

/// The fields of the current span.
pub(super) fn outgoing() -> TraceHeaders {
    let mut fields = Outgoing(Vec::new());
    PROPAGATOR.inject_context(&Context::current(), &mut fields);
    fields.0
}

/// The current span, if it is sampled.
pub(super) fn sampled() -> Option<SpanContext> {
    let context = Context::current();
    let span = context.span().span_context().clone();
    (span.is_valid() && span.is_sampled()).then_some(span)
}

#[cfg(test)]
mod tests {
    use opentelemetry::baggage::BaggageExt as _;

    use super::*;

    #[test]
    fn what_a_caller_sends_is_sent_on() {
        let mut headers = HeaderMap::new();
        let sent = [
            ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            ("tracestate", "vendor=1"),
            ("baggage", "tenant=a"),
        ];
        for (name, value) in sent {
            headers.insert(name, value.parse().unwrap());
        }
        let entered = enter_remote(&headers);
        let fields = outgoing();
        for (name, value) in sent {
            assert!(fields.contains(&(name, value.to_owned())), "{fields:?}");
        }
        assert_eq!(Context::current().baggage().len(), 1);
        drop(entered);
        assert_eq!(outgoing(), []);
    }

    #[test]
    fn invalid_fields_begin_no_trace() {
        for value in ["", "00-0-0-01", "00-00000000000000000000000000000000-00f067aa0ba902b7-01"] {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", value.parse().unwrap());
            let _entered = enter_remote(&headers);
            assert_eq!(sampled(), None, "{value:?}");
            assert_eq!(outgoing(), [], "{value:?}");
        }
    }
}
