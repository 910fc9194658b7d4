//! `ImageManager::ensure` beyond kubelet: one in-flight pull per image, canceled callers, waiting and status.
//! Kubelet's own rules are covered by the vectors. Time is simulated throughout.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use larder::backend::ByteProgress;
use larder::credentials::{LazyCredentialLookup, PullSecret, SecretCoordinates};
use larder::events::{EventReason, RingSink};
use larder::pod::{ObjectRef, Pod};
use larder::pull::{
    DuplicatePullPolicy, EnsureError, EnsureReason, EnsureRequest, EnsuredImage, ImageManager, ImagePresence,
    Priority, PullConfig, PullPhase, PullPolicy, RateLimitAction,
};
use larder::records::{PullRecords, RecordedCredentials, RecordsError};
use larder::reference::{ImageId, ImageName};
use larder_testkit::fake_backend::{BackendCall, FakeBackend, ScriptedPull, image};
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance};

const APP: &str = "registry.example/app:v1";

struct EnsureFixture {
    backend: FakeBackend,
    events: Arc<RingSink>,
    manager: Arc<ImageManager>,
}

#[expect(clippy::needless_pass_by_value, reason = "tests write the config in the call")]
fn node(config: PullConfig) -> EnsureFixture {
    let (backend, events) = (FakeBackend::new(), Arc::new(RingSink::new(1000)));
    let manager =
        ImageManager::new(Arc::new(backend.clone())).with_config(&config).with_events(events.clone());
    EnsureFixture { backend, events, manager: Arc::new(manager) }
}

impl EnsureFixture {
    /// Starts an ensure and polls it until it waits.
    async fn start(&self, request: EnsureRequest) -> JoinHandle<Result<EnsuredImage, EnsureError>> {
        let manager = self.manager.clone();
        let task = tokio::spawn(async move { manager.ensure(&request).await });
        settle().await;
        task
    }

    fn reasons_of(&self, pod: &str) -> Vec<EventReason> {
        self.events
            .snapshot()
            .into_iter()
            .filter(|event| event.object.name == pod)
            .map(|event| event.reason)
            .collect()
    }

    fn pulls(&self) -> usize {
        self.backend.counts().started
    }
}

async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn wants(pod: &str, image: &str) -> EnsureRequest {
    let pod = Pod { uid: format!("uid-{pod}"), namespace: "ns".into(), name: pod.into(), ..Pod::default() };
    let target = Some(ObjectRef::new(&pod, "spec.containers{c}"));
    EnsureRequest { target, ..EnsureRequest::new(image, PullPolicy::IfNotPresent, pod) }
}

/// A pull secret of `registry.example` with this user.
fn secret(user: &str) -> PullSecret {
    let config =
        format!(r#"{{"auths": {{"registry.example": {{"username": "{user}", "password": "pw-{user}"}}}}}}"#);
    PullSecret {
        kind: "kubernetes.io/dockerconfigjson".into(),
        coordinates: SecretCoordinates {
            uid: format!("uid-{user}"),
            namespace: "ns".into(),
            name: user.into(),
        },
        data: [(".dockerconfigjson".to_owned(), config.into_bytes())].into(),
    }
}

fn wants_as(pod: &str, user: &str) -> EnsureRequest {
    EnsureRequest { secrets: vec![secret(user)], ..wants(pod, APP) }
}

#[tokio::test(start_paused = true)]
async fn two_pods_wanting_one_image_cause_one_pull_and_both_get_their_events() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let (a, b) = (node.start(wants("a", APP)).await, node.start(wants("b", APP)).await);
    assert_eq!(node.pulls(), 1);
    assert!(node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).is_some());
    for task in [a, b] {
        assert_eq!(task.await.unwrap().expect("pulled").image_ref, "sha256:app");
    }
    for pod in ["a", "b"] {
        assert_eq!(node.reasons_of(pod), [EventReason::Pulling, EventReason::Pulled]);
    }
    assert_eq!(node.pulls(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_shared_failure_counts_back_off_for_each_pod() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let tasks = [node.start(wants("a", APP)).await, node.start(wants("b", APP)).await];
    node.backend.finish_pull(ScriptedPull::fails("no route to host")).expect("one pull runs");
    for task in tasks {
        let error = task.await.unwrap().expect_err("the pull failed");
        assert_eq!(
            (error.reason, error.retry_in),
            (EnsureReason::ErrImagePull, Some(Duration::from_secs(10)))
        );
    }
    for pod in ["a", "b"] {
        let error = node.manager.ensure(&wants(pod, APP)).await.expect_err("in back-off");
        assert_eq!(error.reason, EnsureReason::ImagePullBackOff);
        assert_eq!(
            error.message,
            format!("Back-off pulling image \"{APP}\": ErrImagePull: no route to host")
        );
    }
    assert_eq!(node.pulls(), 1);
}

#[tokio::test(start_paused = true)]
async fn three_containers_of_a_pod_sharing_a_failed_pull_count_one_failure() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let mut tasks = Vec::new();
    for _ in 0..3 {
        tasks.push(node.start(wants("a", APP)).await);
    }
    node.backend.finish_pull(ScriptedPull::fails("404")).expect("one pull runs");
    for task in tasks {
        let error = task.await.unwrap().expect_err("the pull failed");
        assert_eq!(error.retry_in, Some(Duration::from_secs(10)), "not doubled by each container");
    }
}

