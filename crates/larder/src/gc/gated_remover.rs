//! The collector's hands: what a sweep does to the world.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::collector::Collector;
use super::dependencies::CollectorDependencies;
use super::disk_space::DiskSpace;
use super::history::RemovalHistoryEntry;
use super::keep::{self, KeepRule};
use super::plan::{GcGoal, GcImage, GcSnapshot, PlannedRemoval, keepables};
use super::policy::{Accounting, GcPolicy, UseRule};
use super::report::GcCounts;
use super::state::GcState;
use super::sweep::{ImageRemover, RemovalError, RemovalOutcome};
use super::uses::{ImageUse, ImageUseIndex};
use crate::backend::{Image, ImageSpec};
use crate::detached::run_to_completion;
use crate::image_service::FsStats;

pub(super) struct GatedRemover<'a> {
    collector: &'a Collector,
    policy: &'a GcPolicy,
    goal: GcGoal,
    /// What the round looked at, without what is gone since: keep rules that came meanwhile are judged by it.
    scene: Mutex<GcSnapshot>,
    /// What was removed last, until the sweep has measured it.
    gone: Mutex<Option<RemovalRecorder>>,
}

impl<'a> GatedRemover<'a> {
    pub(super) fn new(
        collector: &'a Collector,
        policy: &'a GcPolicy,
        goal: GcGoal,
        scene: &GcSnapshot,
    ) -> GatedRemover<'a> {
        GatedRemover { collector, policy, goal, scene: Mutex::new(scene.clone()), gone: Mutex::default() }
    }

    fn scene(&self) -> MutexGuard<'_, GcSnapshot> {
        self.scene.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rule that keeps this image by now, of those that the plan did not know. Who adds a rule is told that it is in
    /// force, also while a round runs.
    fn kept_meanwhile(&self, image: &PlannedRemoval) -> Option<KeepRule> {
        let policy = self.collector.policy();
        let new: Vec<KeepRule> =
            policy.keep.iter().filter(|rule| !self.policy.keep.contains(rule)).cloned().collect();
        if new.is_empty() {
            return None;
        }
        let scene = self.scene();
        let is_it = |subject: &GcImage| subject.id == image.id && subject.handler == image.handler;
        let index = scene.images.iter().position(is_it)?;
        let kept = keep::matching_rules(scene.now, &new, &keepables(&scene));
        kept.get(index).copied().flatten().and_then(|rule| new.get(rule).cloned())
    }
}

#[async_trait]
impl ImageRemover for GatedRemover<'_> {
    async fn remove(&self, removal: &PlannedRemoval) -> Result<RemovalOutcome, RemovalError> {
        let parts = Arc::clone(&self.collector.parts);
        // From here on nobody is told that the image is present, until it is gone or left alone.
        let removing = match &parts.gate {
            Some(gate) => match gate.try_begin_removal(&removal.id) {
                Some(removing) => Some(removing),
                None => return Ok(RemovalOutcome::InUse(Vec::new())),
            },
            None => None,
        };
        if let Some(rule) = self.kept_meanwhile(removal) {
            return Ok(RemovalOutcome::Kept(rule.to_string()));
        }
        let look_again = (self.policy.accounting == Accounting::Exact).then_some(self.policy.uses);
        let (counts, state) = (Arc::clone(&self.collector.counts), Arc::clone(&self.collector.state));
        let (goal, image) = (self.goal, removal.clone());
        // The backend may go on removing after it was dropped; the gate has to stay closed until then.
        let ended = run_to_completion(async move {
            let _removing = removing;
            if let Some(left) = remove_unused(&parts, &image, look_again).await? {
                return Ok(Err(left));
            }
            state.forget(&image.id, &image.handler);
            Ok::<_, RemovalError>(Ok(RemovalRecorder { parts, counts, state, goal, image, freed: None }))
        })
        .await?;
        Ok(match ended {
            Ok(gone) => {
                *self.gone.lock().unwrap_or_else(PoisonError::into_inner) = Some(gone);
                RemovalOutcome::Removed
            }
            Err(left) => {
                if left == RemovalOutcome::AlreadyGone {
                    self.scene().forget(&removal.id, &removal.handler);
                }
                left
            }
        })
    }

    async fn measure(&self) -> Result<FsStats, String> {
        let measured = self.collector.parts.disk.measure_after_deletion().await;
        measured.map_err(|error| error.to_string())
    }

    async fn removed(&self, image: &PlannedRemoval, freed: Option<DiskSpace>) {
        self.scene().forget(&image.id, &image.handler);
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut gone) = gone {
            gone.freed = freed;
        }
        // The journal has it before the next image is removed.
        self.collector.state.flush().await;
    }
}

/// Removes the image, unless it turns out to be used or gone when it is looked at again; then, which of these.
async fn remove_unused(
    parts: &CollectorDependencies,
    image: &PlannedRemoval,
    look_again: Option<UseRule>,
) -> Result<Option<RemovalOutcome>, RemovalError> {
    if let Some(rule) = look_again {
        let uses = users(parts, image, rule).await?;
        if !uses.is_empty() {
            return Ok(Some(RemovalOutcome::InUse(uses)));
        }
    }
    let handler = image.handler.clone();
    let spec = ImageSpec { runtime_handler: handler, ..ImageSpec::named(&image.id) };
    // Removing what is gone succeeds, so that has to be found out before. What cannot be found out is told by the
    // removal.
    if look_again.is_some() && matches!(parts.backend.peek_status(&spec).await, Ok(None)) {
        return Ok(Some(RemovalOutcome::AlreadyGone));
    }
    parts.backend.remove(&spec).await?;
    Ok(None)
}

/// Who uses the image at this moment.
async fn users(
    parts: &CollectorDependencies,
    image: &PlannedRemoval,
    rule: UseRule,
) -> Result<Vec<ImageUse>, RemovalError> {
    let found = ImageUseIndex::collect(&parts.sources).await?;
    let named = Image { id: image.id.clone(), repo_tags: image.names.clone(), ..Image::default() };
    let uses = ImageUseIndex::match_images(found, &[named], rule);
    Ok(uses.of_image(&image.id, &image.handler).cloned().collect())
}

/// An image that is gone. Dropping this writes it down: also when nobody waits for the removal any more, or for what it
/// freed.
struct RemovalRecorder {
    parts: Arc<CollectorDependencies>,
    counts: Arc<Mutex<GcCounts>>,
    state: Arc<GcState>,
    goal: GcGoal,
    image: PlannedRemoval,
    freed: Option<DiskSpace>,
}

impl Drop for RemovalRecorder {
    fn drop(&mut self) {
        let RemovalRecorder { parts, counts, state, goal, image, freed } = self;
        {
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            match goal {
                GcGoal::Age => counts.age += 1,
                GcGoal::Thresholds | GcGoal::Free { .. } | GcGoal::AllUnused => counts.space += 1,
            }
        }
        tracing::info!(image = %image.id, names = ?image.names, why = %image.why, "removed image");
        state.record_removal(RemovalHistoryEntry {
            at: parts.clock.read().wall,
            id: image.id.clone(),
            names: image.names.clone(),
            reason: goal.name().to_owned(),
            why: image.why.to_string(),
            promised: image.frees,
            estimated: image.estimated,
            freed: *freed,
        });
        // Also after a round that was given up: an image that comes again is new.
        state.save();
    }
}
