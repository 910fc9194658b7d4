//! The spans of an ensure and of a pull, and what they say at the end.

use tracing::Span;
use tracing::field::Empty;

use super::ensure::{EnsureError, EnsureRequest, EnsuredImage, ImagePresence};
use super::metrics::PullFailureReason;
use super::puller::{PullJob, PullOutcome};
use crate::trace_context::fail;

/// One ensure. Kubelet's function of this name has no span.
pub(super) fn ensure_span(request: &EnsureRequest) -> Span {
    tracing::trace_span!(
        "EnsureImageExists",
        image.ref = request.image.as_str(),
        larder.pull_policy = request.policy.as_str(),
        k8s.namespace.name = present(&request.pod.namespace),
        k8s.pod.name = present(&request.pod.name),
        k8s.pod.uid = present(&request.pod.uid),
        image.id = Empty,
        larder.outcome = Empty,
        larder.retry_in_ms = Empty,
        otel.status_description = Empty,
        error.type = Empty,
    )
}

fn present(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

pub(super) fn note_ensured(span: &Span, result: &Result<EnsuredImage, EnsureError>) {
    if span.is_disabled() {
        return;
    }
    match result {
        Ok(ensured) => {
            span.record("image.id", ensured.image_ref.as_str());
            let outcome = match ensured.outcome {
                ImagePresence::Present => "present",
                ImagePresence::Pulled { .. } => "pulled",
            };
            span.record("larder.outcome", outcome);
        }
        Err(error) => {
            fail(span, &error.reason, &error.message);
            if let Some(wait) = error.retry_in {
                span.record("larder.retry_in_ms", u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
            }
        }
    }
}

/// One pull, which may serve several callers; named as containerd names it.
pub(super) fn pull_span(job: &PullJob) -> Span {
    let span = tracing::info_span!(
        "pull",
        image = %job.spec.image,
        otel.name = "pull.Pull",
        image.ref = Empty,
        image.id = Empty,
        larder.image.size_bytes = Empty,
        otel.status_description = Empty,
        error.type = Empty,
    );
    // Only fields that the span begins with are in lines of the log.
    span.record("image.ref", job.spec.image.as_str());
    span
}

pub(super) fn note_pulled(span: &Span, outcome: &PullOutcome) {
    match &outcome.pulled {
        Ok(pulled) => {
            span.record("image.id", pulled.image_ref.as_str());
            span.record("larder.image.size_bytes", outcome.size_bytes);
        }
        Err(error) if !span.is_disabled() => {
            fail(span, PullFailureReason::of(&error.as_of_backend()).word(), error);
        }
        Err(_) => {}
    }
}
