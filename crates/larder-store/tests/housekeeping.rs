//! Progress of a pull, its cleanup before the fetch, and its error when disk space is insufficient.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::fs::FileTimes;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder::backend::{
    Backend as _, ByteProgress, CallErrorKind, ImageSpec, LayerPhase, PullDetail, PullStep,
};
use larder::gc::ClockReading;
use larder::hint::Hint;
use larder::pod::Pod;
use larder::pull::{BackendFailure, EnsureReason, EnsureRequest, ImageManager, PullPolicy};
use larder::reference::{Digest, Reference};
use larder::scheduler::Scheduler;
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::disk::DiskSpace;
use larder_store::mounts::MountOptions;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{BlobSource, LeaseRecord, LeaseResources, Store, StoreConfig, TransferLogin};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, PutImage, ResponseFault};
use tempfile::TempDir;

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

fn open(root: &Path) -> Store {
    Store::open(root, StoreConfig::default()).unwrap()
}

fn backend(store: &Store, config: StorePullConfig) -> StoreBackend {
    let registry =
        RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    StoreBackend::new(StorePuller::new(store.clone(), RegistryClient::new(registry), config))
}

fn put(registry: &FaultRegistry, repository: &str, files: &[(&str, usize)]) -> PutImage {
    let layer = |(name, size): &(&str, usize)| {
        TarBuilder::new().with(TarBuilderEntry::file(*name, vec![7; *size])).finish()
    };
    let layers: Vec<Vec<u8>> = files.iter().map(layer).collect();
    registry.put_image(repository, "1", PLAIN, &layers, &[])
}

/// A new store, and a registry with an image `shop/web:1` of one layer.
fn node() -> (TempDir, Store, FaultRegistry) {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir.path().join("store"));
    let registry = FaultRegistry::start();
    put(&registry, "shop/web", &[("web", 300_000)]);
    (dir, store, registry)
}

/// Returns the details of the pull once `enough` of it is visible.
async fn seen(registry: &FaultRegistry, store: &Store, enough: impl Fn(&PullDetail) -> bool) -> PullDetail {
    seen_with(StorePullConfig::default(), registry, store, enough).await
}

