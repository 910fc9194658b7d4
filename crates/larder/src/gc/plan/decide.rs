//! From a scene to a plan. Read [`plan`].

use super::layer_graph::{LayerGraph, RemovalStep, exclusive_space};
use super::{
    GcDecision, GcGoal, GcImage, GcPlan, GcSnapshot, ImageDecision, PlannedRemoval, RemovalReason,
    RetainReason, unused_for,
};
use crate::gc::disk_space::DiskSpace;
use crate::gc::filesystem_stats::{self, size_text, used_percent, wanted_free, with_more_free};
use crate::gc::keep::{KeepRuleInput, matching_rules};
use crate::gc::policy::{Accounting, AgeRule, GcPolicy};
use crate::gc::unix_millis::millis;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// What a goal comes down to on one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gc) enum ReclaimTarget {
    /// Nothing has to go.
    Nothing,
    /// Everything unused for too long.
    Old,
    /// Everything that may go.
    Everything,
    /// Nominal sizes must add up to this; at least one image goes.
    Nominal(i64),
    /// So much must be free.
    Free(DiskSpace),
}

/// What the goal means on this disk.
pub(in crate::gc) fn reclaim_target(goal: GcGoal, disk: Option<FsStats>, policy: &GcPolicy) -> ReclaimTarget {
    match (goal, policy.accounting) {
        (GcGoal::Age, _) => ReclaimTarget::Old,
        (GcGoal::AllUnused, Accounting::Nominal) => ReclaimTarget::Nominal(i64::MAX),
        (GcGoal::AllUnused, Accounting::Exact) => ReclaimTarget::Everything,
        (GcGoal::Free { bytes }, accounting) => {
            let bytes = bytes.saturating_add(bytes / 100 * u64::from(policy.free_margin_percent));
            match (accounting, disk) {
                (Accounting::Exact, Some(disk)) => {
                    let bytes = filesystem_stats::free(disk).bytes.saturating_add(bytes);
                    ReclaimTarget::Free(DiskSpace { bytes, inodes: 0 })
                }
                _ => ReclaimTarget::Nominal(i64::try_from(bytes).unwrap_or(i64::MAX)),
            }
        }
        (GcGoal::Thresholds, Accounting::Nominal) => disk
            .and_then(|disk| filesystem_stats::kubelet_bytes_to_free(disk, policy))
            .map_or(ReclaimTarget::Nothing, ReclaimTarget::Nominal),
        (GcGoal::Thresholds, Accounting::Exact) => disk
            .and_then(|disk| wanted_free(disk, policy))
            .map_or(ReclaimTarget::Nothing, ReclaimTarget::Free),
    }
}

/// What to remove for this goal, and why the rest stays.
pub fn plan(scene: &GcSnapshot, policy: &GcPolicy, goal: GcGoal) -> GcPlan {
    plan_for(scene, policy, goal, reclaim_target(goal, scene.disk, policy))
}

/// One whole round, as it would run now: what is too old, and then what the thresholds ask for.
pub fn plan_round(scene: &GcSnapshot, policy: &GcPolicy) -> GcPlan {
    let old = plan(scene, policy, GcGoal::Age);
    if old.removals.is_empty() {
        return plan(scene, policy, GcGoal::Thresholds);
    }
    let mut rest = scene.clone();
    for removal in &old.removals {
        rest.forget(&removal.id, &removal.handler);
    }
    rest.disk = old.after;
    let mut both = plan(&rest, policy, GcGoal::Thresholds);
    both.expected_freed += old.expected_freed;
    both.removals.splice(0..0, old.removals);
    let gone = old.decisions.into_iter().filter(|image| matches!(image.verdict, GcDecision::Remove(_)));
    both.decisions.extend(gone);
    both.decisions.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    both
}

/// The same for a part of a goal: what is still wanted.
pub(in crate::gc) fn plan_for(
    scene: &GcSnapshot,
    policy: &GcPolicy,
    goal: GcGoal,
    aim: ReclaimTarget,
) -> GcPlan {
    let stays = retain_reasons(scene, policy, aim);
    let exact = policy.accounting == Accounting::Exact;
    let order = removable(&scene.images, &stays, exact);
    let mut examined = Vec::new();
    let need = needed(aim, scene.disk);
    let graph = LayerGraph::new(&scene.images, &scene.layers, &order);
    let useless: Vec<bool> =
        (0..scene.images.len()).map(|image| exact && !graph.frees_something(image)).collect();
    let steps = match aim {
        ReclaimTarget::Nothing => Vec::new(),
        ReclaimTarget::Old | ReclaimTarget::Everything if exact => graph.remove_all(),
        ReclaimTarget::Old | ReclaimTarget::Everything => {
            order.iter().map(|&image| nominal(&scene.images, image)).collect()
        }
        ReclaimTarget::Nominal(wanted) => add_up(&scene.images, &order, &stays, wanted, &mut examined),
        ReclaimTarget::Free(_) => graph.remove_until(need),
    };
    let frees: DiskSpace = steps.iter().map(|step| step.frees).sum();
    let removals: Vec<PlannedRemoval> = steps.iter().map(|step| removal(scene, policy, aim, step)).collect();
    let reached = match aim {
        ReclaimTarget::Nominal(i64::MAX) => true,
        ReclaimTarget::Nominal(wanted) => i128::from(frees.bytes) >= i128::from(wanted),
        _ => frees.shortfall_to(need) == DiskSpace::ZERO,
    };
    let mut goes: Vec<Option<RemovalReason>> = vec![None; scene.images.len()];
    for (step, removal) in steps.iter().zip(&removals) {
        goes[step.image] = Some(removal.why.clone());
    }
    GcPlan {
        goal,
        need,
        removals,
        decisions: verdicts(scene, goes, stays, &useless),
        expected_freed: frees,
        reachable: reached,
        after: scene.disk.map(|disk| with_more_free(disk, frees)),
        examined,
    }
}

