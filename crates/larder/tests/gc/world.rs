//! A node in memory: images made of layers, a disk that they fill, containers, and clocks. Nothing reads the wall
//! clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, CallErrorKind, Container, ContainerInventory, Filesystems, Image, ImageDetails,
    ImageSpec, ProgressReporter, RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::gc::{
    ActivityFeed, Clock, ClockReading, Collector, CollectorBuilder, DiskSpace, FsStatsProvider, GcError,
    GcGoal, GcPlan, GcReport, GcRoundResult, ImageActivity, LayerSource, LayerUsageIndex, MeasuredLayer,
    ReclaimWait, SpaceHolder, UnixMillis,
};
use larder::image_service::{FilesystemError, FsStats};
use larder::pod::SandboxConfig;
use larder::reference::ImageId;
use tokio::time::Instant;

/// Deterministic random numbers from a seed.
#[derive(Debug, Clone)]
pub(crate) struct SeededRandom(u64);

impl SeededRandom {
    pub(crate) fn new(seed: u64) -> SeededRandom {
        SeededRandom(seed)
    }

    pub(crate) fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.roll(100) < percent
    }
}

#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "each switches one behavior of the fake")]
pub(crate) struct FakeNodeState {
    /// Images of the registry: the layers of each one. Its id is its name with `sha256:` before it.
    pub(crate) registry: BTreeMap<String, Vec<String>>,
    pub(crate) layer_sizes: BTreeMap<String, u64>,
    /// Names of images that are present.
    pub(crate) present: BTreeSet<String>,
    pub(crate) pinned: BTreeSet<String>,
    /// Images that lost their last name.
    pub(crate) nameless: BTreeSet<String>,
    /// The activity that a feed reports; `None` without a feed.
    pub(crate) sightings: Option<Vec<ImageActivity>>,
    /// Container id to image name.
    pub(crate) containers: BTreeMap<String, String>,
    pub(crate) capacity: u64,
    /// Bytes on the disk that are not images.
    pub(crate) other: u64,
    pub(crate) wall: i64,
    pub(crate) since_boot: i64,
    pub(crate) boot: u64,
    pub(crate) removals: Vec<String>,
    pub(crate) calls: usize,
    pub(crate) remove_fails: HashMap<String, String>,
    pub(crate) uses_fail: bool,
    /// Inodes of the disk; each byte of a layer takes one as well. 0 where they are not counted.
    pub(crate) inodes: u64,
    /// Space that is freed later, and when.
    later: Vec<(Instant, u64)>,
    frees_after: Duration,
    /// Inodes that come into use later.
    inodes_later: Vec<(Instant, u64)>,
    pub(crate) frees_inodes_after: Duration,
    /// Whether the backend counts the files of a removal.
    pub(crate) counts_files: bool,
    /// Bytes that another process writes during each removal.
    pub(crate) written_during_removal: u64,
    /// Whether another process deletes all data that is no image during the next removal.
    pub(crate) deleted_during_removal: bool,
    /// The processes that hold deleted files open.
    pub(crate) space_holders: Vec<SpaceHolder>,
    /// Whether a removal runs now.
    pub(crate) removing: bool,
    removes_slowly: Duration,
    yields: Option<SeededRandom>,
}

impl FakeNodeState {
    fn layers_on_disk(&self) -> BTreeSet<&String> {
        self.present.iter().flat_map(|name| &self.registry[name]).collect()
    }

    pub(crate) fn image_bytes(&self) -> u64 {
        self.layers_on_disk().into_iter().map(|layer| self.layer_sizes[layer]).sum()
    }

    pub(crate) fn used(&self) -> u64 {
        let now = Instant::now();
        let later: u64 = self.later.iter().filter(|(at, _)| *at > now).map(|(_, bytes)| bytes).sum();
        self.image_bytes() + self.other + later
    }

    fn used_inodes(&self) -> u64 {
        let now = Instant::now();
        let later: u64 = self.inodes_later.iter().filter(|(at, _)| *at > now).map(|(_, inodes)| inodes).sum();
        self.image_bytes() + later
    }

    pub(crate) fn size_of(&self, name: &str) -> u64 {
        self.registry[name].iter().map(|layer| self.layer_sizes[layer]).sum()
    }

    fn image(&self, name: &str) -> Image {
        Image {
            id: id(name),
            repo_tags: if self.nameless.contains(name) { Vec::new() } else { vec![name.to_owned()] },
            size: self.size_of(name),
            pinned: self.pinned.contains(name),
            ..Image::default()
        }
    }
}

