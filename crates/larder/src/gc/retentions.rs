//! The reasons for which images are retained now, for callers that describe or remove images without a round.

use std::collections::HashMap;

use super::collector::Collector;
use super::policy::{GcPolicy, GcStrategy};
use super::usage_records::handler_of;
use crate::backend::{BackendError, Image};
use crate::reference::ImageId;
use crate::retention::keep::{KeepRule, KeepRuleInput, KeptBy, matching_rules};
use crate::retention::set::in_order;
use crate::retention::source::collect;
use crate::retention::{RetentionError, RetentionPurpose, RetentionSet, SourceScope};

impl Collector {
    /// The reasons for which each of these images is retained, whatever its age, by the policy in force at the call.
    /// Asks sources up to this scope, and matches images by ID and by name, whatever the strategy. Updates no records;
    /// an image without a record is first seen now.
    pub async fn retentions(
        &self,
        images: &[Image],
        scope: SourceScope,
    ) -> Result<HashMap<ImageId, Vec<RetentionPurpose>>, RetentionError> {
        if images.is_empty() {
            return Ok(HashMap::new());
        }
        let policy = self.policy();
        let mut sources = self.parts.sources.clone();
        sources.retain(|source| source.scope() <= scope);
        let set = RetentionSet::new(collect(&sources).await?, images, GcStrategy::Larder);
        let mut kept = self.kept_images(&policy, images).await?;
        let retained = images.iter().map(|image| {
            let sources = set.of_image(&image.id, handler_of(image)).cloned();
            (image.id.clone(), in_order(sources, image.pinned, kept.remove(&image.id)))
        });
        Ok(retained.collect())
    }

    /// Of these images, those that a keep rule retains. Lists all images if a rule compares images or selects by label,
    /// and calls the backend in no other case.
    async fn kept_images(
        &self,
        policy: &GcPolicy,
        images: &[Image],
    ) -> Result<HashMap<ImageId, KeptBy>, BackendError> {
        if policy.keep.is_empty() {
            return Ok(HashMap::new());
        }
        let all;
        let compared = if policy.keep.iter().any(KeepRule::needs_all_images) {
            all = self.parts.backend.list().await?;
            &all
        } else {
            images
        };
        let labels = self.labels_for_rules(policy, compared).await?;
        let names: Vec<Vec<String>> = compared
            .iter()
            .map(|image| image.repo_tags.iter().chain(&image.repo_digests).cloned().collect())
            .collect();
        let (records, now) = (self.records(), self.parts.clock.read().wall);
        let inputs = compared.iter().zip(&names).map(|(image, names)| {
            let record = records.get(&image.id, handler_of(image));
            KeepRuleInput {
                id: &image.id,
                artifact_type: &image.artifact_type,
                names,
                labels: labels.get(&image.id),
                size: image.size,
                first_seen: record.map_or(now, |record| record.first_seen),
                last_used: record.and_then(|record| record.last_used),
            }
        });
        let inputs: Vec<KeepRuleInput<'_>> = inputs.collect();
        let kept = compared.iter().zip(matching_rules(now, &policy.keep, &inputs));
        Ok(kept.filter_map(|(image, kept)| Some((image.id.clone(), kept?))).collect())
    }
}
