//! Pulls an image into the store: fetches, unpacks and commits it, each layer once.
//!
//! ```text
//! resolve -> plan -> claim each layer -> admission -> one job per layer -> commit
//!                                                     fetch and unpack -> merge with the layers below
//! ```
//!
//! Read [`StorePuller::pull`] first, then `layer_job.rs`. Layers are fetched in parallel: `fetch_layer.rs` writes the
//! received bytes into an ingest file while a thread behind it hashes, decompresses and unpacks.
//!
//! Guarantees: an image is visible only after all its bytes are verified and durable; a layer needed by several
//! pulls is fetched once; a pull that fails, is dropped, or dies with its process leaves its fetched bytes and finished
//! layers to the next one, unless it failed for lack of space; memory does not depend on the image.

mod deferred_guard;
mod error;
mod fetch_layer;
mod fetched_image;
mod fill;
mod fill_sessions;
mod fill_watch;
mod layer_job;
mod load;
mod lowers;
mod open_files;
mod plan;
mod pull_progress;
mod pull_workers;
mod pulls_in_progress;
mod read_ahead;
mod remnant;
mod repair;
mod resume_fills;
mod soci_index;
mod spans;
mod verify_reads;

use std::collections::{HashMap, HashSet};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use larder::backend::{MinimumRate, ProgressReporter, PullUntil};
use larder::credentials::{Credential, NodeKeyring};
use larder::gc::{ClockReading, ReclaimOutcome, ReclaimTrigger};
use larder::reference::{Digest, Platform, Reference};
use larder::retention::{KeepRule, Selector};
use larder::scheduler::Scheduler;
use tokio::sync::Semaphore;
use tokio::time::{self, Instant};

pub use error::PullError;
pub use fetched_image::{FetchedImage, FetchedLayer};
pub use load::{FailedImage, LoadOptions, LoadOutcome, LoadedImage};
pub use plan::chain_id;
pub use resume_fills::GuardedBefore;

use crate::disk::{DiskSpace, SpaceReserve};
use crate::store::admission::{
    self, DeclaredSize, PullClaim, PullClaims, RemovableSpace, SpaceEstimate, admit,
};
use crate::store::{
    ClaimOutcome, ImageCommit, ImageRecord, IngestId, IngestReferences, LayerHandle, LayerKey, LeaseRecord,
    LeaseResources, Store, StoreError, TransferLogin,
};
use crate::unpack::{BackgroundSyncer, UnpackLimits, UnpackOptions, UnpackThreads};
use deferred_guard::DeferredGuard;
pub use deferred_guard::GuardPlan;
use fetch_layer::LayerOrigin;
use fill_sessions::{LayerSessions, NodeCredentials};
use fill_watch::{FILL_CHECK, FillWatch};
use larder_registry::manifest::{ImageConfig, PlatformMatcher};
use larder_registry::{ImageDocuments, RegistryClient};
use open_files::OpenFileBudget;
use plan::{PlannedLayer, PullPlan};
use pull_progress::PullProgress;
use pull_workers::{EndingPulls, PullWorker, PullWorkers, blocking};
use pulls_in_progress::{PullInProgress, PullsInProgress};
use soci_index::SociIndex;
use spans::{traced_commit, traced_resolve};

/// How images are pulled into the store.
#[derive(Debug, Clone)]
pub struct StorePullConfig {
    /// The platform to select from an index. Default: the platform of this machine.
    pub platform: PlatformMatcher,
    /// Bounds the layers that are fetched and unpacked at the same time, over all pulls. Default
    /// [`LAYERS_AT_ONCE`](StorePullConfig::LAYERS_AT_ONCE) of one registry. Each layer takes up to 3 MiB of memory.
    pub scheduler: Scheduler,
    /// A layer that is fetched more slowly gives way to pulls that wait for it or for its slot; any other one, after
    /// this time, to those of a namespace with fewer slots. Default 64 KiB/s over 10 s.
    pub minimum_rate: MinimumRate,
    /// Space to leave free on the store's filesystem. A pull or load is refused if even its least estimate does not fit
    /// beside the reserve; one that takes more fails when it would use up the reserve. Default 64 MiB and 1,000 inodes.
    pub reserve: DiskSpace,
    /// Files that all pulls together keep open, but for a few of each pull. Default three quarters of this process's
    /// limit, and no more than 4,096. Below 200, pulls get slower.
    pub open_files: usize,
    /// Limits against hostile layers.
    pub limits: UnpackLimits,
    /// Images whose containers may start before their layers are complete. Default none.
    pub lazy: LazyPulls,
    /// Whether complete layers are verified when they are read, where reads are
    /// [guarded](StorePuller::guard_reads). Default false.
    pub verify_reads: bool,
}

