//! The collector's hands: what a sweep does to the world.

use std::sync::PoisonError;

use async_trait::async_trait;

use super::amount::Amount;
use super::collector::Collector;
use super::history::Entry;
use super::plan::{Goal, Removal};
use super::policy::{Accounting, GcPolicy};
use super::sweep::{Hands, Outcome, RemoveError};
use super::uses::{Use, Uses};
use crate::backend::{Image, ImageSpec};
use crate::image_service::Disk;

pub(super) struct Hand<'a> {
    pub(super) collector: &'a Collector,
    pub(super) policy: &'a GcPolicy,
    pub(super) goal: Goal,
}

impl Hand<'_> {
    /// Who uses the image at this moment.
    async fn users(&self, image: &Removal) -> Result<Vec<Use>, RemoveError> {
        let parts = &self.collector.parts;
        let found = Uses::ask(&parts.sources).await;
        let found = found.map_err(|error| RemoveError::UseUnknown(error.to_string()))?;
        let named = Image { id: image.id.clone(), repo_tags: image.names.clone(), ..Image::default() };
        let uses = Uses::of(found, &[named], self.policy.uses);
        Ok(uses.of_image(&image.id, &image.handler).cloned().collect())
    }
}

#[async_trait]
impl Hands for Hand<'_> {
    async fn remove(&self, image: &Removal) -> Result<Outcome, RemoveError> {
        let parts = &self.collector.parts;
        // From here on nobody is told that the image is present, until it is gone or left alone.
        let _removing = match &parts.gate {
            Some(gate) => match gate.begin_removal(&image.id) {
                Some(removing) => Some(removing),
                None => return Ok(Outcome::InUse(Vec::new())),
            },
            None => None,
        };
        if self.policy.accounting == Accounting::Exact {
            let uses = self.users(image).await?;
            if !uses.is_empty() {
                return Ok(Outcome::InUse(uses));
            }
        }
        let spec =
            ImageSpec { runtime_handler: image.handler.clone(), ..ImageSpec::named(image.id.as_str()) };
        parts.backend.remove(&spec).await?;
        Ok(Outcome::Removed)
    }

    async fn measure(&self) -> Result<Disk, String> {
        self.collector.parts.disk.measure().await.map_err(|error| error.to_string())
    }

    async fn removed(&self, image: &Removal, freed: Option<Amount>) {
        let parts = &self.collector.parts;
        {
            let mut counts = self.collector.counts.lock().unwrap_or_else(PoisonError::into_inner);
            match self.goal {
                Goal::Age => counts.age += 1,
                Goal::Thresholds | Goal::Free { .. } | Goal::AllUnused => counts.space += 1,
            }
        }
        tracing::info!(image = image.id, names = ?image.names, why = %image.why, "removed an image");
        let Some(history) = &parts.history else { return };
        let reason = match self.goal {
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
            freed,
        };
        if let Err(error) = history.record(&entry) {
            tracing::warn!("the removal of {} could not be written down: {error}", image.id);
        }
    }
}