fn needed(aim: ReclaimTarget, disk: Option<FsStats>) -> DiskSpace {
    match (aim, disk) {
        (ReclaimTarget::Free(wanted), Some(disk)) => filesystem_stats::free(disk).shortfall_to(wanted),
        (ReclaimTarget::Free(wanted), None) => wanted,
        (ReclaimTarget::Nominal(wanted), _) => {
            DiskSpace { bytes: u64::try_from(wanted).unwrap_or(0), inodes: 0 }
        }
        (ReclaimTarget::Nothing | ReclaimTarget::Old | ReclaimTarget::Everything, _) => DiskSpace::ZERO,
    }
}

/// What becomes of each image. `useless` ones free nothing by their removal.
fn verdicts(
    scene: &GcSnapshot,
    goes: Vec<Option<RemovalReason>>,
    stays: Vec<Option<RetainReason>>,
    useless: &[bool],
) -> Vec<ImageDecision> {
    let alone = exclusive_space(&scene.images, &scene.layers);
    let images = scene.images.iter().zip(alone).zip(goes.into_iter().zip(stays)).enumerate();
    let verdict = |(index, ((image, alone), fate)): (usize, ((&GcImage, DiskSpace), _))| {
        let verdict = match fate {
            (Some(why), _) => GcDecision::Remove(why),
            (None, Some(stays)) => GcDecision::Retain(stays),
            (None, None) if useless[index] => GcDecision::Retain(RetainReason::FreesNothing),
            (None, None) => GcDecision::Retain(RetainReason::NotNeeded),
        };
        let (id, handler, names) = (image.id.clone(), image.handler.clone(), image.names.clone());
        let (first_seen, last_used) = (image.first_seen, image.last_used);
        ImageDecision { id, handler, names, size: image.size, alone, first_seen, last_used, verdict }
    };
    let mut verdicts: Vec<ImageDecision> = images.map(verdict).collect();
    verdicts.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    verdicts
}

/// For each image why it may not go, whatever is wanted; `None` for candidates.
fn retain_reasons(scene: &GcSnapshot, policy: &GcPolicy, aim: ReclaimTarget) -> Vec<Option<RetainReason>> {
    let kept = if policy.keep.is_empty() {
        vec![None; scene.images.len()]
    } else {
        matching_rules(scene.now, &policy.keep, &keepables(scene))
    };
    let judge = |(image, kept): (&GcImage, Option<usize>)| {
        if image.id.is_empty() {
            return Some(RetainReason::InvalidId);
        }
        if !image.uses.is_empty() {
            return Some(RetainReason::InUse(image.uses.clone()));
        }
        if image.pinned {
            return Some(RetainReason::Pinned);
        }
        if let Some(rule) = kept {
            let known = scene.layers.layers_of(&image.id).is_some_and(|known| known.labels.is_some());
            let text = policy.keep[rule].text_for(known);
            return Some(RetainReason::Kept { rule, text });
        }
        if let Some(error) = &image.failed {
            return Some(RetainReason::Failed(error.clone()));
        }
        match aim {
            ReclaimTarget::Old => fresh(scene, policy, image),
            // The disk has room; what is past the maximum age may be too young to go for that.
            ReclaimTarget::Nothing if policy.maximum_age.is_zero() => None,
            ReclaimTarget::Nothing
            | ReclaimTarget::Everything
            | ReclaimTarget::Nominal(_)
            | ReclaimTarget::Free(_) => find_retain_reason(scene, policy, image),
        }
    };
    scene.images.iter().zip(kept).map(judge).collect()
}

/// The images of a scene as keep rules see them.
pub(in crate::gc) fn keepables(scene: &GcSnapshot) -> Vec<KeepRuleInput<'_>> {
    let see = scene.images.iter().map(|image| KeepRuleInput {
        id: &image.id,
        names: &image.names,
        labels: scene.layers.layers_of(&image.id).and_then(|known| known.labels.as_ref()),
        size: image.size,
        first_seen: image.first_seen,
        last_used: image.last_used,
    });
    see.collect()
}

