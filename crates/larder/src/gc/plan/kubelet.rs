//! Kubelet's algorithm, as of v1.36, accidents included: sizes as the runtime reports them add up, whatever images
//! share.

use super::layer_graph::RemovalStep;
use super::strategy::{PlanInput, ReclaimTarget, Selection, Strategy, sort_by_last_use};
use super::{GcImage, GcSnapshot, RemovalReason, RetainReason, unused_for};
use crate::gc::disk_space::DiskSpace;
use crate::gc::filesystem_stats::{free_at, used_percent};
use crate::gc::policy::GcPolicy;
use crate::gc::unix_millis::millis;
use crate::image_service::FsStats;
use crate::reference::ImageId;

pub(super) struct KubeletStrategy;

impl Strategy for KubeletStrategy {
    /// At or above the high threshold. The amount is negative when usage is already below the low threshold, which
    /// rounding can cause when both are equal.
    fn threshold_target(&self, disk: FsStats, policy: &GcPolicy) -> Option<ReclaimTarget> {
        let available = disk.available.min(disk.capacity);
        let is_over = used_percent(disk.capacity, available) >= i64::from(policy.high_threshold_percent);
        let wanted = i128::from(free_at(disk.capacity, policy.low_threshold_percent)) - i128::from(available);
        is_over.then(|| ReclaimTarget::NominalBytes(i64::try_from(wanted).unwrap_or(i64::MAX)))
    }

    fn bytes_target(&self, bytes: u64, _: Option<FsStats>) -> ReclaimTarget {
        ReclaimTarget::NominalBytes(i64::try_from(bytes).unwrap_or(i64::MAX))
    }

    /// An image that was never used is older than any maximum age, whatever the minimum age; no image is removed by age
    /// before the process has run that long.
    fn retain_by_age(
        &self,
        snapshot: &GcSnapshot,
        policy: &GcPolicy,
        image: &GcImage,
    ) -> Option<RetainReason> {
        let maximum = millis(policy.maximum_age);
        let has_run = snapshot.now.millis_since(snapshot.began) > maximum;
        let is_old = image.last_used.is_none_or(|used| snapshot.now.millis_since(used) > maximum);
        (!has_run || !is_old).then_some(RetainReason::NotNeeded)
    }

    fn removal_order(&self, images: &[GcImage], retained: &[Option<RetainReason>]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..images.len()).filter(|&image| retained[image].is_none()).collect();
        sort_by_last_use(&mut order, images);
        order
    }

    fn select(&self, input: &PlanInput<'_>) -> Selection {
        let (steps, examined) = match input.target {
            ReclaimTarget::Nothing => (Vec::new(), Vec::new()),
            ReclaimTarget::Old => {
                (input.order.iter().map(|&image| step(input.snapshot, image)).collect(), Vec::new())
            }
            ReclaimTarget::NominalBytes(wanted) => add_up(input, wanted),
            ReclaimTarget::Everything | ReclaimTarget::Free(_) => add_up(input, i64::MAX),
        };
        let reclaimable: DiskSpace = steps.iter().map(|step| step.frees).sum();
        let reachable = match input.target {
            ReclaimTarget::NominalBytes(wanted) => i128::from(reclaimable.bytes) >= i128::from(wanted),
            _ => true,
        };
        Selection {
            steps,
            reclaimable,
            reachable,
            when_unreachable: None,
            frees_nothing: Vec::new(),
            examined,
        }
    }

    fn removal_reasons(&self, input: &PlanInput<'_>, steps: &[RemovalStep]) -> Vec<RemovalReason> {
        let reason = |step: &RemovalStep| {
            let image = &input.snapshot.images[step.image];
            let unused_for = unused_for(input.snapshot.now, image);
            match input.target {
                ReclaimTarget::Old => RemovalReason::TooOld {
                    unused_for: image.last_used.map(|_| unused_for),
                    maximum: input.policy.maximum_age,
                },
                ReclaimTarget::Everything => RemovalReason::Unused,
                _ => RemovalReason::LeastRecentlyUsed { unused_for, skipped_older: 0 },
            }
        };
        steps.iter().map(reason).collect()
    }
}

fn step(snapshot: &GcSnapshot, image: usize) -> RemovalStep {
    let frees = DiskSpace { bytes: snapshot.images[image].size, inodes: 0 };
    RemovalStep { image, frees, estimated: true, shared: None }
}

/// Adds up nominal sizes and checks the sum after each removal. Also returns the images that are too young, as far as
/// they come before the last removal.
fn add_up(input: &PlanInput<'_>, wanted: i64) -> (Vec<RemovalStep>, Vec<ImageId>) {
    let PlanInput { snapshot, retained, .. } = input;
    let is_too_young = |retained: &Option<RetainReason>| {
        matches!(retained, Some(RetainReason::ClockWentBack | RetainReason::TooYoung { .. }))
    };
    let mut all: Vec<usize> =
        (0..snapshot.images.len()).filter(|&image| is_too_young(&retained[image])).collect();
    all.extend(input.order);
    sort_by_last_use(&mut all, &snapshot.images);
    let (mut steps, mut examined) = (Vec::new(), Vec::new());
    let mut freed = 0_i128;
    for image in all {
        if retained[image].is_some() {
            examined.push(snapshot.images[image].id.clone());
            continue;
        }
        steps.push(step(snapshot, image));
        freed += i128::from(snapshot.images[image].size);
        if freed >= i128::from(wanted) {
            break;
        }
    }
    (steps, examined)
}
