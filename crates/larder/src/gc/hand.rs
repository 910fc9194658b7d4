//! The collector's hands: what a sweep does to the world.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use super::amount::Amount;
use super::builder::Parts;
use super::collector::{Collector, GcCounts};
use super::history::Entry;
use super::plan::{Goal, Removal};
use super::policy::{Accounting, GcPolicy, UseRule};
use super::sweep::{Hands, Outcome, RemoveError};
use super::uses::{Use, Uses};
use crate::backend::{Image, ImageSpec};
use crate::image_service::Disk;
use crate::outlive::to_its_end;

pub(super) struct Hand<'a> {
    collector: &'a Collector,
    policy: &'a GcPolicy,
    goal: Goal,
    /// What was removed last, until the sweep has measured it.
    gone: Mutex<Option<Gone>>,
}

impl<'a> Hand<'a> {
    pub(super) fn new(collector: &'a Collector, policy: &'a GcPolicy, goal: Goal) -> Hand<'a> {
        Hand { collector, policy, goal, gone: Mutex::default() }
    }
}

#[async_trait]
impl Hands for Hand<'_> {
    async fn remove(&self, image: &Removal) -> Result<Outcome, RemoveError> {
        let parts = Arc::clone(&self.collector.parts);
        // From here on nobody is told that the image is present, until it is gone or left alone.
        let removing = match &parts.gate {
            Some(gate) => match gate.begin_removal(&image.id) {
                Some(removing) => Some(removing),
                None => return Ok(Outcome::InUse(Vec::new())),
            },
            None => None,
        };
        let look_again = (self.policy.accounting == Accounting::Exact).then_some(self.policy.uses);
        let (counts, goal, image) = (Arc::clone(&self.collector.counts), self.goal, image.clone());
        // The backend may go on removing after it was dropped; the gate has to stay closed until then.
        let ended = to_its_end(async move {
            let _removing = removing;
            if let Some(rule) = look_again {
                let uses = users(&parts, &image, rule).await?;
                if !uses.is_empty() {
                    return Ok(Err(uses));
                }
            }
            let handler = image.handler.clone();
            let spec = ImageSpec { runtime_handler: handler, ..ImageSpec::named(image.id.as_str()) };
            parts.backend.remove(&spec).await?;
            Ok::<_, RemoveError>(Ok(Gone { parts, counts, goal, image, freed: None }))
        })
        .await?;
        Ok(match ended {
            Ok(gone) => {
                *self.gone.lock().unwrap_or_else(PoisonError::into_inner) = Some(gone);
                Outcome::Removed
            }
            Err(uses) => Outcome::InUse(uses),
        })
    }

    async fn measure(&self) -> Result<Disk, String> {
        self.collector.parts.disk.measure().await.map_err(|error| error.to_string())
    }

    async fn removed(&self, _: &Removal, freed: Option<Amount>) {
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut gone) = gone {
            gone.freed = freed;
        }
    }
}

/// Who uses the image at this moment.
async fn users(parts: &Parts, image: &Removal, rule: UseRule) -> Result<Vec<Use>, RemoveError> {
    let found = Uses::ask(&parts.sources).await;
    let found = found.map_err(|error| RemoveError::UseUnknown(error.to_string()))?;
    let named = Image { id: image.id.clone(), repo_tags: image.names.clone(), ..Image::default() };
    let uses = Uses::of(found, &[named], rule);
    Ok(uses.of_image(&image.id, &image.handler).cloned().collect())
}

/// An image that is gone. Dropping this writes it down: also when nobody waits for the removal any more, or for what it
/// freed.
struct Gone {
    parts: Arc<Parts>,
    counts: Arc<Mutex<GcCounts>>,
    goal: Goal,
    image: Removal,
    freed: Option<Amount>,
}

impl Drop for Gone {
    fn drop(&mut self) {
        let Gone { parts, counts, goal, image, freed } = self;
        {
            let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            match goal {
                Goal::Age => counts.age += 1,
                Goal::Thresholds | Goal::Free { .. } | Goal::AllUnused => counts.space += 1,
            }
        }
        tracing::info!(image = image.id, names = ?image.names, why = %image.why, "removed an image");
        let Some(history) = &parts.history else { return };
        let reason = match goal {
            Goal::Age => "age",
            Goal::Thresholds => "space",
            Goal::Free { .. } => "demand",
            Goal::AllUnused => "unused",
        };
        let entry = Entry {
            at: parts.clock.read().wall,
            id: image.id.clone(),
            names: image.names.clone(),
            reason: reason.to_owned(),
            why: image.why.to_string(),
            promised: image.frees,
            estimated: image.estimated,
            freed: *freed,
        };
        if let Err(error) = history.record(&entry) {
            tracing::warn!("the removal of {} could not be written down: {error}", image.id);
        }
    }
}
