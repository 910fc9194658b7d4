//! Where the layers of an image come from.

use std::sync::Arc;

use larder::backend::LayerPhase;
use larder_registry::RepositorySession;

use super::plan::PlannedLayer;
use super::pull_progress::PullProgress;
use crate::store::import::Import;

/// Where layers come from.
#[derive(Clone)]
pub(super) enum LayerOrigin {
    /// A registry; the tally counts received bytes.
    Registry { session: RepositorySession, tally: Arc<PullProgress> },
    /// An archive or a layout.
    Import(Arc<Import>),
}

impl LayerOrigin {
    /// Notes what happens to a layer.
    pub(super) fn note(&self, wanted: &PlannedLayer, phase: LayerPhase) {
        if let LayerOrigin::Registry { tally, .. } = self {
            tally.set(&wanted.descriptor.digest, phase);
        }
    }
}