#[tokio::test(start_paused = true)]
async fn one_caller_leaving_does_not_cancel_the_others() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let (first, second) = (node.start(wants("a", APP)).await, node.start(wants("b", APP)).await);
    // The caller that started the pull is canceled; the other one keeps it running.
    first.abort();
    settle().await;
    assert_eq!(node.backend.counts().canceled, 0);
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("the pull still runs");
    assert_eq!(second.await.unwrap().expect("pulled").image_ref, "sha256:app");
    assert_eq!(node.pulls(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_last_caller_leaving_cancels_the_pull_and_frees_its_slot() {
    let node = node(PullConfig { max_parallel_image_pulls: NonZeroU32::new(1), ..PullConfig::default() });
    node.backend.hold_pulls();
    let tasks = [node.start(wants("a", APP)).await, node.start(wants("b", APP)).await];
    let other = node.start(wants("c", "registry.example/other:v1")).await;
    for task in tasks {
        task.abort();
    }
    settle().await;
    let counts = node.backend.counts();
    assert_eq!((counts.canceled, counts.running, counts.started), (1, 1, 2));
    node.backend.finish_pull(ScriptedPull::ok("sha256:other", 7)).expect("the next in line pulls");
    other.await.unwrap().expect("pulled");
    // The image can be requested again after the cancellation.
    let again = node.start(wants("a", APP)).await;
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("a new flight");
    again.await.unwrap().expect("pulled");
    assert_eq!(node.manager.pulls(), []);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_a_pull_counts_no_failure() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let task = node.start(wants("a", APP)).await;
    task.abort();
    settle().await;
    let again = node.start(wants("a", APP)).await;
    assert_eq!(node.pulls(), 2, "no back-off after an abandoned pull");
    again.abort();
}

#[tokio::test(start_paused = true)]
async fn a_pod_with_other_credentials_does_not_join_a_private_pull() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let owner = node.start(wants_as("owner", "ann")).await;
    let stranger = node.start(wants("stranger", APP)).await;
    let friend = node.start(wants_as("friend", "ann")).await;
    assert_eq!(node.pulls(), 1);
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("the owner's pull");
    settle().await;
    // Ann's credential serves both callers with it; the third caller needs a pull of its own.
    owner.await.unwrap().expect("pulled");
    friend.await.unwrap().expect("pulled");
    assert_eq!(node.pulls(), 2);
    node.backend.finish_pull(ScriptedPull::fails("denied")).expect("the stranger's pull");
    let error = stranger.await.unwrap().expect_err("anonymous pulls are refused");
    assert_eq!(error.message, "denied");
    let users = node.backend.calls().into_iter().filter_map(|call| match call {
        BackendCall::Pull { username, .. } => Some(username),
        _ => None,
    });
    assert_eq!(users.collect::<Vec<_>>(), [Some("ann".to_owned()), None]);
}

/// Pull records that only store which images were pulled with which credentials.
#[derive(Default)]
struct CredentialRecorder(std::sync::Mutex<Vec<RecordedCredentials>>);

#[async_trait::async_trait]
impl PullRecords for CredentialRecorder {
    async fn must_attempt_pull(
        &self,
        _image: &ImageName,
        _image_ref: &ImageId,
        _credentials: &mut LazyCredentialLookup<'_>,
    ) -> Result<bool, RecordsError> {
        Ok(false)
    }

    async fn record_pull_intent(&self, _image: &ImageName) -> Result<(), RecordsError> {
        Ok(())
    }

    async fn record_image_pulled(
        &self,
        _image: &ImageName,
        _image_ref: &ImageId,
        credentials: &RecordedCredentials,
    ) {
        self.0.lock().expect("no test panics with it").push(credentials.clone());
    }

    fn record_image_pull_failed(&self, _image: &ImageName) {}
}

#[tokio::test(start_paused = true)]
async fn a_joining_caller_is_recorded_with_its_own_secret() {
    let (backend, noted) = (FakeBackend::new(), Arc::new(CredentialRecorder::default()));
    let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())).with_records(noted.clone()));
    let node = EnsureFixture { backend, events: Arc::new(RingSink::new(0)), manager };
    node.backend.hold_pulls();
    // The same login in two secrets.
    let mut theirs = wants_as("b", "ann");
    theirs.secrets[0].coordinates.name = "copy-of-ann".into();
    let tasks = [node.start(wants_as("a", "ann")).await, node.start(theirs).await];
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("one pull runs");
    for task in tasks {
        task.await.unwrap().expect("pulled");
    }
    let mut names: Vec<_> = noted
        .0
        .lock()
        .expect("unpoisoned")
        .iter()
        .map(|recorded| match recorded {
            RecordedCredentials::Secret(at, _) => at.name.clone(),
            other => panic!("recorded as {other:?}"),
        })
        .collect();
    names.sort();
    assert_eq!((names, node.pulls()), (vec!["ann".to_owned(), "copy-of-ann".to_owned()], 1));
}

