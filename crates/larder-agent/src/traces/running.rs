//! The exporter of this process.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;

use super::export::LastCause;
use super::options::TraceOptions;
use super::queue::{Flush, SpanCounts, queue};
use super::{TraceCounts, context, export, layer};
use crate::config::Config;
use crate::environment::variable;
use crate::error::Error;

struct RunningExporter {
    flush: Flush,
    counts: Arc<SpanCounts>,
    /// Makes spans as long as it exists.
    _provider: SdkTracerProvider,
}

static RUNNING: OnceLock<RunningExporter> = OnceLock::new();

/// Starts to export traces, if the settings or the environment say so. Must be called within a runtime, which has to
/// last as long as the process; a second call changes nothing.
pub fn start(config: &Config) -> Result<(), Error> {
    let Some(options) = TraceOptions::of(&config.tracing, &variable)? else { return Ok(()) };
    if RUNNING.get().is_some() {
        return Ok(());
    }
    let resource = export::resource();
    let cause = LastCause::default();
    let exporter = export::exporter(&options, &resource, &cause)?;
    let (spans, flush, counts, sending) =
        queue(exporter, options.batch, options.shown_endpoint.clone(), cause);
    let provider = export::provider(&options, spans, resource);
    let tracer = provider.tracer("larder");
    if RUNNING.set(RunningExporter { flush, counts, _provider: provider }).is_ok() {
        tokio::spawn(sending);
        layer::start(tracer);
        larder::trace_context::set_source(context::outgoing);
        tracing::info!("exporting traces to {}", options.shown_endpoint);
    }
    Ok(())
}

/// Whether traces are exported.
pub fn is_on() -> bool {
    RUNNING.get().is_some()
}

/// Sends the spans that have ended, for at most `limit`.
pub async fn flush(limit: Duration) {
    if let Some(running) = RUNNING.get() {
        running.flush.within(limit).await;
    }
}

/// Counts of exported and dropped spans, if traces are on.
pub fn counts() -> Option<TraceCounts> {
    RUNNING.get().map(|running| running.counts.now())
}

/// The trace that this thread works for, as 32 hexadecimal digits, if it is sampled. `None` without the feature.
pub fn current_trace_id() -> Option<String> {
    context::sampled().map(|span| span.trace_id().to_string())
}

#[cfg(test)]
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
