//! A runtime whose pulls are admitted as those into larder's own store are: the runtime pulls and stores, larder makes
//! room before, in the same call.
//!
//! ```text
//! admit -> assume a size -> or ask the registry -> wait for running pulls -> claim, or refuse
//! pull  -> the runtime's; one that runs out of space is repeated after a round of collection
//! ```
//!
//! The registry is asked with the credential of the call, and only where the [assumed](assumed_bytes) size does not fit
//! beside what running pulls claim. What it answers, and what containerd has of the image, say what is missing. Where
//! that is unknown, such as behind a mirror that only the runtime knows, or with another runtime, the pull is the
//! runtime's alone; so is one of an image that is present under its name, as with the policy Always.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, CallErrorKind, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec,
    ProgressReporter, ReclaimBytes, RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::error_chain;
use larder::gc::DiskSpace;
use larder::hint::Hint;
use larder::image_service::{FsStats, ImageService, local_disk};
use larder::pod::SandboxConfig;
use larder::reference::{Digest, ImageId, Reference};
use larder_containerd::{ContainerdLayers, PresentLayers};
use larder_cri::CriBackend;
use larder_registry::manifest::{Descriptor, PlatformMatcher};
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::pull::chain_id;
use larder_store::store::UnpackRatio;
use larder_store::store::admission::{
    DeclaredSize, InsufficientSpace, PullClaim, PullClaims, RemovableSpace, SpaceEstimate, admit, estimate,
    learn,
};
use parking_lot::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::config::Config;
use crate::node::collection::MEASURE_WITHIN;

/// How long a registry and containerd may take to say what an image has, and what is missing of it.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// Need of a pull of unknown size at most, a quarter of smaller disks. Larger images are rare, and most disks
/// have more free all the time.
const ASSUMED: u64 = 8 << 30;

/// containerd's directories of snapshots, in the directory with its content.
const SNAPSHOTS: &str = "io.containerd.snapshotter.v1.";
/// The directory of its content.
const CONTENT: &str = "io.containerd.content.v1.content";
/// Snapshotters that unpack whole layers as files.
const SNAPSHOTTERS: [&str; 2] = ["overlayfs", "native"];

/// A container runtime, over CRI, with admission of its pulls.
pub(crate) struct AdmittedRuntime {
    runtime: Arc<CriBackend>,
    layers: Arc<ContainerdLayers>,
    registry: RegistryClient,
    reserve: DiskSpace,
    /// Learned from admitted pulls.
    ratio: Mutex<Option<UnpackRatio>>,
    claims: PullClaims,
}

/// The image filesystem of the runtime.
struct MeasuredDisk {
    /// The directory of the snapshots.
    snapshots: PathBuf,
    stats: FsStats,
}

/// Layers of an image that the runtime lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MissingLayers {
    need: SpaceEstimate,
    /// The snapshotter that gets them.
    snapshotter: String,
    /// Chain IDs of the layers to unpack, with the sizes of their archives.
    chains: Vec<(Digest, u64)>,
}

/// The size of a pull as far as known.
#[derive(Debug)]
enum PullSize {
    /// The registry was not asked.
    Unasked,
    /// It cannot be determined.
    Unknown,
    Missing(MissingLayers),
}

/// Decision about a pull.
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    /// It claims this much, and goes on.
    Admitted(DiskSpace),
    /// Its size decides.
    Ask,
    /// It fits if running pulls need less than they claim, or when they have ended.
    Wait,
    Refused(InsufficientSpace),
}

impl AdmittedRuntime {
    /// Pulls with `runtime`; `layers` has what containerd has. Opens nothing.
    pub(crate) fn new(
        runtime: Arc<CriBackend>,
        layers: Arc<ContainerdLayers>,
        config: &Config,
    ) -> AdmittedRuntime {
        AdmittedRuntime {
            runtime,
            layers,
            // The answer is worth no retry: without it the runtime pulls all the same.
            registry: RegistryClient::new(RegistryConfig {
                tries: 1,
                tries_of_mirror: 1,
                ..config.registry.clone()
            }),
            reserve: config.store_pull().reserve,
            ratio: Mutex::default(),
            claims: PullClaims::default(),
        }
    }