#[tokio::test(start_paused = true)]
async fn a_wrong_password_does_not_fail_a_pod_with_the_right_one() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let wrong = node.start(wants_as("wrong", "mallory")).await;
    let right = node.start(wants_as("right", "ann")).await;
    node.backend.finish_pull(ScriptedPull::fails("unauthorized")).expect("the wrong one's pull");
    settle().await;
    wrong.await.unwrap().expect_err("unauthorized");
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("the right one's pull");
    right.await.unwrap().expect("pulled");
}

#[tokio::test(start_paused = true)]
async fn an_anonymous_pull_serves_every_pod() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let tasks = [node.start(wants("a", APP)).await, node.start(wants_as("b", "ann")).await];
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("one pull runs");
    for task in tasks {
        task.await.unwrap().expect("pulled");
    }
    assert_eq!(node.pulls(), 1);
}

#[tokio::test(start_paused = true)]
async fn joining_late_reports_no_pull_longer_than_the_wait() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let first = node.start(wants("a", APP)).await;
    advance(Duration::from_secs(60)).await;
    let late = node.start(wants("b", APP)).await;
    advance(Duration::from_millis(1500)).await;
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("one pull runs");
    first.await.unwrap().expect("pulled");
    let expected = Duration::from_millis(1500);
    match late.await.unwrap().expect("pulled").outcome {
        ImagePresence::Pulled { pull_duration, total_duration, .. } => {
            assert_eq!((pull_duration, total_duration), (expected, expected));
        }
        ImagePresence::Present => panic!("the image was pulled"),
    }
    let message = node.events.snapshot().pop().expect("an event").message;
    assert!(message.contains("in 1.5s (1.5s including waiting). Image size: 7 bytes."), "{message}");
}

#[tokio::test(start_paused = true)]
async fn no_more_pulls_run_at_once_than_the_bound() {
    let node = node(PullConfig {
        max_parallel_image_pulls: NonZeroU32::new(3),
        registry_pull_qps: 0,
        ..PullConfig::default()
    });
    for i in 0..20 {
        node.backend.on_pull_of(
            &format!("app-{i}:v1"),
            ScriptedPull::ok(format!("sha256:{i}"), 1).after(Duration::from_secs(1)),
        );
    }
    let start = Instant::now();
    let requests: Vec<_> = (0..20).map(|i| wants(&format!("pod-{i}"), &format!("app-{i}:v1"))).collect();
    for result in join_all(requests.iter().map(|request| node.manager.ensure(request))).await {
        result.expect("pulled");
    }
    assert_eq!(node.backend.counts().most_at_once, 3);
    assert_eq!(start.elapsed().as_secs(), 7, "three at once, seven rounds");
}

