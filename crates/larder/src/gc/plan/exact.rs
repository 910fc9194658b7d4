//! Larder's strategy: a layer counts once, for the image that is removed last.
//!
//! Each removal states what it frees after the removals before it, every removal frees something, and the plan without
//! the last removal would miss the goal.

use std::collections::{BTreeSet, HashSet};

use super::layer_graph::{LayerGraph, RemovalStep};
use super::retained::retain_by_minimum_age;
use super::strategy::{PlanInput, ReclaimTarget, Selection, Strategy, sort_by_last_use};
use super::{GcImage, GcSnapshot, RemovalReason, RetainReason, last_use, unused_for};
use crate::gc::disk_space::DiskSpace;
use crate::gc::filesystem_stats::{free, free_at, used_percent};
use crate::gc::goal::GcGoal;
use crate::gc::policy::{GcPolicy, WhenUnreachable};
use crate::gc::unix_millis::{UnixMillis, millis};
use crate::image_service::FsStats;

/// All candidates are removed if together they free one part in so many of what is missing.
const WORTHWHILE_TOGETHER: u64 = 2;
/// Else an image is removed if it frees one part in so many of what is missing.
const WORTHWHILE_ALONE: u64 = 10;

pub(super) struct ExactStrategy;

impl Strategy for ExactStrategy {
    /// The free space that the policy requires, if the filesystem is past one of its thresholds.
    fn threshold_target(&self, disk: FsStats, policy: &GcPolicy) -> Option<ReclaimTarget> {
        wanted_free(disk, policy).map(ReclaimTarget::Free)
    }

    fn bytes_target(&self, bytes: u64, disk: Option<FsStats>) -> ReclaimTarget {
        let available = disk.map_or(0, |disk| free(disk).bytes);
        ReclaimTarget::Free(DiskSpace { bytes: available.saturating_add(bytes), inodes: 0 })
    }

    /// The age counts from the last use, or from when the image was first seen; the minimum age applies.
    fn retain_by_age(
        &self,
        snapshot: &GcSnapshot,
        policy: &GcPolicy,
        image: &GcImage,
    ) -> Option<RetainReason> {
        retain_by_minimum_age(snapshot, policy, image).or_else(|| {
            let since = image.last_used.map_or(image.first_seen, |used| used.max(image.first_seen));
            // Use before the first observation is unknown.
            let since = since.max(snapshot.watched);
            let is_old = snapshot.now.millis_since(since) > millis(policy.maximum_age);
            (!is_old).then_some(RetainReason::NotNeeded)
        })
    }

    /// An image that was never used was last used when it was first seen. Images without a name come before all others,
    /// because no pod can request them by name.
    fn removal_order(&self, images: &[GcImage], retained: &[Option<RetainReason>]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..images.len()).filter(|&image| retained[image].is_none()).collect();
        sort_by_last_use(&mut order, images);
        order.sort_by_key(|&image| (!images[image].names.is_empty(), last_use(&images[image])));
        order
    }

    fn select(&self, input: &PlanInput<'_>) -> Selection {
        let graph = LayerGraph::new(&input.snapshot.images, &input.snapshot.layers, input.order);
        let frees_nothing =
            (0..input.snapshot.images.len()).map(|image| !graph.frees_something(image)).collect();
        let steps = match input.target {
            ReclaimTarget::Nothing => Vec::new(),
            ReclaimTarget::Old | ReclaimTarget::Everything => graph.remove_all(),
            ReclaimTarget::NominalBytes(_) | ReclaimTarget::Free(_) => graph.remove_until(input.need),
        };
        let reclaimable = total(&steps);
        let reachable = reclaimable.shortfall_to(input.need) == DiskSpace::ZERO;
        let is_in_vain = !reachable && !steps.is_empty();
        let rule =
            Some(input.policy.when_unreachable).filter(|rule| is_in_vain && *rule != WhenUnreachable::All);
        let steps = match rule {
            None | Some(WhenUnreachable::All) => steps,
            Some(WhenUnreachable::Nothing) => Vec::new(),
            Some(WhenUnreachable::Worthwhile) => worthwhile(input, steps),
        };
        Selection {
            steps,
            reclaimable,
            reachable,
            when_unreachable: rule,
            frees_nothing,
            examined: Vec::new(),
        }
    }

    fn removal_reasons(&self, input: &PlanInput<'_>, steps: &[RemovalStep]) -> Vec<RemovalReason> {
        let images = &input.snapshot.images;
        // Candidates that are still present, in the order of their last use.
        let mut present: BTreeSet<(UnixMillis, usize)> =
            input.order.iter().map(|&image| (last_use(&images[image]), image)).collect();
        let reason = |step: &RemovalStep| {
            let image = &images[step.image];
            let last_use = last_use(image);
            present.remove(&(last_use, step.image));
            let skipped_older = present.range(..(last_use, 0)).count();
            removal_reason(input, step, skipped_older)
        };
        steps.iter().map(reason).collect()
    }
}

