//! Reports of the node in a status and in an explanation.

use async_trait::async_trait;
use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder::gc::FsStatsProvider;
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::image_service::{FilesystemError, FsStats};
use larder::records::{PullRecordStore, Verification};
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};

use super::*;
use crate::backend::BackendHandle;
use crate::node::pulls::PullAccess;

async fn status(served: &TestDaemon) -> api::StatusResponse {
    served.client().status(api::StatusRequest { look: false }).await.unwrap().into_inner()
}

#[tokio::test(start_paused = true)]
async fn the_status_has_the_images_of_the_node_status() {
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        let document = r#"{"version":1,"hidden":["sha256:d:1"],"pulls":{},"isLost":false,"visible":[]}"#;
        let file = dir.join("hidden.json");
        fs_err::write(&file, document).unwrap();
        let hidden = Arc::new(HiddenImages::open(&file).unwrap());
        let parts = testing::parts(backend, dir, None, |config| config.images.node_status_max_images = 2);
        let prefetch_credentials = PrefetchCredentials::Hide(hidden);
        NodeDependencies { access: PullAccess { prefetch_credentials, ..parts.access }, ..parts }
    });
    for (name, size) in [("a:1", 1), ("b:1", 3), ("c:1", 2), ("d:1", 4)] {
        served.backend.add_image(name, image(format!("sha256:{name}"), size));
    }
    let node = Arc::clone(&served.node);
    let mut listed = node.collection.images();
    let status = tokio::select! {
        () = node.collection.run() => unreachable!("it runs until dropped"),
        status = async {
            listed.wait_for(|images| images.listed.is_some()).await.unwrap();
            status(&served).await
        } => status,
    };
    let shown: Vec<_> = status.node_images.iter().map(|image| (&image.names[..], image.size_bytes)).collect();
    let names = ["b:1", "c:1"].map(|name| [name.to_owned()]);
    assert_eq!(shown, [(&names[0][..], 3), (&names[1][..], 2)]);
    assert_eq!((status.images_bytes, status.images_listed.is_some()), (10, true));
}

/// A disk that fills up while the node looks at it.
struct FillingDisk(std::sync::atomic::AtomicU64);

#[async_trait]
impl FsStatsProvider for FillingDisk {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        let available = self.0.fetch_sub(100, std::sync::atomic::Ordering::Relaxed);
        Ok(FsStats { capacity: 1000, available, inodes: 50, inodes_free: 20, reserved: 0 })
    }
}

#[tokio::test]
async fn the_status_measures_the_image_filesystem_and_has_the_warnings_of_the_settings() {
    let disk = Arc::new(FillingDisk(700.into()));
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        let warnings = vec!["a setting has no effect".to_owned()];
        testing::parts(backend, dir, Some(disk), |config| config.warnings = warnings)
    });
    for (used, available) in [(30, 700), (40, 600)] {
        let status = status(&served).await;
        let disk = status.disk.unwrap();
        assert_eq!((disk.used_percent, disk.available_bytes, disk.size_bytes), (used, available, 1000));
        assert_eq!((disk.gc_starts_at_percent, disk.gc_frees_to_percent), (Some(85), Some(80)));
        assert_eq!((disk.inodes, disk.inodes_free), (50, 20));
        assert_eq!((disk.inodes_used_percent, disk.gc_starts_at_inodes_percent), (Some(60), Some(90)));
        assert_eq!(status.warnings, ["a setting has no effect"]);
    }
}

#[tokio::test]
async fn an_image_without_a_record_is_explained_by_the_policy() {
    for (policy, every_pod) in [("NeverVerify", true), ("AlwaysVerify", false)] {
        let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
            let verification = Verification::parse(policy, []).unwrap();
            let records = PullRecordStore::open(&dir.join("records"), verification).unwrap();
            let access = PullAccess { records: Some(Arc::new(records)), ..PullAccess::default() };
            NodeDependencies { access, ..testing::parts(backend, dir, None, |_| ()) }
        });
        served.backend.add_image("a:1", image("sha256:1", 1));
        let request = api::ExplainRequest { image: "a:1".into(), ..Default::default() };
        let explanation = served.client().explain(request).await.unwrap().into_inner();
        assert_eq!(explanation.unrecorded_access, Some(every_pod), "{policy}");
    }
}

#[tokio::test]
async fn a_registry_that_limits_the_rate_is_a_warning_of_the_status() {
    let registry = FaultRegistry::start();
    registry.fault(FaultTrigger::path("/"), ResponseFault::RetryAfter(429, "86400".into()));
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        let store = Store::open(&dir.join("store"), StoreConfig::default()).unwrap();
        let client = RegistryClient::new(RegistryConfig { proxy: Proxy::None, ..RegistryConfig::default() });
        let store = StoreBackend::new(StorePuller::new(store, client, StorePullConfig::default()));
        let parts = testing::parts(backend, dir, None, |_| ());
        NodeDependencies { storage: parts.storage.with_handle(BackendHandle::Store(store)), ..parts }
    });
    assert_eq!(status(&served).await.warnings, [""; 0]);
    assert_eq!(status(&served).await.registries, []);
    let image = ImageSpec::named(registry.image("shop/web:1"));
    let store = served.node.storage.store().unwrap();
    store.pull(&image, None, None, &ProgressReporter::unwatched()).await.unwrap_err();
    let api::StatusResponse { warnings, registries, .. } = status(&served).await;
    let [load] = &registries[..] else { panic!("{registries:?}") };
    assert_eq!((&*load.host, load.connection_limit), (registry.address().as_str(), 8));
    assert!(load.requests > 0 && load.throttled > 0, "{load:?}");
    assert!(load.retry_after_milliseconds.is_some_and(|wait| wait > 50_000), "{load:?}");
    let expected = format!("registry {}: rate limited; requests", registry.address());
    assert!(warnings.len() == 1 && warnings[0].starts_with(&expected), "{warnings:?}");
}

#[tokio::test]
async fn the_status_has_the_progress_of_a_round_by_request() {
    let served = TestDaemon::new();
    for (name, id) in [("a:1", "sha256:1"), ("b:1", "sha256:2")] {
        served.backend.add_image(name, image(id, 10));
    }
    assert_eq!(status(&served).await.gc.unwrap().round, None);
    served.backend.hold_removals();
    let mut client = served.client();
    let goal = Some(Goal::AllUnused(true));
    let request = api::CollectRequest { goal, ..Default::default() };
    let round = tokio::spawn(async move { client.collect(request).await });
    let progress = loop {
        match status(&served).await.gc.unwrap().round {
            Some(round) if round.removing.is_some() => break round,
            _ => tokio::task::yield_now().await,
        }
    };
    assert_eq!(progress.goal(), api::CollectionGoal::AllUnused);
    assert_eq!(progress.phase(), api::GcPhase::Removing);
    assert_eq!((progress.removed_images, progress.planned_images), (0, 2));
    assert_eq!((progress.freed_bytes, progress.promised_bytes), (0, 20));
    assert_eq!(progress.removing.unwrap().names, ["a:1"]);
    round.abort();
    while status(&served).await.gc.unwrap().round.is_some() {
        time::sleep(Duration::from_millis(10)).await;
    }
}
