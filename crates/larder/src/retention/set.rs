//! The reasons of all sources, by image.

use std::collections::HashMap;

use super::entry::{Retention, RetentionPurpose};
use super::keep::KeptBy;
use crate::backend::Image;
use crate::gc::GcStrategy;
use crate::reference::ImageId;

/// The reasons of all sources, by image.
#[derive(Debug, Clone, Default)]
pub struct RetentionSet {
    by_id: HashMap<ImageId, Vec<(Option<String>, RetentionPurpose)>>,
}

impl RetentionSet {
    /// Matches reported images with the listed ones: by ID, and with larder's strategy by name as well.
    pub fn new(found: Vec<Retention>, images: &[Image], strategy: GcStrategy) -> RetentionSet {
        let mut ids: HashMap<&str, &ImageId> = HashMap::new();
        if strategy == GcStrategy::Larder && !found.is_empty() {
            for image in images {
                for name in image.repo_tags.iter().chain(&image.repo_digests) {
                    ids.insert(name, &image.id);
                }
            }
        }
        let mut by_id: HashMap<ImageId, Vec<_>> = HashMap::new();
        for Retention { image, handler, purpose } in found {
            let handler = match strategy {
                GcStrategy::Larder => handler,
                // For kubelet a mount counts for the record without a handler only.
                GcStrategy::Kubelet => handler.or_else(|| Some(String::new())),
            };
            let named = ids.get(image.as_str()).map(|&id| id.clone());
            for id in named.into_iter().chain([image]) {
                let (known, reason) = (by_id.entry(id).or_default(), (handler.clone(), purpose.clone()));
                // A source may report one reason by ID and by name.
                if !known.contains(&reason) {
                    known.push(reason);
                }
            }
        }
        RetentionSet { by_id }
    }

    /// The reasons for one image. An image without a handler is used whatever handler a container has.
    pub fn of_image(&self, id: impl AsRef<str>, handler: &str) -> impl Iterator<Item = &RetentionPurpose> {
        self.by_id.get(id.as_ref()).into_iter().flatten().filter_map(move |(with, purpose)| {
            let counts = handler.is_empty() || with.as_deref().is_none_or(|with| with == handler);
            counts.then_some(purpose)
        })
    }
}

/// All reasons for one image, in the order of [`RetentionClass`](super::RetentionClass): those of sources, the
/// runtime's pin and the keep rule.
pub(crate) fn in_order(
    sources: impl IntoIterator<Item = RetentionPurpose>,
    is_pinned: bool,
    kept: Option<KeptBy>,
) -> Vec<RetentionPurpose> {
    let mut all: Vec<RetentionPurpose> = sources.into_iter().collect();
    all.extend(is_pinned.then_some(RetentionPurpose::Pinned));
    all.extend(kept.map(RetentionPurpose::Kept));
    all.sort_by_key(RetentionPurpose::class);
    all
}
