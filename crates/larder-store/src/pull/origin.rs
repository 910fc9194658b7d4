//! Where the layers of an image come from.

use std::sync::Arc;

use larder::backend::LayerPhase;
use larder_registry::Session;

use super::plan::Wanted;
use super::tally::Tally;
use crate::store::import::Import;

/// Where layers come from.
#[derive(Clone)]
pub(super) enum Origin {
    /// A registry; the tally counts what comes.
    Registry { session: Session, tally: Arc<Tally> },
    /// An archive or a layout.
    Import(Arc<Import>),
}

impl Origin {
    /// Notes what happens to a layer.
    pub(super) fn note(&self, wanted: &Wanted, phase: LayerPhase) {
        if let Origin::Registry { tally, .. } = self {
            tally.set(&wanted.descriptor.digest, phase);
        }
    }
}
