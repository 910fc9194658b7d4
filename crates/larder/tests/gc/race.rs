//! A concurrent ensure and collection, in many orders: an image that an ensure returned is present until its lease
//! expires.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder::gc::GcPolicy;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, ImageManager, PullConfig, PullPolicy};
use larder::retention::RemovalGate;
use tokio::time::{Instant, sleep};

use crate::world::{FakeNode, OwnPolicy as _, SeededRandom};

const LEASE: Duration = Duration::from_secs(60);

/// When each lease expires.
type PromisedUntil = Arc<Mutex<HashMap<String, Instant>>>;

fn check(world: &FakeNode, promises: &PromisedUntil, seed: u64) {
    let state = world.state();
    for (image, until) in promises.lock().expect("no thread panicked").iter() {
        assert!(
            *until <= Instant::now() || state.present.contains(image),
            "seed {seed}: {image} is gone, {:?} before its lease ends",
            until.duration_since(Instant::now())
        );
    }
}

async fn ensures(
    manager: Arc<ImageManager>,
    world: FakeNode,
    promises: PromisedUntil,
    mut dice: SeededRandom,
    seed: u64,
) {
    let policies = [PullPolicy::Always, PullPolicy::IfNotPresent];
    for _ in 0..12 {
        let image = format!("i{}:1", dice.roll(3));
        let policy = policies[usize::from(dice.chance(60))].clone();
        let asked = Instant::now();
        let request = EnsureRequest::new(image.clone(), policy, Pod::default());
        manager.ensure(&request).await.expect("the registry has all of them");
        promises.lock().expect("no thread panicked").insert(image, asked + LEASE);
        check(&world, &promises, seed);
        if dice.chance(20) {
            sleep(Duration::from_secs(dice.roll(80))).await;
        }
    }
}

async fn one_order(seed: u64) {
    let world = FakeNode::new(1_000_000);
    for n in 0..3 {
        let layer = format!("l{n}");
        world.publish(&format!("i{n}:1"), &[(layer.as_str(), 10)]);
    }
    let mut dice = SeededRandom::new(seed);
    world.interleaved(SeededRandom::new(seed + 1_000_000));
    let gate = Arc::new(RemovalGate::default());
    // Kubelet does not recheck before a removal, so only the gate protects the image.
    let policy = if seed.is_multiple_of(2) { GcPolicy::default() } else { GcPolicy::kubelet() };
    let policy = GcPolicy { minimum_age: Duration::ZERO, ..policy };
    let collector = Arc::new(world.collector().policy(policy).gate(gate.clone()).build());
    let config = PullConfig { registry_pull_qps: 0, ..PullConfig::default() };
    let manager = ImageManager::new(Arc::new(world.clone())).with_config(&config).with_lease(gate, LEASE);
    let (manager, promises) = (Arc::new(manager), PromisedUntil::default());
    let mut tasks = Vec::new();
    for n in 0..3 {
        let dice = SeededRandom::new(seed * 10 + n);
        tasks.push(tokio::spawn(ensures(manager.clone(), world.clone(), promises.clone(), dice, seed)));
    }
    let collecting = {
        let (world, promises) = (world.clone(), promises.clone());
        tokio::spawn(async move {
            for _ in 0..60 {
                world.advance(1000);
                collector.delete_unused().await.expect("nothing fails here");
                check(&world, &promises, seed);
                if dice.chance(30) {
                    sleep(Duration::from_secs(dice.roll(15))).await;
                }
            }
        })
    };
    for task in tasks {
        task.await.unwrap_or_else(|error| panic!("{error}"));
    }
    collecting.await.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn an_ensured_image_is_retained_until_its_lease_ends() {
    for seed in 0..400 {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(one_order(seed));
    }
}
