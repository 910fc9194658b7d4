//! The collector's hands: what a sweep does to the world.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::amount::Amount;
use super::collector::Collector;
use super::history::Entry;
use super::keep::{self, KeepRule};
use super::parts::Parts;
use super::plan::{Goal, Removal, Scene, Subject, keepables};
use super::policy::{Accounting, GcPolicy, UseRule};
use super::report::GcCounts;
use super::state::GcState;
use super::sweep::{Hands, Outcome, RemoveError};
use super::uses::{Use, Uses};
use crate::backend::{Image, ImageSpec};
use crate::image_service::Disk;
use crate::outlive::to_its_end;

pub(super) struct Hand<'a> {
    collector: &'a Collector,
    policy: &'a GcPolicy,
    goal: Goal,
    /// What the round looked at, without what is gone since: keep rules that came meanwhile are judged by it.
    scene: Mutex<Scene>,
    /// What was removed last, until the sweep has measured it.
    gone: Mutex<Option<Gone>>,
}

impl<'a> Hand<'a> {
    pub(super) fn new(collector: &'a Collector, policy: &'a GcPolicy, goal: Goal, scene: &Scene) -> Hand<'a> {
        Hand { collector, policy, goal, scene: Mutex::new(scene.clone()), gone: Mutex::default() }
    }

    fn scene(&self) -> MutexGuard<'_, Scene> {
        self.scene.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rule that keeps this image by now, of those that the plan did not know. Who adds a rule is told that it is in
    /// force, also while a round runs.
    fn kept_meanwhile(&self, image: &Removal) -> Option<KeepRule> {
        let policy = self.collector.policy();
        let new: Vec<KeepRule> =
            policy.keep.iter().filter(|rule| !self.policy.keep.contains(rule)).cloned().collect();
        if new.is_empty() {
            return None;
        }
        let scene = self.scene();
        let is_it = |subject: &Subject| subject.id == image.id && subject.handler == image.handler;
        let index = scene.images.iter().position(is_it)?;
        let kept = keep::kept(scene.now, &new, &keepables(&scene));
        kept.get(index).copied().flatten().and_then(|rule| new.get(rule).cloned())
    }
}

#[async_trait]
impl Hands for Hand<'_> {
    async fn remove(&self, removal: &Removal) -> Result<Outcome, RemoveError> {
        let parts = Arc::clone(&self.collector.parts);
        // From here on nobody is told that the image is present, until it is gone or left alone.
        let removing = match &parts.gate {
            Some(gate) => match gate.begin_removal(&removal.id) {
                Some(removing) => Some(removing),
                None => return Ok(Outcome::InUse(Vec::new())),
            },
            None => None,
        };
        if let Some(rule) = self.kept_meanwhile(removal) {
            return Ok(Outcome::Kept(rule.to_string()));
        }
        let look_again = (self.policy.accounting == Accounting::Exact).then_some(self.policy.uses);
        let (counts, state) = (Arc::clone(&self.collector.counts), Arc::clone(&self.collector.state));
        let (goal, image) = (self.goal, removal.clone());
        // The backend may go on removing after it was dropped; the gate has to stay closed until then.
        let ended = to_its_end(async move {
            let _removing = removing;
            if let Some(left) = remove_unused(&parts, &image, look_again).await? {
                return Ok(Err(left));
            }
            state.forget(&image.id, &image.handler);
            Ok::<_, RemoveError>(Ok(Gone { parts, counts, state, goal, image, freed: None }))
        })
        .await?;
        Ok(match ended {
            Ok(gone) => {
                *self.gone.lock().unwrap_or_else(PoisonError::into_inner) = Some(gone);
                Outcome::Removed
            }
            Err(left) => {
                if left == Outcome::GoneMeanwhile {
                    self.scene().forget(&removal.id, &removal.handler);
                }
                left
            }
        })
    }

    async fn measure(&self) -> Result<Disk, String> {
        let measured = self.collector.parts.disk.measure_after_deletion().await;
        measured.map_err(|error| error.to_string())
    }

    async fn removed(&self, image: &Removal, freed: Option<Amount>) {
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
    parts: &Parts,
    image: &Removal,
    look_again: Option<UseRule>,
) -> Result<Option<Outcome>, RemoveError> {
    if let Some(rule) = look_again {
        let uses = users(parts, image, rule).await?;
        if !uses.is_empty() {
            return Ok(Some(Outcome::InUse(uses)));
        }
    }
    let handler = image.handler.clone();
    let spec = ImageSpec { runtime_handler: handler, ..ImageSpec::named(&image.id) };
    // Removing what is gone succeeds, so that has to be found out before. What cannot be found out is told by the
    // removal.
    if look_again.is_some() && matches!(parts.backend.look(&spec).await, Ok(None)) {
        return Ok(Some(Outcome::GoneMeanwhile));
    }
    parts.backend.remove(&spec).await?;
    Ok(None)
}

/// Who uses the image at this moment.
async fn users(parts: &Parts, image: &Removal, rule: UseRule) -> Result<Vec<Use>, RemoveError> {
    let found = Uses::ask(&parts.sources).await?;
    let named = Image { id: image.id.clone(), repo_tags: image.names.clone(), ..Image::default() };
    let uses = Uses::of(found, &[named], rule);
    Ok(uses.of_image(&image.id, &image.handler).cloned().collect())
}

/// An image that is gone. Dropping this writes it down: also when nobody waits for the removal any more, or for what it
/// freed.
struct Gone {
    parts: Arc<Parts>,
    counts: Arc<Mutex<GcCounts>>,
    state: Arc<GcState>,
    goal: Goal,
    image: Removal,
    freed: Option<Amount>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let Gone { parts, counts, state, goal, image, freed } = self;
        {
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            match goal {
                Goal::Age => counts.age += 1,
                Goal::Thresholds | Goal::Free { .. } | Goal::AllUnused => counts.space += 1,
            }
        }
        tracing::info!(image = %image.id, names = ?image.names, why = %image.why, "removed an image");
        state.record_removal(Entry {
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
