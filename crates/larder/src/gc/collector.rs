//! The collector of one backend's images: what rounds share, and what readers ask. Read [`Collector::round`] first.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use parking_lot::{Mutex as Lock, RwLock};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::activity::{ActivityKind, ImageActivity};
use super::dependencies::CollectorDependencies;
use super::disk_space::DiskSpace;
use super::error::GcError;
use super::filesystem_stats::{self, OtherFilesystem};
use super::goal::GcGoal;
use super::labels::{ImageLabels, LabelCache, read_labels};
use super::layers::LayerUsageIndex;
use super::plan::{GcImage, GcSnapshot, is_due, keep_rule_inputs, plan};
use super::policy::{GcPolicy, GcStrategy, WhenUnreachable};
use super::progress::{GcRoundProgress, RoundTracker};
use super::reclaim::{ReclaimTrigger, ReclaimableSpace};
use super::remover::GcCounts;
use super::report::{DryRun, GcReport, GcRoundResult};
use super::room::RoomRequests;
use super::round::Round;
use super::spans::measure_span;
use super::state::{GcObservation, GcState, ObservationPurpose};
use super::unix_millis::UnixMillis;
use super::usage_records::{ImageUsageRecord, ImageUsageRecords, handler_of};
use crate::backend::{BackendError, Image, ReclaimBytes};
use crate::detached::SharedCall;
use crate::events::{Event, EventReason, EventType};
use crate::image_service::{FilesystemError, FsStats};
use crate::pull::{RoomMaker, RoomOutcome};
use crate::reference::ImageId;
use crate::retention::source::collect;
use crate::retention::{KeepWarning, LeasePurpose, Retention, RetentionError, RetentionSet, keep};

/// Collects the images of one backend. One round runs at a time, and only other rounds wait for it. Dropping a call
/// abandons its round: a removal that has begun completes and is recorded, and no other follows.
pub struct Collector {
    pub(super) parts: Arc<CollectorDependencies>,
    pub(super) policy: RwLock<Arc<GcPolicy>>,
    pub(super) state: Arc<GcState>,
    /// Locked by the running round.
    round: Mutex<()>,
    pub(super) room: RoomRequests,
    pub(super) progress: RoundTracker,
    /// The error of unreadable records at the start.
    notice: Option<String>,
    began: UnixMillis,
    measurement: SharedCall<Result<FsStats, FilesystemError>>,
    other_measurement: SharedCall<Result<Vec<OtherFilesystem>, FilesystemError>>,
    pub(super) counts: Arc<Lock<GcCounts>>,
    pub(super) labels: LabelCache,
}

impl Collector {
    pub(super) fn new(parts: CollectorDependencies) -> Collector {
        let (state, notice) = GcState::open(parts.store.clone(), parts.history.clone());
        if let Some(notice) = &notice {
            tracing::warn!("{notice}");
        }
        let began = parts.clock.read().wall;
        Collector {
            policy: RwLock::new(Arc::new(parts.policy.clone())),
            state: Arc::new(state),
            round: Mutex::default(),
            room: RoomRequests::default(),
            progress: RoundTracker::default(),
            notice,
            began,
            measurement: SharedCall::default(),
            other_measurement: SharedCall::default(),
            counts: Arc::default(),
            labels: LabelCache::default(),
            parts: Arc::new(parts),
        }
    }

    /// The error of unreadable records on disk at the start, and their new path.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// The policy in force.
    pub fn policy(&self) -> Arc<GcPolicy> {
        Arc::clone(&self.policy.read())
    }

    /// Sets the policy from the next round on; its keep rules also apply to a running round. It must have no
    /// [problems](GcPolicy::problems).
    pub fn set_policy(&self, policy: GcPolicy) {
        *self.policy.write() = Arc::new(policy);
    }

    /// How many images were removed since the start.
    pub fn counts(&self) -> GcCounts {
        *self.counts.lock()
    }

    /// The progress of the running round; `None` while none runs.
    pub fn progress(&self) -> Option<GcRoundProgress> {
        self.progress.current()
    }

    /// Measures the image filesystem. Callers that ask while a measurement runs share it.
    pub async fn measure_filesystem(&self) -> Result<FsStats, FilesystemError> {
        let disk = Arc::clone(&self.parts.disk);
        let measure = self.measurement.join(async move { disk.measure().await });
        measure.instrument(measure_span()).await
    }

    /// Measures the filesystems that the runtime reports beside the one that GC acts on, and shares a measurement
    /// likewise.
    pub async fn measure_other_filesystems(&self) -> Result<Vec<OtherFilesystem>, FilesystemError> {
        let disk = Arc::clone(&self.parts.disk);
        self.other_measurement.join(async move { disk.measure_others().await }).await
    }

