//! One round of garbage collection: reclaim space beside images, observe, plan, sweep.

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::collector::{Collector, keep_warnings, trigger};
use super::disk_space::DiskSpace;
use super::error::{GcError, LeftUnused};
use super::filesystem_stats;
use super::goal::GcGoal;
use super::meter::SpaceMeter;
use super::plan::{GcPlan, GcSnapshot, is_due, stages};
use super::policy::{GcPolicy, GcStrategy};
use super::reclaim::{ReclaimOutcome, ReclaimTrigger};
use super::remover::ImageRemover;
use super::report::{GcReport, GcRoundResult};
use super::spans::{measure_span, note_round, traced_plan_stage};
use super::state::ObservationPurpose;
use super::sweep::{SweepReport, sweep};
use crate::events::EventReason;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// A running round.
pub(super) struct Round<'a> {
    collector: &'a Collector,
    policy: &'a GcPolicy,
    goal: GcGoal,
    keeps_downloads: bool,
    report: GcReport,
}

impl<'a> Round<'a> {
    pub(super) fn new(collector: &'a Collector, policy: &'a GcPolicy, goal: GcGoal) -> Round<'a> {
        Round { collector, policy, goal, keeps_downloads: false, report: GcReport::default() }
    }

    /// Reclaims nothing that a pull can resume from, whatever the goal: the round is for pulls that will.
    pub(super) fn keeping_downloads(self) -> Round<'a> {
        Round { keeps_downloads: true, ..self }
    }

    pub(super) async fn run(mut self) -> GcRoundResult {
        let span = tracing::info_span!(
            "gc_round",
            goal = self.goal.name(),
            otel.name = "Images/GarbageCollect",
            otel.status_description = Empty,
            larder.gc.removed_images = Empty,
            larder.gc.freed_bytes = Empty,
            larder.gc.reclaimed_bytes = Empty,
            error.type = Empty,
        );
        let ended = async {
            let ended = match self.goal {
                GcGoal::FailedPulls => self.reclaim_failed_pulls().await,
                _ => self.collect().await,
            };
            self.collector.state.flush().await;
            ended
        };
        let error = ended.instrument(span.clone()).await.err();
        let result = GcRoundResult { report: self.report, error };
        note_round(&span, &result);
        result
    }

    async fn reclaim_failed_pulls(&mut self) -> Result<(), GcError> {
        let before = self.collector.checked(self.collector.measure_filesystem().await?)?;
        self.report.before = Some(before);
        let ReclaimOutcome { freed, error } = self.reclaim(ReclaimTrigger::Request).await;
        self.report.reclaimed = freed;
        let after = self.measure_after_deletion().await;
        self.report.after = after.as_ref().ok().copied();
        error.map_or(after.map(drop), |error| Err(GcError::Reclaim(error)))
    }

    async fn collect(&mut self) -> Result<(), GcError> {
        let reclaimed = self.reclaim_before_images().await;
        self.collector.progress.planning();
        let observe = self.collector.observe(self.policy, ObservationPurpose::Round);
        let mut snapshot = observe.instrument(tracing::trace_span!("gc.Observe")).await?;
        snapshot.reclaimed = reclaimed;
        self.report.warnings = keep_warnings(self.policy, &snapshot);
        if self.goal != GcGoal::Detect {
            self.report_invalid_ids(&snapshot);
        }
        let mut earlier_error = None;
        for stage in stages(self.goal, self.policy) {
            if stage == self.goal {
                return self.run_last_stage(&mut snapshot, earlier_error).await;
            }
            earlier_error = self.run_earlier_stage(&mut snapshot, stage).await;
            if earlier_error.is_some() && !self.is_larder() {
                break;
            }
        }
        earlier_error.map_or(Ok(()), Err)
    }

    /// Runs the stage of the round's goal. Returns the error of the stage before it where this one succeeds.
    async fn run_last_stage(
        &mut self,
        snapshot: &mut GcSnapshot,
        earlier_error: Option<GcError>,
    ) -> Result<(), GcError> {
        snapshot.disk = if self.goal.needs_filesystem() {
            Some(self.measure_after_deletion().await?)
        } else {
            self.collector.parts.disk.measure_after_deletion().await.ok()
        };
        self.report.before = self.report.before.or(snapshot.disk);
        self.report.after = snapshot.disk;
        let planned = traced_plan_stage(snapshot, self.policy, self.goal);
        if !self.has_to_free(snapshot.disk) {
            self.report.plans.push(planned);
            // Kubelet calls its hooks only after a space pass.
            if earlier_error.is_none() && self.goal == GcGoal::Thresholds && self.is_larder() {
                self.run_hooks(snapshot, &SweepReport::default()).await;
            }
            return earlier_error.map_or(Ok(()), Err);
        }
        let before = snapshot.disk;
        let swept = self.execute(snapshot, planned).await;
        if let Some(error) = swept.error(self.goal, self.policy) {
            return Err(error);
        }
        self.run_hooks(snapshot, &swept).await;
        match before {
            Some(before) if !swept.reached => Err(self.insufficient(before, &swept)),
            _ => earlier_error.map_or(Ok(()), Err),
        }
    }

    fn is_larder(&self) -> bool {
        self.policy.strategy == GcStrategy::Larder
    }

    /// Whether images may have to be removed for the goal.
    fn has_to_free(&self, disk: Option<FsStats>) -> bool {
        match self.goal {
            GcGoal::Thresholds | GcGoal::Age => disk.is_some_and(|disk| is_due(disk, self.policy)),
            GcGoal::Detect | GcGoal::FailedPulls => false,
            GcGoal::Free { .. } | GcGoal::AllUnused | GcGoal::Dangling => true,
        }
    }

    fn insufficient(&self, before: FsStats, swept: &SweepReport) -> GcError {
        let left = self.report.plans.last().and_then(|plan| {
            let bytes = plan.reclaimable.bytes.saturating_sub(plan.expected_freed.bytes);
            plan.when_unreachable.filter(|_| bytes > 0).map(|by| LeftUnused { bytes, by })
        });
        let error = GcError::insufficient(before, swept.freed, left);
        if self.goal == GcGoal::Thresholds {
            self.collector.event(EventReason::FreeDiskSpaceFailed, &error.to_string());
        }
        error
    }

    /// Runs a stage before that of the round's goal. Returns the errors of removals.
    async fn run_earlier_stage(&mut self, snapshot: &mut GcSnapshot, stage: GcGoal) -> Option<GcError> {
        let planned = traced_plan_stage(snapshot, self.policy, stage);
        if planned.removals.is_empty() {
            return None;
        }
        if self.is_larder() {
            snapshot.disk = self.collector.parts.disk.measure_after_deletion().await.ok();
            self.report.before = self.report.before.or(snapshot.disk);
        }
        self.execute(snapshot, planned).await.error(stage, self.policy)
    }

    async fn execute(&mut self, snapshot: &mut GcSnapshot, planned: GcPlan) -> SweepReport {
        let collector = self.collector;
        self.report.plans.push(planned.clone());
        collector.progress.planned(&planned);
        let remover = ImageRemover {
            parts: Arc::clone(&collector.parts),
            state: Arc::clone(&collector.state),
            counts: Arc::clone(&collector.counts),
            progress: &collector.progress,
            policy: self.policy,
            current_policy: &collector.policy,
            goal: planned.goal,
            last: Mutex::default(),
        };
        let before = snapshot.disk.filter(|_| self.is_larder());
        let meter = SpaceMeter::new(&*collector.parts.disk, collector.parts.reclaim_wait, before);
        let swept = sweep(&remover, meter, snapshot, self.policy, planned).await;
        if !swept.removed.is_empty() {
            collector.state.save();
        }
        if swept.lagging {
            self.report.space_holders = collector.parts.disk.deleted_open_files().await;
        }
        self.report.after = swept.disk.or(self.report.after);
        self.report.swept.push(swept.clone());
        swept
    }

    /// Reclaims space beside images. Returns the measured part of it, which counts towards a goal of bytes.
    async fn reclaim_before_images(&mut self) -> DiskSpace {
        if self.collector.parts.reclaim.is_none() {
            return DiskSpace::ZERO;
        }
        // A filesystem that cannot be measured is the round's error, and not of this step.
        // Not after deletion: that would empty the trash, which counts as reclaimed.
        let before = self.collector.measure_filesystem().await.ok();
        let trigger = if self.keeps_downloads {
            ReclaimTrigger::Schedule
        } else {
            trigger(self.goal, before, self.policy)
        };
        let outcome = self.reclaim(trigger).await;
        if let Some(error) = &outcome.error {
            tracing::warn!("cannot reclaim all space beside images: {error}");
        }
        let reclaimed = outcome.freed;
        if reclaimed.total() == DiskSpace::ZERO {
            return DiskSpace::ZERO;
        }
        (self.report.before, self.report.reclaimed) = (before, reclaimed);
        let freed =
            |(before, after)| filesystem_stats::free(before).shortfall_to(filesystem_stats::free(after));
        let after = self.collector.parts.disk.measure_after_deletion().await.ok();
        before.zip(after).map_or(reclaimed.total(), freed)
    }

    async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome {
        let Some(source) = &self.collector.parts.reclaim else { return ReclaimOutcome::default() };
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

    async fn measure_after_deletion(&self) -> Result<FsStats, GcError> {
        let measure = self.collector.parts.disk.measure_after_deletion();
        self.collector.checked(measure.instrument(measure_span()).await?)
    }

    /// Raises kubelet's event for each candidate without an ID.
    fn report_invalid_ids(&self, snapshot: &GcSnapshot) {
        for image in &snapshot.images {
            if image.id.is_empty() && !image.pinned && image.retained_by.is_empty() {
                let handler = &image.handler;
                let key = if handler.is_empty() { String::new() } else { format!(",{handler}") };
                let message = format!("ImageID is not valid, skipping, image: {key}");
                self.collector.event(EventReason::InvalidImageId, &message);
            }
        }
    }

    /// Kubelet's hooks receive the images that its space pass examined and retained, larder's all that are present.
    /// Images that lack a layer are retained: a pull may complete them.
    async fn run_hooks(&self, snapshot: &GcSnapshot, swept: &SweepReport) {
        let mut retained: Vec<ImageId> = match self.policy.strategy {
            GcStrategy::Kubelet => swept.examined.clone(),
            GcStrategy::Larder => snapshot.images.iter().map(|image| image.id.clone()).collect(),
        };
        if let Some(origins) = self.collector.parts.backend.origins() {
            match origins.recorded().await {
                Ok(recorded) => retained.extend(recorded),
                Err(error) => {
                    tracing::warn!("cannot list the records of images, pull records are kept: {error}");
                    return;
                }
            }
        }
        for hook in &self.collector.parts.hooks {
            hook.collected(&retained, snapshot.now);
        }
    }
}