fn removal_reason(input: &PlanInput<'_>, step: &RemovalStep, skipped_older: usize) -> RemovalReason {
    let image = &input.snapshot.images[step.image];
    let unused_for = unused_for(input.snapshot.now, image);
    match (input.target, step.shared) {
        (ReclaimTarget::Old, _) => {
            RemovalReason::TooOld { unused_for: Some(unused_for), maximum: input.policy.maximum_age }
        }
        (ReclaimTarget::Everything, _) => RemovalReason::Unused,
        (_, Some((layer, images))) => {
            let layer = input.snapshot.layers.all()[layer as usize].id.clone();
            RemovalReason::SharedLayer { layer, images }
        }
        (_, None) if image.names.is_empty() => RemovalReason::Untagged { unused_for },
        (_, None) => RemovalReason::LeastRecentlyUsed { unused_for, skipped_older },
    }
}

/// The removals that are worthwhile although they do not reach the goal; `all` are the removals of all candidates.
fn worthwhile(input: &PlanInput<'_>, all: Vec<RemovalStep>) -> Vec<RemovalStep> {
    let together = total(&all);
    if let Some(enough) = shortfall_below_high_threshold(input)
        && together.shortfall_to(enough) == DiskSpace::ZERO
    {
        return remove_until(input, input.order, enough);
    }
    if is_part(together, input.missing, WORTHWHILE_TOGETHER) {
        return all;
    }
    let mut steps = all;
    loop {
        let groups = groups(&steps).filter(|group| is_part(total(group), input.missing, WORTHWHILE_ALONE));
        let images: HashSet<usize> = groups.flatten().map(|step| step.image).collect();
        if images.len() == steps.len() {
            return steps;
        }
        // Without the others, these free less where they share layers.
        let order: Vec<usize> = input.order.iter().copied().filter(|image| images.contains(image)).collect();
        steps = remove_until(input, &order, input.missing);
    }
}

fn remove_until(input: &PlanInput<'_>, order: &[usize], amount: DiskSpace) -> Vec<RemovalStep> {
    LayerGraph::new(&input.snapshot.images, &input.snapshot.layers, order).remove_until(amount)
}

/// The amount to free until the filesystem is below the thresholds where a round starts.
fn shortfall_below_high_threshold(input: &PlanInput<'_>) -> Option<DiskSpace> {
    let disk = input.snapshot.disk.filter(|_| input.goal == GcGoal::Thresholds)?;
    Some(free(disk).shortfall_to(free_below_high_threshold(disk, input.policy)?))
}

/// Whether an amount is one part in `parts` of the bytes or of the inodes that are missing.
fn is_part(amount: DiskSpace, missing: DiskSpace, parts: u64) -> bool {
    let is_part = |amount: u64, missing: u64| missing > 0 && amount.saturating_mul(parts) >= missing;
    is_part(amount.bytes, missing.bytes) || is_part(amount.inodes, missing.inodes)
}

fn total(steps: &[RemovalStep]) -> DiskSpace {
    steps.iter().map(|step| step.frees).sum()
}

/// Removals that only together free a layer.
fn groups(steps: &[RemovalStep]) -> impl Iterator<Item = &[RemovalStep]> {
    steps.chunk_by(|a, b| a.shared.is_some() && a.shared == b.shared)
}

/// The free space that the policy requires, if the filesystem is past one of its thresholds now.
fn wanted_free(disk: FsStats, policy: &GcPolicy) -> Option<DiskSpace> {
    let mut wanted = DiskSpace::ZERO;
    let mut is_due = false;
    if is_past(disk.capacity, disk.available, policy.high_threshold_percent) {
        (is_due, wanted.bytes) = (true, free_at(disk.capacity, policy.low_threshold_percent));
    }
    if free(disk).bytes < policy.min_free_bytes {
        (is_due, wanted.bytes) = (true, wanted.bytes.max(policy.min_free_bytes));
    }
    if let Some(limits) = policy.inodes
        && disk.inodes > 0
        && is_past(disk.inodes, disk.inodes_free, limits.high_percent)
    {
        (is_due, wanted.inodes) = (true, free_at(disk.inodes, limits.low_percent));
    }
    is_due.then_some(wanted)
}

/// Whether usage is at or above a high threshold; 100 is never.
fn is_past(capacity: u64, available: u64, high: i32) -> bool {
    high < 100 && used_percent(capacity, available) >= i64::from(high)
}

/// The free space at which the filesystem is no longer past any threshold: just below those where a round starts.
/// Never more than [`wanted_free`].
fn free_below_high_threshold(disk: FsStats, policy: &GcPolicy) -> Option<DiskSpace> {
    let wanted = wanted_free(disk, policy)?;
    let below = |capacity: u64, high: i32| {
        let percent = u128::from((101 - high.clamp(0, 100)).unsigned_abs());
        u64::try_from((u128::from(capacity) * percent).div_ceil(100)).unwrap_or(u64::MAX)
    };
    let bytes = below(disk.capacity, policy.high_threshold_percent).max(policy.min_free_bytes);
    let inodes = policy.inodes.map_or(0, |limits| below(disk.inodes, limits.high_percent));
    Some(DiskSpace { bytes: bytes.min(wanted.bytes), inodes: inodes.min(wanted.inodes) })
}
