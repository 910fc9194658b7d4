//! From a scene to a plan. Read [`plan`].

use super::release::{Graph, Step, alone};
use super::{Goal, ImageVerdict, Plan, Removal, Scene, Stays, Subject, Verdict, Why, unused_for};
use crate::gc::amount::Amount;
use crate::gc::disk::{self, size_text, used_percent, wanted_free, with_more_free};
use crate::gc::keep::{Keepable, kept};
use crate::gc::policy::{Accounting, AgeRule, GcPolicy};
use crate::gc::time::millis;
use crate::image_service::Disk;
use crate::reference::ImageId;

/// What a goal comes down to on one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gc) enum Aim {
    /// Nothing has to go.
    Nothing,
    /// Everything unused for too long.
    Old,
    /// Everything that may go.
    Everything,
    /// Nominal sizes must add up to this; at least one image goes.
    Nominal(i64),
    /// So much must be free.
    Free(Amount),
}

/// What the goal means on this disk.
pub(in crate::gc) fn aim(goal: Goal, disk: Option<Disk>, policy: &GcPolicy) -> Aim {
    match (goal, policy.accounting) {
        (Goal::Age, _) => Aim::Old,
        (Goal::AllUnused, Accounting::Nominal) => Aim::Nominal(i64::MAX),
        (Goal::AllUnused, Accounting::Exact) => Aim::Everything,
        (Goal::Free { bytes }, accounting) => {
            let bytes = bytes.saturating_add(bytes / 100 * u64::from(policy.free_margin_percent));
            match (accounting, disk) {
                (Accounting::Exact, Some(disk)) => {
                    let bytes = disk::free(disk).bytes.saturating_add(bytes);
                    Aim::Free(Amount { bytes, inodes: 0 })
                }
                _ => Aim::Nominal(i64::try_from(bytes).unwrap_or(i64::MAX)),
            }
        }
        (Goal::Thresholds, Accounting::Nominal) => {
            disk.and_then(|disk| disk::kubelet_wants(disk, policy)).map_or(Aim::Nothing, Aim::Nominal)
        }
        (Goal::Thresholds, Accounting::Exact) => {
            disk.and_then(|disk| wanted_free(disk, policy)).map_or(Aim::Nothing, Aim::Free)
        }
    }
}

/// What to remove for this goal, and why the rest stays.
pub fn plan(scene: &Scene, policy: &GcPolicy, goal: Goal) -> Plan {
    plan_for(scene, policy, goal, aim(goal, scene.disk, policy))
}

/// One whole round, as it would run now: what is too old, and then what the thresholds ask for.
pub fn plan_round(scene: &Scene, policy: &GcPolicy) -> Plan {
    let old = plan(scene, policy, Goal::Age);
    if old.removals.is_empty() {
        return plan(scene, policy, Goal::Thresholds);
    }
    let mut rest = scene.clone();
    for removal in &old.removals {
        rest.forget(&removal.id, &removal.handler);
    }
    rest.disk = old.after;
    let mut both = plan(&rest, policy, Goal::Thresholds);
    both.frees += old.frees;
    both.removals.splice(0..0, old.removals);
    let gone = old.verdicts.into_iter().filter(|image| matches!(image.verdict, Verdict::Goes(_)));
    both.verdicts.extend(gone);
    both.verdicts.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    both
}

/// The same for a part of a goal: what is still wanted.
pub(in crate::gc) fn plan_for(scene: &Scene, policy: &GcPolicy, goal: Goal, aim: Aim) -> Plan {
    let stays = standing(scene, policy, aim);
    let exact = policy.accounting == Accounting::Exact;
    let order = removable(&scene.images, &stays, exact);
    let mut examined = Vec::new();
    let need = needed(aim, scene.disk);
    let graph = Graph::new(&scene.images, &scene.layers, &order);
    let useless: Vec<bool> =
        (0..scene.images.len()).map(|image| exact && !graph.frees_something(image)).collect();
    let steps = match aim {
        Aim::Nothing => Vec::new(),
        Aim::Old | Aim::Everything if exact => graph.everything(),
        Aim::Old | Aim::Everything => order.iter().map(|&image| nominal(&scene.images, image)).collect(),
        Aim::Nominal(wanted) => add_up(&scene.images, &order, &stays, wanted, &mut examined),
        Aim::Free(_) => graph.until(need),
    };
    let frees: Amount = steps.iter().map(|step| step.frees).sum();
    let removals: Vec<Removal> = steps.iter().map(|step| removal(scene, policy, aim, step)).collect();
    let reached = match aim {
        Aim::Nominal(i64::MAX) => true,
        Aim::Nominal(wanted) => i128::from(frees.bytes) >= i128::from(wanted),
        _ => frees.short_of(need) == Amount::ZERO,
    };
    let mut goes: Vec<Option<Why>> = vec![None; scene.images.len()];
    for (step, removal) in steps.iter().zip(&removals) {
        goes[step.image] = Some(removal.why.clone());
    }
    Plan {
        goal,
        need,
        removals,
        verdicts: verdicts(scene, goes, stays, &useless),
        frees,
        reachable: reached,
        after: scene.disk.map(|disk| with_more_free(disk, frees)),
        examined,
    }
}

