//! Weeks of a node: pods come and go, images are pulled, larder restarts, the machine boots, the clock is set. Removed
//! images were always unused and old enough, and a round frees what it must and no more.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder::gc::{Collector, GcError, GcPolicy, GcReport, UsageRecordFileStore, WhenUnreachable};
use larder::retention::{KeepRule, Selector};

use crate::world::{FakeNode, OwnPolicy as _, SeededRandom};

const MINUTE: i64 = 60_000;
const DAY: i64 = 24 * 60 * MINUTE;
const CAPACITY: u64 = 100_000;

struct SimulatedNode {
    world: FakeNode,
    dice: SeededRandom,
    /// True time, independent of the clocks.
    now: i64,
    /// For each image when it was truly last pulled, and last used.
    wanted: BTreeMap<String, i64>,
    removed: usize,
    rounds: usize,
}

/// Nodes with an even seed remove only what helps when a goal is out of reach.
fn policy(seed: u64) -> GcPolicy {
    let helpful = seed.is_multiple_of(2);
    GcPolicy {
        when_unreachable: if helpful { WhenUnreachable::Worthwhile } else { WhenUnreachable::All },
        maximum_age: Duration::from_secs(4 * 86400),
        keep: vec![KeepRule::new(Selector::Name("base0*".into()))],
        ..GcPolicy::default()
    }
}

fn collector(world: &FakeNode, path: &Path, seed: u64) -> Collector {
    world.collector().policy(policy(seed)).records(Arc::new(UsageRecordFileStore::new(path))).build()
}

impl SimulatedNode {
    fn new(seed: u64) -> SimulatedNode {
        let world = FakeNode::new(CAPACITY);
        let mut dice = SeededRandom::new(seed);
        for base in 0..4 {
            for app in 0..10 {
                let layers: Vec<(String, u64)> = std::iter::once((format!("b{base}"), 3000))
                    .chain((0..=dice.roll(3)).map(|n| (format!("s{base}-{n}"), 700 * (n + 1))))
                    .chain([(format!("a{base}-{app}"), 100 + dice.roll(4000))])
                    .collect();
                let layers: Vec<(&str, u64)> = layers.iter().map(|(id, size)| (id.as_str(), *size)).collect();
                world.publish(&format!("base{base}-app{app}"), &layers);
            }
        }
        world.state().wall = 20_000 * DAY;
        world.state().pinned.insert("base1-app1".into());
        SimulatedNode { world, dice, now: 0, wanted: BTreeMap::new(), removed: 0, rounds: 0 }
    }

    /// Whatever happens on a node in ten minutes.
    fn live(&mut self) {
        let millis = 10 * MINUTE;
        self.now += millis;
        self.world.advance(millis);
        let mut state = self.world.state();
        if self.dice.chance(60) {
            let (base, app) = (self.dice.roll(4), self.dice.roll(10));
            let image = format!("base{base}-app{app}");
            let fits = state.used() + state.size_of(&image) <= CAPACITY;
            if fits && state.present.insert(image.clone()) {
                self.wanted.insert(image.clone(), self.now);
            }
            if state.present.contains(&image) && self.dice.chance(70) {
                state.containers.insert(format!("c{}", self.now), image);
            }
        }
        let ending: Vec<String> = state.containers.keys().filter(|_| self.dice.chance(8)).cloned().collect();
        for container in ending {
            state.containers.remove(&container);
        }
        for image in state.containers.values() {
            self.wanted.insert(image.clone(), self.now);
        }
        if self.dice.chance(30) {
            let most = CAPACITY - state.image_bytes();
            state.other = most.min(10_000 + self.dice.roll(60_000));
        }
        if self.dice.chance(3) {
            // The clock is set.
            let days = i64::try_from(self.dice.roll(60)).expect("small") - 30;
            state.wall += days * DAY + 1234;
        }
        if self.dice.chance(2) {
            // The machine boots, and its clock may have lost some time.
            state.boot += 1;
            state.since_boot = 1000;
            if self.dice.chance(50) {
                state.wall -= 10 * DAY;
            }
        }
    }

    async fn round(&mut self, collector: &Collector) {
        let used: Vec<String> = self.world.state().containers.values().cloned().collect();
        let before = self.world.removals().len();
        let outcome = collector.collect().await;
        let removed = self.world.removals().split_off(before);
        for image in &removed {
            let unwanted = self.now - self.wanted[image];
            assert!(!used.contains(image), "{image} is in use");
            assert!(!image.starts_with("base0"), "{image} is kept");
            assert_ne!(image, "base1-app1", "it is pinned");
            assert!(unwanted >= 2 * MINUTE, "{image} was wanted {unwanted} ms ago");
        }
        self.rounds += 1;
        self.removed += removed.len();
        match outcome {
            Ok(report) => self.check_enough(&report),
            Err(GcError::Insufficient(_))
                if collector.policy().when_unreachable == WhenUnreachable::Worthwhile => {}
            Err(GcError::Insufficient(_)) => {
                let left = collector.plan(larder::gc::GcGoal::AllUnused).await.expect("the node answers");
                assert_eq!(left.expected_freed.bytes, 0, "it gave up too early");
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn check_enough(&self, report: &GcReport) {
        let used = self.world.state().used();
        assert!(used < CAPACITY * 85 / 100, "{used} in use after a round that succeeded");
        for swept in &report.swept {
            for done in &swept.removed {
                assert_eq!(done.freed, Some(done.removal.frees), "promised and freed");
            }
        }
        let room = report.plans.last().filter(|plan| !plan.removals.is_empty() && plan.need.bytes > 0);
        if let (Some(plan), Some(swept)) = (room, report.swept.last()) {
            let last = swept.removed.last().expect("something had to go").removal.frees.bytes;
            let freed: u64 = swept.removed.iter().map(|done| done.removal.frees.bytes).sum();
            assert!(
                freed >= plan.need.bytes && freed - plan.need.bytes < last,
                "overshoot of an image or more"
            );
        }
    }
}

async fn weeks(seed: u64) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
    let path = dir.path().join("images.json");
    let mut node = SimulatedNode::new(seed);
    let mut running = collector(&node.world, &path, seed);
    for _ in 0..14 * 24 * 6 {
        let boot = node.world.state().boot;
        node.live();
        if node.dice.chance(5) || node.world.state().boot != boot {
            let before = running.records();
            running = collector(&node.world, &path, seed);
            assert_eq!(running.notice(), None);
            assert_eq!(running.records(), before, "a restart forgets nothing");
        }
        node.round(&running).await;
    }
    assert!(node.removed > 20 && node.rounds == 2016, "{} removed in {} rounds", node.removed, node.rounds);
}

#[test]
fn weeks_of_a_node_remove_nothing_that_is_wanted() {
    for seed in 1..=4 {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(weeks(seed));
    }
}