/// Images whose containers may start before their layers are complete, in a store whose reads are
/// [guarded](StorePuller::guard_reads). Layers without a table of contents are pulled in full.
#[derive(Debug, Clone, Default)]
pub struct LazyPulls {
    /// Which images, by name or digest.
    pub images: Vec<Selector>,
    /// Smaller layers are pulled in full. Compressed bytes.
    pub minimum_size: u64,
}

impl LazyPulls {
    /// Bytes of a layer of this image that is pulled lazily, at least; `None` if none is.
    fn minimum_for(&self, name: &Reference) -> Option<u64> {
        let names = [name.to_string()];
        let is_selected = |select: &Selector| KeepRule::new(select.clone()).parse_selector(&names).is_some();
        self.images.iter().any(is_selected).then_some(self.minimum_size)
    }
}

impl StorePullConfig {
    /// Default number of layers of one registry that are fetched at the same time.
    pub const LAYERS_AT_ONCE: usize = 4;
}

impl Default for StorePullConfig {
    fn default() -> Self {
        StorePullConfig {
            platform: PlatformMatcher::host(),
            scheduler: Scheduler::for_layers(StorePullConfig::LAYERS_AT_ONCE),
            minimum_rate: MinimumRate::default(),
            reserve: DiskSpace { bytes: 64 << 20, inodes: 1000 },
            open_files: open_files::default_total(),
            limits: UnpackLimits::default(),
            lazy: LazyPulls::default(),
            verify_reads: false,
        }
    }
}

/// The layers of an image, all unpacked. Fields are dropped in this order, after the commit: an ingest that is no
/// longer referenced may be reclaimed, and its layer with it.
struct AcquiredLayers {
    plan: PullPlan,
    layers: Vec<LayerHandle>,
    /// Ingests of its layers.
    ingests: Vec<IngestId>,
    /// The lease of the pull; a load has none.
    lease: Option<String>,
    _claim: Option<PullClaim>,
    _running: Arc<PullInProgress>,
    _referenced: IngestReferences,
}

impl AcquiredLayers {
    /// The commit of an image with these layers.
    fn commit(&self, names: Vec<Reference>, manifests: Vec<(Digest, Vec<u8>)>) -> ImageCommit {
        ImageCommit {
            names,
            config: self.plan.config.clone(),
            manifests,
            has_digest: true,
            artifact: self.plan.artifact.clone(),
            layers: self.plan.committed(&self.layers),
            ingests: self.ingests.clone(),
            pinned: false,
            preloaded: false,
            end_lease: self.lease.clone(),
        }
    }
}

/// What becomes of a pull whose space was counted.
enum AdmittedPull {
    /// It goes on, with a claim if it fetches something.
    Admitted(SpaceEstimate, Option<PullClaim>),
    /// Running pulls claim the space.
    Waits,
}

/// How long the fetched bytes and finished layers of a failed pull are retained for a retry, unless space is needed.
const PULL_LEASE: Duration = Duration::from_secs(24 * 3600);

/// Layers of at least so many compressed bytes are unpacked on two threads.
const LARGE_LAYER: u64 = 8 << 20;
/// Inodes that a blob takes which is a file: its own, and a directory meanwhile.
const INODES_OF_FILE: u64 = 2;