pub(crate) fn id(name: &str) -> ImageId {
    format!("sha256:{name}").into()
}

fn name_of(image: &str) -> &str {
    image.strip_prefix("sha256:").unwrap_or(image)
}

/// The node. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct FakeNode(Arc<Mutex<FakeNodeState>>);

impl FakeNode {
    pub(crate) fn new(capacity: u64) -> FakeNode {
        let world = FakeNode::default();
        world.state().capacity = capacity;
        world
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FakeNodeState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an image with these layers to the registry.
    pub(crate) fn publish(&self, name: &str, layers: &[(&str, u64)]) {
        let mut state = self.state();
        for (layer, size) in layers {
            state.layer_sizes.insert((*layer).to_owned(), *size);
        }
        let layers = layers.iter().map(|(layer, _)| (*layer).to_owned()).collect();
        state.registry.insert(name.to_owned(), layers);
    }

    /// Adds an image to the registry, and pulls it.
    pub(crate) fn have(&self, name: &str, layers: &[(&str, u64)]) {
        self.publish(name, layers);
        self.state().present.insert(name.to_owned());
    }

    pub(crate) fn advance(&self, millis: i64) {
        let mut state = self.state();
        state.wall += millis;
        state.since_boot += millis;
    }

    /// Frees space this long after a removal.
    pub(crate) fn frees_after(&self, time: Duration) {
        self.state().frees_after = time;
    }

    /// Another process removes the image, and its space is freed this long after that.
    pub(crate) fn removed_by_another(&self, name: &str, after: Duration) {
        let mut state = self.state();
        let before = state.image_bytes();
        assert!(state.present.remove(name));
        let freed = before - state.image_bytes();
        state.later.push((Instant::now() + after, freed));
    }

    /// A removal takes this long and, like the store's, continues when its caller is canceled.
    pub(crate) fn removes_slowly(&self, time: Duration) {
        self.state().removes_slowly = time;
    }

    /// Every call yields a random number of times.
    pub(crate) fn interleaved(&self, dice: SeededRandom) {
        self.state().yields = Some(dice);
    }

    pub(crate) fn removals(&self) -> Vec<String> {
        self.state().removals.clone()
    }

    pub(crate) fn collector(&self) -> CollectorBuilder {
        let shared = Arc::new(self.clone());
        // These disks are small: every byte counts.
        let wait = ReclaimWait { tolerance: DiskSpace::ZERO, ..ReclaimWait::default() };
        let builder = Collector::builder(shared.clone()).reclaim_wait(wait);
        builder.disk(shared.clone()).layers(shared.clone()).feed(shared.clone()).clock(shared)
    }

    async fn turns(&self) {
        let turns = self.state().yields.as_mut().map_or(0, |dice| dice.roll(4));
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
    }
}

pub(crate) fn failure(text: &str) -> BackendError {
    BackendError::call(CallErrorKind::Other, text)
}

#[async_trait]
impl Backend for FakeNode {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        Ok(RuntimeInfo::default())
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.turns().await;
        let mut state = self.state();
        state.calls += 1;
        Ok(state.present.iter().map(|name| state.image(name)).collect())
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.turns().await;
        let found = {
            let state = self.state();
            let name = name_of(image.image.as_str());
            state.present.contains(name).then(|| state.image(name))
        };
        self.turns().await;
        Ok(found)
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        Ok(self.status(image).await?.map(|image| ImageDetails { image, info: BTreeMap::new() }))
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        _: Option<&Credential>,
        _: Option<&SandboxConfig>,
        _: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        self.turns().await;
        self.state().present.insert(image.image.to_string());
        self.turns().await;
        Ok(id(image.image.as_str()))
    }

    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        options.require_all_names()?;
        let slowly = std::mem::take(&mut self.state().removes_slowly);
        if !slowly.is_zero() {
            let (own, image, options) = (self.clone(), image.clone(), options.clone());
            own.state().removing = true;
            let removing = tokio::spawn(async move {
                tokio::time::sleep(slowly).await;
                own.remove(&image, &options).await
            });
            return removing.await.expect("it does not panic");
        }
        let before = self.state().image_bytes();
        self.turns().await;
        {
            let mut state = self.state();
            let name = name_of(image.image.as_str()).to_owned();
            if let Some(error) = state.remove_fails.get(&name) {
                return Err(failure(error));
            }
            let before = state.image_bytes();
            state.present.remove(&name);
            let freed = before - state.image_bytes();
            state.other += state.written_during_removal;
            if std::mem::take(&mut state.deleted_during_removal) {
                state.other = 0;
            }
            let after = state.frees_after;
            state.later.retain(|(at, _)| *at > Instant::now());
            if !after.is_zero() {
                state.later.push((Instant::now() + after, freed));
            }
            let inodes_at = Instant::now() + state.frees_inodes_after;
            state.inodes_later.push((inodes_at, freed));
            state.removals.push(name);
        }
        self.turns().await;
        let state = self.state();
        // Another pull may have added more.
        let bytes = before.saturating_sub(state.image_bytes());
        Ok(Removed::Image { freed: state.counts_files.then_some(DiskSpace { bytes, inodes: bytes }) })
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        Ok(Filesystems::default())
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.turns().await;
        let mut state = self.state();
        state.calls += 1;
        if state.uses_fail {
            return Err(failure("the runtime is down"));
        }
        let container = |(container, image): (&String, &String)| Container {
            id: container.clone(),
            image_id: id(image),
            running: true,
            ..Container::default()
        };
        let containers = state.containers.iter().map(container).collect();
        Ok(ContainerInventory { containers, sandboxes: Vec::new() })
    }
}