fn needed(aim: Aim, disk: Option<Disk>) -> Amount {
    match (aim, disk) {
        (Aim::Free(wanted), Some(disk)) => disk::free(disk).short_of(wanted),
        (Aim::Free(wanted), None) => wanted,
        (Aim::Nominal(wanted), _) => Amount { bytes: u64::try_from(wanted).unwrap_or(0), inodes: 0 },
        (Aim::Nothing | Aim::Old | Aim::Everything, _) => Amount::ZERO,
    }
}

/// What becomes of each image. `useless` ones free nothing by their removal.
fn verdicts(
    scene: &Scene,
    goes: Vec<Option<Why>>,
    stays: Vec<Option<Stays>>,
    useless: &[bool],
) -> Vec<ImageVerdict> {
    let alone = alone(&scene.images, &scene.layers);
    let images = scene.images.iter().zip(alone).zip(goes.into_iter().zip(stays)).enumerate();
    let verdict = |(index, ((image, alone), fate)): (usize, ((&Subject, Amount), _))| {
        let verdict = match fate {
            (Some(why), _) => Verdict::Goes(why),
            (None, Some(stays)) => Verdict::Stays(stays),
            (None, None) if useless[index] => Verdict::Stays(Stays::FreesNothing),
            (None, None) => Verdict::Stays(Stays::NotNeeded),
        };
        let (id, handler, names) = (image.id.clone(), image.handler.clone(), image.names.clone());
        let (first_seen, last_used) = (image.first_seen, image.last_used);
        ImageVerdict { id, handler, names, size: image.size, alone, first_seen, last_used, verdict }
    };
    let mut verdicts: Vec<ImageVerdict> = images.map(verdict).collect();
    verdicts.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    verdicts
}

/// For each image why it may not go, whatever is wanted; `None` for candidates.
fn standing(scene: &Scene, policy: &GcPolicy, aim: Aim) -> Vec<Option<Stays>> {
    let kept = if policy.keep.is_empty() {
        vec![None; scene.images.len()]
    } else {
        kept(scene.now, &policy.keep, &keepables(scene))
    };
    let judge = |(image, kept): (&Subject, Option<usize>)| {
        if image.id.is_empty() {
            return Some(Stays::InvalidId);
        }
        if !image.uses.is_empty() {
            return Some(Stays::InUse(image.uses.clone()));
        }
        if image.pinned {
            return Some(Stays::Pinned);
        }
        if let Some(rule) = kept {
            let known = scene.layers.of(&image.id).is_some_and(|known| known.labels.is_some());
            let text = policy.keep[rule].text_for(known);
            return Some(Stays::Kept { rule, text });
        }
        if let Some(error) = &image.failed {
            return Some(Stays::Failed(error.clone()));
        }
        match aim {
            Aim::Old => fresh(scene, policy, image),
            // The disk has room; what is past the maximum age may be too young to go for that.
            Aim::Nothing if policy.maximum_age.is_zero() => None,
            Aim::Nothing | Aim::Everything | Aim::Nominal(_) | Aim::Free(_) => spared(scene, policy, image),
        }
    };
    scene.images.iter().zip(kept).map(judge).collect()
}

