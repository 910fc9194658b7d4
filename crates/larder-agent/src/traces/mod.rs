//! Traces over OTLP, with the feature `traces`.

/// The trace that this thread works for, as 32 hexadecimal digits, if it is sampled. `None` without the feature.
pub fn current_trace_id() -> Option<String> {
    #[cfg(feature = "traces")]
    {
        use opentelemetry::trace::TraceContextExt as _;
        let context = opentelemetry::Context::current();
        let span = context.span().span_context().clone();
        (span.is_valid() && span.is_sampled()).then(|| span.trace_id().to_string())
    }
    #[cfg(not(feature = "traces"))]
    None
}

#[cfg(all(test, feature = "traces"))]
mod tests {
    use opentelemetry::Context;
    use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};

    use super::*;

    #[test]
    fn the_current_trace_has_an_id_only_if_it_is_sampled() {
        assert_eq!(current_trace_id(), None);
        let trace = TraceId::from_hex("4bf92f3577b34da6a3ce929d0e0e4736").unwrap();
        let enter = |flags| {
            let span = SpanContext::new(trace, SpanId::from(1), flags, true, TraceState::default());
            Context::current().with_remote_span_context(span).attach()
        };
        let sampled = enter(TraceFlags::SAMPLED);
        assert_eq!(current_trace_id().as_deref(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
        let unsampled = enter(TraceFlags::default());
        assert_eq!(current_trace_id(), None);
        drop((unsampled, sampled));
        assert_eq!(current_trace_id(), None);
    }
}