#[async_trait]
impl FsStatsProvider for FakeNode {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        let state = self.state();
        let available = state.capacity.saturating_sub(state.used());
        let inodes_free = state.inodes.saturating_sub(state.used_inodes());
        Ok(FsStats { capacity: state.capacity, available, inodes: state.inodes, inodes_free, reserved: 0 })
    }

    async fn deleted_open_files(&self) -> Vec<SpaceHolder> {
        self.state().space_holders.clone()
    }
}

#[async_trait]
impl ActivityFeed for FakeNode {
    async fn take_activity(&self, _: &[Image]) -> Result<Vec<ImageActivity>, BackendError> {
        self.state().sightings.clone().ok_or_else(|| failure("no events"))
    }
}

#[async_trait]
impl LayerSource for FakeNode {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let state = self.state();
        let mut layers = LayerUsageIndex::unknown();
        for (id, bytes) in &state.layer_sizes {
            let amount = DiskSpace { bytes: *bytes, inodes: if state.inodes > 0 { *bytes } else { 0 } };
            layers.add(MeasuredLayer { id: id.into(), amount, estimated: false, referenced_by: None });
        }
        for image in images {
            let of = &state.registry[name_of(image.id.as_str())];
            layers.add_image(&image.id, of, DiskSpace::ZERO);
        }
        Ok(layers)
    }
}

impl Clock for FakeNode {
    fn read(&self) -> ClockReading {
        let state = self.state();
        ClockReading {
            wall: UnixMillis(state.wall),
            since_boot: Some(state.since_boot),
            boot: state.boot.to_string(),
        }
    }
}

/// Rounds and dry runs by the collector's own policy.
pub(crate) trait OwnPolicy {
    async fn round_for(&self, goal: GcGoal) -> GcRoundResult;
    async fn plan(&self, goal: GcGoal) -> Result<GcPlan, GcError>;

    async fn collect(&self) -> Result<GcReport, GcError> {
        self.round_for(GcGoal::Thresholds).await.into_result()
    }

    async fn detect(&self) -> Result<GcReport, GcError> {
        self.round_for(GcGoal::Detect).await.into_result()
    }

    async fn free(&self, bytes: u64) -> Result<GcReport, GcError> {
        self.round_for(GcGoal::Free { bytes }).await.into_result()
    }

    async fn delete_unused(&self) -> Result<GcReport, GcError> {
        self.round_for(GcGoal::AllUnused).await.into_result()
    }

    async fn plan_round(&self) -> Result<GcPlan, GcError> {
        self.plan(GcGoal::Thresholds).await
    }
}

impl OwnPolicy for Collector {
    async fn round_for(&self, goal: GcGoal) -> GcRoundResult {
        self.round(goal, &self.policy()).await
    }

    async fn plan(&self, goal: GcGoal) -> Result<GcPlan, GcError> {
        let run = self.dry_run(goal, &self.policy(), &[]).await?;
        Ok(run.plan().expect("a dry run has a plan").clone())
    }
}
