//! The reasons for which images are retained, whatever is needed.

use std::collections::HashSet;

use super::strategy::ReclaimTarget;
use super::{GcImage, GcSnapshot, RetainReason, strategy};
use crate::gc::disk_space::DiskSpace;
use crate::gc::goal::GcGoal;
use crate::gc::policy::GcPolicy;
use crate::gc::unix_millis::millis;
use crate::retention::keep::{KeepRuleInput, matching_rules};
use crate::retention::set::in_order;
use crate::retention::{RetentionClass, RetentionPurpose};

/// The reason for which each image is retained; `None` for candidates.
pub(super) fn retain_reasons(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    goal: GcGoal,
    target: ReclaimTarget,
) -> Vec<Option<RetainReason>> {
    let retain_reason = |(image, entries): (&GcImage, Vec<RetentionPurpose>)| {
        protection(image, entries)
            .or_else(|| image.failed.clone().map(RetainReason::Failed))
            .or_else(|| retain_by_age(snapshot, policy, target, image))
            .or_else(|| (goal == GcGoal::Dangling && has_tag(image)).then_some(RetainReason::NotNeeded))
    };
    snapshot.images.iter().zip(retentions(snapshot, policy)).map(retain_reason).collect()
}

/// The reasons of the retention model for each image, in the order of their precedence.
fn retentions(snapshot: &GcSnapshot, policy: &GcPolicy) -> Vec<Vec<RetentionPurpose>> {
    let kept = if policy.keep.is_empty() {
        vec![None; snapshot.images.len()]
    } else {
        matching_rules(snapshot.now, &policy.keep, &keep_rule_inputs(snapshot))
    };
    let images = snapshot.images.iter().zip(kept);
    images.map(|(image, kept)| in_order(image.retained_by.iter().cloned(), image.pinned, kept)).collect()
}

/// The reason of the retention model that takes precedence.
fn protection(image: &GcImage, mut entries: Vec<RetentionPurpose>) -> Option<RetainReason> {
    if image.id.is_empty() {
        return Some(RetainReason::InvalidId);
    }
    match entries.first()?.class() {
        RetentionClass::Pinned => Some(RetainReason::Pinned),
        RetentionClass::InUse => {
            entries.retain(|entry| matches!(entry.class(), RetentionClass::InUse | RetentionClass::Leased));
            Some(RetainReason::InUse(entries))
        }
        _ => match entries.swap_remove(0) {
            RetentionPurpose::Kept(kept) => Some(RetainReason::Kept(kept)),
            first => {
                let leases = entries.iter().chain([&first]).filter_map(RetentionPurpose::lease);
                Some(RetainReason::Leased { left: leases.map(|lease| lease.left).max()? })
            }
        },
    }
}

fn retain_by_age(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    target: ReclaimTarget,
    image: &GcImage,
) -> Option<RetainReason> {
    match target {
        ReclaimTarget::Old if policy.maximum_age.is_zero() => Some(RetainReason::NotNeeded),
        ReclaimTarget::Old => strategy(policy).retain_by_age(snapshot, policy, image),
        // Nothing has to be freed. An image past the maximum age may still be younger than the minimum age.
        ReclaimTarget::Nothing if policy.maximum_age.is_zero() => None,
        ReclaimTarget::Nothing
        | ReclaimTarget::Everything
        | ReclaimTarget::NominalBytes(_)
        | ReclaimTarget::Free(_) => retain_by_minimum_age(snapshot, policy, image),
    }
}

/// The reason for which a candidate is too young to be removed for space.
pub(super) fn retain_by_minimum_age(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    image: &GcImage,
) -> Option<RetainReason> {
    if image.last_used.is_some_and(|used| used >= snapshot.now) {
        return Some(RetainReason::ClockWentBack);
    }
    // An image that was pulled or ensured counts as used at that time, when it is first seen.
    let was_used = image.last_used.is_some_and(|used| used > image.first_seen);
    let applies = policy.minimum_age_of_used || !was_used;
    (applies && snapshot.now.millis_since(image.first_seen) < millis(policy.minimum_age)).then(|| {
        RetainReason::TooYoung { age: snapshot.now.since(image.first_seen), minimum: policy.minimum_age }
    })
}

fn has_tag(image: &GcImage) -> bool {
    image.names.iter().any(|name| is_tag(name))
}

/// Whether a name of an image has a tag and no digest.
pub(in crate::gc) fn is_tag(name: &str) -> bool {
    !name.contains('@')
}

/// The snapshot's images as input for keep rules.
pub(in crate::gc) fn keep_rule_inputs(snapshot: &GcSnapshot) -> Vec<KeepRuleInput<'_>> {
    let inputs = snapshot.images.iter().map(|image| KeepRuleInput {
        id: &image.id,
        artifact_type: &image.artifact_type,
        names: &image.names,
        labels: snapshot.labels.get(&image.id),
        size: image.size,
        first_seen: image.first_seen,
        last_used: image.last_used,
    });
    inputs.collect()
}

/// Retains the most recently used candidates when space is needed, until the next one would exceed `keep_bytes` of the
/// policy. Layers count once, and not at all if an image that is retained anyway has them.
pub(super) fn retain_recent(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    target: ReclaimTarget,
    retained: &mut [Option<RetainReason>],
) {
    let keep_bytes = policy.keep_bytes;
    if keep_bytes == 0 || !target.is_amount() {
        return;
    }
    let layers_of =
        |image: &GcImage| snapshot.layers.layers_of(&image.id).map_or(&[][..], |known| &known.layers);
    let others = snapshot.images.iter().zip(retained.iter()).filter(|(_, reason)| reason.is_some());
    let mut counted: HashSet<u32> = others.flat_map(|(image, _)| layers_of(image)).copied().collect();
    let mut left = keep_bytes;
    for index in strategy(policy).removal_order(&snapshot.images, retained).into_iter().rev() {
        let image = &snapshot.images[index];
        let bytes = match snapshot.layers.layers_of(&image.id) {
            None => image.size,
            Some(known) => {
                let new = known.layers.iter().filter(|layer| !counted.contains(layer));
                let new: DiskSpace = new.map(|&layer| snapshot.layers.all()[layer as usize].amount).sum();
                (new + known.own).bytes
            }
        };
        let Some(rest) = left.checked_sub(bytes) else { return };
        left = rest;
        counted.extend(layers_of(image));
        retained[index] = Some(RetainReason::Recent { keep_bytes });
    }
}
