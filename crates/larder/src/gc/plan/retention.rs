//! Who holds the disk: what images in use take, what the others do, and what is no image at all.

use std::collections::HashMap;

use super::decide::{find_retain_reason, keepables};
use super::{GcGoal, GcImage, GcSnapshot, plan};
use crate::gc::disk_space::DiskSpace;
use crate::gc::keep::matching_rules;
use crate::gc::policy::GcPolicy;
use crate::gc::uses::ImageUse;

/// Why an image holds its room. A layer counts for the first of these that any of its images is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RetentionClass {
    /// Containers, volumes or mounts.
    InUse,
    /// The runtime asks to keep it.
    Pinned,
    /// A keep rule.
    Kept,
    /// A lease, or an ensure just done.
    Leased,
    /// It was first seen too short a time ago.
    TooYoung,
    /// Nobody: it may go.
    Unused,
}

impl RetentionClass {
    /// All of them, in order.
    pub(crate) const ALL: [RetentionClass; 6] = [
        RetentionClass::InUse,
        RetentionClass::Pinned,
        RetentionClass::Kept,
        RetentionClass::Leased,
        RetentionClass::TooYoung,
        RetentionClass::Unused,
    ];
}

/// What one of them holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionClassUsage {
    /// Who.
    pub holder: RetentionClass,
    /// How many images.
    pub images: usize,
    /// What they take, each layer once.
    pub amount: DiskSpace,
}

/// Who holds the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionBreakdown {
    /// By holder, in the order of [`RetentionClass`].
    pub images: Vec<RetentionClassUsage>,
    /// What removing all that may go would free.
    pub reclaimable: DiskSpace,
    /// Bytes on the file system that are no images, without what is reserved; `None` if it was not read.
    pub other_bytes: Option<u64>,
    /// Whether amounts are guesses, because the backend does not tell what layers take.
    pub estimated: bool,
}

/// Adds up who holds the disk. Pure.
pub fn holders(scene: &GcSnapshot, policy: &GcPolicy) -> RetentionBreakdown {
    let kept = matching_rules(scene.now, &policy.keep, &keepables(scene));
    let mut held: HashMap<RetentionClass, (usize, DiskSpace)> = HashMap::new();
    let mut of_layer: Vec<Option<RetentionClass>> = vec![None; scene.layers.all().len()];
    let mut estimated = false;
    for (image, kept) in scene.images.iter().zip(kept) {
        let holder = holder_of(scene, policy, image, kept.is_some());
        let (count, amount) = held.entry(holder).or_default();
        *count += 1;
        let Some(known) = scene.layers.layers_of(&image.id) else {
            *amount += DiskSpace::estimate(image.size);
            estimated = true;
            continue;
        };
        *amount += known.own;
        for &layer in &known.layers {
            let first = &mut of_layer[layer as usize];
            *first = Some(first.map_or(holder, |known| known.min(holder)));
        }
    }
    for (layer, holder) in scene.layers.all().iter().zip(of_layer) {
        if let Some(holder) = holder {
            held.entry(holder).or_default().1 += layer.amount;
            estimated |= layer.estimated;
        }
    }
    let holding = |holder| {
        let (images, amount) = held.get(&holder).copied().unwrap_or_default();
        RetentionClassUsage { holder, images, amount }
    };
    let images: Vec<RetentionClassUsage> = RetentionClass::ALL.into_iter().map(holding).collect();
    let sum: DiskSpace = images.iter().map(|held| held.amount).sum();
    let used = scene.disk.map(|disk| disk.capacity.saturating_sub(disk.available + disk.reserved));
    RetentionBreakdown {
        images,
        reclaimable: plan(scene, policy, GcGoal::AllUnused).expected_freed,
        other_bytes: used.map(|used| used.saturating_sub(sum.bytes)),
        estimated,
    }
}

fn holder_of(scene: &GcSnapshot, policy: &GcPolicy, image: &GcImage, kept: bool) -> RetentionClass {
    let lease = |by: &ImageUse| matches!(by, ImageUse::Lease { .. } | ImageUse::Ensured { .. });
    match () {
        () if image.uses.iter().any(|by| !lease(by)) => RetentionClass::InUse,
        () if image.pinned => RetentionClass::Pinned,
        () if kept => RetentionClass::Kept,
        () if !image.uses.is_empty() => RetentionClass::Leased,
        () if find_retain_reason(scene, policy, image).is_some() => RetentionClass::TooYoung,
        () => RetentionClass::Unused,
    }
}