#[tokio::test(start_paused = true)]
async fn a_queued_prefetch_waits_for_pods_and_gets_their_priority_when_they_join_it() {
    let node = node(PullConfig { serialize_image_pulls: true, ..PullConfig::default() });
    node.backend.hold_pulls();
    let prefetch = |image: &str| EnsureRequest { priority: Priority::Prefetch, ..wants("prefetch", image) };
    let mut tasks = vec![node.start(wants("p", "running:1")).await];
    for request in [
        prefetch("idle:1"),
        prefetch("joined:1"),
        wants("p", "pod:1"),
        wants("q", "joined:1"),
        wants("q", "pod:2"),
    ] {
        tasks.push(node.start(request).await);
    }
    let mut order = Vec::new();
    while let Some(image) = node.backend.finish_pull(ScriptedPull::ok("sha256:1", 1)) {
        order.push(image);
        settle().await;
    }
    for task in join_all(tasks).await {
        task.expect("no panic").expect("all pulls succeed");
    }
    assert_eq!(order, ["running:1", "joined:1", "pod:1", "pod:2", "idle:1"]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_over_the_rate_waits_and_reports_it() {
    let node = node(PullConfig {
        registry_pull_qps: 1,
        registry_burst: 1,
        max_parallel_image_pulls: None,
        ..PullConfig::default()
    });
    node.backend.hold_pulls();
    let first = node.start(wants("a", "a:v1")).await;
    let second = node.start(wants("b", "b:v1")).await;
    let pulls = node.manager.pulls();
    assert_eq!(
        pulls.iter().map(|pull| pull.phase).collect::<Vec<_>>(),
        [PullPhase::Pulling, PullPhase::Throttled]
    );
    assert!(
        pulls[1].waiting.as_ref().is_some_and(|what| what.contains("registryPullQPS")),
        "{:?}",
        pulls[1].waiting
    );
    tokio::time::sleep(Duration::from_secs(2)).await;
    settle().await;
    assert_eq!(node.pulls(), 2);
    for _ in 0..2 {
        node.backend.finish_pull(ScriptedPull::ok("sha256:x", 1)).expect("both pull");
    }
    for task in [first, second] {
        task.await.unwrap().expect("no caller is refused");
    }
}

#[tokio::test(start_paused = true)]
async fn kubelets_way_over_the_rate_is_to_refuse() {
    let node = node(PullConfig { registry_pull_qps: 1, registry_burst: 1, ..PullConfig::kubelet() });
    node.backend.offer("a:v1", image("sha256:a", 1));
    node.manager.ensure(&wants("a", "a:v1")).await.expect("the first token");
    let error = node.manager.ensure(&wants("b", "b:v1")).await.expect_err("no token is left");
    assert_eq!((error.reason, error.message.as_str()), (EnsureReason::ErrImagePull, "pull QPS exceeded"));
}

#[tokio::test(start_paused = true)]
async fn waiting_pulls_start_with_a_burst_of_zero() {
    let node = node(PullConfig {
        registry_pull_qps: 1,
        registry_burst: 0,
        over_rate: RateLimitAction::Wait,
        ..PullConfig::default()
    });
    node.backend.offer("a:v1", image("sha256:a", 1));
    node.manager.ensure(&wants("a", "a:v1")).await.expect("a burst of 0 counts as 1");
}

#[tokio::test(start_paused = true)]
async fn a_watcher_sees_the_turn_the_bytes_and_the_end() {
    let node = node(PullConfig { max_parallel_image_pulls: NonZeroU32::new(1), ..PullConfig::default() });
    node.backend.hold_pulls();
    let before = node.start(wants("a", "first:v1")).await;
    let task = node.start(wants("b", APP)).await;
    let mut watch = node.manager.watch(APP).expect("the pull is tracked");
    let status = watch.borrow_and_update().clone();
    assert_eq!(status.phase, PullPhase::Queued);
    assert!(
        status.waiting.as_ref().is_some_and(|what| what.contains("maxParallelImagePulls")),
        "{:?}",
        status.waiting
    );

    node.backend.finish_pull(ScriptedPull::ok("sha256:first", 1)).expect("the first pull");
    settle().await;
    assert_eq!(watch.borrow_and_update().phase, PullPhase::Pulling);

    let (pull, release) = ScriptedPull::ok("sha256:app", 9).progress(4, Some(9)).held();
    node.backend.finish_pull(pull).expect("the second pull");
    settle().await;
    assert_eq!(watch.borrow_and_update().bytes, Some(ByteProgress { done: 4, total: Some(9) }));

    release.release();
    task.await.unwrap().expect("pulled");
    before.await.unwrap().expect("pulled");
    assert!(watch.changed().await.is_err(), "the channel closes when the pull ends");
    assert!(node.manager.watch(APP).is_none());
}

#[tokio::test(start_paused = true)]
async fn queued_pulls_of_the_serial_puller_report_what_they_wait_for() {
    let node = node(PullConfig { serialize_image_pulls: true, ..PullConfig::default() });
    node.backend.hold_pulls();
    let mut tasks = Vec::new();
    for i in 0..13 {
        tasks.push(node.start(wants(&format!("pod-{i}"), &format!("app-{i}:v1"))).await);
    }
    let waiting: Vec<_> =
        node.manager.pulls().into_iter().map(|pull| pull.waiting.unwrap_or("nothing".into())).collect();
    assert_eq!(waiting.iter().filter(|what| **what == "nothing").count(), 1);
    assert_eq!(waiting.iter().filter(|what| what.contains("serializeImagePulls")).count(), 12);
    for task in &tasks {
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_present_image_is_one_status_call_and_no_pull() {
    let node = node(PullConfig::default());
    node.backend.add_image(APP, image("sha256:app", 7));
    let ensured = node.manager.ensure(&wants("a", APP)).await.expect("present");
    assert_eq!((ensured.image_ref.as_str(), ensured.outcome), ("sha256:app", ImagePresence::Present));
    assert_eq!(node.backend.calls(), [BackendCall::Status { image: APP.into() }]);
}

#[tokio::test(start_paused = true)]
async fn short_names_are_sent_short_to_the_runtime() {
    let node = node(PullConfig::default());
    node.backend.offer("busybox:latest", image("sha256:b", 1));
    node.manager.ensure(&wants("a", "busybox")).await.expect("pulled");
    assert!(
        node.backend.calls().contains(&BackendCall::Pull { image: "busybox:latest".into(), username: None })
    );
}

/// A small deterministic random number generator.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Random callers start, are canceled, succeed and fail, in every mode; the invariants are checked after each step.
#[tokio::test(start_paused = true)]
async fn whatever_callers_do_the_rules_hold() {
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let bound = NonZeroU32::new(1 + u32::try_from(dice.roll(3)).expect("small"));
        let same_image =
            if dice.roll(2) == 0 { DuplicatePullPolicy::Coalesce } else { DuplicatePullPolicy::EachRequest };
        let config = PullConfig {
            serialize_image_pulls: dice.roll(4) == 0,
            max_parallel_image_pulls: bound,
            registry_pull_qps: u32::try_from(dice.roll(3)).expect("small"),
            registry_burst: 2,
            same_image,
            ..PullConfig::default()
        };
        let at_once =
            if config.serialize_image_pulls { 1 } else { bound.map_or(0, NonZeroU32::get) as usize };
        let node = node(config);
        node.backend.hold_pulls();
        let mut tasks = Vec::new();
        for step in 0..80 {
            match dice.roll(6) {
                0 | 1 => {
                    let (pod, image) = (dice.roll(4), dice.roll(3));
                    let mut request = wants(&format!("pod-{pod}"), &format!("app-{image}:v1"));
                    request.policy = PullPolicy::Always;
                    tasks.push(node.start(request).await);
                }
                2 if !tasks.is_empty() => {
                    let gone = usize::try_from(dice.roll(tasks.len() as u64)).expect("small");
                    tasks.swap_remove(gone).abort();
                }
                3 => {
                    node.backend.finish_pull(ScriptedPull::ok("sha256:x", 1));
                }
                4 => {
                    node.backend.finish_pull(ScriptedPull::fails("no"));
                }
                _ => advance(Duration::from_secs(dice.roll(30))).await,
            }
            settle().await;
            let (running, held) = (node.backend.counts().running, node.backend.held_pulls());
            assert!(running <= at_once, "seed {seed}, step {step}: {running} at once");
            let mut images = held.clone();
            images.sort();
            images.dedup();
            if same_image == DuplicatePullPolicy::Coalesce {
                assert_eq!(images.len(), held.len(), "seed {seed}, step {step}: one image twice in {held:?}");
            }
            if tasks.iter().all(JoinHandle::is_finished) {
                assert_eq!(
                    (running, node.manager.pulls()),
                    (0, vec![]),
                    "seed {seed}, step {step}: left behind"
                );
            }
        }
        // Once pulls end, every caller gets an answer.
        while tasks.iter().any(|task| !task.is_finished()) {
            node.backend.finish_pull(ScriptedPull::ok("sha256:x", 1));
            tokio::time::sleep(Duration::from_secs(1)).await;
            settle().await;
        }
        assert_eq!(node.manager.pulls(), []);
        let counts = node.backend.counts();
        assert_eq!(counts.started, counts.succeeded + counts.failed + counts.canceled);
    }
}
