//! Pull slots are shared between namespaces and registries, and never more pulls run than `maxParallelImagePulls`. Time
//! is simulated.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::MinimumRate;
use larder::pod::{Pod, SandboxConfig};
use larder::pull::{EnsureError, EnsureRequest, EnsuredImage, ImageManager, PullConfig, PullPolicy};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull};
use tokio::task::JoinHandle;
use tokio::time;

const OTHER: &str = "other.example/app:1";

struct SlotFixture {
    backend: FakeBackend,
    manager: Arc<ImageManager>,
}

impl SlotFixture {
    /// With four slots, on a backend that continues canceled pulls, or does not.
    fn new(continues: bool) -> SlotFixture {
        SlotFixture::with_slots(4, continues)
    }

    fn with_slots(slots: u32, continues: bool) -> SlotFixture {
        let backend = FakeBackend::new();
        backend.hold_pulls();
        if continues {
            backend.continue_pulls(MinimumRate::default());
        }
        let config = PullConfig {
            max_parallel_image_pulls: NonZeroU32::new(slots),
            registry_pull_qps: 0,
            ..PullConfig::default()
        };
        let manager = ImageManager::new(Arc::new(backend.clone())).with_config(&config);
        SlotFixture { backend, manager: Arc::new(manager) }
    }

    async fn start(&self, image: &str) -> JoinHandle<Result<EnsuredImage, EnsureError>> {
        self.start_for("", image).await
    }

    async fn start_for(&self, namespace: &str, image: &str) -> JoinHandle<Result<EnsuredImage, EnsureError>> {
        let pod = Pod { namespace: namespace.into(), ..Pod::default() };
        let request = EnsureRequest {
            sandbox: Some(SandboxConfig::of(&pod)),
            ..EnsureRequest::new(image, PullPolicy::IfNotPresent, pod)
        };
        let manager = self.manager.clone();
        let task = tokio::spawn(async move { manager.ensure(&request).await });
        settle().await;
        task
    }

    fn finish(&self, image: &str) -> bool {
        self.backend.finish_pull_of(image, ScriptedPull::ok(format!("sha256:{image}"), 1))
    }
}

/// Lets all tasks run, at one instant.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn slow_images_of_one_registry_leave_a_slot_to_pulls_of_others() {
    let node = SlotFixture::new(true);
    let slow = [1, 2, 3, 4].map(|n| format!("slow.example/app{n}:1"));
    let mut tasks = Vec::new();
    for image in &slow {
        tasks.push(node.start(image).await);
    }
    assert_eq!(node.backend.held_pulls(), slow, "without other pulls, one registry may have all slots");
    let other = node.start(OTHER).await;
    assert!(node.finish(OTHER), "{:?}", node.backend.held_pulls());
    assert!(other.await.unwrap().is_ok());
    for (image, task) in slow.iter().zip(tasks) {
        assert!(!task.is_finished() && node.finish(image), "{image} continues");
        assert!(task.await.unwrap().is_ok());
    }
    assert_eq!(node.backend.counts().most_at_once, 4);
}

#[tokio::test(start_paused = true)]
async fn pulls_below_the_minimum_rate_give_their_slots_to_waiting_pulls() {
    let node = SlotFixture::new(true);
    let (window, rate) = (MinimumRate::default().window, MinimumRate::default().bytes_per_second * 10);
    let fast = || ScriptedPull::ok("sha256:fast", 1);
    let progress = (1..6).fold(fast(), |pull, n| pull.progress(n * rate, Some(9 * rate)).after(window));
    node.backend.on_pull_of("fast.example/app:1", progress);
    for registry in ["fast", "a", "b", "c"] {
        node.start(&format!("{registry}.example/app:1")).await;
    }
    let other = node.start(OTHER).await;
    assert_eq!(node.backend.counts().started, 4, "no registry has more than one slot");
    time::sleep(window + Duration::from_secs(1)).await;
    assert!(node.finish(OTHER), "{:?}", node.backend.held_pulls());
    assert!(other.await.unwrap().is_ok());
    let counts = node.backend.until(|counts| counts.succeeded == 2).await;
    assert_eq!((counts.most_at_once, node.backend.images().len()), (4, 2), "the fast pull was not stopped");
    assert!(counts.canceled >= 1 && node.backend.held_pulls().len() == 3);
}

#[tokio::test(start_paused = true)]
async fn a_fast_pull_gives_its_slot_to_another_namespace_after_a_time_slice() {
    let (window, rate) = (MinimumRate::default().window, MinimumRate::default().bytes_per_second);
    for (namespace, slots, gives_way) in [("honest", 1, true), ("honest", 2, true), ("hostile", 1, false)] {
        let node = SlotFixture::with_slots(slots, true);
        for n in 0..slots {
            let image = format!("r{n}.example/app:1");
            let received = |n: u64| (n + 1) * window.as_secs() * rate;
            let pull = ScriptedPull::ok("sha256:hostile", 1);
            let endless =
                (0..100).fold(pull, |pull, n| pull.progress(received(n), Some(1 << 40)).after(window / 2));
            node.backend.on_pull_of(&image, endless);
            node.start_for("hostile", &image).await;
        }
        time::sleep(window / 2).await;
        let _other = node.start_for(namespace, OTHER).await;
        // With several slots, the other namespace gets one at once.
        assert_eq!(node.backend.counts().canceled, usize::from(slots > 1));
        time::sleep(window).await;
        assert_eq!(node.finish(OTHER), gives_way);
        assert_eq!(node.backend.counts().most_at_once, slots as usize);
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_pull_that_gave_its_slot_away_does_not_take_it_back() {
    let node = SlotFixture::with_slots(2, true);
    let (window, rate) = (MinimumRate::default().window, MinimumRate::default().bytes_per_second);
    let fetched = window.as_secs() * rate;
    let fast = ScriptedPull::ok("sha256:fast", 1);
    let fast = (1..9).fold(fast, |pull, n| pull.progress(n * fetched, Some(9 * fetched)).after(window / 2));
    node.backend.on_pull_of("fast.example/a:1", fast);
    for image in ["fast.example/a:1", "slow.example/x:1", "fast.example/b:1"] {
        node.start(image).await;
    }
    assert_eq!(node.backend.held_pulls(), ["slow.example/x:1"]);
    for _ in 0..4 {
        time::advance(window / 4).await;
        settle().await;
    }
    settle().await;
    let counts = node.backend.counts();
    assert_eq!((counts.started, counts.canceled), (3, 1), "{:?}", node.backend.held_pulls());
    assert!(node.finish("fast.example/b:1"));
    settle().await;
    assert!(node.finish("slow.example/x:1"), "it continues in the free slot");
    assert_eq!(node.backend.counts().canceled, 1);
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_would_start_over_is_never_stopped_for_another() {
    let node = SlotFixture::new(false);
    for n in 0..6 {
        node.start(&format!("slow.example/app{n}:1")).await;
    }
    let _other = node.start_for("other", OTHER).await;
    time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((node.backend.counts().canceled, node.backend.counts().started), (0, 4));
    assert!(node.finish("slow.example/app2:1"));
    time::sleep(Duration::from_secs(1)).await;
    assert!(
        node.backend.held_pulls().contains(&OTHER.to_owned()),
        "the next free slot is for the other registry"
    );
}