/// Pulls images into a store. Clones share it, and with it the bounds on what runs at once.
#[derive(Clone)]
pub struct StorePuller {
    store: Store,
    client: RegistryClient,
    config: Arc<StorePullConfig>,
    files: OpenFileBudget,
    /// Bounds the layers that are open as lowers of others.
    lowers: Arc<Semaphore>,
    syncer: BackgroundSyncer,
    ending: EndingPulls,
    running: PullsInProgress,
    claims: PullClaims,
    reserve: SpaceReserve,
    /// Of fills, to which space is promised.
    fill_reserve: SpaceReserve,
    refuse_artifacts: bool,
    until: PullUntil,
    /// Guards reads once a pull asks for it.
    deferred_guard: Arc<OnceLock<DeferredGuard>>,
    /// Bytes of a layer that this pull fetches lazily, at least; `None` if it fetches all in full.
    lazy_minimum: Option<u64>,
    /// Workers of layers that are being filled.
    fills: EndingPulls,
    /// Credentials of this node, for data of layers that are in use.
    credentials: NodeCredentials,
    layer_sessions: LayerSessions,
}

impl StorePuller {
    /// Returns the puller of images that are complete when a pull returns, whatever [`LazyPulls`] says.
    #[must_use]
    pub fn completely(&self) -> StorePuller {
        StorePuller { until: PullUntil::Complete, ..self.clone() }
    }

    /// Returns the puller of images whose containers may start before all layers are there, whatever [`LazyPulls`]
    /// says of their names.
    #[must_use]
    pub fn lazily(&self) -> StorePuller {
        StorePuller { until: PullUntil::Startable, ..self.clone() }
    }

    /// Fetches data of layers that are in use with the credentials of this node from now on, once those of the pulls
    /// are not known or not valid any more. All clones do.
    pub fn use_node_keyring(&self, keyring: Arc<NodeKeyring>) {
        self.credentials.set(keyring);
    }

    /// Returns the puller of images for containers, which refuses artifacts before anything of them is fetched.
    #[must_use]
    pub fn without_artifacts(&self) -> StorePuller {
        StorePuller { refuse_artifacts: true, ..self.clone() }
    }

    /// Returns the puller for pulls that accept any certificate, and plain HTTP where a server does not speak TLS.
    #[must_use]
    pub fn without_tls_verify(&self) -> StorePuller {
        StorePuller { client: self.client.without_tls_verify(), ..self.clone() }
    }

    /// Pulls into `store` through `client`.
    pub fn new(store: Store, client: RegistryClient, config: StorePullConfig) -> Self {
        let files = OpenFileBudget::of(config.open_files);
        let lowers = Arc::new(Semaphore::new(files.lowers as usize));
        let (syncer, ending) = (BackgroundSyncer::new(files.waiting), EndingPulls::default());
        let fill_reserve = SpaceReserve::new(store.root().to_owned(), config.reserve);
        let (root, promising) = (store.root().to_owned(), store.clone());
        let promised = move || Ok(promising.promised().map_err(io::Error::other)?.total());
        let reserve = SpaceReserve::beside(root, config.reserve, Box::new(promised));
        StorePuller {
            store,
            client,
            config: Arc::new(config),
            files,
            lowers,
            syncer,
            ending,
            running: PullsInProgress::default(),
            claims: PullClaims::default(),
            reserve,
            fill_reserve,
            refuse_artifacts: false,
            until: PullUntil::default(),
            deferred_guard: Arc::default(),
            lazy_minimum: None,
            fills: EndingPulls::default(),
            credentials: NodeCredentials::default(),
            layer_sessions: LayerSessions::default(),
        }
    }

    /// The rate below which a fetch gives way to others.
    pub fn minimum_rate(&self) -> MinimumRate {
        self.config.minimum_rate
    }

    /// The store that it pulls into.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The registry client.
    pub fn client(&self) -> &RegistryClient {
        &self.client
    }

    /// Waits until no pull that has failed or was dropped can make an image present any more.
    pub async fn wait_for_ending_pulls(&self) {
        self.ending.wait().await;
    }

    /// Like [`pull`](StorePuller::pull); if the registry has the image for one other platform only, that is pulled
    /// under its name for this platform.
    pub async fn pull_only_platform(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        progress: &ProgressReporter,
    ) -> Result<ImageRecord, PullError> {
        let error = match self.pull(name, credential, progress).await {
            Err(error) if name.platform().is_none() => error,
            pulled => return pulled,
        };
        let Some(only) = error.only_platform() else { return Err(error) };
        let name = name.for_platform(Some(&only));
        progress.warn(format!("built for {only} only: present as {name}, which no pod of this node runs"));
        self.pull(&name, credential, progress).await
    }

