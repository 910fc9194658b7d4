//! Plans against brute force: small graphs of images and layers, where every set of removals can be enumerated.

use std::collections::BTreeSet;
use std::time::Duration;

use larder::gc::{
    DiskSpace, GcDecision, GcGoal, GcImage, GcPlan, GcPolicy, GcSnapshot, GcStrategy, ImageLabels,
    InodeThresholds, LayerUsageIndex, MeasuredLayer, RetainReason, UnixMillis, WhenUnreachable, plan,
};
use larder::image_service::FsStats;
use larder::retention::{KeepRule, KeptBy, Lease, LeasePurpose, RetentionPurpose, Selector};
use proptest::prelude::*;

const NOW: i64 = 1_000_000;
const MINIMUM_AGE: i64 = 1_000;

#[derive(Debug, Clone)]
struct PlanCase {
    /// Bytes and inodes of each layer, and whether something else references it.
    layers: Vec<(u64, u64, bool)>,
    images: Vec<GeneratedImage>,
    /// Percent of all bytes, and of all inodes, that images take and that have to be free.
    bytes: u64,
    inodes: u64,
}

#[derive(Debug, Clone)]
struct GeneratedImage {
    layers: BTreeSet<usize>,
    known: bool,
    size: u64,
    last_used: Option<i64>,
    first_seen: i64,
    used: bool,
    pinned: bool,
}

fn sketch(layers: usize) -> impl Strategy<Value = GeneratedImage> {
    let rarely = || proptest::bool::weighted(0.12);
    (
        proptest::collection::btree_set(0..layers, 0..=layers.min(5)),
        proptest::bool::weighted(0.9),
        0..50_u64,
        proptest::option::of(0..8_i64),
        prop_oneof![4 => 0..4_i64, 1 => NOW - MINIMUM_AGE..NOW],
        rarely(),
        rarely(),
    )
        .prop_map(|(layers, known, size, last_used, first_seen, used, pinned)| GeneratedImage {
            layers,
            known,
            size,
            last_used,
            first_seen,
            used,
            pinned,
        })
}

fn case() -> impl Strategy<Value = PlanCase> {
    (1..10_usize).prop_flat_map(|layers| {
        let size = prop_oneof![1 => Just(0), 6 => 1..100_u64];
        let layer = (size.clone(), size, proptest::bool::weighted(0.08));
        let images = proptest::collection::vec(sketch(layers), 0..=12);
        (proptest::collection::vec(layer, layers), images, 0..120_u64, prop_oneof![Just(0), 0..120_u64])
            .prop_map(|(layers, images, bytes, inodes)| PlanCase { layers, images, bytes, inodes })
    })
}

fn lease(seconds: u64) -> RetentionPurpose {
    RetentionPurpose::Lease(Lease { purpose: LeasePurpose::Request, left: Duration::from_secs(seconds) })
}

fn name(image: usize) -> String {
    format!("i{image:02}")
}

impl PlanCase {
    fn removable(&self, image: usize) -> bool {
        let image = &self.images[image];
        !image.used && !image.pinned && image.first_seen <= NOW - MINIMUM_AGE
    }

    fn amount(&self, layer: usize) -> DiskSpace {
        DiskSpace { bytes: self.layers[layer].0, inodes: self.layers[layer].1 }
    }

    /// Returns the space that removing exactly these images frees.
    fn frees(&self, gone: &BTreeSet<usize>) -> DiskSpace {
        let stays = |layer: usize| {
            let held = |(at, image): (usize, &GeneratedImage)| {
                !gone.contains(&at) && image.known && image.layers.contains(&layer)
            };
            self.layers[layer].2 || self.images.iter().enumerate().any(held)
        };
        let had = |layer: usize| {
            gone.iter().any(|&at| self.images[at].known && self.images[at].layers.contains(&layer))
        };
        let layers = (0..self.layers.len()).filter(|&layer| had(layer) && !stays(layer));
        let unknown = gone.iter().filter(|&&at| !self.images[at].known);
        layers
            .map(|layer| self.amount(layer))
            .chain(unknown.map(|&at| DiskSpace::estimate(self.images[at].size)))
            .sum()
    }

