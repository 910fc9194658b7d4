//! Garbage collection of images. Read [`Collector::collect`] first.

use std::sync::{Arc, Mutex as Lock, PoisonError, RwLock};
use std::time::SystemTime;

use tokio::sync::Mutex;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::activity::ImageActivity;
use super::dependencies::CollectorDependencies;
use super::disk_space::DiskSpace;
use super::error::GcError;
use super::filesystem_stats::{self, OtherFilesystem};
use super::gated_remover::GatedRemover;
use super::keep::{self, KeepWarning};
use super::layers::LayerUsageIndex;
use super::plan::{GcGoal, GcImage, GcPlan, GcSnapshot, insufficient, keep_rule_inputs, plan, plan_round};
use super::policy::{Accounting, GcPolicy, HookRule};
use super::progress::{GcRoundProgress, RoundTracker};
use super::reclaim::{ReclaimOutcome, ReclaimTrigger, SpaceBesideImages};
use super::report::{GcCounts, GcReport, GcRoundResult};
use super::spans::{measure_span, note_round, traced_plan};
use super::state::{GcObservation, GcState, ObservationPurpose};
use super::sweep::{SweepReport, sweep};
use super::unix_millis::UnixMillis;
use super::usage_records::{ImageUsageRecords, handler_of};
use super::uses::ImageUseIndex;
use crate::backend::{BackendError, Image};
use crate::detached::SharedCall;
use crate::events::{Event, EventReason, EventType};
use crate::image_service::{FilesystemError, FsStats};
use crate::reference::ImageId;