    /// Resolves `name`, makes that image present under the name, and returns it. When this returns an error, no worker
    /// of the pull is left, and partially unpacked layers take no disk space.
    pub async fn pull(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        progress: &ProgressReporter,
    ) -> Result<ImageRecord, PullError> {
        let lazy_minimum = match self.until {
            PullUntil::Configured => self.config.lazy.minimum_for(name),
            PullUntil::Startable => Some(self.config.lazy.minimum_size),
            PullUntil::Complete => None,
        };
        if lazy_minimum.is_some() {
            self.open_guard().await;
        }
        let lazily = StorePuller { lazy_minimum, ..self.clone() };
        match lazily.pull_once(name, credential, progress).await {
            Err(PullError::NotLazily) => self.pull_once(name, credential, progress).await,
            pulled => pulled,
        }
    }

    /// Pulls with the layers that are as large as [`lazy_minimum`](StorePuller::lazy_minimum) left for later.
    async fn pull_once(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        progress: &ProgressReporter,
    ) -> Result<ImageRecord, PullError> {
        let workers = PullWorkers::new(self.syncer.begin(), &self.ending);
        let pulled = Box::pin(self.pull_layers(name, credential, progress, &workers)).await;
        workers.end().await;
        let image = self.reclaim_if_full(pulled).await?;
        self.offer_credential(&image, name, credential)?;
        if self.lazy_minimum.is_some() {
            self.store.expect_start();
        } else {
            // Another pull may have fetched some lazily.
            for layer in &image.layers {
                self.wait_until_filled(&layer.key, &layer.digest).await?;
            }
        }
        Ok(image)
    }

    /// Waits until a layer is complete, if it is being filled.
    async fn wait_until_filled(&self, key: &LayerKey, digest: &Digest) -> Result<(), PullError> {
        let partials = &self.store.0.partials;
        let _completing = partials.demand().complete();
        let Some(filling) = partials.get(key) else { return Ok(()) };
        let (mut checks, mut watch) = (time::interval(FILL_CHECK), FillWatch::new(Instant::now()));
        loop {
            tokio::select! {
                is_complete = filling.ended() => {
                    let reason = "its archive is not what its table of contents says".into();
                    let differs = PullError::Incomplete { digest: digest.clone(), reason };
                    return if is_complete { Ok(()) } else { Err(differs) };
                }
                _ = checks.tick() => {}
            }
            let (now, progress) = (Instant::now(), filling.progress());
            let (_, problem) = partials.source(key, now);
            if let Some(reason) = watch.failed(progress.filled_bytes, problem, now) {
                let missing_bytes = progress.total_bytes - progress.filled_bytes;
                return Err(PullError::Unfilled { digest: digest.clone(), missing_bytes, reason });
            }
        }
    }

    async fn pull_layers(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        reporter: &ProgressReporter,
        workers: &PullWorkers,
    ) -> Result<ImageRecord, PullError> {
        let progress = PullProgress::begin(reporter);
        let (documents, acquired) = Box::pin(self.acquire(name, credential, &progress, workers)).await?;
        let platform = self.matcher(name.platform());
        let config = Some(&documents.config).filter(|_| documents.artifact.is_none());
        let warnings = image_warnings(config, &platform, &acquired.layers);
        for warning in warnings {
            progress.warn(warning);
        }
        progress.set_committing();
        let (store, names, manifests) = (self.store.clone(), vec![name.clone()], manifests_of(&documents));
        // A worker of the pull: if the caller gives up now, the image may still appear.
        let commit = move || store.commit(&acquired.commit(names, manifests), SystemTime::now());
        let committed = workers.worker().blocking(commit);
        traced_commit(name, async { committed.await?.map_err(PullError::from) }).await
    }

    /// Selects images for this platform; `None` is that of this machine.
    fn matcher(&self, requested: Option<&Platform>) -> PlatformMatcher {
        requested.map_or_else(|| self.config.platform.clone(), PlatformMatcher::requested)
    }

    /// The platform for which a present image was requested.
    pub(crate) fn platform_of(&self, image: &ImageRecord) -> PlatformMatcher {
        let mut names = image.names().filter_map(|name| Reference::parse(name).ok());
        self.matcher(names.next().as_ref().and_then(Reference::platform))
    }