    /// The current usage records.
    pub fn records(&self) -> Arc<ImageUsageRecords> {
        self.state.records()
    }

    /// Records an ensure of the image as a use. Returns at once.
    pub fn note_ensured(&self, id: &ImageId) {
        self.state.ensured(id, &self.parts.clock.read(), self.policy().strategy);
    }

    /// Records an image that was just pulled as first seen now, unless it is known.
    pub fn note_pulled(&self, id: &ImageId) {
        if self.records().get(id, "").is_none() {
            self.note_ensured(id);
        }
    }

    /// Whether a round or an observation has recorded the images.
    pub fn has_detected(&self) -> bool {
        self.state.has_observed()
    }

    /// Waits until the current records and history are on disk. Dropping the collector does the same.
    pub async fn flush(&self) {
        self.state.flush().await;
    }

    /// Collects for this goal by this policy; keep rules of the collector's policy that are newer apply as well. The
    /// result reports what was done even if that was not enough or some removals failed.
    pub async fn round(&self, goal: GcGoal, policy: &GcPolicy) -> GcRoundResult {
        let _turn = self.round.lock().await;
        let _running = self.progress.begin(goal);
        Round::new(self, policy, goal).run().await
    }

    /// Plans a round for this goal without executing it. Does not wait for a running round. Records which images are
    /// present, but no use. As after the leases of the purposes `ended` were ended.
    pub async fn dry_run(
        &self,
        goal: GcGoal,
        policy: &GcPolicy,
        ended: &[LeasePurpose],
    ) -> Result<DryRun, GcError> {
        let measured = self.measure_filesystem().await;
        let before = if goal.needs_filesystem() { Some(self.checked(measured?)?) } else { measured.ok() };
        let mut snapshot = match goal {
            GcGoal::FailedPulls => GcSnapshot::empty(self.parts.clock.read().wall),
            _ => self.snapshot(policy).await?,
        };
        for image in &mut snapshot.images {
            image
                .retained_by
                .retain(|reason| !reason.lease().is_some_and(|lease| ended.contains(&lease.purpose)));
        }
        let reclaimed = self.reclaimable(goal, before, policy).await?;
        snapshot.reclaimed = reclaimed.total();
        snapshot.disk = before.map(|disk| filesystem_stats::with_more_free(disk, snapshot.reclaimed));
        let plan = plan(&snapshot, policy, goal);
        let report = GcReport {
            before,
            after: plan.after,
            reclaimed,
            warnings: keep_warnings(policy, &snapshot),
            plans: vec![plan],
            ..GcReport::default()
        };
        Ok(DryRun { report, snapshot })
    }

    /// The space beside images that a round would reclaim. Unknown space counts as nothing, unless the goal is that
    /// space alone.
    async fn reclaimable(
        &self,
        goal: GcGoal,
        disk: Option<FsStats>,
        policy: &GcPolicy,
    ) -> Result<ReclaimableSpace, GcError> {
        let Some(reclaimer) = &self.parts.reclaim else { return Ok(ReclaimableSpace::default()) };
        match reclaimer.reclaimable(trigger(goal, disk, policy)).await {
            Err(error) if goal == GcGoal::FailedPulls => Err(GcError::Reclaim(error)),
            Err(error) => {
                tracing::warn!("cannot determine reclaimable space beside images: {error}");
                Ok(ReclaimableSpace::default())
            }
            Ok(space) => Ok(space),
        }
    }

    /// Images, their uses and their layers by this policy, without the filesystem. Does not wait for a running round.
    /// Records which images are present, but no use.
    pub async fn snapshot(&self, policy: &GcPolicy) -> Result<GcSnapshot, GcError> {
        self.observe(policy, ObservationPurpose::Query).await
    }

    /// Adds the filesystem to a snapshot.
    pub async fn add_filesystem(&self, snapshot: &mut GcSnapshot) -> Result<(), GcError> {
        snapshot.disk = Some(self.checked(self.measure_filesystem().await?)?);
        Ok(())
    }

    /// Whether the backend can be reached.
    pub async fn backend_answers(&self) -> Result<(), BackendError> {
        self.parts.backend.info().await.map(drop)
    }

