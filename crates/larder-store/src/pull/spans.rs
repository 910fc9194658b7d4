//! The spans of a pull and of its layers, named as containerd names them where it has a name.

use std::sync::atomic::{AtomicU64, Ordering};

use larder::reference::Reference;
use larder::trace_context::fail;
use larder_registry::{FetchError, FetchNotice, FetchWait, ImageDocuments};
use tracing::field::{Empty, display};
use tracing::{Instrument as _, Span};

use super::error::PullError;
use super::plan::PlannedLayer;
use crate::store::ImageRecord;

/// The fetch of manifest and config.
pub(super) async fn traced_resolve(
    name: &Reference,
    resolve: impl Future<Output = Result<ImageDocuments, FetchError>>,
) -> Result<ImageDocuments, FetchError> {
    let span = tracing::trace_span!(
        "pull.Resolve",
        image.name = %name,
        image.digest = Empty,
        target.mediaType = Empty,
        larder.layers = Empty,
        otel.status_description = Empty,
        error.type = Empty,
    );
    let resolved = resolve.instrument(span.clone()).await;
    match &resolved {
        Ok(documents) if !span.is_disabled() => {
            let target = &documents.target.descriptor;
            span.record("image.digest", display(&target.digest));
            span.record("target.mediaType", target.media_type.as_str());
            span.record("larder.layers", documents.layers.layers.len());
        }
        Ok(_) => {}
        Err(error) => fail(&span, "resolve", error),
    }
    resolved
}

/// The commit of an image whose layers are all in place.
pub(super) async fn traced_commit(
    name: &Reference,
    commit: impl Future<Output = Result<ImageRecord, PullError>>,
) -> Result<ImageRecord, PullError> {
    let span = tracing::trace_span!(
        "pull.pull.createNewImage",
        image.name = %name,
        otel.status_description = Empty,
        error.type = Empty,
    );
    let committed = commit.instrument(span.clone()).await;
    if let Err(error) = &committed {
        fail(&span, "commit", error);
    }
    committed
}

/// From the wait for a slot until the layer is fetched and unpacked. Each try of a fetch is a child.
pub(super) fn layer_span(planned: &PlannedLayer) -> Span {
    let span = tracing::info_span!(
        "layer",
        digest = %planned.descriptor.digest,
        otel.name = "pkg.unpack.unpacker.fetchLayer",
        layer.media.digest = Empty,
        layer.media.size = Empty,
        layer.media.type = Empty,
        larder.layer.resumed_bytes = Empty,
        larder.layer.attempts = Empty,
        larder.layer.registry = Empty,
        otel.status_description = Empty,
        error.type = Empty,
    );
    // Only fields that the span begins with are in lines of the log.
    if !span.is_disabled() {
        span.record("layer.media.digest", display(&planned.descriptor.digest));
        span.record("layer.media.size", planned.descriptor.size);
        span.record("layer.media.type", planned.descriptor.media_type.as_str());
    }
    span
}

/// While received bytes are unpacked.
pub(super) fn unpack_span(planned: &PlannedLayer) -> Span {
    tracing::trace_span!("pkg.unpack.unpacker.unpackLayer", layer.media.digest = %planned.descriptor.digest)
}

/// While an unpacked layer is merged with the layers below.
pub(super) fn merge_span(planned: &PlannedLayer) -> Span {
    tracing::trace_span!("pull.MergeLayer", layer.media.digest = %planned.descriptor.digest)
}

/// Fields of the fetch of a layer, recorded from its notices on the span that is current when this is made.
pub(super) struct FetchSpanFields {
    span: Span,
    attempts: AtomicU64,
}

impl FetchSpanFields {
    pub(super) fn of_current_span() -> FetchSpanFields {
        let span = Span::current();
        span.record("larder.layer.attempts", 1);
        FetchSpanFields { span, attempts: AtomicU64::new(1) }
    }

    pub(super) fn note(&self, notice: &FetchNotice) {
        match notice {
            FetchNotice::Host(host) => {
                self.span.record("larder.layer.registry", host.as_str());
            }
            FetchNotice::Present(bytes) => {
                self.span.record("larder.layer.resumed_bytes", *bytes);
            }
            FetchNotice::Waiting(FetchWait::Retry { .. }) => {
                let attempts = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
                self.span.record("larder.layer.attempts", attempts);
            }
            FetchNotice::Waiting(_)
            | FetchNotice::Bytes(_)
            | FetchNotice::Resumed
            | FetchNotice::Warning(_) => {}
        }
    }
}