    /// Resolves `name` and acquires all its layers.
    async fn acquire(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        progress: &Arc<PullProgress>,
        workers: &PullWorkers,
    ) -> Result<(ImageDocuments, AcquiredLayers), PullError> {
        let watched = Arc::clone(progress);
        let mut session =
            self.client.session(name, credential)?.with_watcher(move |notice| watched.notice(&notice));
        if self.refuse_artifacts {
            session = session.without_artifacts();
        }
        // A repeated pull of a present image, as with the policy Always, fetches manifests only.
        let (store, repository) = (self.store.clone(), name.clone());
        let known = move |digest: &Digest| -> Pin<Box<dyn Future<Output = Option<Bytes>> + Send>> {
            let (store, repository, digest) = (store.clone(), repository.clone(), digest.clone());
            let read = blocking(move || served_config(&store, &repository, &digest));
            Box::pin(async { read.await.ok().flatten() })
        };
        let platform = self.matcher(name.platform());
        let documents = session.documents_with_known_configs(&platform, &known);
        let documents = Box::pin(traced_resolve(name, documents)).await?;
        let login = TransferLogin::from(credential);
        let soci = Arc::new(SociIndex::of(&documents.layers));
        let origin = LayerOrigin::Registry { session, progress: Arc::clone(progress), login, soci };
        let plan = PullPlan::of(&documents);
        let acquired = Box::pin(self.acquire_layers(&origin, plan, Some(name), workers)).await?;
        Ok((documents, acquired))
    }

    /// Acquires all layers of a plan, which are not durable yet. A pull of `name` takes a lease on what a retry can
    /// use; a load has its archive for that.
    async fn acquire_layers(
        &self,
        origin: &LayerOrigin,
        plan: PullPlan,
        name: Option<&Reference>,
        workers: &PullWorkers,
    ) -> Result<AcquiredLayers, PullError> {
        let mut wait = self.claims.wait();
        loop {
            let may_wait = wait.begin();
            let acquired = self.acquire_admitted(origin, plan.clone(), name, workers, may_wait);
            match Box::pin(acquired).await? {
                Some(acquired) => return Ok(acquired),
                // It holds no layer meanwhile: the running pulls may need one.
                None => wait.changed().await,
            }
        }
    }

    /// Acquires the layers if there is space. `None` if running pulls claim it, and the pull may wait for them.
    async fn acquire_admitted(
        &self,
        origin: &LayerOrigin,
        plan: PullPlan,
        name: Option<&Reference>,
        workers: &PullWorkers,
        may_wait: bool,
    ) -> Result<Option<AcquiredLayers>, PullError> {
        let ingests: Vec<IngestId> = plan.layers.iter().map(|layer| origin.blob(layer).ingest_id()).collect();
        // Before the claims: a resumable layer must not be reclaimed in between.
        let referenced = self.store.reference_ingests(ingests.iter().cloned());
        let running = self.running.begin(&plan, origin.progress());
        let claims = self.claim(origin, &plan).await?;
        origin.progress().set_layers(&plan, &claims);
        let AdmittedPull::Admitted(estimated, claim) = self.admit(origin, &plan, &claims, may_wait).await?
        else {
            return Ok(None);
        };
        let lease = match name {
            Some(name) => Some(self.lease_of(name, &plan, &ingests, &claims).await?),
            None => None,
        };
        let layers = Box::pin(self.run_layer_jobs(origin, &plan, claims, workers.worker())).await;
        let layers = layers.map_err(|error| error.after_admission(estimated))?;
        Ok(Some(AcquiredLayers {
            plan,
            layers,
            ingests,
            lease,
            _claim: claim,
            _running: running,
            _referenced: referenced,
        }))
    }