    fn need(&self) -> DiskSpace {
        let all: BTreeSet<usize> = (0..self.images.len()).collect();
        let total = self.frees(&all);
        DiskSpace { bytes: total.bytes * self.bytes / 100, inodes: total.inodes * self.inodes / 100 }
    }

    fn misses(&self, gone: &BTreeSet<usize>) -> bool {
        self.frees(gone).shortfall_to(self.need()) != DiskSpace::ZERO
    }

    /// A snapshot in which exactly the need is missing from what the policy wants free; images in the order given.
    fn snapshot(&self, order: &[usize]) -> (GcSnapshot, GcPolicy) {
        let need = self.need();
        let mut layers = LayerUsageIndex::unknown();
        let mut ids: Vec<usize> = (0..self.layers.len()).collect();
        if order.first() != Some(&0) {
            ids.reverse();
        }
        for layer in ids {
            let held_by = self.layers[layer].2.then(|| "a mount".to_owned());
            layers.add(MeasuredLayer {
                id: format!("l{layer}").into(),
                amount: self.amount(layer),
                estimated: false,
                referenced_by: held_by,
            });
        }
        let mut images = Vec::new();
        for &image in order {
            let sketch = &self.images[image];
            if sketch.known {
                let of: Vec<String> = sketch.layers.iter().map(|layer| format!("l{layer}")).collect();
                layers.add_image(name(image), of, DiskSpace::ZERO);
            }
            let lease = lease(60);
            images.push(GcImage {
                id: name(image).into(),
                handler: String::new(),
                artifact_type: String::new(),
                names: [].into(),
                size: sketch.size,
                pinned: sketch.pinned,
                first_seen: UnixMillis(sketch.first_seen),
                last_used: sketch.last_used.map(UnixMillis),
                retained_by: if sketch.used { vec![lease] } else { Vec::new() },
                failed: None,
            });
        }
        // Nothing is free, and the thresholds require exactly the need.
        let disk = FsStats {
            capacity: 1_000_000,
            available: 0,
            inodes: 100 * need.inodes.max(1),
            inodes_free: 0,
            reserved: 0,
        };
        let inodes =
            InodeThresholds { high_percent: if need.inodes > 0 { 99 } else { 100 }, low_percent: 99 };
        let policy = GcPolicy {
            high_threshold_percent: 100,
            low_threshold_percent: 100,
            min_free_bytes: need.bytes,
            inodes: (need.inodes > 0).then_some(inodes),
            minimum_age: Duration::from_millis(MINIMUM_AGE.unsigned_abs()),
            when_unreachable: WhenUnreachable::All,
            ..GcPolicy::default()
        };
        let snapshot = GcSnapshot {
            now: UnixMillis(NOW),
            began: UnixMillis(0),
            watched: UnixMillis(0),
            images,
            layers,
            labels: ImageLabels::new(),
            disk: Some(disk),
            reclaimed: DiskSpace::ZERO,
        };
        (snapshot, policy)
    }

    fn plan(&self, order: &[usize]) -> GcPlan {
        let (snapshot, policy) = self.snapshot(order);
        plan(&snapshot, &policy, GcGoal::Thresholds)
    }

    fn rank(&self, image: usize) -> (i64, KubeletRank) {
        let GeneratedImage { last_used, first_seen, .. } = self.images[image];
        (last_used.unwrap_or(first_seen), self.kubelet_rank(image))
    }

    fn kubelet_rank(&self, image: usize) -> KubeletRank {
        (self.images[image].last_used, self.images[image].first_seen, image)
    }
}

/// Never used comes first, whenever it was first seen.
type KubeletRank = (Option<i64>, i64, usize);