    /// Queries all sources, updates the usage records, and builds the snapshot. On an error the records do not change.
    pub(super) async fn observe(
        &self,
        policy: &GcPolicy,
        purpose: ObservationPurpose,
    ) -> Result<GcSnapshot, GcError> {
        let parts = &self.parts;
        let began = self.state.begin_observation(&*parts.clock);
        let images = parts.backend.list().await.map_err(GcError::List)?;
        // Before the leases are listed that a use has ended.
        let activity = self.recent_activity(&images).await;
        let found = self.look_at_uses(&images).await?;
        let layers = match &parts.layers {
            Some(source) if policy.strategy == GcStrategy::Larder => {
                source.layers(&images).await.map_err(GcError::Layers)?
            }
            _ => LayerUsageIndex::unknown(),
        };
        let labels = self.labels_for_rules(policy, &images).await.map_err(GcError::Labels)?;
        let retained = RetentionSet::new(found, &images, policy.strategy);
        let observed = GcObservation { purpose, images: &images, retained: &retained, activity: &activity };
        let (records, now) = self.state.observe(began, &observed, &*parts.clock, policy.strategy);
        Ok(GcSnapshot {
            now,
            began: self.began,
            watched: records.watched().unwrap_or(now),
            images: gc_images(&records, images, &retained),
            layers,
            labels,
            disk: None,
            reclaimed: DiskSpace::ZERO,
        })
    }

    /// The labels of these images that the policy's keep rules select by.
    pub(super) async fn labels_for_rules(
        &self,
        policy: &GcPolicy,
        images: &[Image],
    ) -> Result<ImageLabels, BackendError> {
        self.labels.labels(&*self.parts.backend, images, &policy.label_keys()).await
    }

    /// The labels of these images with these keys, read now.
    pub async fn labels(
        &self,
        images: &[Image],
        keys: &BTreeSet<String>,
    ) -> Result<ImageLabels, BackendError> {
        read_labels(&*self.parts.backend, images, keys).await
    }

    /// All reasons of all sources now. The uses among them end the leases that waited for them.
    async fn look_at_uses(&self, images: &[Image]) -> Result<Vec<Retention>, RetentionError> {
        let looked = Instant::now();
        let found = collect(&self.parts.sources).await?;
        if let Some(gate) = &self.parts.gate {
            gate.note_uses(&found, images, looked);
        }
        Ok(found)
    }

    /// Ends the leases whose images are used now, if there may be one. `images` are those of the last list.
    pub(super) async fn end_used_leases(&self, images: &[Image]) {
        if self.parts.gate.as_ref().is_some_and(|gate| gate.awaits_use())
            && let Err(error) = self.look_at_uses(images).await
        {
            tracing::debug!("cannot determine whether leased images are used: {error}");
        }
    }

    /// The activity since the last observation. An error does not end the round, because current uses are known.
    async fn recent_activity(&self, images: &[Image]) -> Vec<ImageActivity> {
        let Some(feed) = &self.parts.feed else { return Vec::new() };
        let activity = feed.take_activity(images).await.unwrap_or_else(|error| {
            tracing::warn!("cannot read image activity since the last observation: {error}");
            Vec::new()
        });
        if let Some(gate) = &self.parts.gate {
            let (wall, now) = (self.parts.clock.read().wall, Instant::now());
            let mut used: HashMap<ImageId, Instant> = HashMap::new();
            for ImageActivity { image, at, .. } in
                activity.iter().filter(|one| one.what == ActivityKind::Used)
            {
                if let Some(at) = now.checked_sub(wall.since(*at)) {
                    used.entry(image.clone()).and_modify(|latest| *latest = at.max(*latest)).or_insert(at);
                }
            }
            gate.end_used(&used);
        }
        activity
    }

    pub(super) fn checked(&self, disk: FsStats) -> Result<FsStats, GcError> {
        if disk.capacity == 0 {
            self.event(EventReason::InvalidDiskCapacity, &GcError::NoCapacity.to_string());
            return Err(GcError::NoCapacity);
        }
        Ok(FsStats { available: disk.available.min(disk.capacity), ..disk })
    }

    /// Keep rules that match no image of this snapshot.
    pub fn warnings(&self, snapshot: &GcSnapshot) -> Vec<KeepWarning> {
        keep_warnings(&self.policy(), snapshot)
    }

    /// Bytes that a round for a pull would free which a user asks for.
    pub async fn reclaimable_room(&self, bytes: ReclaimBytes) -> RoomOutcome {
        match self.dry_run(GcGoal::Free { bytes: bytes.likely }, &self.room_policy(), &[]).await {
            Ok(DryRun { report, .. }) => match report.plans.last() {
                Some(plan) if plan.reachable || plan.reclaimable.bytes >= bytes.least => {
                    RoomOutcome::NotTried { reclaimable: plan.reclaimable.bytes }
                }
                plan => RoomOutcome::NotEnough { reclaimable: plan.map(|plan| plan.reclaimable.bytes) },
            },
            Err(error) => {
                tracing::warn!("cannot determine what garbage collection can free: {error}");
                RoomOutcome::NotEnough { reclaimable: None }
            }
        }
    }