    /// Waits until there is room for a pull, and claims it. Fails where collection has to make it. `None` where the
    /// disk cannot be measured.
    async fn admit(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
    ) -> Result<(Option<PullClaim>, Option<MissingLayers>), BackendError> {
        let (mut size, mut wait) = (PullSize::Unasked, self.claims.wait());
        loop {
            let may_wait = wait.begin();
            let alone = self.claims.admit_alone().await;
            let running = self.claims.running();
            let Some(disk) = self.measure().await else { return Ok((None, None)) };
            let free = free(disk.stats);
            match decide(&size, disk.stats, running.unused(free), self.reserve, may_wait) {
                Admission::Admitted(space) => {
                    let claim = self.claims.claim(space, free);
                    let missing = match size {
                        PullSize::Missing(missing) => Some(missing),
                        PullSize::Unasked | PullSize::Unknown => None,
                    };
                    return Ok((Some(claim), missing));
                }
                Admission::Refused(full) => return Err(refused(full)),
                Admission::Ask => {
                    drop(alone);
                    // One that is present is pulled for what has changed, mostly nothing.
                    let missing = match self.runtime.status(image).await {
                        Ok(Some(_)) => None,
                        _ => self.missing(image, credential, &disk.snapshots).await,
                    };
                    size = missing.map_or(PullSize::Unknown, PullSize::Missing);
                }
                Admission::Wait => {
                    drop(alone);
                    wait.changed().await;
                }
            }
        }
    }

    async fn measure(&self) -> Option<MeasuredDisk> {
        let images = ImageService::new(self.runtime.clone());
        // A filesystem that does not answer holds no pull back.
        match timeout(MEASURE_WITHIN, images.image_filesystem(local_disk)).await.ok()? {
            Ok(found) => {
                let stats = found.disk.filter(|disk| disk.capacity > 0)?;
                Some(MeasuredDisk { snapshots: found.usage.mountpoint, stats })
            }
            Err(error) => {
                tracing::debug!("pulls are not admitted: {error}");
                None
            }
        }
    }

    /// The layers that the runtime lacks of an image; `None` if that cannot be determined, which is no error of the
    /// pull.
    async fn missing(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        snapshots: &Path,
    ) -> Option<MissingLayers> {
        let asked = timeout(ASK_WITHIN, self.ask(image, credential, snapshots)).await;
        let asked = asked.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        asked.inspect_err(|error| tracing::debug!("unknown size of {}: {error}", image.image)).ok()
    }

    async fn ask(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        snapshots: &Path,
    ) -> Result<MissingLayers, String> {
        // A handler of runtimes may have a snapshotter of its own.
        let snapshotter = snapshotter_of(snapshots)
            .filter(|name| SNAPSHOTTERS.contains(name) && image.runtime_handler.is_empty())
            .ok_or_else(|| format!("unknown snapshotter of {}", snapshots.display()))?;
        let name = Reference::parse(image.image.as_str()).map_err(|error| error_chain(&error))?;
        let session = self.registry.session(&name, credential).map_err(|error| error_chain(&error))?;
        let platform = PlatformMatcher::host();
        let (documents, present, has_content) = tokio::join!(
            session.documents(&platform),
            self.layers.present(snapshotter),
            has_content(snapshots.to_owned())
        );
        let documents = documents.map_err(|error| error_chain(&error))?;
        let present = present.map_err(|error| error.to_string())?;
        let ratio = self.ratio.lock().unwrap_or_default();
        let layers = documents.layers.layers.iter().zip(&documents.config.diff_ids);
        Ok(missing_layers(layers, &present, snapshotter, has_content, ratio))
    }

    /// Learns from a pull what the layers became that were missing.
    async fn learn(&self, missing: &MissingLayers) {
        let mut became = DiskSpace::ZERO;
        for (chain, _) in &missing.chains {
            match self.layers.written(&missing.snapshotter, chain.as_str()).await {
                Ok(usage) => became += usage,
                Err(error) => return tracing::debug!("unknown size of layer {chain}: {error}"),
            }
        }
        let fetched = missing.chains.iter().map(|(_, size)| size).sum();
        let mut ratio = self.ratio.lock();
        *ratio = learn(*ratio, fetched, became).or(*ratio);
    }

