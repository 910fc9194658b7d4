//! The images that keep rules retain now, for callers that remove images without a round.

use std::collections::HashMap;

use super::collector::Collector;
use super::keep::{self, KeepRule, KeepRuleInput};
use super::usage_records::handler_of;
use crate::backend::{BackendError, Image};
use crate::reference::ImageId;

/// The keep rule that retains an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptBy {
    /// Its index in the policy, from 0.
    pub index: usize,
    /// The rule.
    pub rule: KeepRule,
}

impl Collector {
    /// Of these images, those that a keep rule retains, each with the rule and its index in the policy that is in force at
    /// the call. Updates no records; an image without a record is first seen now. Lists all images if a rule compares images or
    /// selects by label, and calls the backend in no other case.
    pub async fn kept_images(&self, images: &[Image]) -> Result<HashMap<ImageId, KeptBy>, BackendError> {
        let policy = self.policy();
        if policy.keep.is_empty() || images.is_empty() {
            return Ok(HashMap::new());
        }
        let all;
        let compared = if policy.keep.iter().any(KeepRule::needs_all_images) {
            all = self.parts.backend.list().await?;
            &all
        } else {
            images
        };
        let labels = match &self.parts.layers {
            Some(source) if policy.has_label_rules() => source.labels(compared).await?,
            _ => HashMap::new(),
        };
        let names: Vec<Vec<String>> = compared
            .iter()
            .map(|image| image.repo_tags.iter().chain(&image.repo_digests).cloned().collect())
            .collect();
        let (records, now) = (self.records(), self.parts.clock.read().wall);
        let inputs = compared.iter().zip(&names).map(|(image, names)| {
            let record = records.get(&image.id, handler_of(image));
            KeepRuleInput {
                id: &image.id,
                names,
                labels: labels.get(&image.id),
                size: image.size,
                first_seen: record.map_or(now, |record| record.first_seen),
                last_used: record.and_then(|record| record.last_used),
            }
        });
        let inputs: Vec<KeepRuleInput<'_>> = inputs.collect();
        let kept = keep::matching_rules(now, &policy.keep, &inputs);
        let kept_by = |index: usize| policy.keep.get(index).map(|rule| KeptBy { index, rule: rule.clone() });
        let kept = compared.iter().zip(kept).filter_map(|(image, index)| Some((image, kept_by(index?)?)));
        let asked = kept.filter(|(image, _)| images.iter().any(|asked| asked.id == image.id));
        Ok(asked.map(|(image, by)| (image.id.clone(), by)).collect())
    }
}