/// Collects the images of one backend. One round runs at a time, and only other rounds wait for it. Dropping a call
/// abandons its round: a removal that has begun completes and is recorded, and no other follows.
pub struct Collector {
    pub(super) parts: Arc<CollectorDependencies>,
    policy: RwLock<Arc<GcPolicy>>,
    pub(super) state: Arc<GcState>,
    /// Locked by the running round.
    round: Mutex<()>,
    pub(super) progress: RoundTracker,
    /// The error of unreadable records at the start.
    notice: Option<String>,
    began: UnixMillis,
    measurement: SharedCall<Result<FsStats, FilesystemError>>,
    other_measurement: SharedCall<Result<Vec<OtherFilesystem>, FilesystemError>>,
    pub(super) counts: Arc<Lock<GcCounts>>,
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
            progress: RoundTracker::default(),
            notice,
            began,
            measurement: SharedCall::default(),
            other_measurement: SharedCall::default(),
            counts: Arc::default(),
            parts: Arc::new(parts),
        }
    }

    /// The error of unreadable records on disk at the start, and their new path.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// The policy in force.
    pub fn policy(&self) -> Arc<GcPolicy> {
        Arc::clone(&self.policy.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the policy from the next round on; its keep rules also apply to a running round. It must have no
    /// [problems](GcPolicy::problems).
    pub fn set_policy(&self, policy: GcPolicy) {
        *self.policy.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
    }

    /// How many images were removed since the start.
    pub fn counts(&self) -> GcCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Measures the filesystems that the runtime reports beside the one that GC acts on, and shares a measurement likewise.
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
        self.state.ensured(id, &self.parts.clock.read(), self.policy().clock);
    }

    /// Records an image that was just pulled as first seen now, unless it is known.
    pub fn note_pulled(&self, id: &ImageId) {
        if self.records().get(id, "").is_none() {
            self.note_ensured(id);
        }
    }

    /// Whether a round or an observation has recorded the images.
    pub fn has_detected(&self) -> bool {
        self.state.has_looked()
    }

    /// Waits until the current records and history are on disk. Dropping the collector does the same.
    pub async fn flush(&self) {
        self.state.flush().await;
    }

    /// Updates the usage records, also on disk, and removes nothing.
    pub async fn detect(&self) -> Result<(), GcError> {
        self.list_present_images(&self.policy(), ObservationPurpose::Round).await?;
        self.state.flush().await;
        Ok(())
    }

    /// What [`collect`](Collector::collect) would do now.
    pub async fn plan_round(&self) -> Result<GcPlan, GcError> {
        let (mut snapshot, policy) = (self.snapshot_with_fs_stats().await?, self.policy());
        self.expect_reclaim(&mut snapshot, &policy, GcGoal::Thresholds).await;
        Ok(plan_round(&snapshot, &policy))
    }

    /// What collecting for this goal would do now.
    pub async fn plan(&self, goal: GcGoal) -> Result<GcPlan, GcError> {
        let (mut snapshot, policy) = (self.snapshot_with_fs_stats().await?, self.policy());
        self.expect_reclaim(&mut snapshot, &policy, goal).await;
        Ok(plan(&snapshot, &policy, goal))
    }

    /// Adds what a round for this goal would reclaim beside images to the free space of `snapshot`, and returns it.
    pub async fn expect_reclaim(
        &self,
        snapshot: &mut GcSnapshot,
        policy: &GcPolicy,
        goal: GcGoal,
    ) -> SpaceBesideImages {
        let Some(reclaimer) = &self.parts.reclaim else { return SpaceBesideImages::default() };
        let expected = reclaimer.reclaimable(trigger(goal, snapshot.disk, policy)).await;
        let expected = expected.unwrap_or_else(|error| {
            tracing::warn!("cannot determine reclaimable space beside images: {error}");
            SpaceBesideImages::default()
        });
        snapshot.reclaimed = expected.total();
        snapshot.disk = snapshot.disk.map(|disk| filesystem_stats::with_more_free(disk, snapshot.reclaimed));
        expected
    }

    /// The input of a plan. Does not wait for a running round. Records which images are present, but no use.
    pub async fn snapshot(&self) -> Result<GcSnapshot, GcError> {
        self.list_present_images(&self.policy(), ObservationPurpose::Look).await
    }

    /// The input of a plan with filesystem statistics. Does not wait for a running round.
    pub async fn snapshot_with_fs_stats(&self) -> Result<GcSnapshot, GcError> {
        self.snapshot_for(&self.policy()).await
    }

    /// The input of a plan under this policy.
    pub async fn snapshot_for(&self, policy: &GcPolicy) -> Result<GcSnapshot, GcError> {
        let mut snapshot = self.list_present_images(policy, ObservationPurpose::Look).await?;
        snapshot.disk = Some(self.checked(self.measure_filesystem().await?)?);
        Ok(snapshot)
    }

    /// Whether the backend can be reached.
    pub async fn backend_answers(&self) -> Result<(), BackendError> {
        self.parts.backend.info().await.map(drop)
    }

    /// Runs one round: removes images past the maximum age, and then, if the filesystem is past a threshold, frees
    /// space until it is not.
    pub async fn collect(&self) -> Result<GcReport, GcError> {
        let GcRoundResult { report, error } = self.round(GcGoal::Thresholds).await;
        error.map_or(Ok(report), Err)
    }

    /// Collects for this goal. The result reports what was done even if that was not enough or some removals failed.
    pub async fn round(&self, goal: GcGoal) -> GcRoundResult {
        self.round_by(&self.policy(), goal).await
    }

    /// Collects with a policy for this round only. The collector's keep rules apply as well.
    pub async fn round_by(&self, policy: &GcPolicy, goal: GcGoal) -> GcRoundResult {
        let _turn = self.round.lock().await;
        let _running = self.progress.begin(Some(goal));
        let round = async {
            let mut report = GcReport::default();
            let ended = match goal {
                GcGoal::Thresholds | GcGoal::Age => self.collect_on_schedule(policy, &mut report).await,
                GcGoal::Free { .. } | GcGoal::AllUnused | GcGoal::Dangling => {
                    self.on_demand(policy, goal, &mut report).await
                }
            };
            self.state.flush().await;
            GcRoundResult { report, error: ended.err() }
        };
        let span = tracing::info_span!(
            "gc_round",
            goal = goal.name(),
            otel.name = "Images/GarbageCollect",
            otel.status_description = Empty,
            larder.gc.removed_images = Empty,
            larder.gc.freed_bytes = Empty,
            larder.gc.reclaimed_bytes = Empty,
            error.type = Empty,
        );
        let result = round.instrument(span.clone()).await;
        note_round(&span, &result);
        result
    }

    /// What [`reclaim_only`](Collector::reclaim_only) would do now.
    pub async fn plan_reclaim_only(&self) -> Result<GcReport, GcError> {
        let before = self.checked(self.measure_filesystem().await?)?;
        let reclaimed = match &self.parts.reclaim {
            Some(source) => source.reclaimable(ReclaimTrigger::Request).await.map_err(GcError::Reclaim)?,
            None => SpaceBesideImages::default(),
        };
        let after = filesystem_stats::with_more_free(before, reclaimed.total());
        Ok(GcReport { reclaimed, before: Some(before), after: Some(after), ..GcReport::default() })
    }

    /// Reclaims all space beside images that no running pull uses, and removes no image.
    pub async fn reclaim_only(&self) -> Result<GcRoundResult, GcError> {
        let _turn = self.round.lock().await;
        let _running = self.progress.begin(None);
        let before = Some(self.checked(self.measure_filesystem().await?)?);
        let ReclaimOutcome { freed: reclaimed, error } = self.reclaim(ReclaimTrigger::Request).await;
        let after = self.disk_after_deletion().await;
        let error = error.map(GcError::Reclaim).or(after.as_ref().err().cloned());
        let report = GcReport { reclaimed, before, after: after.ok(), ..GcReport::default() };
        Ok(GcRoundResult { report, error })
    }

    /// A round without a threshold that can be exceeded: reclaims what nothing can use any more, records which images are
    /// present and used, and removes no image.
    pub async fn reclaim_and_detect(&self) -> GcRoundResult {
        let _turn = self.round.lock().await;
        let _running = self.progress.begin(Some(GcGoal::Thresholds));
        let before = self.measure_filesystem().await.ok();
        let reclaimed = self.reclaim(ReclaimTrigger::Schedule).await;
        warn_of(&reclaimed);
        self.progress.planning();
        let error = self.detect().await.err();
        let after = self.parts.disk.measure_after_deletion().await.ok();
        let reclaimed = reclaimed.freed;
        GcRoundResult {
            report: GcReport { reclaimed, before, after, disabled: true, ..GcReport::default() },
            error,
        }
    }

    async fn collect_on_schedule(&self, policy: &GcPolicy, report: &mut GcReport) -> Result<(), GcError> {
        let reclaimed = self.reclaim_before_images(policy, GcGoal::Thresholds, report).await;
        self.progress.planning();
        let observe = self.list_present_images(policy, ObservationPurpose::Round);
        let snapshot = &mut observe.instrument(tracing::trace_span!("gc.Observe")).await?;
        snapshot.reclaimed = reclaimed;
        let started = snapshot.now;
        report.warnings = Self::warnings_by(policy, snapshot);
        self.report_invalid_ids(snapshot);
        let age_error = self.age_pass(policy, snapshot, report).await;
        if let (Some(error), Accounting::Nominal) = (&age_error, policy.accounting) {
            return Err(error.clone());
        }
        let disk = self.disk_after_deletion().await?;
        snapshot.disk = Some(disk);
        report.before.get_or_insert(disk);
        report.after = Some(disk);
        let planned = traced_plan(snapshot, policy, GcGoal::Thresholds);
        if !is_due(disk, policy) {
            report.plans.push(planned);
            if let Some(error) = age_error {
                return Err(error);
            }
            // Kubelet calls its hooks only after a space pass.
            if policy.hooks == HookRule::AllPresent {
                self.run_hooks(policy, snapshot, &SweepReport::default(), started);
            }
            return Ok(());
        }
        let swept = self.execute_plan(policy, snapshot, planned, report).await;
        if let Some(error) = swept.error(GcGoal::Thresholds, policy) {
            return Err(error);
        }
        self.run_hooks(policy, snapshot, &swept, started);
        if !swept.reached {
            let message = insufficient(disk, swept.freed);
            self.event(EventReason::FreeDiskSpaceFailed, &message);
            return Err(GcError::Insufficient(message));
        }
        age_error.map_or(Ok(()), Err)
    }

    /// Removes all candidates, whatever the disk usage.
    pub async fn delete_unused(&self) -> Result<GcReport, GcError> {
        let GcRoundResult { report, error } = self.round(GcGoal::AllUnused).await;
        error.map_or(Ok(report), Err)
    }

    /// Frees this many bytes plus the policy's margin, with as few removals as needed.
    pub async fn free(&self, bytes: u64) -> Result<GcReport, GcError> {
        let GcRoundResult { report, error } = self.round(GcGoal::Free { bytes }).await;
        error.map_or(Ok(report), Err)
    }

    async fn on_demand(&self, policy: &GcPolicy, goal: GcGoal, report: &mut GcReport) -> Result<(), GcError> {
        let reclaimed = self.reclaim_before_images(policy, goal, report).await;
        self.progress.planning();
        let observe = self.list_present_images(policy, ObservationPurpose::Round);
        let snapshot = &mut observe.instrument(tracing::trace_span!("gc.Observe")).await?;
        snapshot.reclaimed = reclaimed;
        let started = snapshot.now;
        report.warnings = Self::warnings_by(policy, snapshot);
        self.report_invalid_ids(snapshot);
        snapshot.disk = match (goal, policy.accounting) {
            (GcGoal::AllUnused, Accounting::Nominal) => None,
            (GcGoal::AllUnused | GcGoal::Dangling, _) => self.parts.disk.measure_after_deletion().await.ok(),
            _ => Some(self.disk_after_deletion().await?),
        };
        report.before = report.before.or(snapshot.disk);
        let planned = traced_plan(snapshot, policy, goal);
        let swept = self.execute_plan(policy, snapshot, planned, report).await;
        if let Some(error) = swept.error(goal, policy) {
            return Err(error);
        }
        self.run_hooks(policy, snapshot, &swept, started);
        match report.before {
            Some(before) if !swept.reached => Err(GcError::Insufficient(insufficient(before, swept.freed))),
            _ => Ok(()),
        }
    }

    async fn age_pass(
        &self,
        policy: &GcPolicy,
        snapshot: &mut GcSnapshot,
        report: &mut GcReport,
    ) -> Option<GcError> {
        if policy.maximum_age.is_zero() {
            return None;
        }
        let planned = traced_plan(snapshot, policy, GcGoal::Age);
        if planned.removals.is_empty() {
            return None;
        }
        if policy.accounting == Accounting::Exact {
            snapshot.disk = self.parts.disk.measure_after_deletion().await.ok();
            report.before = report.before.or(snapshot.disk);
        }
        let swept = self.execute_plan(policy, snapshot, planned, report).await;
        swept.error(GcGoal::Age, policy)
    }

    async fn execute_plan(
        &self,
        policy: &GcPolicy,
        snapshot: &mut GcSnapshot,
        planned: GcPlan,
        report: &mut GcReport,
    ) -> SweepReport {
        report.plans.push(planned.clone());
        self.progress.planned(&planned);
        let hand = GatedRemover::new(self, policy, planned.goal, snapshot);
        let swept = sweep(&hand, snapshot, policy, planned, self.parts.patience).await;
        if !swept.done.is_empty() {
            self.state.save();
        }
        if swept.lagging {
            report.space_holders = self.parts.disk.deleted_open_files().await;
        }
        report.after = swept.disk.or(report.after);
        report.swept.push(swept.clone());
        swept
    }

    /// Queries all sources, updates the usage records, and builds the snapshot. On an error the records do not change.
    async fn list_present_images(
        &self,
        policy: &GcPolicy,
        purpose: ObservationPurpose,
    ) -> Result<GcSnapshot, GcError> {
        let parts = &self.parts;
        let began = self.state.begin_observation(&*parts.clock);
        let images = parts.backend.list().await.map_err(GcError::List)?;
        let found = ImageUseIndex::collect(&parts.sources).await?;
        let layers = match (&parts.layers, policy.accounting) {
            // Keep rules may need labels, whatever the accounting.
            (Some(source), accounting) if accounting == Accounting::Exact || policy.asks_for_labels() => {
                source.layers(&images).await.map_err(GcError::Layers)?
            }
            _ => LayerUsageIndex::unknown(),
        };
        let uses = ImageUseIndex::match_images(found, &images, policy.uses);
        let happened = self.sightings(&images).await;
        let observed = GcObservation { purpose, images: &images, uses: &uses, sightings: &happened };
        let (records, now) = self.state.observe(began, &observed, &*parts.clock, policy.clock);
        let subjects = Self::subjects(&records, &images, &uses);
        let (began, watched) = (self.began, records.watched().unwrap_or(now));
        Ok(GcSnapshot {
            now,
            began,
            watched,
            images: subjects,
            layers,
            disk: None,
            reclaimed: DiskSpace::ZERO,
        })
    }

    /// Reclaims space beside images. Returns the measured part of it, which counts towards a goal of bytes.
    async fn reclaim_before_images(
        &self,
        policy: &GcPolicy,
        goal: GcGoal,
        report: &mut GcReport,
    ) -> DiskSpace {
        if self.parts.reclaim.is_none() {
            return DiskSpace::ZERO;
        }
        // A filesystem that cannot be measured is the round's error, and not of this step.
        // Not after deletion: that would empty the trash, which counts as reclaimed.
        let before = self.measure_filesystem().await.ok();
        let outcome = self.reclaim(trigger(goal, before, policy)).await;
        warn_of(&outcome);
        let reclaimed = outcome.freed;
        if reclaimed.total() == DiskSpace::ZERO {
            return DiskSpace::ZERO;
        }
        (report.before, report.reclaimed) = (before, reclaimed);
        let freed =
            |(before, after)| filesystem_stats::free(before).shortfall_to(filesystem_stats::free(after));
        let after = self.parts.disk.measure_after_deletion().await.ok();
        before.zip(after).map_or(reclaimed.total(), freed)
    }

    async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome {
        let Some(source) = &self.parts.reclaim else { return ReclaimOutcome::default() };
        let span = if Span::current().is_none() {
            Span::none()
        } else {
            tracing::trace_span!("gc.Reclaim", larder.gc.freed_bytes = Empty)
        };
        let outcome = source.reclaim(trigger).instrument(span.clone()).await;
        span.record("larder.gc.freed_bytes", outcome.freed.total().bytes);
        if outcome.freed.total() != DiskSpace::ZERO {
            tracing::info!("reclaimed {}", outcome.freed);
        }
        outcome
    }

    /// The activity since the last observation. An error does not end the round, because current uses are known.
    async fn sightings(&self, images: &[Image]) -> Vec<ImageActivity> {
        let Some(feed) = &self.parts.feed else { return Vec::new() };
        feed.take_activity(images).await.unwrap_or_else(|error| {
            tracing::warn!("cannot read image activity since the last observation: {error}");
            Vec::new()
        })
    }

    fn subjects(records: &ImageUsageRecords, images: &[Image], uses: &ImageUseIndex) -> Vec<GcImage> {
        let names: std::collections::HashMap<_, _> =
            images.iter().map(|image| ((image.id.as_str(), handler_of(image)), image)).collect();
        let subject = |record: &super::usage_records::ImageUsageRecord| {
            let image = names.get(&(record.id.as_str(), record.handler.as_str()));
            let names =
                image.map(|image| image.repo_tags.iter().chain(&image.repo_digests).cloned().collect());
            GcImage {
                names: names.unwrap_or_default(),
                uses: uses.of_image(&record.id, &record.handler).cloned().collect(),
                id: record.id.clone(),
                handler: record.handler.clone(),
                size: record.size,
                pinned: record.pinned,
                first_seen: record.first_seen,
                last_used: record.last_used,
                failed: None,
            }
        };
        records.iter().map(subject).collect()
    }

    /// Raises kubelet's event for each candidate without an ID.
    fn report_invalid_ids(&self, snapshot: &GcSnapshot) {
        for image in &snapshot.images {
            if image.id.is_empty() && !image.pinned && image.uses.is_empty() {
                let handler = &image.handler;
                let key = if handler.is_empty() { String::new() } else { format!(",{handler}") };
                let message = format!("ImageID is not valid, skipping, image: {key}");
                self.event(EventReason::InvalidImageId, &message);
            }
        }
    }

    async fn disk_after_deletion(&self) -> Result<FsStats, GcError> {
        let measure = self.parts.disk.measure_after_deletion();
        self.checked(measure.instrument(measure_span()).await?)
    }

    fn checked(&self, disk: FsStats) -> Result<FsStats, GcError> {
        if disk.capacity == 0 {
            self.event(EventReason::InvalidDiskCapacity, &GcError::NoCapacity.to_string());
            return Err(GcError::NoCapacity);
        }
        Ok(FsStats { available: disk.available.min(disk.capacity), ..disk })
    }

    /// Keep rules that match no image of this snapshot.
    pub fn warnings(&self, snapshot: &GcSnapshot) -> Vec<KeepWarning> {
        Self::warnings_by(&self.policy(), snapshot)
    }

    fn warnings_by(policy: &GcPolicy, snapshot: &GcSnapshot) -> Vec<KeepWarning> {
        let rules = &policy.keep;
        if rules.is_empty() { Vec::new() } else { keep::warnings(rules, &keep_rule_inputs(snapshot)) }
    }

    fn run_hooks(&self, policy: &GcPolicy, snapshot: &GcSnapshot, swept: &SweepReport, started: UnixMillis) {
        let kept: Vec<ImageId> = match policy.hooks {
            HookRule::Examined => swept.examined.clone(),
            HookRule::AllPresent => snapshot.images.iter().map(|image| image.id.clone()).collect(),
        };
        for hook in &self.parts.hooks {
            hook.collected(&kept, started);
        }
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

fn warn_of(reclaimed: &ReclaimOutcome) {
    if let Some(error) = &reclaimed.error {
        tracing::warn!("cannot reclaim all space beside images: {error}");
    }
}

/// Why a round for this goal reclaims space beside images.
fn trigger(goal: GcGoal, disk: Option<FsStats>, policy: &GcPolicy) -> ReclaimTrigger {
    match goal {
        GcGoal::Free { .. } | GcGoal::AllUnused => ReclaimTrigger::Request,
        // Interrupted pulls are resumed from what they left.
        GcGoal::Dangling => ReclaimTrigger::Schedule,
        GcGoal::Thresholds | GcGoal::Age => match disk {
            Some(disk) if disk.capacity > 0 && is_due(disk, policy) => ReclaimTrigger::Pressure,
            _ => ReclaimTrigger::Schedule,
        },
    }
}

/// Whether the filesystem is past a threshold of the policy.
pub(super) fn is_due(disk: FsStats, policy: &GcPolicy) -> bool {
    match policy.accounting {
        Accounting::Nominal => filesystem_stats::kubelet_bytes_to_free(disk, policy).is_some(),
        Accounting::Exact => filesystem_stats::wanted_free(disk, policy).is_some(),
    }
}