    /// The error of a pull that ran out of space, with what collection has to free for a retry.
    async fn out_of_space(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        mut error: BackendError,
    ) -> BackendError {
        let Some(disk) = self.measure().await else { return error };
        let missing = self.missing(image, credential, &disk.snapshots).await;
        let reclaim_bytes = reclaim_after(missing.as_ref(), disk.stats, self.reserve);
        if let BackendError::Call { kind, .. } = &mut error {
            *kind = CallErrorKind::InsufficientSpace { reclaim_bytes };
        }
        error.with_hint(match reclaim_bytes {
            Some(_) => Hint::new().command(["gc", "--all-unused"]).text(" removes unused images"),
            None => Hint::new().command(["df"]).text(" shows disk usage"),
        })
    }
}

/// Decides on a pull. Running pulls may still use what is `claimed`.
fn decide(
    size: &PullSize,
    disk: FsStats,
    claimed: DiskSpace,
    reserve: DiskSpace,
    may_wait: bool,
) -> Admission {
    let free = free(disk);
    let beside = claimed.shortfall_to(free);
    let used = RemovableSpace::Used(used(disk));
    let assumed = DiskSpace { bytes: assumed_bytes(disk), inodes: 0 };
    match size {
        PullSize::Unasked => {
            let need = SpaceEstimate { likely: assumed, least: assumed };
            match admit(need, beside, reserve, used) {
                Ok(()) => Admission::Admitted(assumed),
                Err(_) => Admission::Ask,
            }
        }
        // A claim of more than is free would keep others waiting for nothing.
        PullSize::Unknown => {
            Admission::Admitted(DiskSpace { bytes: assumed.bytes.min(beside.bytes), inodes: 0 })
        }
        PullSize::Missing(MissingLayers { need, .. }) => match admit(*need, beside, reserve, used) {
            Ok(()) => Admission::Admitted(need.least),
            Err(_) if may_wait && claimed != DiskSpace::ZERO => Admission::Wait,
            Err(_) => match admit(*need, free, reserve, used) {
                Ok(()) => Admission::Admitted(need.least),
                Err(full) => Admission::Refused(full),
            },
        },
    }
}

/// The bytes to free after the runtime has run out of space: of an unknown size, or one that was estimated too low,
/// what is assumed of a pull, or a part of it; `None` if the pull never fits.
fn reclaim_after(missing: Option<&MissingLayers>, disk: FsStats, reserve: DiskSpace) -> Option<ReclaimBytes> {
    let used = RemovableSpace::Used(used(disk));
    match missing.map(|missing| admit(missing.need, free(disk), reserve, used)) {
        Some(Err(full)) => full.reclaim_bytes(),
        Some(Ok(())) | None => {
            Some(ReclaimBytes { least: assumed_bytes(disk) / 4, likely: assumed_bytes(disk) })
        }
    }
}

fn refused(full: InsufficientSpace) -> BackendError {
    let kind = CallErrorKind::InsufficientSpace { reclaim_bytes: full.reclaim_bytes() };
    let hint = full.hint();
    BackendError::caused_by(kind, full).with_hint(hint)
}

/// Free space of a filesystem. Some make inodes as needed and report none.
fn free(disk: FsStats) -> DiskSpace {
    let inodes = if disk.inodes == 0 { u64::MAX } else { disk.inodes_free };
    DiskSpace { bytes: disk.available, inodes }
}

fn used(disk: FsStats) -> DiskSpace {
    DiskSpace {
        bytes: disk.capacity.saturating_sub(disk.available).saturating_sub(disk.reserved),
        inodes: disk.inodes.saturating_sub(disk.inodes_free),
    }
}

/// The assumed need of a pull of unknown size.
fn assumed_bytes(disk: FsStats) -> u64 {
    ASSUMED.min(disk.capacity / 4)
}

/// The snapshotter whose directory of snapshots this is.
fn snapshotter_of(snapshots: &Path) -> Option<&str> {
    snapshots.file_name()?.to_str()?.strip_prefix(SNAPSHOTS)
}

