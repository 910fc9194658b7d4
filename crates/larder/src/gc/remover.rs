//! Removes images for a sweep, through the removal gate, after a second look at their uses.

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::dependencies::CollectorDependencies;
use super::disk_space::DiskSpace;
use super::goal::GcGoal;
use super::history::RemovalHistoryEntry;
use super::plan::{GcImage, GcSnapshot, PlannedRemoval, is_tag, keep_rule_inputs};
use super::policy::{GcPolicy, GcStrategy};
use super::progress::RoundTracker;
use super::state::GcState;
use crate::backend::{BackendError, CallErrorKind, Image, ImageSpec, RemoveOptions};
use crate::detached::run_to_completion;
use crate::retention::source::collect;
use crate::retention::{KeptBy, RetentionError, RetentionPurpose, RetentionSet, keep};

/// How many images were removed, for `kubelet_image_garbage_collected_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GcCounts {
    /// With `reason="age"`.
    pub age: u64,
    /// With `reason="space"`.
    pub space: u64,
}

/// The outcome of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RemovalOutcome {
    /// The image was removed, and with it files of this size, if the backend counted them.
    Removed(Option<DiskSpace>),
    /// Another process had removed it before.
    AlreadyRemoved,
    /// Skipped: it is now in use.
    InUse(Vec<RetentionPurpose>),
    /// Skipped: a keep rule that was added after the plan retains it.
    Kept(KeptBy),
}

/// Why an image was not removed. The text is the backend's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum RemovalError {
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Its uses could not be determined.
    #[error(transparent)]
    UseUnknown(#[from] RetentionError),
}

/// Removes the images of one sweep.
pub(super) struct ImageRemover<'a> {
    pub(super) parts: Arc<CollectorDependencies>,
    pub(super) state: Arc<GcState>,
    pub(super) counts: Arc<Mutex<GcCounts>>,
    pub(super) progress: &'a RoundTracker,
    /// The policy of the round.
    pub(super) policy: &'a GcPolicy,
    /// The policy in force, whose keep rules may be newer.
    pub(super) current_policy: &'a RwLock<Arc<GcPolicy>>,
    pub(super) goal: GcGoal,
    /// The last removed image, until the sweep has measured what it freed.
    pub(super) last: Mutex<Option<RemovalRecorder>>,
}

impl ImageRemover<'_> {
    /// Removes one image, unless it is now in use or kept. `snapshot` is the round's, without removed images.
    pub(super) async fn remove(
        &self,
        removal: &PlannedRemoval,
        snapshot: &GcSnapshot,
    ) -> Result<RemovalOutcome, RemovalError> {
        let parts = Arc::clone(&self.parts);
        self.progress.removing(removal);
        // From here on no ensure reports the image as present, until it is removed or skipped.
        let removing = match &parts.gate {
            Some(gate) => match gate.try_begin_removal(&removal.id) {
                Some(removing) => Some(removing),
                None => return Ok(RemovalOutcome::InUse(Vec::new())),
            },
            None => None,
        };
        if let Some(kept) = self.new_keep_rule(removal, snapshot) {
            return Ok(RemovalOutcome::Kept(kept));
        }
        if self.goal == GcGoal::Dangling && has_tag(&parts, removal).await {
            return Ok(RemovalOutcome::InUse(Vec::new()));
        }
        let (counts, state) = (Arc::clone(&self.counts), Arc::clone(&self.state));
        let (goal, strategy, image) = (self.goal, self.policy.strategy, removal.clone());
        // The backend may continue the removal after the future is dropped; the gate must stay closed until it ends.
        let (outcome, recorder) = run_to_completion(async move {
            let _removing = removing;
            let outcome = remove_unused(&parts, &image, strategy).await?;
            let RemovalOutcome::Removed(freed) = outcome else { return Ok((outcome, None)) };
            state.forget(&image.id, &image.handler);
            let recorder = RemovalRecorder { parts, counts, state, goal, image, freed };
            Ok::<_, RemovalError>((outcome, Some(recorder)))
        })
        .await?;
        *self.last.lock() = recorder;
        Ok(outcome)
    }

    /// Records a removed image with the amount that it freed. Durable in the history when it returns.
    pub(super) async fn record(&self, removal: &PlannedRemoval, freed: Option<DiskSpace>) {
        self.progress.removed(freed.unwrap_or(removal.frees));
        let last = self.last.lock().take();
        if let Some(mut recorder) = last {
            recorder.freed = freed;
        }
        self.state.flush().await;
    }

    /// The keep rule that was added after the plan and retains this image. A new rule is in force at once, even while a
    /// round runs.
    fn new_keep_rule(&self, removal: &PlannedRemoval, snapshot: &GcSnapshot) -> Option<KeptBy> {
        let policy = Arc::clone(&self.current_policy.read());
        let new: Vec<_> =
            policy.keep.iter().filter(|rule| !self.policy.keep.contains(rule)).cloned().collect();
        if new.is_empty() {
            return None;
        }
        let is_same = |image: &GcImage| image.id == removal.id && image.handler == removal.handler;
        let index = snapshot.images.iter().position(is_same)?;
        let mut kept = keep::matching_rules(snapshot.now, &new, &keep_rule_inputs(snapshot));
        let kept = kept.swap_remove(index)?;
        let number = policy.keep.iter().position(|rule| *rule == kept.rule)?;
        Some(KeptBy { index: number, ..kept })
    }
}

