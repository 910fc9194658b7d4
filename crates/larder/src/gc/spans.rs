//! Spans of a collection: measuring, planning, and what a round did.

use tracing::Span;
use tracing::field::Empty;

use super::goal::GcGoal;
use super::plan::{GcPlan, GcSnapshot, plan_stage};
use super::policy::GcPolicy;
use super::report::GcRoundResult;
use crate::trace_context;

/// The span of a measurement within another span; a measurement by itself is no trace.
pub(super) fn measure_span() -> Span {
    if Span::current().is_none() { Span::none() } else { tracing::trace_span!("gc.Measure") }
}

/// Plans a stage, in a span.
pub(super) fn traced_plan_stage(snapshot: &GcSnapshot, policy: &GcPolicy, goal: GcGoal) -> GcPlan {
    let span = tracing::trace_span!(
        "gc.Plan",
        larder.gc.goal = goal.name(),
        larder.gc.images = snapshot.images.len(),
        larder.gc.removals = Empty,
        larder.gc.needed_bytes = Empty,
    );
    let planned = span.in_scope(|| plan_stage(snapshot, policy, goal));
    span.record("larder.gc.removals", planned.removals.len());
    span.record("larder.gc.needed_bytes", planned.need.bytes);
    planned
}

/// Records on a round's span what the round did.
pub(super) fn note_round(span: &Span, result: &GcRoundResult) {
    if span.is_disabled() {
        return;
    }
    let swept = &result.report.swept;
    span.record("larder.gc.removed_images", swept.iter().map(|swept| swept.removed.len()).sum::<usize>());
    span.record("larder.gc.freed_bytes", swept.iter().map(|swept| swept.freed).sum::<i64>());
    span.record("larder.gc.reclaimed_bytes", result.report.reclaimed.total().bytes);
    if let Some(error) = &result.error {
        trace_context::fail(span, "GarbageCollect", error);
    }
}
