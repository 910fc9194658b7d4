//! Removes images for a sweep, through the removal gate.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::collector::Collector;
use super::dependencies::CollectorDependencies;
use super::disk_space::DiskSpace;
use super::history::RemovalHistoryEntry;
use super::keep::{self, KeepRule};
use super::plan::{GcGoal, GcImage, GcSnapshot, PlannedRemoval, is_tag, keep_rule_inputs};
use super::policy::{Accounting, GcPolicy, UseRule};
use super::report::GcCounts;
use super::state::GcState;
use super::sweep::{ImageRemover, RemovalError, RemovalOutcome};
use super::uses::{ImageUse, ImageUseIndex};
use crate::backend::{BackendError, CallErrorKind, Image, ImageSpec, RemoveOptions};
use crate::detached::run_to_completion;
use crate::image_service::FsStats;

pub(super) struct GatedRemover<'a> {
    collector: &'a Collector,
    policy: &'a GcPolicy,
    goal: GcGoal,
    /// The round's snapshot without removed images; keep rules added during the round are matched against it.
    snapshot: Mutex<GcSnapshot>,
    /// The last removed image, until the sweep has measured what it freed.
    gone: Mutex<Option<RemovalRecorder>>,
}

impl<'a> GatedRemover<'a> {
    pub(super) fn new(
        collector: &'a Collector,
        policy: &'a GcPolicy,
        goal: GcGoal,
        snapshot: &GcSnapshot,
    ) -> GatedRemover<'a> {
        GatedRemover {
            collector,
            policy,
            goal,
            snapshot: Mutex::new(snapshot.clone()),
            gone: Mutex::default(),
        }
    }

    fn snapshot(&self) -> MutexGuard<'_, GcSnapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keep rule that was added after the plan and retains this image. A new rule is in force at once, even while a
    /// round runs.
    fn new_keep_rule(&self, image: &PlannedRemoval) -> Option<KeepRule> {
        let policy = self.collector.policy();
        let new: Vec<KeepRule> =
            policy.keep.iter().filter(|rule| !self.policy.keep.contains(rule)).cloned().collect();
        if new.is_empty() {
            return None;
        }
        let snapshot = self.snapshot();
        let is_it = |subject: &GcImage| subject.id == image.id && subject.handler == image.handler;
        let index = snapshot.images.iter().position(is_it)?;
        let kept = keep::matching_rules(snapshot.now, &new, &keep_rule_inputs(&snapshot));
        kept.get(index).copied().flatten().and_then(|rule| new.get(rule).cloned())
    }
}

#[async_trait]
impl ImageRemover for GatedRemover<'_> {
    async fn remove(&self, removal: &PlannedRemoval) -> Result<RemovalOutcome, RemovalError> {
        let parts = Arc::clone(&self.collector.parts);
        self.collector.progress.removing(removal);
        // From here on no ensure reports the image as present, until it is removed or skipped.
        let removing = match &parts.gate {
            Some(gate) => match gate.try_begin_removal(&removal.id) {
                Some(removing) => Some(removing),
                None => return Ok(RemovalOutcome::InUse(Vec::new())),
            },
            None => None,
        };
        if let Some(rule) = self.new_keep_rule(removal) {
            return Ok(RemovalOutcome::Kept(rule.to_string()));
        }
        if self.goal == GcGoal::Dangling && has_tag(&parts, removal).await {
            return Ok(RemovalOutcome::InUse(Vec::new()));
        }
        let recheck = (self.policy.accounting == Accounting::Exact).then_some(self.policy.uses);
        let (counts, state) = (Arc::clone(&self.collector.counts), Arc::clone(&self.collector.state));
        let (goal, image) = (self.goal, removal.clone());
        // The backend may continue the removal after the future is dropped; the gate must stay closed until it ends.
        let ended = run_to_completion(async move {
            let _removing = removing;
            let outcome = remove_unused(&parts, &image, recheck).await?;
            let RemovalOutcome::Removed(freed) = outcome else { return Ok((outcome, None)) };
            state.forget(&image.id, &image.handler);
            Ok::<_, RemovalError>((
                outcome,
                Some(RemovalRecorder { parts, counts, state, goal, image, freed }),
            ))
        })
        .await?;
        let (outcome, gone) = ended;
        match outcome {
            RemovalOutcome::Removed(_) => {
                *self.gone.lock().unwrap_or_else(PoisonError::into_inner) = gone;
            }
            RemovalOutcome::AlreadyGone => self.snapshot().forget(&removal.id, &removal.handler),
            RemovalOutcome::InUse(_) | RemovalOutcome::Kept(_) => {}
        }
        Ok(outcome)
    }

    async fn measure(&self) -> Result<FsStats, String> {
        let measured = self.collector.parts.disk.measure_after_deletion().await;
        measured.map_err(|error| error.to_string())
    }

    async fn removed(&self, image: &PlannedRemoval, freed: Option<DiskSpace>) {
        self.snapshot().forget(&image.id, &image.handler);
        self.collector.progress.removed(freed.unwrap_or(image.frees));
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut gone) = gone {
            gone.freed = freed;
        }
        // The history has it on disk before the next image is removed.
        self.collector.state.flush().await;
    }
}

/// Whether the image has a tag now.
async fn has_tag(parts: &CollectorDependencies, image: &PlannedRemoval) -> bool {
    let spec = ImageSpec { runtime_handler: image.handler.clone(), ..ImageSpec::named(&image.id) };
    let present = parts.backend.status(&spec).await;
    matches!(present, Ok(Some(image)) if image.repo_tags.iter().any(|name| is_tag(name)))
}

/// Removes the image, unless a recheck finds it in use or already absent.
async fn remove_unused(
    parts: &CollectorDependencies,
    image: &PlannedRemoval,
    recheck: Option<UseRule>,
) -> Result<RemovalOutcome, RemovalError> {
    if let Some(rule) = recheck {
        let uses = users(parts, image, rule).await?;
        if !uses.is_empty() {
            return Ok(RemovalOutcome::InUse(uses));
        }
    }
    let handler = image.handler.clone();
    let spec = ImageSpec { runtime_handler: handler, ..ImageSpec::named(&image.id) };
    // Removing an absent image succeeds, so presence is checked first. If the check fails, the removal reports the
    // error.
    if recheck.is_some() && matches!(parts.backend.status(&spec).await, Ok(None)) {
        return Ok(RemovalOutcome::AlreadyGone);
    }
    let options = RemoveOptions { spare_leased_at: Some(parts.clock.read()), ..RemoveOptions::default() };
    let error = match parts.backend.remove(&spec, &options).await {
        Ok(removed) => return Ok(RemovalOutcome::Removed(removed.freed())),
        Err(error) => error,
    };
    // The backend may have refused it because it came into use since the check.
    if let (BackendError::Call { kind: CallErrorKind::FailedPrecondition, .. }, Some(rule)) =
        (&error, recheck)
    {
        let uses = users(parts, image, rule).await?;
        if !uses.is_empty() {
            return Ok(RemovalOutcome::InUse(uses));
        }
    }
    Err(error.into())
}

/// The current uses of the image.
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

/// A removed image. Dropping this records it, even if the round was canceled before it measured what the removal
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
                GcGoal::Thresholds | GcGoal::Free { .. } | GcGoal::AllUnused | GcGoal::Dangling => {
                    counts.space += 1;
                }
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
        // Also after a canceled round: an image that is pulled again is new.
        state.save();
    }
}
