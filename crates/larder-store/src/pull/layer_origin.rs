//! Where the layers of an image come from.

use std::sync::Arc;

use larder::backend::LayerPhase;
use larder_registry::RepositorySession;

use super::plan::PlannedLayer;
use super::possession::ProvedBlobs;
use super::pull_progress::PullProgress;
use crate::store::LayerRecord;
use crate::store::fetch_progress::FetchSource;
use crate::store::import::Import;

/// Where layers come from.
#[derive(Clone)]
pub(super) enum LayerOrigin {
    /// A registry; the tally counts received bytes.
    Registry { session: RepositorySession, tally: Arc<PullProgress>, proved: Arc<ProvedBlobs> },
    /// An archive or a layout.
    Import(Arc<Import>),
}

impl LayerOrigin {
    /// Whether this pull may use a stored layer without fetching its blob.
    pub(super) fn may_reuse(&self, layer: &LayerRecord, wanted: &PlannedLayer) -> bool {
        match self {
            LayerOrigin::Registry { proved, .. } => proved.covers(layer, wanted),
            LayerOrigin::Import(_) => true, // only an administrator can import
        }
    }

    /// The source, as other pulls see it.
    pub(super) fn source(&self) -> FetchSource {
        match self {
            LayerOrigin::Registry { session, .. } => source_of(session),
            LayerOrigin::Import(_) => FetchSource::default(),
        }
    }

    /// Notes what happens to a layer.
    pub(super) fn note(&self, wanted: &PlannedLayer, phase: LayerPhase) {
        if let LayerOrigin::Registry { tally, .. } = self {
            tally.set(&wanted.descriptor.digest, phase);
        }
    }
}

/// The source of a session's layers.
pub(super) fn source_of(session: &RepositorySession) -> FetchSource {
    FetchSource {
        registry: session.image().registry().to_owned(),
        repository: session.image().name().to_owned(),
        authorizers: session.authorizers(),
    }
}
