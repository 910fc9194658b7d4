//! Wires garbage collection to a backend: what knows its layers, its disk, and what uses its images.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::gc::{Collector, CollectorBuilder, InspectedLayers, Patience};
use larder_store::collection::{Labelled, StoreDisk};

use super::handle::BackendHandle;

/// The backend, and a collector's builder that knows how to ask it.
pub(crate) fn parts(handle: &BackendHandle) -> (Arc<dyn Backend>, CollectorBuilder) {
    match handle {
        BackendHandle::Store(store) => {
            let backend: Arc<dyn Backend> = Arc::new(store.clone());
            let builder = Collector::builder(backend.clone())
                .also_used_by(Arc::new(store.clone()))
                .disk(Arc::new(StoreDisk(store.store().clone())))
                // What was removed is deleted when the disk is measured: there is nothing to wait for.
                .patience(Patience { quiet: Duration::ZERO, ..Patience::default() })
                .layers(Arc::new(Labelled::new(store.clone())));
            (backend, builder)
        }
        BackendHandle::Runtime(runtime) => {
            let told = Arc::new(runtime.containerd_layers());
            let backend: Arc<dyn Backend> = runtime.clone();
            let layers = InspectedLayers::new(backend.clone()).told_by(told);
            (backend.clone(), Collector::builder(backend).layers(Arc::new(layers)))
        }
        #[cfg(feature = "docker")]
        BackendHandle::Docker(engine) => super::docker::parts(engine),
    }
}