/// Whether containerd has its content on the filesystem of its snapshots.
async fn has_content(snapshots: PathBuf) -> bool {
    let device = |path: &Path| fs_err::metadata(path).ok().map(|found| found.dev());
    let same = move || {
        let content = device(&snapshots.with_file_name(CONTENT));
        content.is_some() && content == device(&snapshots)
    };
    spawn_blocking(same).await.unwrap_or(false)
}

/// Bytes that containerd lacks of an image with these layers and diff IDs. It keeps the archive of a layer beside the
/// unpacked one.
fn missing_layers<'a>(
    layers: impl Iterator<Item = (&'a Descriptor, &'a Digest)>,
    present: &PresentLayers,
    snapshotter: &str,
    has_content: bool,
    ratio: UnpackRatio,
) -> MissingLayers {
    let (mut chains, mut sizes, mut archives, mut below) = (Vec::new(), Vec::new(), 0_u64, None);
    let mut seen = HashSet::new();
    for (layer, diff_id) in layers {
        let chain = chain_id(below.as_ref(), diff_id);
        if !present.snapshots.contains(chain.as_str()) {
            if has_content && !present.blobs.contains(layer.digest.as_str()) && seen.insert(&layer.digest) {
                archives = archives.saturating_add(layer.size);
            }
            chains.push((chain.clone(), layer.size));
            sizes.push(DeclaredSize::of(layer));
        }
        below = Some(chain);
    }
    MissingLayers { need: estimate(ratio, &sizes, archives), snapshotter: snapshotter.to_owned(), chains }
}