/// Why a candidate is spared by the space pass.
pub(super) fn find_retain_reason(
    scene: &GcSnapshot,
    policy: &GcPolicy,
    image: &GcImage,
) -> Option<RetainReason> {
    if image.last_used.is_some_and(|used| used >= scene.now) {
        return Some(RetainReason::ClockWentBack);
    }
    (scene.now.millis_since(image.first_seen) < millis(policy.minimum_age)).then(|| RetainReason::TooYoung {
        age: scene.now.since(image.first_seen),
        minimum: policy.minimum_age,
    })
}

/// Why a candidate is spared by the age pass.
fn fresh(scene: &GcSnapshot, policy: &GcPolicy, image: &GcImage) -> Option<RetainReason> {
    let maximum = millis(policy.maximum_age);
    if maximum == 0 {
        return Some(RetainReason::NotNeeded);
    }
    let old = match policy.age {
        AgeRule::Kubelet => {
            let running = scene.now.millis_since(scene.began) > maximum;
            running && image.last_used.is_none_or(|used| scene.now.millis_since(used) > maximum)
        }
        AgeRule::FromFirstSeen => {
            if let Some(stays) = find_retain_reason(scene, policy, image) {
                return Some(stays);
            }
            let since = image.last_used.map_or(image.first_seen, |used| used.max(image.first_seen));
            // It may have been used every day until somebody began to look.
            let since = since.max(scene.watched);
            scene.now.millis_since(since) > maximum
        }
    };
    (!old).then_some(RetainReason::NotNeeded)
}

/// The candidates, least recently used first: never used before used, then by first seen, then by id. Where it does not
/// have to be kubelet's order, images that lost their last name go before all others: nobody asks for them any more.
fn removable(images: &[GcImage], stays: &[Option<RetainReason>], nameless_first: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..images.len()).filter(|&image| stays[image].is_none()).collect();
    sort(&mut order, images);
    if nameless_first {
        order.sort_by_key(|&image| !images[image].names.is_empty());
    }
    order
}

fn sort(order: &mut [usize], images: &[GcImage]) {
    let key = |image: &GcImage| (image.last_used, image.first_seen);
    order.sort_unstable_by(|&a, &b| {
        let (a, b) = (&images[a], &images[b]);
        key(a).cmp(&key(b)).then_with(|| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)))
    });
}

fn nominal(images: &[GcImage], image: usize) -> RemovalStep {
    let frees = DiskSpace { bytes: images[image].size, inodes: 0 };
    RemovalStep { image, frees, estimated: true, shared: None }
}

/// Kubelet's space pass: nominal sizes, and a look at the sum after each removal.
fn add_up(
    images: &[GcImage],
    order: &[usize],
    stays: &[Option<RetainReason>],
    wanted: i64,
    examined: &mut Vec<ImageId>,
) -> Vec<RemovalStep> {
    let passed_over = |stays: &Option<RetainReason>| {
        matches!(stays, Some(RetainReason::ClockWentBack | RetainReason::TooYoung { .. }))
    };
    let mut all: Vec<usize> = (0..images.len()).filter(|&image| passed_over(&stays[image])).collect();
    all.extend(order);
    sort(&mut all, images);
    let mut steps = Vec::new();
    let mut freed = 0_i128;
    for image in all {
        if stays[image].is_some() {
            examined.push(images[image].id.clone());
            continue;
        }
        steps.push(nominal(images, image));
        freed += i128::from(images[image].size);
        if freed >= i128::from(wanted) {
            break;
        }
    }
    steps
}

fn removal(scene: &GcSnapshot, policy: &GcPolicy, aim: ReclaimTarget, step: &RemovalStep) -> PlannedRemoval {
    let image = &scene.images[step.image];
    let unused_for = unused_for(scene.now, image);
    let why = match (aim, step.shared) {
        (ReclaimTarget::Old, _) => {
            let never = policy.age == AgeRule::Kubelet && image.last_used.is_none();
            RemovalReason::TooOld { unused_for: (!never).then_some(unused_for), maximum: policy.maximum_age }
        }
        (ReclaimTarget::Everything | ReclaimTarget::Nominal(i64::MAX), _) => RemovalReason::Unused,
        (_, Some((layer, images))) => {
            RemovalReason::SharedLayer { layer: scene.layers.all()[layer as usize].id.clone(), images }
        }
        (_, None) => RemovalReason::Room { unused_for },
    };
    PlannedRemoval {
        id: image.id.clone(),
        handler: image.handler.clone(),
        names: image.names.clone(),
        frees: step.frees,
        estimated: step.estimated,
        why,
        first_seen: image.first_seen,
        last_used: image.last_used,
    }
}

/// Kubelet's text for a collection that did not free enough; `disk` is the reading before it.
pub(in crate::gc) fn insufficient(disk: FsStats, freed: i64) -> String {
    let (used, size) = (used_percent(disk.capacity, disk.available), i64::try_from(disk.capacity));
    let size = size_text(size.unwrap_or(i64::MAX));
    format!(
        "Insufficient free disk space on the node's image filesystem ({used}% of {size} used). Failed to free \
         sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be \
         used by active images, logs, volumes, or other data."
    )
}