fn at(id: &str) -> usize {
    id[1..].parse().expect("ids are numbered")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_is_what_brute_force_would_choose(case in case()) {
        let order: Vec<usize> = (0..case.images.len()).collect();
        let plan = case.plan(&order);
        prop_assert_eq!(plan.need, case.need());

        let mut gone = BTreeSet::new();
        for removal in &plan.removals {
            let image = at(removal.id.as_str());
            prop_assert!(case.removable(image), "{} must stay", removal.id);
            let before = case.frees(&gone);
            prop_assert!(gone.insert(image), "{} goes twice", removal.id);
            prop_assert_eq!(before + removal.frees, case.frees(&gone), "{} promises wrongly", removal.id);
        }
        prop_assert_eq!(plan.expected_freed, case.frees(&gone));

        let removable: Vec<usize> = order.iter().copied().filter(|&image| case.removable(image)).collect();
        let subset = |bits: u32| removable.iter().enumerate().filter(move |(n, _)| bits >> n & 1 == 1).map(|(_, &image)| image);
        let reachable = (0..1_u32 << removable.len()).any(|bits| !case.misses(&subset(bits).collect()));
        prop_assert_eq!(plan.reachable, reachable);
        prop_assert_eq!(case.misses(&gone), !reachable);

        if let (true, Some(last)) = (reachable, plan.removals.last()) {
            let mut without = gone.clone();
            without.remove(&at(last.id.as_str()));
            prop_assert!(case.misses(&without), "the last removal was not needed");
            // No image is removed if older ones alone free enough.
            let youngest = gone.iter().map(|&image| case.rank(image)).max().expect("something goes");
            let older = removable.iter().copied().filter(|&image| case.rank(image) < youngest).collect();
            prop_assert!(case.misses(&older), "older images would have been enough");
        }
        for &image in &gone {
            let mut without = gone.clone();
            without.remove(&image);
            prop_assert_ne!(case.frees(&without), case.frees(&gone), "{} goes in vain", name(image));
        }

        prop_assert_eq!(plan.decisions.len(), case.images.len());
        for decided in &plan.decisions {
            let image = at(decided.id.as_str());
            prop_assert_eq!(matches!(decided.decision, GcDecision::Remove(_)), gone.contains(&image));
            prop_assert_eq!(decided.alone, case.frees(&BTreeSet::from([image])));
            if decided.decision == GcDecision::Retain(RetainReason::FreesNothing) {
                let all: BTreeSet<usize> = removable.iter().copied().collect();
                let mut without = all.clone();
                without.remove(&image);
                prop_assert_eq!(case.frees(&without), case.frees(&all), "it would have freed something");
            }
        }
    }

    /// A goal in reach has the same plan by each rule; one out of reach removes no more than all, and by `worthwhile`
    /// only what frees half of what is missing together, or a tenth alone.
    #[test]
    fn a_rule_for_goals_out_of_reach_changes_no_other_plan(case in case()) {
        let order: Vec<usize> = (0..case.images.len()).collect();
        let (snapshot, policy) = case.snapshot(&order);
        let by = |rule| plan(&snapshot, &GcPolicy { when_unreachable: rule, ..policy.clone() }, GcGoal::Thresholds);
        let (all, worthwhile, nothing) = (by(WhenUnreachable::All), by(WhenUnreachable::Worthwhile), by(WhenUnreachable::Nothing));
        prop_assert!(worthwhile.reachable == all.reachable && nothing.reachable == all.reachable);
        if all.reachable {
            prop_assert_eq!(&worthwhile, &all);
            prop_assert_eq!(&nothing, &all);
            return Ok(());
        }
        prop_assert!(nothing.removals.is_empty());
        let removed = |plan: &GcPlan| plan.removals.iter().map(|removal| at(removal.id.as_str())).collect::<BTreeSet<_>>();
        prop_assert!(removed(&worthwhile).is_subset(&removed(&all)));
        prop_assert_eq!(worthwhile.expected_freed, case.frees(&removed(&worthwhile)));
        prop_assert_eq!(worthwhile.reclaimable, all.expected_freed);
        let is_part = |amount: DiskSpace, parts: u64| {
            let need = case.need();
            (need.bytes > 0 && amount.bytes * parts >= need.bytes) || (need.inodes > 0 && amount.inodes * parts >= need.inodes)
        };
        if is_part(all.expected_freed, 2) {
            prop_assert_eq!(removed(&worthwhile), removed(&all));
        } else {
            prop_assert!(worthwhile.removals.is_empty() || is_part(worthwhile.expected_freed, 10));
        }
    }

    #[test]
    fn the_order_of_input_does_not_matter(case in case(), seed in any::<u64>()) {
        let order: Vec<usize> = (0..case.images.len()).collect();
        let mut shuffled = order.clone();
        let mut dice = crate::world::SeededRandom::new(seed);
        for n in (1..shuffled.len()).rev() {
            let other = usize::try_from(dice.roll(n as u64 + 1)).expect("small");
            shuffled.swap(n, other);
        }
        prop_assert_eq!(case.plan(&order), case.plan(&order));
        prop_assert_eq!(case.plan(&order), case.plan(&shuffled));
    }

    #[test]
    fn nominal_plans_are_the_shortest_run_of_oldest_images_that_adds_up(case in case()) {
        let order: Vec<usize> = (0..case.images.len()).collect();
        let (mut snapshot, policy) = case.snapshot(&order);
        let policy = GcPolicy { strategy: GcStrategy::Kubelet, high_threshold_percent: 50, low_threshold_percent: 50, ..policy };
        let wanted = case.images.iter().map(|image| image.size).sum::<u64>() * case.bytes / 100;
        snapshot.disk = Some(FsStats { capacity: 1000, available: 500_u64.saturating_sub(wanted), ..FsStats::default() });
        let wanted = wanted.min(500);
        let plan = plan(&snapshot, &policy, GcGoal::Thresholds);
        let mut oldest: Vec<usize> = order.into_iter().filter(|&image| case.removable(image)).collect();
        oldest.sort_by_key(|&image| case.kubelet_rank(image));
        let mut expected = Vec::new();
        let mut sum = 0;
        for image in oldest {
            expected.push(name(image));
            sum += case.images[image].size;
            if sum >= wanted {
                break;
            }
        }
        let removed: Vec<&str> = plan.removals.iter().map(|removal| removal.id.as_str()).collect();
        prop_assert_eq!(removed, expected);
    }
}