    /// Refuses a pull that would fill the disk, after space beside images was reclaimed: what has expired, and if that
    /// is not enough but can be, everything that no running pull uses. Before that, it may wait for what running pulls
    /// claim.
    async fn admit(
        &self,
        origin: &LayerOrigin,
        plan: &PullPlan,
        claims: &[ClaimOutcome],
        may_wait: bool,
    ) -> Result<AdmittedPull, PullError> {
        let missing: Vec<&PlannedLayer> = plan.to_fetch(claims).collect();
        if missing.is_empty() {
            return Ok(AdmittedPull::Admitted(SpaceEstimate::default(), None));
        }
        let (files, archives): (Vec<_>, Vec<_>) =
            missing.into_iter().partition(|layer| !layer.files.is_empty());
        let sizes: Vec<_> = archives.iter().map(|layer| DeclaredSize::of(&layer.descriptor)).collect();
        let ingests: Vec<IngestId> = archives.iter().map(|layer| origin.blob(layer).ingest_id()).collect();
        let files: Vec<_> =
            files.iter().map(|layer| (layer.descriptor.size, origin.blob(layer).ingest_id())).collect();
        let _alone = self.claims.admit_alone().await;
        let (store, reserve, pulls) = (self.store.clone(), self.config.reserve, self.claims.clone());
        let fits = move || {
            store.sweep(&ClockReading::now())?;
            // The fetched bytes of a layer are there until it is unpacked.
            let largest = sizes.iter().map(|size| size.fetched).max().unwrap_or_default();
            let need = admission::estimate(store.ratio()?, &sizes, largest);
            let need =
                need.after_download(store.ingested_bytes(&ingests), largest).with(missing_of(&files, &store));
            let running = pulls.running();
            let free = store.unpromised()?;
            let claimed = running.unused(free);
            let fits = admit(need, claimed.shortfall_to(free), reserve, RemovableSpace::NONE).is_ok();
            Ok::<_, StoreError>((fits.then(|| pulls.claim(need.least, free)), claimed, need))
        };
        let (claim, claimed, need) = blocking(fits).await??;
        if claim.is_some() {
            return Ok(AdmittedPull::Admitted(need, claim));
        }
        if may_wait && claimed != DiskSpace::ZERO {
            return Ok(AdmittedPull::Waits);
        }
        // What dropped pulls still use can be reclaimed once their workers have ended.
        self.ending.wait().await;
        let (store, pulls) = (self.store.clone(), self.claims.clone());
        blocking(move || {
            let (now, images) = (ClockReading::now(), unmounted(&store)?);
            let beside = store.reclaimable(ReclaimTrigger::Pressure, &now)?.total();
            // The sizes are only declared: for a pull that can never fit nothing is given up.
            let most = store.unpromised()? + beside + images;
            if admit(need, most, reserve, RemovableSpace::NONE).is_ok() {
                warn_of(&store.reclaim(ReclaimTrigger::Pressure, &now));
            }
            let free = store.unpromised()?;
            admit(need, free, reserve, RemovableSpace::Unmounted(images))?;
            Ok(AdmittedPull::Admitted(need, Some(pulls.claim(need.least, free))))
        })
        .await?
    }

    /// A pull that failed for lack of space leaves nothing for a retry, nor do other ended pulls. One that was not
    /// admitted has written nothing.
    async fn reclaim_if_full<T>(&self, ended: Result<T, PullError>) -> Result<T, PullError> {
        match &ended {
            Err(PullError::InsufficientSpace(_)) => {}
            Err(error) if error.is_no_space() => self.reclaim().await?,
            _ => {}
        }
        ended
    }

    /// Reclaims everything beside images that no running pull uses.
    async fn reclaim(&self) -> Result<(), PullError> {
        let store = self.store.clone();
        let reclaim = move || store.reclaim(ReclaimTrigger::Pressure, &ClockReading::now());
        warn_of(&blocking(reclaim).await?);
        Ok(())
    }

    /// Takes a lease on fetched bytes and finished layers until the image is committed, so that a retry can use them
    /// even if this process dies. Returns the lease ID. Includes layers that other pulls fetch, since those may fail,
    /// and layers that other pulls have left.
    async fn lease_of(
        &self,
        name: &Reference,
        plan: &PullPlan,
        ingests: &[IngestId],
        claims: &[ClaimOutcome],
    ) -> Result<String, PullError> {
        let id = format!("pull/{}@{}", name.name(), plan.config.0);
        if plan.is_present(claims) {
            return Ok(id);
        }
        let left = claims.iter().filter_map(|claim| match claim {
            ClaimOutcome::Present(layer) if layer.is_uncommitted() => Some(layer.ingests()),
            _ => None,
        });
        let ingests = ingests.iter().cloned().chain(left.flatten()).collect();
        let leased = LeaseResources { ingests, ..LeaseResources::default() };
        let now = ClockReading::now();
        let lease = LeaseRecord::granted(id.clone(), leased, PULL_LEASE, &now);
        let store = self.store.clone();
        blocking(move || store.lease(&lease)).await??;
        Ok(id)
    }

