//! Who holds the disk: what images in use take, what the others do, and what is no image at all.

use std::collections::HashMap;

use super::decide::{keepables, spared};
use super::{Goal, Scene, Subject, plan};
use crate::gc::amount::Amount;
use crate::gc::keep::kept;
use crate::gc::policy::GcPolicy;
use crate::gc::uses::Use;

/// Why an image holds its room. A layer counts for the first of these that any of its images is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
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

impl Holder {
    /// All of them, in order.
    pub(crate) const ALL: [Holder; 6] =
        [Holder::InUse, Holder::Pinned, Holder::Kept, Holder::Leased, Holder::TooYoung, Holder::Unused];
}

/// What one of them holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// Who.
    pub holder: Holder,
    /// How many images.
    pub images: usize,
    /// What they take, each layer once.
    pub amount: Amount,
}

/// Who holds the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders {
    /// By holder, in the order of [`Holder`].
    pub images: Vec<Holding>,
    /// What removing all that may go would free.
    pub reclaimable: Amount,
    /// Bytes on the file system that are no images, without what is reserved; `None` if it was not read.
    pub other_bytes: Option<u64>,
    /// Whether amounts are guesses, because the backend does not tell what layers take.
    pub estimated: bool,
}

/// Adds up who holds the disk. Pure.
pub fn holders(scene: &Scene, policy: &GcPolicy) -> Holders {
    let kept = kept(scene.now, &policy.keep, &keepables(scene));
    let mut held: HashMap<Holder, (usize, Amount)> = HashMap::new();
    let mut of_layer: Vec<Option<Holder>> = vec![None; scene.layers.all().len()];
    let mut estimated = false;
    for (image, kept) in scene.images.iter().zip(kept) {
        let holder = holder_of(scene, policy, image, kept.is_some());
        let (count, amount) = held.entry(holder).or_default();
        *count += 1;
        let Some(known) = scene.layers.of(&image.id) else {
            *amount += Amount::estimate(image.size);
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
        Holding { holder, images, amount }
    };
    let images: Vec<Holding> = Holder::ALL.into_iter().map(holding).collect();
    let sum: Amount = images.iter().map(|held| held.amount).sum();
    let used = scene.disk.map(|disk| disk.capacity.saturating_sub(disk.available + disk.reserved));
    Holders {
        images,
        reclaimable: plan(scene, policy, Goal::AllUnused).frees,
        other_bytes: used.map(|used| used.saturating_sub(sum.bytes)),
        estimated,
    }
}

fn holder_of(scene: &Scene, policy: &GcPolicy, image: &Subject, kept: bool) -> Holder {
    let lease = |by: &Use| matches!(by, Use::Lease { .. } | Use::Ensured { .. });
    match () {
        () if image.uses.iter().any(|by| !lease(by)) => Holder::InUse,
        () if image.pinned => Holder::Pinned,
        () if kept => Holder::Kept,
        () if !image.uses.is_empty() => Holder::Leased,
        () if spared(scene, policy, image).is_some() => Holder::TooYoung,
        () => Holder::Unused,
    }
}
