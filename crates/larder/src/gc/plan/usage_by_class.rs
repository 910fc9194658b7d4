//! Breaks the filesystem's usage down by the reason for which images are retained.

use std::collections::HashMap;

use super::{GcSnapshot, plan};
use crate::gc::disk_space::DiskSpace;
use crate::gc::goal::GcGoal;
use crate::gc::policy::GcPolicy;
use crate::reference::ImageId;
use crate::retention::RetentionClass;

/// The usage of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetentionClassUsage {
    /// The class.
    pub class: RetentionClass,
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

/// Computes the usage by class. Pure. A layer counts for the first class that any of its images is in.
pub fn usage_by_class(snapshot: &GcSnapshot, policy: &GcPolicy) -> RetentionBreakdown {
    let all_unused = plan(snapshot, policy, GcGoal::AllUnused);
    let classes: HashMap<(&ImageId, &str), RetentionClass> = all_unused
        .decisions
        .iter()
        .map(|image| ((&image.id, image.handler.as_str()), image.decision.class()))
        .collect();
    let mut usage: HashMap<RetentionClass, (usize, DiskSpace)> = HashMap::new();
    let mut layer_classes: Vec<Option<RetentionClass>> = vec![None; snapshot.layers.all().len()];
    let mut estimated = false;
    for image in &snapshot.images {
        let Some(&class) = classes.get(&(&image.id, image.handler.as_str())) else { continue };
        let (count, amount) = usage.entry(class).or_default();
        *count += 1;
        let Some(known) = snapshot.layers.layers_of(&image.id) else {
            *amount += DiskSpace::estimate(image.size);
            estimated = true;
            continue;
        };
        *amount += known.own;
        for &layer in &known.layers {
            let first = &mut layer_classes[layer as usize];
            *first = Some(first.map_or(class, |known| known.min(class)));
        }
    }
    for (layer, class) in snapshot.layers.all().iter().zip(layer_classes) {
        if let Some(class) = class {
            usage.entry(class).or_default().1 += layer.amount;
            estimated |= layer.estimated;
        }
    }
    let usage_of = |class| {
        let (images, amount) = usage.get(&class).copied().unwrap_or_default();
        RetentionClassUsage { class, images, amount }
    };
    let images: Vec<RetentionClassUsage> = RetentionClass::ALL.into_iter().map(usage_of).collect();
    let sum: DiskSpace = images.iter().map(|usage| usage.amount).sum();
    let used = snapshot.disk.map(|disk| disk.capacity.saturating_sub(disk.available + disk.reserved));
    RetentionBreakdown {
        images,
        reclaimable: all_unused.expected_freed,
        other_bytes: used.map(|used| used.saturating_sub(sum.bytes)),
        estimated,
    }
}