/// The images of a scene as keep rules see them.
pub(in crate::gc) fn keepables(scene: &Scene) -> Vec<Keepable<'_>> {
    let see = scene.images.iter().map(|image| Keepable {
        id: &image.id,
        names: &image.names,
        labels: scene.layers.of(&image.id).and_then(|known| known.labels.as_ref()),
        size: image.size,
        first_seen: image.first_seen,
        last_used: image.last_used,
    });
    see.collect()
}

/// Why a candidate is spared by the space pass.
pub(super) fn spared(scene: &Scene, policy: &GcPolicy, image: &Subject) -> Option<Stays> {
    if image.last_used.is_some_and(|used| used >= scene.now) {
        return Some(Stays::ClockWentBack);
    }
    (scene.now.millis_since(image.first_seen) < millis(policy.minimum_age))
        .then(|| Stays::TooYoung { age: scene.now.since(image.first_seen), minimum: policy.minimum_age })
}

/// Why a candidate is spared by the age pass.
fn fresh(scene: &Scene, policy: &GcPolicy, image: &Subject) -> Option<Stays> {
    let maximum = millis(policy.maximum_age);
    if maximum == 0 {
        return Some(Stays::NotNeeded);
    }
    let old = match policy.age {
        AgeRule::Kubelet => {
            let running = scene.now.millis_since(scene.began) > maximum;
            running && image.last_used.is_none_or(|used| scene.now.millis_since(used) > maximum)
        }
        AgeRule::FromFirstSeen => {
            if let Some(stays) = spared(scene, policy, image) {
                return Some(stays);
            }
            let since = image.last_used.map_or(image.first_seen, |used| used.max(image.first_seen));
            // It may have been used every day until somebody began to look.
            let since = since.max(scene.watched);
            scene.now.millis_since(since) > maximum
        }
    };
    (!old).then_some(Stays::NotNeeded)
}

/// The candidates, least recently used first: never used before used, then by first seen, then by id. Where it does not
/// have to be kubelet's order, images that lost their last name go before all others: nobody asks for them any more.
fn removable(images: &[Subject], stays: &[Option<Stays>], nameless_first: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..images.len()).filter(|&image| stays[image].is_none()).collect();
    sort(&mut order, images);
    if nameless_first {
        order.sort_by_key(|&image| !images[image].names.is_empty());
    }
    order
}

fn sort(order: &mut [usize], images: &[Subject]) {
    let key = |image: &Subject| (image.last_used, image.first_seen);
    order.sort_unstable_by(|&a, &b| {
        let (a, b) = (&images[a], &images[b]);
        key(a).cmp(&key(b)).then_with(|| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)))
    });
}

fn nominal(images: &[Subject], image: usize) -> Step {
    let frees = Amount { bytes: images[image].size, inodes: 0 };
    Step { image, frees, estimated: true, shared: None }
}

/// Kubelet's space pass: nominal sizes, and a look at the sum after each removal.
fn add_up(
    images: &[Subject],
    order: &[usize],
    stays: &[Option<Stays>],
    wanted: i64,
    examined: &mut Vec<ImageId>,
) -> Vec<Step> {
    let passed_over =
        |stays: &Option<Stays>| matches!(stays, Some(Stays::ClockWentBack | Stays::TooYoung { .. }));
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

fn removal(scene: &Scene, policy: &GcPolicy, aim: Aim, step: &Step) -> Removal {
    let image = &scene.images[step.image];
    let unused_for = unused_for(scene.now, image);
    let why = match (aim, step.shared) {
        (Aim::Old, _) => {
            let never = policy.age == AgeRule::Kubelet && image.last_used.is_none();
            Why::TooOld { unused_for: (!never).then_some(unused_for), maximum: policy.maximum_age }
        }
        (Aim::Everything | Aim::Nominal(i64::MAX), _) => Why::Unused,
        (_, Some((layer, images))) => {
            Why::SharedLayer { layer: scene.layers.all()[layer as usize].id.clone(), images }
        }
        (_, None) => Why::Room { unused_for },
    };
    Removal {
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
pub(in crate::gc) fn insufficient(disk: Disk, freed: i64) -> String {
    let (used, size) = (used_percent(disk.capacity, disk.available), i64::try_from(disk.capacity));
    let size = size_text(size.unwrap_or(i64::MAX));
    format!(
        "Insufficient free disk space on the node's image filesystem ({used}% of {size} used). Failed to free \
         sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be \
         used by active images, logs, volumes, or other data."
    )
}
