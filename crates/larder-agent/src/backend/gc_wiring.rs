//! Wires garbage collection to a backend: what knows its layers, its disk, and what uses its images.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::gc::{Collector, CollectorBuilder, InspectLayerSource, ReclaimWait};
use larder_containerd::ContainerdLayers;
use larder_store::gc_sources::{StoreFsStats, StoreLayerSource};

use super::handle::BackendHandle;

/// The backend, and a collector's builder that knows how to ask it.
pub(crate) fn backend_and_collector(handle: &BackendHandle) -> (Arc<dyn Backend>, CollectorBuilder) {
    match handle {
        BackendHandle::Store(store) => {
            let backend: Arc<dyn Backend> = Arc::new(store.clone());
            let builder = Collector::builder(backend.clone())
                .use_source(Arc::new(store.clone()))
                .reclaimer(Arc::new(store.clone()))
                .disk(Arc::new(StoreFsStats(store.store().clone())))
                // What was removed is deleted when the disk is measured: there is nothing to wait for.
                .reclaim_wait(ReclaimWait { quiet: Duration::ZERO, ..ReclaimWait::default() })
                .layers(Arc::new(StoreLayerSource::new(store.clone())));
            (backend, builder)
        }
        BackendHandle::Runtime(runtime) => {
            let sizes = ContainerdLayers::new(runtime.image_channel(), runtime.request_timeout());
            let backend: Arc<dyn Backend> = runtime.clone();
            let layers = InspectLayerSource::new(backend.clone()).with_sizes_from(Arc::new(sizes));
            let mut builder = Collector::builder(backend.clone()).layers(Arc::new(layers));
            if let Some(unlisted) = handle.unlisted_containers() {
                builder = builder.use_source(unlisted);
            }
            (backend, builder)
        }
        #[cfg(feature = "docker")]
        BackendHandle::Docker(engine) => super::docker::parts(engine),
    }
}
