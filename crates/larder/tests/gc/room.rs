//! Room for pulls that were refused for lack of space.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use larder::backend::{BackendError, CallErrorKind, ReclaimBytes};
use larder::gc::{ActivityKind, GcPolicy, ImageActivity, UnixMillis};
use larder::pod::Pod;
use larder::pull::RoomOutcome::Made;
use larder::pull::{EnsureRequest, ImageManager, PullConfig, PullPolicy, RoomMaker, RoomOutcome};
use larder::retention::{LeasePurpose, RemovalGate};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull};

use crate::world::{FakeNode, OwnPolicy as _, id};

fn policy() -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, free_margin_percent: 0, ..GcPolicy::default() }
}

/// The outcome where a round may free this much.
fn not_enough(bytes: u64) -> RoomOutcome {
    RoomOutcome::NotEnough { reclaimable: Some(bytes) }
}

/// Four unused images of 1000 bytes, the first one unused for longest.
fn world() -> FakeNode {
    let world = FakeNode::new(10_000);
    for name in ["a", "b", "c", "d"] {
        world.have(name, &[(name, 1000)]);
        world.advance(1000);
    }
    world
}

#[tokio::test(start_paused = true)]
async fn as_many_images_are_removed_as_pulls_need() {
    let world = world();
    let collector = world.collector().policy(policy()).build();
    let made = tokio::join!(
        collector.make_room(ReclaimBytes::exactly(500)),
        collector.make_room(ReclaimBytes::exactly(400)),
        collector.make_room(ReclaimBytes::exactly(500)),
        collector.make_room(ReclaimBytes::exactly(1_000_000)),
    );
    assert_eq!(made, (Made, Made, Made, not_enough(1000)));
    assert_eq!(world.removals(), ["a", "b", "c"]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_looks_again_after_others_got_the_room_that_it_asked_for() {
    let world = world();
    let collector = world.collector().policy(policy()).build();
    let room = |bytes| collector.make_room(ReclaimBytes::exactly(bytes));
    let made = tokio::join!(room(3500), room(500), room(3600));
    assert_eq!(
        made,
        (Made, Made, not_enough(0)),
        "the round of the first one freed less than the last one needs"
    );
    assert_eq!(room(500).await, not_enough(0), "nothing was freed since");
}

#[tokio::test(start_paused = true)]
async fn pulls_that_wait_share_a_round_unless_one_asks_for_too_much() {
    let world = world();
    let collector = world.collector().policy(policy()).build();
    // The first one has a round of its own; those that come while it runs fit into one image together.
    let made = tokio::join!(
        collector.make_room(ReclaimBytes::exactly(900)),
        collector.make_room(ReclaimBytes::exactly(400)),
        collector.make_room(ReclaimBytes::exactly(300))
    );
    assert_eq!(made, (Made, Made, Made));
    assert_eq!(world.removals().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_retained_stays_and_nothing_is_removed_in_vain() {
    let world = world();
    let gate = Arc::new(RemovalGate::default());
    let collector = world.collector().gate(Arc::clone(&gate)).policy(policy()).build();
    for name in ["a", "b", "c"] {
        let check = gate.begin_presence_check();
        assert!(check.lease(&id(name), LeasePurpose::Ensure, Duration::from_secs(600)).await);
    }
    assert_eq!(collector.make_room(ReclaimBytes::exactly(1500)).await, not_enough(1000));
    assert_eq!(world.removals().len(), 0);
    assert_eq!(collector.make_room(ReclaimBytes::exactly(500)).await, Made);
    assert_eq!(world.removals(), ["d"]);
}

#[tokio::test(start_paused = true)]
async fn what_can_be_freed_is_enough_if_it_is_the_least() {
    let world = world();
    let gate = Arc::new(RemovalGate::default());
    let collector = world.collector().gate(Arc::clone(&gate)).policy(policy()).build();
    for name in ["a", "b"] {
        lease(&gate, name, LeasePurpose::Ensure).await;
    }
    let room = |least, likely| collector.make_room(ReclaimBytes { least, likely });
    assert_eq!(room(2500, 3500).await, not_enough(2000));
    assert_eq!(world.removals().len(), 0);
    assert_eq!(room(500, 3500).await, Made);
    assert_eq!(world.removals(), ["c", "d"]);
}

#[tokio::test(start_paused = true)]
async fn the_minimum_age_retains_only_what_no_container_has_used() {
    let world = world();
    let policy = GcPolicy { minimum_age: Duration::from_secs(3600), ..policy() };
    let collector = world.collector().policy(policy).build();
    collector.detect().await.unwrap();
    world.advance(1000);
    world.state().containers = [("container of b".to_owned(), "b".to_owned())].into();
    collector.detect().await.unwrap();
    world.state().containers.clear();
    world.advance(1000);
    assert_eq!(collector.make_room(ReclaimBytes::exactly(1500)).await, not_enough(1000));
    assert_eq!(collector.make_room(ReclaimBytes::exactly(500)).await, Made);
    assert_eq!(world.removals(), ["b"]);
}

async fn lease(gate: &Arc<RemovalGate>, name: &str, purpose: LeasePurpose) {
    assert!(gate.begin_presence_check().lease(id(name), purpose, Duration::from_secs(600)).await);
    tokio::time::advance(Duration::from_secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_when_the_first_container_of_its_image_was_seen() {
    let world = world();
    let gate = Arc::new(RemovalGate::default());
    let collector = world.collector().gate(Arc::clone(&gate)).policy(policy()).build();
    let look = async |containers: &[&str]| {
        let of = |name: &&str| (format!("container of {name}"), (*name).to_owned());
        world.state().containers = containers.iter().map(of).collect();
        collector.detect().await.unwrap();
        world.advance(1000);
        tokio::time::advance(Duration::from_secs(1)).await;
    };
    look(&["b"]).await;
    for name in ["a", "b"] {
        lease(&gate, name, LeasePurpose::Ensure).await;
    }
    lease(&gate, "c", LeasePurpose::Request).await;
    lease(&gate, "d", LeasePurpose::Ensure).await;
    let leased = || gate.active_leases().into_iter().map(|(image, _)| image).collect::<Vec<_>>();

    look(&["a", "b", "c"]).await;
    assert_eq!(leased(), [id("b"), id("c"), id("d")], "b was used before its lease");
    let used = |at| Some(vec![ImageActivity { image: id("d"), at, what: ActivityKind::Used }]);
    let wall = world.state().wall;
    world.state().sightings = used(UnixMillis(wall - 3_600_000));
    look(&[]).await;
    assert_eq!(leased(), [id("b"), id("c"), id("d")], "d was used before its lease");
    assert_eq!(
        collector.make_room(ReclaimBytes::exactly(1500)).await,
        not_enough(1000),
        "a round may remove a alone"
    );
    assert_eq!(collector.make_room(ReclaimBytes::exactly(500)).await, Made);
    assert_eq!(world.removals(), ["a"]);

    // A container of d ran between two looks.
    let wall = world.state().wall;
    world.state().sightings = used(UnixMillis(wall));
    world.advance(1000);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(collector.make_room(ReclaimBytes::exactly(500)).await, Made);
    assert_eq!(world.removals(), ["a", "d"]);
    assert_eq!(leased(), [id("b"), id("c")]);
}

/// Answers so many requests with success, and counts them.
struct CountedRoom {
    left: AtomicU64,
    asked: AtomicU64,
}

#[async_trait]
impl RoomMaker for CountedRoom {
    async fn make_room(&self, bytes: ReclaimBytes) -> RoomOutcome {
        assert_eq!(bytes, ReclaimBytes::exactly(700));
        self.asked.fetch_add(1, Ordering::Relaxed);
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_ok() { Made } else { not_enough(300) }
    }
}

/// A pull that lacks 700 bytes.
fn refused() -> ScriptedPull {
    let kind = CallErrorKind::InsufficientSpace { reclaim_bytes: Some(ReclaimBytes::exactly(700)) };
    ScriptedPull::with_outcome(Err(BackendError::call(kind, "insufficient space")))
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_lacks_space_goes_on_when_there_is_room() {
    for (refusals, rounds, asked, is_ok) in
        [(1, 1, 1, true), (2, 5, 2, true), (1, 0, 1, false), (9, 9, 3, false)]
    {
        let backend = FakeBackend::new();
        for _ in 0..refusals {
            backend.on_pull(refused());
        }
        backend.offer("a:1", larder_testkit::fake_backend::image("sha256:1", 1));
        let room = Arc::new(CountedRoom { left: AtomicU64::new(rounds), asked: AtomicU64::new(0) });
        let manager =
            ImageManager::new(Arc::new(backend.clone())).with_room(Arc::clone(&room) as Arc<dyn RoomMaker>);
        let request = EnsureRequest::new("a:1", PullPolicy::IfNotPresent, Pod::default());
        let ended = manager.ensure(&request).await;
        assert_eq!(
            (ended.is_ok(), room.asked.load(Ordering::Relaxed)),
            (is_ok, asked),
            "{refusals}: {ended:?}"
        );
        let Err(error) = ended else { continue };
        let is_told = error.message.contains("insufficient space; 300B are reclaimable now");
        assert_eq!(is_told, rounds == 0, "what a round may free now: {error}");
        let failure = error.failure.expect("the backend failed");
        let hint = failure.hint.expect("a next step").to_string();
        assert!(hint.starts_with("larder gc --dry-run --free 1MB "), "{hint}");
        let kind = failure.kind;
        assert_eq!(
            kind,
            CallErrorKind::InsufficientSpace { reclaim_bytes: None },
            "a further round is no next step"
        );
    }
}

/// A round whose removal hangs.
struct HangingRoom;

#[async_trait]
impl RoomMaker for HangingRoom {
    async fn make_room(&self, _: ReclaimBytes) -> RoomOutcome {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_waits_for_room_holds_no_slot() {
    let backend = FakeBackend::new();
    backend.on_pull(refused());
    backend.offer("small:1", larder_testkit::fake_backend::image("sha256:1", 1));
    let config = PullConfig { serialize_image_pulls: true, ..PullConfig::default() };
    let manager = ImageManager::new(Arc::new(backend)).with_config(&config).with_room(Arc::new(HangingRoom));
    let ensure = async |image: &str| {
        manager.ensure(&EnsureRequest::new(image, PullPolicy::IfNotPresent, Pod::default())).await
    };
    let (mut large, small) = (pin!(ensure("large:1")), ensure("small:1"));
    assert!((&mut large).now_or_never().is_none());
    let small = tokio::time::timeout(Duration::from_secs(600), small).await;
    assert!(small.expect("it gets the slot").is_ok());
    assert!(large.now_or_never().is_none(), "the round hangs");
}