#[async_trait]
impl Backend for AdmittedRuntime {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.runtime.info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.runtime.list().await
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.runtime.status(image).await
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.runtime.inspect(image).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        image.check_runtime_pull()?;
        let (claim, missing) = self.admit(image, credential).await?;
        let pulled = self.runtime.pull(image, credential, sandbox, progress).await;
        drop(claim);
        match (pulled, missing) {
            (Ok(id), Some(missing)) => {
                self.learn(&missing).await;
                Ok(id)
            }
            (Err(error), _) if matches!(error.kind(), Some(CallErrorKind::InsufficientSpace { .. })) => {
                Err(self.out_of_space(image, credential, error).await)
            }
            (pulled, _) => pulled,
        }
    }

    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        self.runtime.remove(image, options).await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.runtime.filesystems().await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.runtime.container_inventory().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// A disk of a gigabyte with this much free.
    fn disk(available: u64) -> FsStats {
        FsStats { capacity: 1000 * MB, available, reserved: 0, inodes: 1000, inodes_free: 500 }
    }

    fn bytes(bytes: u64) -> DiskSpace {
        DiskSpace { bytes, inodes: 0 }
    }

    fn missing(least: u64, likely: u64) -> PullSize {
        let need = SpaceEstimate { likely: bytes(likely), least: bytes(least) };
        PullSize::Missing(MissingLayers { need, snapshotter: "overlayfs".to_owned(), chains: Vec::new() })
    }

    #[test]
    fn the_registry_is_asked_only_where_what_is_assumed_does_not_fit() {
        let decided = |size: &PullSize, available, claimed| {
            decide(size, disk(available), bytes(claimed), bytes(50 * MB), true)
        };
        let quarter = Admission::Admitted(bytes(250 * MB));
        assert_eq!(decided(&PullSize::Unasked, 300 * MB, 0), quarter);
        assert_eq!(decided(&PullSize::Unasked, 299 * MB, 0), Admission::Ask);
        assert_eq!(decided(&PullSize::Unasked, 400 * MB, 101 * MB), Admission::Ask, "others claim space");
        let large = FsStats { capacity: 1 << 40, ..disk(9 << 30) };
        let decided_on_large = decide(&PullSize::Unasked, large, bytes(0), bytes(50 * MB), true);
        assert_eq!(decided_on_large, Admission::Admitted(bytes(8 << 30)), "hardly an image is larger");
        assert_eq!(decided(&PullSize::Unknown, 100 * MB, 0), Admission::Admitted(bytes(100 * MB)));
        assert_eq!(decided(&PullSize::Unknown, 100 * MB, 90 * MB), Admission::Admitted(bytes(10 * MB)));
    }

    #[test]
    fn a_pull_waits_for_others_and_is_refused_only_without_them() {
        let decided = |available, claimed, may_wait| {
            decide(&missing(100 * MB, 200 * MB), disk(available), bytes(claimed), bytes(50 * MB), may_wait)
        };
        let admitted = Admission::Admitted(bytes(100 * MB));
        assert_eq!(decided(150 * MB, 0, true), admitted);
        assert_eq!(decided(150 * MB, 1, true), Admission::Wait);
        assert_eq!(decided(250 * MB, 100 * MB, true), admitted);
        assert_eq!(decided(150 * MB, 1, false), admitted, "what others claim may never be used");
        let Admission::Refused(full) = decided(149 * MB, 0, true) else { panic!("it does not fit") };
        let lacks = Some(ReclaimBytes { least: MB, likely: 101 * MB });
        assert_eq!(full.reclaim_bytes(), lacks);
        let error = refused(full);
        assert_eq!(error.kind(), Some(CallErrorKind::InsufficientSpace { reclaim_bytes: lacks }));
        let hint = error.hint().unwrap().to_string();
        assert!(hint.starts_with("larder gc --free 101MB"), "{hint}");
    }

    #[test]
    fn a_runtime_out_of_space_gets_what_is_missing_or_what_is_assumed() {
        let freed = |size, available| {
            let missing = match &size {
                PullSize::Missing(missing) => Some(missing),
                PullSize::Unasked | PullSize::Unknown => None,
            };
            reclaim_after(missing, disk(available), bytes(50 * MB))
        };
        let quarter = Some(ReclaimBytes { least: 62_500_000, likely: 250 * MB });
        assert_eq!(freed(PullSize::Unknown, 10 * MB), quarter);
        assert_eq!(freed(missing(20 * MB, 30 * MB), 100 * MB), quarter, "it is larger than estimated");
        let lacks = Some(ReclaimBytes { least: 140 * MB, likely: 240 * MB });
        assert_eq!(freed(missing(100 * MB, 200 * MB), 10 * MB), lacks);
        assert_eq!(freed(missing(951 * MB, 951 * MB), 10 * MB), None, "it never fits");
    }

    #[test]
    fn layers_are_missing_unless_they_are_unpacked_and_archives_unless_they_are_fetched() {
        let digest = |text: &str| Digest::sha256(text);
        let layer = |name: &str| Descriptor::new("", digest(name), 100 * MB);
        let (layers, diff_ids) = ([layer("a"), layer("b"), layer("b")], ["1", "2", "3"].map(digest));
        let chains: Vec<Digest> = diff_ids
            .iter()
            .scan(None, |below, diff_id| {
                let chain = chain_id(below.as_ref(), diff_id);
                *below = Some(chain.clone());
                Some(chain)
            })
            .collect();
        let ratio = UnpackRatio { bytes: 2.0, inodes: 0.0 };
        let find = |blobs: &[&Digest], snapshots: &[&Digest], has_content| {
            let names = |digests: &[&Digest]| digests.iter().map(|one| one.as_str().to_owned()).collect();
            let present = PresentLayers { blobs: names(blobs), snapshots: names(snapshots) };
            let found = missing_layers(layers.iter().zip(&diff_ids), &present, "native", has_content, ratio);
            (found.chains.len(), found.need.least.bytes / MB)
        };
        assert_eq!(find(&[], &[], true), (3, 300 + 200), "an archive that two layers have is stored once");
        assert_eq!(find(&[], &[], false), (3, 300), "archives are on another filesystem");
        assert_eq!(find(&[&layers[0].digest], &[], true), (3, 300 + 100));
        assert_eq!(find(&[], &[&chains[0]], true), (2, 200 + 100), "its archive was discarded");
        let all: Vec<&Digest> = chains.iter().collect();
        assert_eq!(find(&[], &all, true), (0, 0));
    }

    #[test]
    fn the_snapshotter_is_that_of_the_directory() {
        let dir = |text: &'static str| snapshotter_of(Path::new(text));
        assert_eq!(dir("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"), Some("overlayfs"));
        assert_eq!(dir("/var/lib/containers/storage/overlay-images"), None);
    }
}