/// Whether the image has a tag now.
async fn has_tag(parts: &CollectorDependencies, image: &PlannedRemoval) -> bool {
    let spec = ImageSpec { runtime_handler: image.handler.clone(), ..ImageSpec::named(&image.id) };
    let present = parts.backend.status(&spec).await;
    matches!(present, Ok(Some(image)) if image.repo_tags.iter().any(|name| is_tag(name)))
}

/// Removes the image, unless a second look finds it in use or already absent.
async fn remove_unused(
    parts: &CollectorDependencies,
    image: &PlannedRemoval,
    strategy: GcStrategy,
) -> Result<RemovalOutcome, RemovalError> {
    let uses = current_uses(parts, image, strategy).await?;
    if !uses.is_empty() {
        return Ok(RemovalOutcome::InUse(uses));
    }
    let handler = image.handler.clone();
    let spec = ImageSpec { runtime_handler: handler, ..ImageSpec::named(&image.id) };
    // Removing an absent image succeeds, so presence is checked first. If the check fails, the removal reports the
    // error.
    if matches!(parts.backend.status(&spec).await, Ok(None)) {
        return Ok(RemovalOutcome::AlreadyRemoved);
    }
    let error = match parts.backend.remove(&spec, &RemoveOptions::default()).await {
        Ok(removed) => return Ok(RemovalOutcome::Removed(removed.freed())),
        Err(error) => error,
    };
    // The backend may have refused it because it came into use since the check.
    if let BackendError::Call { kind: CallErrorKind::FailedPrecondition, .. } = &error {
        let uses = current_uses(parts, image, strategy).await?;
        if !uses.is_empty() {
            return Ok(RemovalOutcome::InUse(uses));
        }
    }
    Err(error.into())
}

async fn current_uses(
    parts: &CollectorDependencies,
    image: &PlannedRemoval,
    strategy: GcStrategy,
) -> Result<Vec<RetentionPurpose>, RemovalError> {
    let found = collect(&parts.sources).await?;
    let named = Image { id: image.id.clone(), repo_tags: image.names.to_vec(), ..Image::default() };
    let uses = RetentionSet::new(found, &[named], strategy);
    Ok(uses.of_image(&image.id, &image.handler).cloned().collect())
}

/// A removed image. Dropping this records it, even if the round was canceled before it measured what the removal
/// freed.
pub(super) struct RemovalRecorder {
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
            let mut counts = counts.lock();
            match goal {
                GcGoal::Age => counts.age += 1,
                _ => counts.space += 1,
            }
        }
        tracing::info!(image = %image.id, names = ?image.names, reason = %image.reason, "removed image");
        state.record_removal(RemovalHistoryEntry {
            at: parts.clock.read().wall,
            id: image.id.clone(),
            names: image.names.to_vec(),
            reason: goal.name().to_owned(),
            why: image.reason.to_string(),
            promised: image.frees,
            estimated: image.estimated,
            freed: *freed,
        });
        // Also after a canceled round: an image that is pulled again is new.
        state.save();
    }
}
