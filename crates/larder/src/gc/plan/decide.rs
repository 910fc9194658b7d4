//! Computes a [`GcPlan`] from a [`GcSnapshot`]. Pure. Read [`plan`] first.

use std::collections::BTreeSet;

use super::floor::recent_images;
use super::layer_graph::{LayerGraph, RemovalStep, exclusive_space};
use super::unreachable::UnreachableGoal;
use super::{
    GcDecision, GcGoal, GcImage, GcPlan, GcSnapshot, ImageDecision, PlannedRemoval, RemovalReason,
    RetainReason, last_use, unused_for,
};
use crate::gc::disk_space::DiskSpace;
use crate::gc::filesystem_stats::{self, size_text, used_percent, wanted_free, with_more_free};
use crate::gc::keep::{KeepRuleInput, matching_rules};
use crate::gc::policy::{Accounting, AgeRule, GcPolicy, WhenUnreachable};
use crate::gc::unix_millis::{UnixMillis, millis};
use crate::gc::uses::ImageUse;
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
    /// Remove images until their nominal sizes add up to this many bytes; at least one image.
    Nominal(i64),
    /// Remove images until this much is free.
    Free(DiskSpace),
}

/// Translates the goal for this filesystem.
pub(in crate::gc) fn reclaim_target(goal: GcGoal, snapshot: &GcSnapshot, policy: &GcPolicy) -> ReclaimTarget {
    let disk = snapshot.disk;
    match (goal, policy.accounting) {
        (GcGoal::Age, _) => ReclaimTarget::Old,
        (GcGoal::AllUnused, Accounting::Nominal) => ReclaimTarget::Nominal(i64::MAX),
        (GcGoal::AllUnused, Accounting::Exact) | (GcGoal::Dangling, _) => ReclaimTarget::Everything,
        (GcGoal::Free { bytes }, accounting) => {
            let bytes = bytes.saturating_add(bytes / 100 * u64::from(policy.free_margin_percent));
            let bytes = bytes.saturating_sub(snapshot.reclaimed.bytes);
            match (accounting, disk) {
                (Accounting::Exact, Some(disk)) => {
                    let bytes = filesystem_stats::free(disk).bytes.saturating_add(bytes);
                    ReclaimTarget::Free(DiskSpace { bytes, inodes: 0 })
                }
                _ if bytes == 0 && snapshot.reclaimed.bytes > 0 => ReclaimTarget::Nothing,
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

/// Plans the removals for this goal. Every other image gets the reason for which it is retained.
pub fn plan(snapshot: &GcSnapshot, policy: &GcPolicy, goal: GcGoal) -> GcPlan {
    plan_for(snapshot, policy, goal, reclaim_target(goal, snapshot, policy), None)
}

/// Plans one whole round: first the images past the maximum age, then what the thresholds require.
pub fn plan_round(snapshot: &GcSnapshot, policy: &GcPolicy) -> GcPlan {
    let old = plan(snapshot, policy, GcGoal::Age);
    if old.removals.is_empty() {
        return plan(snapshot, policy, GcGoal::Thresholds);
    }
    let mut rest = snapshot.clone();
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

/// Plans the removals for the rest of a goal. `missing` is what was missing when the round began, if that is not now.
pub(in crate::gc) fn plan_for(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    goal: GcGoal,
    target: ReclaimTarget,
    missing: Option<DiskSpace>,
) -> GcPlan {
    let exact = policy.accounting == Accounting::Exact;
    let mut retained = retain_reasons(snapshot, policy, target);
    if goal == GcGoal::Dangling {
        retain_tagged(&snapshot.images, &mut retained);
    }
    retain_recent(snapshot, policy, target, &mut retained);
    let order = removable(&snapshot.images, &retained, exact);
    let mut examined = Vec::new();
    let need = needed(target, snapshot.disk);
    let graph = LayerGraph::new(&snapshot.images, &snapshot.layers, &order);
    let useless: Vec<bool> =
        (0..snapshot.images.len()).map(|image| exact && !graph.frees_something(image)).collect();
    let steps = match target {
        ReclaimTarget::Nothing => Vec::new(),
        ReclaimTarget::Old | ReclaimTarget::Everything if exact => graph.remove_all(),
        ReclaimTarget::Old | ReclaimTarget::Everything => {
            order.iter().map(|&image| nominal(&snapshot.images, image)).collect()
        }
        ReclaimTarget::Nominal(wanted) => add_up(&snapshot.images, &order, &retained, wanted, &mut examined),
        ReclaimTarget::Free(_) => graph.remove_until(need),
    };
    let reclaimable: DiskSpace = steps.iter().map(|step| step.frees).sum();
    let reached = match target {
        ReclaimTarget::Nominal(i64::MAX) => true,
        ReclaimTarget::Nominal(wanted) => i128::from(reclaimable.bytes) >= i128::from(wanted),
        _ => reclaimable.shortfall_to(need) == DiskSpace::ZERO,
    };
    let is_in_vain = !reached && !steps.is_empty();
    let held_back = Some(policy.when_unreachable).filter(|rule| is_in_vain && *rule != WhenUnreachable::All);
    let steps = match held_back {
        None | Some(WhenUnreachable::All) => steps,
        Some(WhenUnreachable::Nothing) => Vec::new(),
        Some(WhenUnreachable::Helpful) => {
            let relief = relief(snapshot, policy, goal);
            let goal = UnreachableGoal { missing: missing.unwrap_or(need), relief };
            goal.helpful(steps, |images, amount| {
                let order: Vec<usize> = order
                    .iter()
                    .copied()
                    .filter(|image| images.is_none_or(|only| only.contains(image)))
                    .collect();
                freeing(snapshot, exact, &order, amount)
            })
        }
    };
    let frees: DiskSpace = steps.iter().map(|step| step.frees).sum();
    let removals = removals(snapshot, policy, target, &order, &steps);
    let mut removed: Vec<Option<RemovalReason>> = vec![None; snapshot.images.len()];
    for (step, removal) in steps.iter().zip(&removals) {
        removed[step.image] = Some(removal.why.clone());
    }
    GcPlan {
        goal,
        need,
        removals,
        decisions: verdicts(snapshot, removed, retained, &useless, held_back),
        expected_freed: frees,
        reclaimable: if need == DiskSpace::ZERO { DiskSpace::ZERO } else { reclaimable },
        held_back,
        reachable: reached,
        after: snapshot.disk.map(|disk| with_more_free(disk, frees)),
        examined,
    }
}

/// The removals of these candidates, in this order, that free as much.
fn freeing(snapshot: &GcSnapshot, exact: bool, order: &[usize], amount: DiskSpace) -> Vec<RemovalStep> {
    if exact {
        return LayerGraph::new(&snapshot.images, &snapshot.layers, order).remove_until(amount);
    }
    let mut freed = DiskSpace::ZERO;
    let short = |step: &RemovalStep| {
        let short = freed.bytes < amount.bytes;
        freed += step.frees;
        short
    };
    order.iter().map(|&image| nominal(&snapshot.images, image)).take_while(short).collect()
}

/// What has to be freed to get below the thresholds where a round starts.
fn relief(snapshot: &GcSnapshot, policy: &GcPolicy, goal: GcGoal) -> Option<DiskSpace> {
    let disk = snapshot.disk.filter(|_| goal == GcGoal::Thresholds)?;
    let relieving = filesystem_stats::relieving_free(disk, policy)?;
    Some(filesystem_stats::free(disk).shortfall_to(relieving))
}

/// Retains the candidates that have a tag.
fn retain_tagged(images: &[GcImage], retained: &mut [Option<RetainReason>]) {
    for (image, retained) in images.iter().zip(retained) {
        if retained.is_none() && image.names.iter().any(|name| is_tag(name)) {
            *retained = Some(RetainReason::NotNeeded);
        }
    }
}

/// Whether a name of an image has a tag and no digest.
pub(in crate::gc) fn is_tag(name: &str) -> bool {
    !name.contains('@')
}

/// Retains the most recently used candidates when space is needed.
fn retain_recent(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    target: ReclaimTarget,
    retained: &mut [Option<RetainReason>],
) {
    let for_space = match target {
        ReclaimTarget::Free(_) => true,
        ReclaimTarget::Nominal(wanted) => wanted != i64::MAX,
        ReclaimTarget::Nothing | ReclaimTarget::Old | ReclaimTarget::Everything => false,
    };
    let keep_bytes = policy.keep_bytes;
    if keep_bytes == 0 || !for_space {
        return;
    }
    let order = removable(&snapshot.images, retained, policy.accounting == Accounting::Exact);
    for image in recent_images(snapshot, &order, |image| retained[image].is_some(), keep_bytes) {
        retained[image] = Some(RetainReason::Recent { keep_bytes });
    }
}

fn needed(target: ReclaimTarget, disk: Option<FsStats>) -> DiskSpace {
    match (target, disk) {
        (ReclaimTarget::Free(wanted), Some(disk)) => filesystem_stats::free(disk).shortfall_to(wanted),
        (ReclaimTarget::Free(wanted), None) => wanted,
        (ReclaimTarget::Nominal(wanted), _) => {
            DiskSpace { bytes: u64::try_from(wanted).unwrap_or(0), inodes: 0 }
        }
        (ReclaimTarget::Nothing | ReclaimTarget::Old | ReclaimTarget::Everything, _) => DiskSpace::ZERO,
    }
}

/// The decision for each image. Removing a `useless` image frees nothing; `held_back` is the rule that retains the
/// other candidates because the goal cannot be reached.
fn verdicts(
    snapshot: &GcSnapshot,
    removed: Vec<Option<RemovalReason>>,
    retained: Vec<Option<RetainReason>>,
    useless: &[bool],
    held_back: Option<WhenUnreachable>,
) -> Vec<ImageDecision> {
    let alone = exclusive_space(&snapshot.images, &snapshot.layers);
    let images = snapshot.images.iter().zip(alone).zip(removed.into_iter().zip(retained)).enumerate();
    let verdict = |(index, ((image, alone), outcome)): (usize, ((&GcImage, DiskSpace), _))| {
        let verdict = match outcome {
            (Some(why), _) => GcDecision::Remove(why),
            (None, Some(retained)) => GcDecision::Retain(retained),
            (None, None) if useless[index] => GcDecision::Retain(RetainReason::FreesNothing),
            (None, None) => {
                GcDecision::Retain(held_back.map_or(RetainReason::NotNeeded, RetainReason::Unreachable))
            }
        };
        let (id, handler, names) = (image.id.clone(), image.handler.clone(), image.names.clone());
        let (first_seen, last_used) = (image.first_seen, image.last_used);
        ImageDecision { id, handler, names, size: image.size, alone, first_seen, last_used, verdict }
    };
    let mut verdicts: Vec<ImageDecision> = images.map(verdict).collect();
    verdicts.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    verdicts
}

/// The reason for which each image is retained whatever the goal; `None` for candidates.
fn retain_reasons(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    target: ReclaimTarget,
) -> Vec<Option<RetainReason>> {
    let kept = if policy.keep.is_empty() {
        vec![None; snapshot.images.len()]
    } else {
        matching_rules(snapshot.now, &policy.keep, &keep_rule_inputs(snapshot))
    };
    let retain_reason = |(image, kept): (&GcImage, Option<usize>)| {
        if image.id.is_empty() {
            return Some(RetainReason::InvalidId);
        }
        let (leases, uses): (Vec<&ImageUse>, Vec<&ImageUse>) =
            image.uses.iter().partition(|by| by.is_lease());
        if !uses.is_empty() {
            return Some(RetainReason::InUse(uses.into_iter().chain(leases).cloned().collect()));
        }
        if image.pinned {
            return Some(RetainReason::Pinned);
        }
        if let Some(rule) = kept {
            let known = snapshot.layers.layers_of(&image.id).is_some_and(|known| known.labels.is_some());
            let text = policy.keep[rule].text_for(known);
            return Some(RetainReason::Kept { rule, text });
        }
        if let Some(left) = leases.iter().filter_map(|by| by.lease_left()).max() {
            return Some(RetainReason::Leased { left });
        }
        if let Some(error) = &image.failed {
            return Some(RetainReason::Failed(error.clone()));
        }
        match target {
            ReclaimTarget::Old => fresh(snapshot, policy, image),
            // Nothing has to be freed. An image past the maximum age may still be younger than the minimum age.
            ReclaimTarget::Nothing if policy.maximum_age.is_zero() => None,
            ReclaimTarget::Nothing
            | ReclaimTarget::Everything
            | ReclaimTarget::Nominal(_)
            | ReclaimTarget::Free(_) => find_retain_reason(snapshot, policy, image),
        }
    };
    snapshot.images.iter().zip(kept).map(retain_reason).collect()
}

/// The snapshot's images as input for keep rules.
pub(in crate::gc) fn keep_rule_inputs(snapshot: &GcSnapshot) -> Vec<KeepRuleInput<'_>> {
    let inputs = snapshot.images.iter().map(|image| KeepRuleInput {
        id: &image.id,
        names: &image.names,
        labels: snapshot.layers.layers_of(&image.id).and_then(|known| known.labels.as_ref()),
        size: image.size,
        first_seen: image.first_seen,
        last_used: image.last_used,
    });
    inputs.collect()
}

/// The reason for which the space pass retains a candidate.
pub(super) fn find_retain_reason(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    image: &GcImage,
) -> Option<RetainReason> {
    if image.last_used.is_some_and(|used| used >= snapshot.now) {
        return Some(RetainReason::ClockWentBack);
    }
    (snapshot.now.millis_since(image.first_seen) < millis(policy.minimum_age)).then(|| {
        RetainReason::TooYoung { age: snapshot.now.since(image.first_seen), minimum: policy.minimum_age }
    })
}

/// The reason for which the age pass retains a candidate.
fn fresh(snapshot: &GcSnapshot, policy: &GcPolicy, image: &GcImage) -> Option<RetainReason> {
    let maximum = millis(policy.maximum_age);
    if maximum == 0 {
        return Some(RetainReason::NotNeeded);
    }
    let old = match policy.age {
        AgeRule::Kubelet => {
            let running = snapshot.now.millis_since(snapshot.began) > maximum;
            running && image.last_used.is_none_or(|used| snapshot.now.millis_since(used) > maximum)
        }
        AgeRule::FromFirstSeen => {
            if let Some(retained) = find_retain_reason(snapshot, policy, image) {
                return Some(retained);
            }
            let since = image.last_used.map_or(image.first_seen, |used| used.max(image.first_seen));
            // Use before the first observation is unknown.
            let since = since.max(snapshot.watched);
            snapshot.now.millis_since(since) > maximum
        }
    };
    (!old).then_some(RetainReason::NotNeeded)
}

/// The candidates, in the order of their removal. Kubelet's order is least recently used first: never used before used,
/// then by first seen, then by id. By larder's, an image that was never used was last used when it was first seen, and
/// images without a name come before all others, because no pod can request them by name.
fn removable(images: &[GcImage], retained: &[Option<RetainReason>], exact: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..images.len()).filter(|&image| retained[image].is_none()).collect();
    sort(&mut order, images);
    if exact {
        order.sort_by_key(|&image| (!images[image].names.is_empty(), last_use(&images[image])));
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

/// Kubelet's space pass: adds up nominal sizes and checks the sum after each removal.
fn add_up(
    images: &[GcImage],
    order: &[usize],
    retained: &[Option<RetainReason>],
    wanted: i64,
    examined: &mut Vec<ImageId>,
) -> Vec<RemovalStep> {
    let passed_over = |retained: &Option<RetainReason>| {
        matches!(retained, Some(RetainReason::ClockWentBack | RetainReason::TooYoung { .. }))
    };
    let mut all: Vec<usize> = (0..images.len()).filter(|&image| passed_over(&retained[image])).collect();
    all.extend(order);
    sort(&mut all, images);
    let mut steps = Vec::new();
    let mut freed = 0_i128;
    for image in all {
        if retained[image].is_some() {
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

fn removals(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    target: ReclaimTarget,
    order: &[usize],
    steps: &[RemovalStep],
) -> Vec<PlannedRemoval> {
    // Candidates that are still present, in the order of their last use.
    let mut left: BTreeSet<(UnixMillis, usize)> =
        order.iter().map(|&image| (last_use(&snapshot.images[image]), image)).collect();
    let planned = |step: &RemovalStep| {
        let own = (last_use(&snapshot.images[step.image]), step.image);
        left.remove(&own);
        // Kubelet's order is another one.
        let exact = policy.accounting == Accounting::Exact;
        let passed_over = if exact { left.range(..(own.0, 0)).count() } else { 0 };
        removal(snapshot, policy, target, step, passed_over)
    };
    steps.iter().map(planned).collect()
}

fn removal(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    target: ReclaimTarget,
    step: &RemovalStep,
    passed_over: usize,
) -> PlannedRemoval {
    let image = &snapshot.images[step.image];
    let unused_for = unused_for(snapshot.now, image);
    let why = match (target, step.shared) {
        (ReclaimTarget::Old, _) => {
            let never = policy.age == AgeRule::Kubelet && image.last_used.is_none();
            RemovalReason::TooOld { unused_for: (!never).then_some(unused_for), maximum: policy.maximum_age }
        }
        (ReclaimTarget::Everything | ReclaimTarget::Nominal(i64::MAX), _) => RemovalReason::Unused,
        (_, Some((layer, images))) => {
            RemovalReason::SharedLayer { layer: snapshot.layers.all()[layer as usize].id.clone(), images }
        }
        (_, None) if image.names.is_empty() && policy.accounting == Accounting::Exact => {
            RemovalReason::Untagged { unused_for }
        }
        (_, None) => RemovalReason::Room { unused_for, passed_over },
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

/// Kubelet's text for a round that did not free enough; `disk` is the measurement before the round.
pub(in crate::gc) fn insufficient(disk: FsStats, freed: i64) -> String {
    let (used, size) = (used_percent(disk.capacity, disk.available), i64::try_from(disk.capacity));
    let size = size_text(size.unwrap_or(i64::MAX));
    format!(
        "Insufficient free disk space on the node's image filesystem ({used}% of {size} used). Failed to free \
         sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be \
         used by active images, logs, volumes, or other data."
    )
}