    /// The policy of rounds for pulls: as much as they need, or nothing.
    fn room_policy(&self) -> GcPolicy {
        GcPolicy {
            when_unreachable: WhenUnreachable::Nothing,
            free_margin_percent: 0,
            ..(*self.policy()).clone()
        }
    }

    /// Frees the likely bytes for pulls, or what it can; removes no image if that is less than the least.
    async fn free(&self, bytes: ReclaimBytes) -> RoomOutcome {
        let _alone = self.round.lock().await;
        match self.free_exactly(bytes.likely).await {
            RoomOutcome::NotEnough { reclaimable: Some(most) }
                if most >= bytes.least && most < bytes.likely =>
            {
                self.free_exactly(most).await
            }
            outcome => outcome,
        }
    }

    async fn free_exactly(&self, bytes: u64) -> RoomOutcome {
        // A pod that runs once is over long before the minimum age of its image, and the next one waits for its room.
        let policy = GcPolicy { minimum_age_of_used: false, ..self.room_policy() };
        let goal = GcGoal::Free { bytes };
        let _running = self.progress.begin(goal);
        let round = Round::new(self, &policy, goal).keeping_downloads().run().await;
        if round.error.is_none() {
            self.room.note_freed(bytes);
            return RoomOutcome::Made;
        }
        let planned = round.report.plans.last();
        RoomOutcome::NotEnough { reclaimable: planned.map(|plan| plan.reclaimable.bytes) }
    }

    pub(super) fn event(&self, reason: EventReason, message: &str) {
        self.parts.events.record(Event {
            time: SystemTime::now(),
            event_type: EventType::Warning,
            reason,
            object: self.parts.node.clone(),
            message: message.to_owned(),
            requester: String::new(),
        });
    }
}

#[async_trait]
impl RoomMaker for Collector {
    async fn make_room(&self, bytes: ReclaimBytes) -> RoomOutcome {
        let request = self.room.add(bytes);
        let _alone = self.room.round.lock().await;
        if request.made.get().is_some() {
            return RoomOutcome::Made;
        }
        let others = self.room.take_others(&request);
        let sum = others.iter().fold(bytes, |sum, other| sum.plus(other.bytes));
        if !others.is_empty() && self.free(sum).await == RoomOutcome::Made {
            for other in &others {
                let _ = other.made.set(());
            }
            return RoomOutcome::Made;
        }
        // One that asks for too much costs the others nothing: each of them asks on its own.
        match self.free(bytes).await {
            // The bytes that it lacks were counted before.
            RoomOutcome::NotEnough { .. } if self.room.has_freed_since(&request) => RoomOutcome::Made,
            outcome => outcome,
        }
    }
}

/// Keep rules that match no image.
pub(super) fn keep_warnings(policy: &GcPolicy, snapshot: &GcSnapshot) -> Vec<KeepWarning> {
    let rules = &policy.keep;
    if rules.is_empty() { Vec::new() } else { keep::warnings(rules, &keep_rule_inputs(snapshot)) }
}

/// Why a round for this goal reclaims space beside images.
pub(super) fn trigger(goal: GcGoal, disk: Option<FsStats>, policy: &GcPolicy) -> ReclaimTrigger {
    match goal {
        GcGoal::Free { .. } | GcGoal::AllUnused | GcGoal::FailedPulls => ReclaimTrigger::Request,
        // Interrupted pulls are resumed from what they left.
        GcGoal::Dangling | GcGoal::Detect => ReclaimTrigger::Schedule,
        GcGoal::Thresholds | GcGoal::Age => match disk {
            Some(disk) if disk.capacity > 0 && is_due(disk, policy) => ReclaimTrigger::Pressure,
            _ => ReclaimTrigger::Schedule,
        },
    }
}

fn gc_images(records: &ImageUsageRecords, images: Vec<Image>, retained: &RetentionSet) -> Vec<GcImage> {
    let listed = images.into_iter().map(|image| {
        let handler = handler_of(&image).to_owned();
        let names: Arc<[String]> = image.repo_tags.into_iter().chain(image.repo_digests).collect();
        ((image.id, handler), (names, image.artifact_type))
    });
    let listed: HashMap<_, _> = listed.collect();
    let gc_image = |record: &ImageUsageRecord| {
        let (names, artifact_type) =
            listed.get(&(record.id.clone(), record.handler.clone())).cloned().unwrap_or_default();
        GcImage {
            names,
            artifact_type,
            retained_by: retained.of_image(&record.id, &record.handler).cloned().collect(),
            id: record.id.clone(),
            handler: record.handler.clone(),
            size: record.size,
            pinned: record.pinned,
            first_seen: record.first_seen,
            last_used: record.last_used,
            failed: None,
        }
    };
    records.iter().map(gc_image).collect()
}
