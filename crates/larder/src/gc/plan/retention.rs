//! Breaks the filesystem's usage down by the reason for which images are retained.

use std::collections::HashMap;

use super::retained::{keep_rule_inputs, retain_by_minimum_age};
use super::{GcImage, GcSnapshot, plan};
use crate::gc::disk_space::DiskSpace;
use crate::gc::goal::GcGoal;
use crate::gc::keep::matching_rules;
use crate::gc::policy::GcPolicy;

/// Why an image is retained. A layer counts for the first of these classes that any of its images is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RetentionClass {
    /// Containers, volumes or mounts.
    InUse,
    /// The runtime has pinned it.
    Pinned,
    /// A keep rule retains it.
    Kept,
    /// It has a lease.
    Leased,
    /// It is younger than the minimum age.
    TooYoung,
    /// It is a candidate for removal.
    Unused,
}

impl RetentionClass {
    /// All classes, in order.
    pub(crate) const ALL: [RetentionClass; 6] = [
        RetentionClass::InUse,
        RetentionClass::Pinned,
        RetentionClass::Kept,
        RetentionClass::Leased,
        RetentionClass::TooYoung,
        RetentionClass::Unused,
    ];
}

/// The usage of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionClassUsage {
    /// The class.
    pub holder: RetentionClass,
    /// How many images.
    pub images: usize,
    /// Their disk usage, each layer once.
    pub amount: DiskSpace,
}

/// The filesystem's usage by class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionBreakdown {
    /// Usage by class, in the order of [`RetentionClass`].
    pub images: Vec<RetentionClassUsage>,
    /// The amount that removing all candidates would free.
    pub reclaimable: DiskSpace,
    /// Bytes on the filesystem that are not images, without reserved blocks; `None` if it was not measured.
    pub other_bytes: Option<u64>,
    /// Whether amounts are estimated because the backend does not report layer sizes.
    pub estimated: bool,
}

/// Computes the usage by class. Pure.
pub fn holders(snapshot: &GcSnapshot, policy: &GcPolicy) -> RetentionBreakdown {
    let kept = matching_rules(snapshot.now, &policy.keep, &keep_rule_inputs(snapshot));
    let mut held: HashMap<RetentionClass, (usize, DiskSpace)> = HashMap::new();
    let mut of_layer: Vec<Option<RetentionClass>> = vec![None; snapshot.layers.all().len()];
    let mut estimated = false;
    for (image, kept) in snapshot.images.iter().zip(kept) {
        let holder = holder_of(snapshot, policy, image, kept.is_some());
        let (count, amount) = held.entry(holder).or_default();
        *count += 1;
        let Some(known) = snapshot.layers.layers_of(&image.id) else {
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
    for (layer, holder) in snapshot.layers.all().iter().zip(of_layer) {
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
    let used = snapshot.disk.map(|disk| disk.capacity.saturating_sub(disk.available + disk.reserved));
    RetentionBreakdown {
        images,
        reclaimable: plan(snapshot, policy, GcGoal::AllUnused).expected_freed,
        other_bytes: used.map(|used| used.saturating_sub(sum.bytes)),
        estimated,
    }
}

fn holder_of(snapshot: &GcSnapshot, policy: &GcPolicy, image: &GcImage, kept: bool) -> RetentionClass {
    match () {
        () if image.uses.iter().any(|by| !by.is_lease()) => RetentionClass::InUse,
        () if image.pinned => RetentionClass::Pinned,
        () if kept => RetentionClass::Kept,
        () if !image.uses.is_empty() => RetentionClass::Leased,
        () if retain_by_minimum_age(snapshot, policy, image).is_some() => RetentionClass::TooYoung,
        () => RetentionClass::Unused,
    }
}