fn disk(capacity: u64, available: u64) -> FsStats {
    FsStats { capacity, available, inodes: 0, inodes_free: 0, reserved: 0 }
}

fn empty(disk: FsStats) -> GcSnapshot {
    GcSnapshot {
        now: UnixMillis(NOW),
        began: UnixMillis(0),
        watched: UnixMillis(0),
        images: Vec::new(),
        layers: LayerUsageIndex::unknown(),
        labels: ImageLabels::new(),
        disk: Some(disk),
        reclaimed: DiskSpace::ZERO,
    }
}

#[test]
fn odd_disks_ask_for_nothing_and_break_nothing() {
    for odd in [disk(0, 0), disk(0, 10), disk(10, 5000), disk(u64::MAX, u64::MAX)] {
        let plan = plan(&empty(odd), &GcPolicy::default(), GcGoal::Thresholds);
        assert!(plan.removals.is_empty() && plan.need == DiskSpace::ZERO, "{odd:?}");
    }
    let full = plan(&empty(disk(u64::MAX, 0)), &GcPolicy::default(), GcGoal::Thresholds);
    assert!(!full.reachable);
}

#[test]
fn an_image_that_is_not_in_the_list_keeps_its_layers() {
    let case = PlanCase {
        layers: vec![(100, 1, false)],
        images: vec![sketched(&[0], None, false)],
        bytes: 100,
        inodes: 0,
    };
    let (mut snapshot, policy) = case.snapshot(&[0]);
    assert_eq!(plan(&snapshot, &policy, GcGoal::Thresholds).expected_freed.bytes, 100);
    snapshot.layers.add_image("came later", ["l0"], DiskSpace::ZERO);
    let plan = plan(&snapshot, &policy, GcGoal::Thresholds);
    assert!(plan.removals.is_empty() && !plan.reachable);
    assert_eq!(plan.decisions[0].decision, GcDecision::Retain(RetainReason::FreesNothing));
    assert_eq!(plan.decisions[0].alone, DiskSpace::ZERO);
}