    /// How a layer of `size` compressed bytes is unpacked: on two threads if it may be the last one to end, when
    /// the others leave cores idle.
    fn options(&self, size: u64, worker: &PullWorker) -> UnpackOptions {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if cores > 1 && size >= LARGE_LAYER { UnpackThreads::Two } else { UnpackThreads::One };
        let limits = self.config.limits.clone();
        UnpackOptions {
            threads,
            limits,
            image: worker.image_bytes(),
            write_behind: Some(worker.write_behind().clone()),
            ..UnpackOptions::default()
        }
    }
}

/// Lists what containers of an image miss on a machine of this platform, a sentence each. An artifact has no config
/// that says what it is built for.
pub(crate) fn image_warnings<'a>(
    config: Option<&ImageConfig>,
    platform: &PlatformMatcher,
    layers: impl IntoIterator<Item = &'a LayerHandle>,
) -> Vec<String> {
    let built_for = config.map(|config| &config.platform);
    let foreign = built_for.filter(|built| !built.os.is_empty() && platform.rank(built).is_none());
    let foreign = foreign.map(|built_for| format!("built for {built_for}, not for {}", platform.wanted()));
    let skipped = match layers.into_iter().map(|layer| layer.record().facts.skipped_xattrs).sum::<u64>() {
        0 => None,
        count => Some(format!("{count} extended attributes that no kernel takes were left out")),
    };
    foreign.into_iter().chain(skipped).collect()
}

/// The index, if there is one, and the manifest, with their bytes.
fn manifests_of(documents: &ImageDocuments) -> Vec<(Digest, Vec<u8>)> {
    let mut documents = vec![&documents.target, &documents.manifest];
    documents.dedup_by_key(|document| document.descriptor.digest.clone());
    documents
        .into_iter()
        .map(|document| (document.descriptor.digest.clone(), document.raw.to_vec()))
        .collect()
}

/// The config of this digest, if the store has an image or artifact with it under a name of this repository, which has
/// thus served it. Blocks.
fn served_config(store: &Store, repository: &Reference, digest: &Digest) -> Option<Bytes> {
    let of_repository =
        |name: &String| name.split_once('@').is_some_and(|(name, _)| name == repository.name());
    let is_served = |image: &ImageRecord| image.digests.iter().any(of_repository);
    let is_config =
        |image: &ImageRecord| image.id == *digest || image.artifact_config.as_ref() == Some(digest);
    let images = store.images_with_blob(digest).ok()?;
    let bytes = || store.blob(digest).ok().flatten().map(Bytes::from);
    images.iter().any(|image| is_config(image) && is_served(image)).then(bytes).flatten()
}

/// Disk space that files of these sizes take beyond what is there of them.
fn missing_of(files: &[(u64, IngestId)], store: &Store) -> DiskSpace {
    let missing = |(size, ingest): &(u64, IngestId)| DiskSpace {
        bytes: size.saturating_sub(store.ingested_bytes([ingest])),
        inodes: INODES_OF_FILE,
    };
    files.iter().map(missing).sum()
}

fn warn_of(reclaimed: &ReclaimOutcome<StoreError>) {
    if let Some(error) = &reclaimed.error {
        tracing::warn!(%error, "cannot remove the downloads and layers of failed pulls");
    }
}

/// Disk usage of the layers that no mount uses: the most that removing images would free.
fn unmounted(store: &Store) -> Result<DiskSpace, StoreError> {
    let mounted: HashSet<_> = store.mounts()?.into_iter().flat_map(|mount| mount.layers).collect();
    let mut layers = HashMap::new();
    for image in store.images()? {
        for key in image.keys() {
            if !mounted.contains(key)
                && let Some(layer) = store.layer(key)?
            {
                layers.insert(key.clone(), layer.record().usage);
            }
        }
    }
    Ok(layers.into_values().sum())
}

impl From<StoreError> for PullError {
    fn from(error: StoreError) -> Self {
        PullError::Store(error)
    }
}
