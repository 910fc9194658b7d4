//! Wires garbage collection to a backend: what knows its layers, its disk, and what uses its images.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::gc::{Collector, CollectorBuilder, InspectLayerSource, LayerSource, ReclaimWait};
use larder_containerd::{ContainerdActivity, ContainerdLayers};
use larder_store::gc_sources::StoreFsStats;

use super::admitted_runtime::AdmittedRuntime;
use super::handle::BackendHandle;
use super::published_layers::PublishedLayers;
use super::publisher::StorePublisher;
use crate::config::Config;

/// The backend by the settings, and a collector's builder that knows how to ask it.
/// Where images of the store are published, the containers of containerd use them, too.
pub(crate) fn backend_and_collector(
    handle: &BackendHandle,
    config: &Config,
    publisher: Option<&StorePublisher>,
) -> (Arc<dyn Backend>, CollectorBuilder) {
    match handle {
        BackendHandle::Store(store) => {
            let layers: Arc<dyn LayerSource> = match publisher {
                Some(publisher) => {
                    Arc::new(PublishedLayers::new(store.clone(), publisher.shared_snapshots()))
                }
                None => Arc::new(store.clone()),
            };
            let backend: Arc<dyn Backend> = Arc::new(store.clone());
            let mut builder = Collector::builder(backend.clone())
                .reclaimer(Arc::new(store.clone()))
                .feed(Arc::new(store.clone()))
                .disk(Arc::new(StoreFsStats(store.store().clone())))
                .reclaim_wait(reclaim_wait(store.store().frees_at_once()))
                .layers(layers);
            if let Some(publisher) = publisher {
                builder = builder
                    .retention_source(Arc::new(publisher.unlisted_containers()))
                    .retention_source(Arc::new(publisher.pins()));
            }
            (backend, builder)
        }
        BackendHandle::Runtime(runtime) => {
            let sizes = ContainerdLayers::new(runtime.image_channel(), runtime.request_timeout());
            let sizes = Arc::new(sizes);
            let admitted = AdmittedRuntime::new(Arc::clone(runtime), Arc::clone(&sizes), config);
            let backend: Arc<dyn Backend> = Arc::new(admitted);
            let layers = InspectLayerSource::new(backend.clone()).with_sizes_from(sizes);
            let activity = ContainerdActivity::new(runtime.runtime_channel(), runtime.request_timeout());
            let mut builder =
                Collector::builder(backend.clone()).layers(Arc::new(layers)).feed(Arc::new(activity));
            if let Some(unlisted) = handle.unlisted_containers() {
                builder = builder.retention_source(unlisted);
            }
            (backend, builder)
        }
        #[cfg(feature = "docker")]
        BackendHandle::Docker(engine) => super::docker::parts(engine),
    }
}

/// Removed files are deleted before the disk is measured. Where that frees their space at once, waiting would only be
/// for what other processes write.
fn reclaim_wait(frees_at_once: bool) -> ReclaimWait {
    if frees_at_once {
        ReclaimWait { quiet: Duration::ZERO, ..ReclaimWait::default() }
    } else {
        ReclaimWait::default()
    }
}

#[cfg(test)]
mod tests {

    use async_trait::async_trait;
    use larder::gc::{FsStatsProvider, GcGoal, GcPolicy};
    use larder::image_service::{FilesystemError, FsStats};
    use larder_testkit::fake_backend::{FakeBackend, image};
    use parking_lot::Mutex;
    use tokio::time::Instant;

    use super::*;

    /// A filesystem that counts removed images as free 300 ms after it is first measured without them.
    struct LateFsStats {
        backend: FakeBackend,
        missed: Mutex<Vec<Instant>>,
    }

    #[async_trait]
    impl FsStatsProvider for LateFsStats {
        async fn measure(&self) -> Result<FsStats, FilesystemError> {
            let mut missed = self.missed.lock();
            let removed = 3 - self.backend.images().len();
            missed.resize(removed, Instant::now());
            let freed = missed.iter().filter(|since| since.elapsed() >= Duration::from_millis(300)).count();
            let available = 100 + 100 * freed as u64;
            Ok(FsStats { capacity: 1000, available, inodes: 1000, inodes_free: 900, reserved: 0 })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn space_that_is_freed_late_is_waited_for_unless_the_filesystem_frees_at_once() {
        for (frees_at_once, expected) in [(false, 2), (true, 1)] {
            let backend = FakeBackend::new();
            for name in ["a", "b", "c"] {
                backend.add_image(name, image(format!("sha256:{name}"), 100));
            }
            let disk = LateFsStats { backend: backend.clone(), missed: Mutex::default() };
            let tolerance = larder::gc::DiskSpace::ZERO;
            let collector = Collector::builder(Arc::new(backend.clone()))
                .policy(GcPolicy {
                    minimum_age: Duration::ZERO,
                    free_margin_percent: 0,
                    ..GcPolicy::default()
                })
                .disk(Arc::new(disk))
                .reclaim_wait(ReclaimWait { tolerance, ..reclaim_wait(frees_at_once) })
                .build();
            let ended = collector.round(GcGoal::Free { bytes: 100 }, &collector.policy()).await;
            assert!(ended.report.swept[0].removed.len() == 3 - expected, "{ended:?}");
            assert_eq!(backend.images().len(), expected, "frees at once: {frees_at_once}");
        }
    }
}