#[test]
fn no_image_is_removed_only_for_its_metadata_files() {
    let case = PlanCase {
        layers: vec![(100, 1, false), (30, 1, false)],
        images: vec![sketched(&[0], None, false), sketched(&[0, 1], Some(5), true)],
        bytes: 0,
        inodes: 0,
    };
    let (mut snapshot, policy) = case.snapshot(&[0, 1]);
    let own = DiskSpace { bytes: 4096, inodes: 1 };
    snapshot.layers.add_image(name(0), ["l0"], own);
    let plan = plan(&snapshot, &policy, GcGoal::Free { bytes: 50 });
    assert!(plan.removals.is_empty() && !plan.reachable, "{:?}", plan.removals);
    assert_eq!(plan.decisions[0].decision, GcDecision::Retain(RetainReason::FreesNothing));
    assert_eq!(plan.decisions[0].alone, own);
}

/// As `larder df` counts them: in use, pinned, kept, leased.
#[test]
fn a_lease_is_the_reason_only_without_another_one_and_the_longest_counts() {
    let case = PlanCase {
        layers: vec![(100, 1, false)],
        images: vec![sketched(&[0], None, false)],
        bytes: 100,
        inodes: 0,
    };
    let (mut snapshot, mut policy) = case.snapshot(&[0]);
    snapshot.images[0].retained_by = vec![lease(60), lease(600)];
    let reason = |snapshot: &GcSnapshot, policy: &GcPolicy| match plan(snapshot, policy, GcGoal::AllUnused)
        .decisions
        .remove(0)
        .decision
    {
        GcDecision::Retain(reason) => reason,
        removed @ GcDecision::Remove(_) => panic!("{removed}"),
    };
    let leased = reason(&snapshot, &policy);
    assert_eq!(leased, RetainReason::Leased { left: Duration::from_secs(600) });
    assert_eq!(leased.to_string(), "leased (expires in 10m0s)");
    policy.keep = vec![KeepRule::new(Selector::Digest(name(0)))];
    assert!(matches!(reason(&snapshot, &policy), RetainReason::Kept(KeptBy { index: 0, .. })));
    let mount = RetentionPurpose::Mount { target: "/srv/app".into(), mounted: true };
    snapshot.images[0].retained_by.push(mount.clone());
    let RetainReason::InUse(uses) = reason(&snapshot, &policy) else { panic!("in use") };
    assert_eq!(uses[0], mount, "before leases");
}

#[test]
fn images_below_the_maximum_age_are_reported() {
    let case = PlanCase {
        layers: vec![(100, 1, false)],
        images: vec![GeneratedImage { first_seen: NOW - 10, ..sketched(&[0], None, false) }],
        bytes: 0,
        inodes: 0,
    };
    let (mut snapshot, policy) = case.snapshot(&[0]);
    snapshot.disk = Some(disk(1000, 1000));
    let decision = |maximum| {
        let policy = GcPolicy { maximum_age: Duration::from_secs(maximum), ..policy.clone() };
        plan(&snapshot, &policy, GcGoal::Thresholds).decisions[0].decision.clone()
    };
    assert!(matches!(decision(2), GcDecision::Retain(RetainReason::TooYoung { .. })));
    assert_eq!(decision(0), GcDecision::Retain(RetainReason::NotNeeded));
}

#[test]
fn every_reason_reads_as_a_sentence() {
    let case = PlanCase {
        layers: vec![(100, 1, false), (10, 1, false)],
        images: vec![
            sketched(&[0, 1], None, false),
            sketched(&[0], Some(5), true),
            sketched(&[1], Some(7), false),
            GeneratedImage { pinned: true, ..sketched(&[], Some(7), false) },
            GeneratedImage { first_seen: NOW - 10, ..sketched(&[], Some(7), false) },
        ],
        bytes: 9,
        inodes: 0,
    };
    let decisions: Vec<String> =
        case.plan(&[0, 1, 2, 3, 4]).decisions.iter().map(|image| image.decision.to_string()).collect();
    assert_eq!(
        decisions,
        [
            "remove: one of 2 images removed together to free layer l1",
            "retain: leased (expires in 1m0s)",
            "remove: one of 2 images removed together to free layer l1",
            "retain: pinned by the runtime",
            "retain: first seen 0s ago (minimum age 1s)",
        ]
    );
}

fn sketched(layers: &[usize], last_used: Option<i64>, used: bool) -> GeneratedImage {
    let layers = layers.iter().copied().collect();
    GeneratedImage { layers, known: true, size: 1, last_used, first_seen: 0, used, pinned: false }
}
