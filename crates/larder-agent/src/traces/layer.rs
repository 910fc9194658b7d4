//! Turns spans of larder's own crates into spans of a trace.

use std::sync::OnceLock;

use opentelemetry_sdk::trace::SdkTracer;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::layer::{Context, Layer};

use crate::log::{self, Logged};

/// Set when traces start; the process logs before that.
static TRACER: OnceLock<OpenTelemetryLayer<Logged, SdkTracer>> = OnceLock::new();

/// Passes spans on from now on.
pub(super) fn start(tracer: SdkTracer) {
    let layer = OpenTelemetryLayer::new(tracer)
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_target(false)
        .with_error_events_to_status(false)
        .with_error_events_to_exceptions(false);
    if TRACER.set(layer).is_ok() {
        log::trace_spans();
    }
}

/// The spans of libraries are left out: the exporter uses some of them.
fn is_own(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with(log::OWN)
}

/// The part of the subscriber that makes traces. Does nothing until traces start.
pub(crate) struct TraceLayer;

impl Layer<Logged> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get().filter(|_| is_own(attributes.metadata())) {
            layer.on_new_span(attributes, id, context);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get() {
            layer.on_record(id, values, context);
        }
    }

    fn on_follows_from(&self, id: &Id, follows: &Id, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get() {
            layer.on_follows_from(id, follows, context);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get().filter(|_| is_own(event.metadata())) {
            layer.on_event(event, context);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get() {
            layer.on_enter(id, context);
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get() {
            layer.on_exit(id, context);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, Logged>) {
        if let Some(layer) = TRACER.get() {
            layer.on_close(id, context);
        }
    }
}
