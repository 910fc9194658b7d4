//! The interface of a strategy: its input, its target and its selection.

use super::layer_graph::RemovalStep;
use super::{GcImage, GcSnapshot, RemovalReason, RetainReason};
use crate::gc::disk_space::DiskSpace;
use crate::gc::filesystem_stats;
use crate::gc::goal::GcGoal;
use crate::gc::policy::{GcPolicy, WhenUnreachable};
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// A goal, translated into an amount on one filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gc) enum ReclaimTarget {
    /// Remove nothing.
    Nothing,
    /// Remove every image past the maximum age.
    Old,
    /// Remove every candidate.
    Everything,
    /// Remove images until their nominal sizes add up to this many bytes; at least one image. Kubelet's.
    NominalBytes(i64),
    /// Remove images until this much is free. Larder's.
    Free(DiskSpace),
}

impl ReclaimTarget {
    /// The amount that has to be freed; zero for targets without an amount.
    pub(in crate::gc) fn need(self, disk: Option<FsStats>) -> DiskSpace {
        match self {
            ReclaimTarget::Free(wanted) => {
                disk.map(filesystem_stats::free).unwrap_or_default().shortfall_to(wanted)
            }
            ReclaimTarget::NominalBytes(wanted) => {
                DiskSpace { bytes: u64::try_from(wanted).unwrap_or(0), inodes: 0 }
            }
            ReclaimTarget::Nothing | ReclaimTarget::Old | ReclaimTarget::Everything => DiskSpace::ZERO,
        }
    }

    /// Whether images are removed only until enough is free.
    pub(in crate::gc) fn is_amount(self) -> bool {
        matches!(self, ReclaimTarget::NominalBytes(_) | ReclaimTarget::Free(_))
    }
}

/// The input of a strategy.
pub(super) struct PlanInput<'a> {
    pub(super) snapshot: &'a GcSnapshot,
    pub(super) policy: &'a GcPolicy,
    pub(super) goal: GcGoal,
    pub(super) target: ReclaimTarget,
    /// The amount to free now.
    pub(super) need: DiskSpace,
    /// The amount that was missing when the stage began.
    pub(super) missing: DiskSpace,
    /// The reason for which each image is retained whatever the goal needs; `None` for candidates.
    pub(super) retained: &'a [Option<RetainReason>],
    /// The candidates, as indices of the snapshot's images, in the order of their removal.
    pub(super) order: &'a [usize],
}

/// The removals that a strategy selects.
pub(super) struct Selection {
    /// The removals, in order.
    pub(super) steps: Vec<RemovalStep>,
    /// The amount that the removals free, or that all candidates would free if the goal cannot be reached.
    pub(super) reclaimable: DiskSpace,
    /// Whether that is enough.
    pub(super) reachable: bool,
    /// The rule by which candidates are retained because it is not enough.
    pub(super) when_unreachable: Option<WhenUnreachable>,
    /// For each image, whether its removal would free nothing; empty if that is not considered.
    pub(super) frees_nothing: Vec<bool>,
    /// IDs that kubelet's space pass examines and retains.
    pub(super) examined: Vec<ImageId>,
}

/// The rules by which images are selected. All functions are pure.
pub(super) trait Strategy: Sync {
    /// The target of [`GcGoal::Thresholds`]; `None` if the filesystem is not past a threshold.
    fn threshold_target(&self, disk: FsStats, policy: &GcPolicy) -> Option<ReclaimTarget>;

    /// The target of freeing this many bytes.
    fn bytes_target(&self, bytes: u64, disk: Option<FsStats>) -> ReclaimTarget;

    /// The reason for which an image is not past the maximum age, which is not zero.
    fn retain_by_age(
        &self,
        snapshot: &GcSnapshot,
        policy: &GcPolicy,
        image: &GcImage,
    ) -> Option<RetainReason>;

    /// The images that are not retained, in the order of their removal.
    fn removal_order(&self, images: &[GcImage], retained: &[Option<RetainReason>]) -> Vec<usize>;

    /// The removals for a target.
    fn select(&self, input: &PlanInput<'_>) -> Selection;

    /// The reason of each of these removals.
    fn removal_reasons(&self, input: &PlanInput<'_>, steps: &[RemovalStep]) -> Vec<RemovalReason>;
}

/// Sorts images as kubelet does: never used before used, then by last use, by first seen and by ID.
pub(super) fn sort_by_last_use(order: &mut [usize], images: &[GcImage]) {
    let key = |image: &GcImage| (image.last_used, image.first_seen);
    order.sort_unstable_by(|&a, &b| {
        let (a, b) = (&images[a], &images[b]);
        key(a).cmp(&key(b)).then_with(|| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)))
    });
}