async fn seen_with(
    config: StorePullConfig,
    registry: &FaultRegistry,
    store: &Store,
    enough: impl Fn(&PullDetail) -> bool,
) -> PullDetail {
    let manager = ImageManager::new(Arc::new(backend(store, config)));
    let request = EnsureRequest::new(registry.image("shop/web:1"), PullPolicy::Always, Pod::default());
    let looking = async {
        loop {
            let detail = manager.pulls().pop().and_then(|pull| pull.detail);
            if let Some(detail) = detail.filter(&enough) {
                return detail;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        ended = manager.ensure(&request) => panic!("it ended before anything was seen: {ended:?}"),
        detail = looking => detail,
        () = tokio::time::sleep(Duration::from_secs(20)) => panic!("not seen: {:?}", manager.pulls()),
    }
}

#[tokio::test]
async fn a_layer_that_the_registry_delays_is_shown_as_waiting() {
    let (_dir, store, registry) = node();
    let image = put(&registry, "shop/web", &[("web", 300_000), ("more", 5000)]);
    registry.fault(FaultTrigger::path(&image.layers[1]), ResponseFault::RetryAfter(429, "40".into()));
    // One after the other, the larger first: a rate limit of the registry delays all later requests.
    let config = StorePullConfig { scheduler: Scheduler::for_layers(1), ..StorePullConfig::default() };
    let waits = |detail: &PullDetail| {
        detail.layers.first().is_some_and(|layer| layer.phase == LayerPhase::Done)
            && detail.layers[1].waiting.is_some()
    };
    let detail = seen_with(config, &registry, &store, waits).await;
    assert_eq!(detail.layers[0].waiting, None);
    assert_eq!((detail.step, detail.waiting.clone()), (PullStep::Layers, None));
    let second = &detail.layers[1];
    assert_eq!((second.digest.as_str(), second.phase), (image.layers[1].as_str(), LayerPhase::Fetching));
    let wait = second.waiting.clone().expect("it waits");
    assert_eq!(wait.reason, format!("rate limited by {}", registry.address()));
    assert!(wait.until.is_some());
}

/// Its bytes are put there by hand: a pull that is dropped keeps what was written in whole batches by then, which is
/// chance, and reports each batch when it writes the next.
#[tokio::test]
async fn a_resumed_layer_shows_the_bytes_already_fetched() {
    let (_dir, store, registry) = node();
    let layer = TarBuilder::new().with(TarBuilderEntry::file("web", vec![7; 300_000])).finish();
    let image = registry.put_image("shop/web", "1", PLAIN, std::slice::from_ref(&layer), &[]);
    let (name, digest) = (registry.image("shop/web:1"), Digest::parse(&image.layers[0]).unwrap());
    let name = Reference::parse(&name).unwrap();
    let blob = BlobSource::registry(&name, TransferLogin::Anonymous, digest, layer.len() as u64);
    let download = store.ingest(&blob).unwrap();
    download.write_at(&layer[..100_000], 0).unwrap();
    drop(download);
    registry.fault(FaultTrigger::path(&image.layers[0]), ResponseFault::StallAfter(0));
    let detail =
        seen(&registry, &store, |detail| detail.layers.first().is_some_and(|layer| layer.bytes.done > 0));
    let detail = detail.await;
    assert_eq!(detail.layers[0].bytes, ByteProgress { done: 100_000, total: Some(layer.len() as u64) });
    assert_eq!((detail.layers[0].phase, detail.layers[0].rate), (LayerPhase::Fetching, None));
}

#[tokio::test]
async fn a_complete_download_is_verified_after_a_reboot_and_fetched_again_only_if_it_is_damaged() {
    let layer = TarBuilder::new().with(TarBuilderEntry::file("web", vec![7; 300_000])).finish();
    for (left, is_fetched) in [(layer.clone(), false), (vec![0; layer.len()], true)] {
        let (dir, store, registry) = node();
        let image = registry.put_image("shop/web", "1", PLAIN, std::slice::from_ref(&layer), &[]);
        let name = Reference::parse(&registry.image("shop/web:1")).unwrap();
        let digest = Digest::parse(&image.layers[0]).unwrap();
        let blob = BlobSource::registry(&name, TransferLogin::Anonymous, digest, layer.len() as u64);
        let download = store.ingest(&blob).unwrap();
        download.write_at(&left, 0).unwrap();
        drop(download);
        let ingest = format!("ingest/sha256-{}/extents.latest", blob.ingest_id().digest().hex());
        let noted = dir.path().join("store").join(ingest);
        let mut extents: serde_json::Value = serde_json::from_slice(&fs_err::read(&noted).unwrap()).unwrap();
        extents["boot"] = "an earlier one".into();
        fs_err::write(&noted, extents.to_string()).unwrap();

        let manager = ImageManager::new(Arc::new(backend(&store, StorePullConfig::default())));
        let request = EnsureRequest::new(name.to_string(), PullPolicy::Always, Pod::default());
        manager.ensure(&request).await.unwrap();
        assert_eq!(registry.bytes_sent(&image.layers[0]) > 0, is_fetched);
    }
}

#[tokio::test]
async fn a_manifest_that_the_registry_delays_is_shown_as_waiting() {
    let (_dir, store, registry) = node();
    registry.fault(FaultTrigger::path("/manifests/"), ResponseFault::RetryAfter(429, "40".into()));
    let detail = seen(&registry, &store, |detail| detail.waiting.is_some()).await;
    assert_eq!((detail.step, detail.layers.len()), (PullStep::Resolving, 0));
}

#[tokio::test]
async fn layers_beyond_the_bound_wait_for_their_turn() {
    let (_dir, store, registry) = node();
    let files: Vec<String> = (0..6).map(|number| format!("file-{number}")).collect();
    let files: Vec<(&str, usize)> = files.iter().map(|name| (name.as_str(), 400_000)).collect();
    let image = put(&registry, "shop/web", &files);
    for layer in &image.layers {
        registry.fault(FaultTrigger::path(layer), ResponseFault::StallAfter(100_000));
    }
    let counted =
        |detail: &PullDetail, phase| detail.layers.iter().filter(|layer| layer.phase == phase).count();
    let detail = seen(&registry, &store, |detail| counted(detail, LayerPhase::Fetching) == 4).await;
    assert_eq!(counted(&detail, LayerPhase::Queued), 2, "{detail:?}");
    assert!(detail.layers.iter().all(|layer| layer.bytes.total > Some(400_000)), "{detail:?}");
}

#[tokio::test]
async fn a_layer_that_an_image_has_twice_is_not_fetched_by_another_pull() {
    let (_dir, store, registry) = node();
    let image = put(&registry, "shop/web", &[("web", 300_000), ("more", 5000), ("web", 300_000)]);
    assert_eq!(image.layers[0], image.layers[2]);
    registry.fault(FaultTrigger::path(&image.layers[0]), ResponseFault::StallAfter(100_000));
    let detail = seen(&registry, &store, |detail| {
        detail.layers.first().is_some_and(|layer| layer.phase == LayerPhase::Fetching)
    });
    let detail = detail.await;
    assert_eq!(detail.layers[2].phase, LayerPhase::Queued, "{detail:?}");
}

#[tokio::test]
async fn a_pull_clears_away_what_a_dead_process_left_for_too_long() {
    let (dir, store, registry) = node();
    let root = dir.path().join("store");
    let [stale, kept] = ["a", "b"].map(|blob| BlobSource::archive(Digest::sha256(blob), 1 << 20));
    let two_days_ago = SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    for blob in [&stale, &kept] {
        drop(store.ingest(blob).unwrap());
    }
    let granted = [
        ("pull/stale", &stale, ClockReading::wall(two_days_ago.into())),
        ("pull/kept", &kept, ClockReading::now()),
    ];
    for (id, blob, at) in granted {
        let leased = LeaseResources { layers: Vec::new(), ingests: vec![blob.ingest_id()] };
        let minute = Duration::from_secs(60);
        store.lease(&LeaseRecord::granted(id, leased, minute, &at)).unwrap();
    }
    let mut ingests = Vec::new();
    for entry in fs_err::read_dir(root.join("ingest")).unwrap() {
        let path = entry.unwrap().path();
        let opened = fs_err::File::open(&path).unwrap();
        opened.file().set_times(FileTimes::new().set_modified(two_days_ago)).unwrap();
        ingests.push(path);
    }
    assert_eq!(ingests.len(), 2);
    drop(store);
    let store = open(&root);

    backend(&store, StorePullConfig::default())
        .pull(
            &ImageSpec::named(registry.image("shop/web:1")),
            None,
            None,
            &larder::backend::ProgressReporter::unwatched(),
        )
        .await
        .unwrap();
    let left: Vec<_> = ingests.iter().filter(|path| path.exists()).collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert!(left[0].to_string_lossy().contains(kept.ingest_id().digest().hex()), "{left:?}");
    let leases: Vec<String> =
        store.leases(&UNIX_EPOCH.into()).unwrap().into_iter().map(|lease| lease.id).collect();
    assert!(!leases.contains(&"pull/stale".to_owned()), "{leases:?}");
    assert!(leases.contains(&"pull/kept".to_owned()), "{leases:?}");
}

/// The refusal of a pull that finds no room.
async fn refused(store: &Store, image: &str) -> String {
    let reserve = DiskSpace { bytes: 1 << 62, inodes: 0 };
    let full = backend(store, StorePullConfig { reserve, ..StorePullConfig::default() });
    let progress = larder::backend::ProgressReporter::unwatched();
    full.pull(&ImageSpec::named(image), None, None, &progress).await.unwrap_err().to_string()
}

#[tokio::test]
async fn a_pull_that_can_never_fit_costs_no_other_pull_what_it_has_fetched() {
    let (dir, store, registry) = node();
    let other = BlobSource::archive(Digest::sha256("other"), 1 << 20);
    store.ingest(&other).unwrap().write_at(&vec![7; 100_000], 0).unwrap();
    let ingests = || fs_err::read_dir(dir.path().join("store/ingest")).unwrap().count();
    assert_eq!(ingests(), 1);
    let error = refused(&store, &registry.image("shop/web:1")).await;
    assert!(error.contains("insufficient space"), "{error}");
    assert_eq!(ingests(), 1, "sizes of a manifest are only declared");
}

#[tokio::test]
async fn the_hint_of_a_refusal_reaches_the_caller() {
    let (_dir, store, registry) = node();
    let reserve = DiskSpace { bytes: 1 << 62, inodes: 0 };
    let full = backend(&store, StorePullConfig { reserve, ..StorePullConfig::default() });
    let manager = ImageManager::new(Arc::new(full));
    let request = EnsureRequest::new(registry.image("shop/web:1"), PullPolicy::Always, Pod::default());
    let hint = Hint::new()
        .command(["df"])
        .text(" shows disk usage; store.reserveBytes and store.reserveInodes of it stay free");
    for reason in [EnsureReason::ErrImagePull, EnsureReason::ImagePullBackOff] {
        let error = manager.ensure(&request).await.unwrap_err();
        assert_eq!(error.reason, reason);
        assert_eq!(
            error.failure,
            Some(BackendFailure {
                kind: CallErrorKind::InsufficientSpace { reclaim_bytes: None },
                hint: Some(hint.clone()),
            }),
            "{error}"
        );
    }
    let request = EnsureRequest::new(registry.image("no/such:1"), PullPolicy::Always, Pod::default());
    let error = manager.ensure(&request).await.unwrap_err();
    assert_eq!(error.failure.as_ref().map(|failure| failure.kind), Some(CallErrorKind::NotFound), "{error}");
}

/// Whether a refusal counts so many bytes of layers, and no more than a few blocks beside them.
fn holds_about(error: &str, layers: u32) -> bool {
    let size = error.rsplit("; images that are not mounted take ").next();
    let megabytes: f64 =
        size.and_then(|size| size.strip_suffix("MB")).and_then(|number| number.parse().ok()).unwrap_or(-1.0);
    let layers = f64::from(layers) / 1e6;
    (layers - 0.005..layers + 0.1).contains(&megabytes)
}

#[tokio::test]
async fn a_refusal_counts_each_layer_of_images_without_a_mount_once() {
    let (dir, store, registry) = node();
    let (a, b, c) = (("base", 3 << 20), ("app", 1 << 20), ("other", 2 << 20));
    put(&registry, "shop/app", &[a, b]);
    put(&registry, "shop/other", &[a, c]);
    let web = registry.image("shop/web:1");
    let error = refused(&store, &web).await;
    assert!(error.ends_with("not mounted take 0B"), "nothing is here: {error}");

    let roomy = backend(&store, StorePullConfig::default());
    for name in ["shop/app:1", "shop/other:1"] {
        let progress = larder::backend::ProgressReporter::unwatched();
        roomy.pull(&ImageSpec::named(registry.image(name)), None, None, &progress).await.unwrap();
    }
    let error = refused(&store, &web).await;
    assert!(holds_about(&error, 6 << 20), "the base counts once: {error}");

    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "CI must not skip tests of mounts");
        eprintln!("==== SKIPPED, NOT TESTED: what is mounted is not reclaimed; mounting needs root ====");
        return;
    }
    let target = dir.path().join("mnt");
    fs_err::create_dir(&target).unwrap();
    store.mount(registry.image("shop/app:1"), &target, MountOptions::default(), SystemTime::now()).unwrap();
    let error = refused(&store, &web).await;
    store.umount(&target).unwrap();
    assert!(holds_about(&error, 2 << 20), "what is mounted stays: {error}");
}
