//! Pulls, lookups and removals without a pod's request: what they share with `ImageManager::ensure`, and what not. Time
//! is simulated throughout.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image, ImageSpec, PullOptions, PullUntil, RemoveOptions};
use larder::credentials::{Credential, PullSecret, Secret, SecretCoordinates};
use larder::events::{EventReason, RingSink};
use larder::lazy_choice::LAZY_ANNOTATION;
use larder::pod::{ObjectRef, Pod, SandboxConfig};
use larder::pull::{
    EnsureLabels, EnsureRequest, ImageManager, ImagePinSource, PullConfig, PullMetrics, PullPhase,
    PullPolicy, RateLimitAction, StatusIntent, mark_pinned,
};
use larder::records::{PullRecordStore, Verification};
use larder::reference::ImageId;
use larder::retention::RemovalGate;
use larder_testkit::fake_backend::{BackendCall, FakeBackend, ScriptedPull, error, image};
use tokio::task::JoinHandle;
use tokio::time::advance;

const APP: &str = "registry.example/app:v1";
const LEASE: Duration = Duration::from_secs(60);

/// Counted metrics.
#[derive(Default)]
struct CountingMetrics {
    ensures: AtomicUsize,
    pulls: Mutex<Vec<(u64, Duration)>>,
    pulled_sizes: Mutex<Vec<u64>>,
}

impl PullMetrics for CountingMetrics {
    fn ensure_requested(&self, _: &EnsureLabels) {
        self.ensures.fetch_add(1, Ordering::Relaxed);
    }

    fn image_pulled(&self, size_bytes: u64, duration: Duration) {
        self.pulls.lock().expect("no test panics with it").push((size_bytes, duration));
    }

    fn image_downloaded(&self, size_bytes: u64) {
        self.pulled_sizes.lock().expect("no test panics with it").push(size_bytes);
    }
}

struct DirectPullFixture {
    backend: FakeBackend,
    events: Arc<RingSink>,
    counted: Arc<CountingMetrics>,
    gate: Arc<RemovalGate>,
    manager: Arc<ImageManager>,
}

#[expect(clippy::needless_pass_by_value, reason = "tests write the config in the call")]
fn node(config: PullConfig) -> DirectPullFixture {
    let (backend, events) = (FakeBackend::new(), Arc::new(RingSink::new(1000)));
    let (counted, gate) = (Arc::new(CountingMetrics::default()), Arc::new(RemovalGate::default()));
    let manager = ImageManager::new(Arc::new(backend.clone()))
        .with_config(&config)
        .with_events(events.clone())
        .with_metrics(counted.clone())
        .with_lease(gate.clone(), LEASE);
    let manager = Arc::new(manager);
    DirectPullFixture { backend, events, counted, gate, manager }
}

fn login(user: &str) -> Credential {
    Credential { username: user.into(), password: Secret::new(format!("pw-{user}")), ..Credential::default() }
}

/// A pod's request for the image, with a pull secret of this user if given.
fn pod(user: Option<&str>) -> EnsureRequest {
    let pod = Pod { uid: "u".into(), namespace: "ns".into(), name: "web".into(), ..Pod::default() };
    let secret = |user: &str| {
        let config = format!(
            r#"{{"auths": {{"registry.example": {{"username": "{user}", "password": "pw-{user}"}}}}}}"#
        );
        PullSecret {
            kind: "kubernetes.io/dockerconfigjson".into(),
            coordinates: SecretCoordinates { uid: "s".into(), namespace: "ns".into(), name: user.into() },
            data: [(".dockerconfigjson".to_owned(), config.into_bytes())].into(),
        }
    };
    EnsureRequest {
        target: Some(ObjectRef::new(&pod, "spec.containers{c}")),
        secrets: user.map(secret).into_iter().collect(),
        ..EnsureRequest::new(APP, PullPolicy::Always, pod)
    }
}

type PullHandle = JoinHandle<Result<ImageId, BackendError>>;

impl DirectPullFixture {
    /// Starts a pull and polls it until it waits.
    async fn pull(&self, name: &'static str, credential: Option<Credential>) -> PullHandle {
        let manager = self.manager.clone();
        let pulling = tokio::spawn(async move {
            let pulled = manager.pull_directly(ImageSpec::named(name), credential, None).await;
            pulled.map(|pulled| pulled.image_ref)
        });
        settle().await;
        pulling
    }

    async fn ensure(&self, request: EnsureRequest) -> PullHandle {
        let manager = self.manager.clone();
        let ensuring = tokio::spawn(async move {
            manager
                .ensure(&request)
                .await
                .map(|ensured| ensured.image_ref)
                .map_err(|failed| error(failed.message))
        });
        settle().await;
        ensuring
    }

    fn users(&self) -> Vec<Option<String>> {
        let calls = self.backend.calls().into_iter();
        calls
            .filter_map(
                |call| if let BackendCall::Pull { username, .. } = call { Some(username) } else { None },
            )
            .collect()
    }

    fn removals(&self) -> Vec<String> {
        let calls = self.backend.calls().into_iter();
        calls
            .filter_map(|call| if let BackendCall::Remove { image } = call { Some(image) } else { None })
            .collect()
    }
}

async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn callers_and_pods_share_one_pull() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    // Without a tag, as a person writes it: the default is added before names are compared.
    let latest = "registry.example/app:latest";
    let pulls = [
        node.ensure(EnsureRequest { image: latest.into(), ..pod(None) }).await,
        node.pull("registry.example/app", None).await,
        node.pull(latest, None).await,
    ];
    assert_eq!(node.backend.held_pulls(), [latest]);
    advance(Duration::from_secs(2)).await;
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("one pull runs");
    for pulling in pulls {
        assert_eq!(pulling.await.unwrap(), Ok("sha256:app".into()));
    }
    assert_eq!(node.users(), [None]);
    assert_eq!(
        node.counted.ensures.load(Ordering::Relaxed),
        1,
        "a caller with its own policy ensures nothing"
    );
    assert_eq!(*node.counted.pulls.lock().unwrap(), [(7, Duration::from_secs(2)); 3]);
    assert_eq!(*node.counted.pulled_sizes.lock().unwrap(), [7], "it came once");
    assert_eq!(node.events.snapshot().len(), 2, "only the pod has events");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_changes_nothing_for_the_others_and_the_last_one_cancels() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let (first, second) = (node.pull(APP, None).await, node.pull(APP, None).await);
    let third = node.ensure(pod(None)).await;
    for caller in [first, third] {
        caller.abort();
        settle().await;
        assert_eq!(node.backend.counts().running, 1, "one caller still waits");
    }
    second.abort();
    settle().await;
    let counts = node.backend.counts();
    assert_eq!((counts.started, counts.running, counts.canceled), (1, 0, 1));
    assert_eq!(node.manager.pulls(), []);
    let again = node.pull(APP, None).await;
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("a new pull");
    assert_eq!(again.await.unwrap(), Ok("sha256:app".into()));
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_takes_artifacts_tries_for_itself_what_a_container_did_not_get() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let (container, pull) = (node.ensure(pod(None)).await, node.pull(APP, None).await);
    assert_eq!(node.backend.counts().running, 1, "they share a pull");
    node.backend.finish_pull(ScriptedPull::fails("an artifact")).expect("that of the container");
    container.await.unwrap().unwrap_err();
    settle().await;
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("its own");
    assert_eq!(pull.await.unwrap(), Ok("sha256:app".into()));
}

#[tokio::test(start_paused = true)]
async fn an_image_pulled_with_a_credential_serves_only_its_holders() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let owner = node.pull(APP, Some(login("ann"))).await;
    let friend = node.ensure(pod(Some("ann"))).await;
    // They continue in any order: a caller that takes artifacts would not be content with the failure of a pod's pull.
    let others = [
        node.ensure(pod(None)).await,
        node.ensure(pod(None)).await,
        node.pull(APP, Some(login("bob"))).await,
    ];
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("ann's pull");
    for served in [owner, friend] {
        assert_eq!(served.await.unwrap(), Ok("sha256:app".into()));
    }
    // Each other caller starts its own pull; those without a credential share one.
    for _ in 0..2 {
        settle().await;
        node.backend.finish_pull(ScriptedPull::fails("denied")).expect("another pull");
    }
    for denied in others {
        assert_eq!(denied.await.unwrap(), Err(error("denied")));
    }
    let mut users = node.users();
    users.sort();
    assert_eq!(users, [None, Some("ann".into()), Some("bob".into())]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_brings_its_credential_sandbox_and_annotations_to_the_backend() {
    let node = node(PullConfig::default());
    node.backend.offer(APP, image("sha256:app", 7));
    let annotations = [("a".to_owned(), "1".to_owned())].into();
    let spec = ImageSpec { annotations, ..ImageSpec::named(APP) };
    let sandbox = SandboxConfig { name: "web".into(), ..SandboxConfig::default() };
    let pulled =
        node.manager.pull_directly(spec.clone(), Some(login("ann")), Some(sandbox.clone())).await.unwrap();
    assert_eq!(pulled.image_ref, "sha256:app");
    let sent = node
        .backend
        .requests()
        .into_iter()
        .find(|sent| matches!(sent.call, BackendCall::Pull { .. }))
        .unwrap();
    assert_eq!((sent.spec, sent.sandbox), (Some(spec), Some(sandbox)));
    assert_eq!(sent.credential, Some(login("ann")));
}

#[tokio::test(start_paused = true)]
async fn the_annotation_of_a_pod_decides_whether_its_images_are_pulled_lazily() {
    let node = node(PullConfig::default());
    node.backend.offer(APP, image("sha256:app", 7));
    let until = || {
        let sent = node.backend.requests().into_iter();
        let pulled = sent.filter(|sent| matches!(sent.call, BackendCall::Pull { .. })).last().unwrap();
        pulled.spec.unwrap().options.until
    };
    let annotated = |value: &str| [(LAZY_ANNOTATION.to_owned(), value.to_owned())].into();
    let warning = "pod shop/web: annotation images.larder.dev/lazy is \"yes\", and neither";
    let sandbox = SandboxConfig { name: "web".into(), namespace: "shop".into(), ..SandboxConfig::default() };
    for (value, expected, is_warned) in [
        ("true", PullUntil::Startable, false),
        ("false", PullUntil::Complete, false),
        ("yes", PullUntil::Complete, true),
    ] {
        let spec = ImageSpec { annotations: annotated(value), ..ImageSpec::named(APP) };
        let pulled = node.manager.pull_directly(spec, None, Some(sandbox.clone())).await.unwrap();
        assert_eq!(until(), expected, "{value}");
        assert_eq!(pulled.warnings.iter().any(|text| text.starts_with(warning)), is_warned, "{value}");
    }
    let pod =
        Pod { name: "web".into(), namespace: "shop".into(), annotations: annotated("yes"), ..Pod::default() };
    let target = Some(ObjectRef::new(&pod, "spec.containers{web}"));
    let request = EnsureRequest { target, ..EnsureRequest::new(APP, PullPolicy::Always, pod) };
    node.manager.ensure(&request).await.unwrap();
    assert_eq!(until(), PullUntil::Complete);
    let events = node.events.snapshot();
    let warned = events.iter().find(|event| event.reason == EventReason::ImageWarning).unwrap();
    assert!(warned.message.contains(warning), "{}", warned.message);
    let wants = PullOptions { until: PullUntil::Startable, ..PullOptions::default() };
    node.manager.ensure(&EnsureRequest { options: wants, ..request }).await.unwrap();
    assert_eq!(until(), PullUntil::Startable, "the caller decides");
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_returned_as_the_backend_gave_it_and_counts_no_back_off() {
    let node = node(PullConfig::default());
    let denied = BackendError::call(CallErrorKind::Denied, "not for you")
        .with_hint(larder::hint::Hint::from("check the password"));
    for _ in 0..3 {
        node.backend.on_pull(ScriptedPull::with_outcome(Err(denied.clone())));
        assert_eq!(node.pull(APP, None).await.await.unwrap(), Err(denied.clone()));
    }
    assert_eq!(node.backend.counts().failed, 3);
    assert_eq!(node.events.snapshot(), []);
    let named = node.pull("registry.example/App:v1", None).await.await.unwrap().unwrap_err();
    assert!(named.to_string().contains("must be lowercase"), "{named}");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_by_larder_is_a_backend_error() {
    let refuse =
        PullConfig { over_rate: RateLimitAction::Refuse, registry_burst: 0, ..PullConfig::default() };
    let refused = node(refuse).pull(APP, None).await.await.unwrap();
    assert_eq!(refused, Err(error("pull QPS exceeded")));
    let pull_timeout = Some(Duration::from_secs(90));
    let slow = node(PullConfig { pull_timeout, ..PullConfig::default() });
    slow.backend.hold_pulls();
    let late = slow.pull(APP, None).await.await.unwrap();
    let message = "pull timed out after 1m30s and was canceled";
    assert_eq!(late, Err(BackendError::call(CallErrorKind::DeadlineExceeded, message)));
}

#[tokio::test(start_paused = true)]
async fn each_caller_of_one_pull_waits_for_as_long_as_it_wants() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let limited = |seconds| EnsureRequest { time_limit: Some(Duration::from_secs(seconds)), ..pod(None) };
    let (short, long) = (node.ensure(limited(5)).await, node.ensure(limited(u64::MAX / 4)).await);
    assert_eq!(short.await.unwrap(), Err(error("not finished within 5s")));
    assert_eq!(node.backend.counts().canceled, 0, "the other caller waits for it");
    node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("one pull");
    assert_eq!(long.await.unwrap(), Ok("sha256:app".into()));
    let alone = node.ensure(limited(5)).await;
    alone.await.unwrap().unwrap_err();
    settle().await;
    assert_eq!(node.backend.counts().canceled, 1);
    let failed: Vec<_> =
        node.events.snapshot().into_iter().filter(|event| event.reason == EventReason::Failed).collect();
    assert_eq!(failed.len(), 2);
    assert!(failed[0].message.ends_with("not finished within 5s"), "{failed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_verifies_tls_does_not_join_one_that_does_not() {
    let node = node(PullConfig::default());
    node.backend.hold_pulls();
    let options = PullOptions { skip_tls_verify: true, ..PullOptions::default() };
    let insecure = node.ensure(EnsureRequest { options, ..pod(None) }).await;
    let verified = node.ensure(pod(None)).await;
    for pulling in [insecure, verified] {
        node.backend.finish_pull(ScriptedPull::ok("sha256:app", 7)).expect("each has its own");
        assert_eq!(pulling.await.unwrap(), Ok("sha256:app".into()));
    }
}

#[tokio::test(start_paused = true)]
async fn callers_wait_for_their_turn_with_the_pods_and_are_tracked() {
    let node = node(PullConfig { max_parallel_image_pulls: NonZeroU32::new(1), ..PullConfig::default() });
    node.backend.hold_pulls();
    let pod = node.ensure(pod(None)).await;
    let caller = node.pull("registry.example/other:v1", None).await;
    let pulls = node.manager.pulls();
    let phases: Vec<_> = pulls.iter().map(|pull| (pull.image.as_str(), pull.phase)).collect();
    assert_eq!(phases, [(APP, PullPhase::Pulling), ("registry.example/other:v1", PullPhase::Queued)]);
    for (pulling, id) in [(pod, "sha256:app"), (caller, "sha256:other")] {
        node.backend.finish_pull(ScriptedPull::ok(id, 7)).expect("one runs at a time");
        assert_eq!(pulling.await.unwrap(), Ok(id.into()));
        settle().await;
    }
    let leased: Vec<_> = node.gate.active_leases().into_iter().map(|(id, _)| id).collect();
    assert_eq!(leased, ["sha256:app", "sha256:other"]);
}

#[tokio::test(start_paused = true)]
async fn an_image_reported_as_present_is_leased() {
    let node = node(PullConfig::default());
    for (name, id) in [("a:1", "sha256:a"), ("b:1", "sha256:b")] {
        node.backend.add_image(name, image(id, 7));
    }
    let status =
        async |name: &str, intent| node.manager.status(&ImageSpec::named(name), intent).await.unwrap();
    assert_eq!(status("absent", StatusIntent::Use).await, None);
    assert!(status("a:1", StatusIntent::Show).await.is_some());
    assert_eq!(node.gate.active_leases(), [], "no start follows");
    assert!(status("a:1", StatusIntent::Use).await.is_some());
    assert!(node.manager.inspect(&ImageSpec::named("sha256:b")).await.unwrap().is_some());
    for id in ["sha256:a", "sha256:b"] {
        assert!(node.gate.try_begin_removal(id).is_none(), "collection leaves {id} alone");
    }
    advance(LEASE).await;
    assert!(node.gate.try_begin_removal("sha256:a").is_some());
}

#[tokio::test(start_paused = true)]
async fn an_image_that_is_being_removed_is_asked_for_again() {
    let node = node(PullConfig::default());
    node.backend.add_image("a:1", image("sha256:a", 7));
    let removing = node.gate.try_begin_removal("sha256:a").expect("not leased");
    let manager = node.manager.clone();
    let asking =
        tokio::spawn(async move { manager.status(&ImageSpec::named("a:1"), StatusIntent::Use).await });
    settle().await;
    assert!(!asking.is_finished(), "the answer would be wrong in a moment");
    node.backend.forget("a:1");
    drop(removing);
    assert_eq!(asking.await.unwrap(), Ok(None));
    assert_eq!(node.gate.active_leases(), []);
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_misses_what_was_just_removed_is_tried_again() {
    let missed = || {
        let message = format!("failed to create image reference: {APP}: not found");
        ScriptedPull::with_outcome(Err(BackendError::call(CallErrorKind::NotFound, message)))
    };
    let pulls = |node: &DirectPullFixture| {
        node.backend.calls().iter().filter(|call| matches!(call, BackendCall::Pull { .. })).count()
    };
    let node = node(PullConfig::default());
    node.backend.on_pull(missed());
    node.pull(APP, None).await.await.unwrap().expect_err("not in the registry");
    assert_eq!(pulls(&node), 1);

    let (held, release) = missed().held();
    node.backend.on_pull(held);
    node.backend.on_pull(ScriptedPull::ok("sha256:app", 7));
    let pulling = node.pull(APP, None).await;
    drop(node.gate.try_begin_removal("sha256:app").expect("not leased"));
    release.release();
    assert_eq!(pulling.await.unwrap(), Ok("sha256:app".into()));
    assert_eq!(pulls(&node), 3);

    let slow = node.gate.try_begin_removal("sha256:app-0").expect("not leased");
    node.backend.on_pull(missed());
    node.backend.on_pull(ScriptedPull::ok("sha256:app", 7));
    let pulling = node.pull(APP, None).await;
    advance(Duration::from_secs(2)).await;
    settle().await;
    assert_eq!(pulls(&node), 4, "what is being removed would be missed again");
    drop(slow);
    assert_eq!(pulling.await.unwrap(), Ok("sha256:app".into()));
    assert_eq!(pulls(&node), 5);

    let _hangs = node.gate.try_begin_removal("sha256:other").expect("not leased");
    (0..3).for_each(|_| node.backend.on_pull(missed()));
    node.pull(APP, None).await.await.unwrap().expect_err("not for ever");
    assert_eq!(pulls(&node), 8);

    node.backend.take_calls();
    node.backend.on_pull(ScriptedPull::fails("denied"));
    node.pull("registry.example/other:v1", None).await.await.unwrap().expect_err("another reason");
    assert_eq!(pulls(&node), 1);
}

async fn remove(manager: &ImageManager, name: &str) -> Result<(), BackendError> {
    manager.remove(&ImageSpec::named(name)).await.map(drop)
}

#[tokio::test(start_paused = true)]
async fn removals_of_one_image_wait_for_each_other_and_all_succeed() {
    let node = node(PullConfig::default());
    node.backend.add_image("a:1", image("sha256:a", 7));
    node.backend.add_image("a:2", image("sha256:a", 7));
    let collecting = node.gate.try_begin_removal("sha256:a").expect("not leased");
    let mut removals = Vec::new();
    for name in ["a:1", "a:2", "sha256:a", "a:1", "a:1"] {
        let manager = node.manager.clone();
        removals.push(tokio::spawn(async move { remove(&manager, name).await }));
    }
    settle().await;
    assert_eq!(node.removals(), [""; 0], "a removal is under way");
    drop(collecting);
    for removal in removals {
        assert_eq!(removal.await.unwrap(), Ok(()));
    }
    assert_eq!(node.removals(), ["sha256:a"; 5], "by id, whatever its names point at");
    assert_eq!(node.backend.images(), []);
    assert_eq!(remove(&node.manager, "a:1").await, Ok(()), "it is gone already");
}

#[tokio::test(start_paused = true)]
async fn an_explicit_removal_ignores_leases() {
    let node = node(PullConfig::default());
    node.backend.offer(APP, image("sha256:app", 7));
    node.pull(APP, None).await.await.unwrap().expect("pulled");
    assert_eq!(node.gate.active_leases().len(), 1);
    let refusal = |_: Option<&_>| Some(error("it is in use"));
    let (id, spec, options) = ("sha256:app".into(), ImageSpec::named(APP), RemoveOptions::default());
    node.manager.remove_by_id(&id, &spec, &options, Some(&refusal)).await.unwrap_err();
    assert_eq!(node.gate.active_leases().len(), 1, "it is still there");
    assert_eq!(remove(&node.manager, APP).await, Ok(()));
    assert_eq!((node.backend.images(), node.gate.active_leases()), (Vec::new(), Vec::new()));
}

/// An incomplete image has no status, and its name may become that of a complete one before the backend removes it.
#[tokio::test(start_paused = true)]
async fn a_pull_that_completes_an_image_while_it_is_removed_is_repeated() {
    let node = node(PullConfig::default());
    node.backend.offer(APP, image("sha256:app", 7));
    node.backend.hold_removals();
    let manager = node.manager.clone();
    let removing = tokio::spawn(async move { remove(&manager, APP).await });
    settle().await;
    let mut pulling = node.pull(APP, None).await;
    advance(Duration::from_secs(60)).await;
    assert!(!pulling.is_finished() && !node.backend.images().is_empty(), "it does not report the image");
    node.backend.release_removals();
    assert_eq!(removing.await.unwrap(), Ok(()));
    assert_eq!((&mut pulling).await.unwrap(), Ok("sha256:app".into()));
    assert_eq!((node.backend.images().len(), node.gate.active_leases().len()), (1, 1));
}

type Pins = Result<HashMap<ImageId, String>, BackendError>;

/// Answers always the same.
struct FixedPins(Pins);

#[async_trait]
impl ImagePinSource for FixedPins {
    async fn pins(&self, _: &[Image]) -> Pins {
        self.0.clone()
    }
}

#[tokio::test]
async fn while_pins_are_unknown_all_images_are_pinned() {
    let observe = async |pins: Pins| {
        let mut listed = ["a", "b"].map(|id| image(id, 7));
        mark_pinned(&FixedPins(pins), &mut listed).await;
        listed.map(|image| image.pinned)
    };
    assert_eq!(observe(Err(error("the mounts are unknown"))).await, [true; 2]);
    assert_eq!(observe(Ok([("a".into(), "mounted at /mnt".into())].into())).await, [true, false]);
    assert_eq!(observe(Ok(HashMap::new())).await, [false; 2]);
}

#[tokio::test(start_paused = true)]
async fn one_removal_at_a_time_has_the_gate() {
    let gate = Arc::new(RemovalGate::default());
    let first = gate.wait_begin_removal("sha256:a").await;
    let _other = gate.wait_begin_removal("sha256:b").await;
    let waiting = {
        let gate = gate.clone();
        tokio::spawn(async move { gate.wait_begin_removal("sha256:a").await })
    };
    settle().await;
    assert!(!waiting.is_finished());
    assert!(gate.try_begin_removal("sha256:a").is_none(), "nor does collection come between");
    drop(first);
    let second = waiting.await.unwrap();
    assert!(gate.try_begin_removal("sha256:a").is_none());
    drop(second);
    assert!(gate.try_begin_removal("sha256:a").is_some());
}

#[tokio::test]
async fn an_image_pulled_with_a_credential_of_unknown_owner_requires_authentication() {
    let dir = tempfile::tempdir().unwrap();
    let records =
        Arc::new(PullRecordStore::open(dir.path(), Verification::of_unconfigured_kubelet()).unwrap());
    let backend = FakeBackend::new();
    backend.on_pull_of(APP, ScriptedPull::ok("sha256:app", 7));
    let manager = ImageManager::new(Arc::new(backend.clone())).with_records(records.clone());
    let (spec, wants) =
        (ImageSpec::named(APP), EnsureRequest { policy: PullPolicy::Never, ..pod(Some("bob")) });
    manager.pull_directly(spec.clone(), Some(login("bob")), None).await.unwrap();
    assert_eq!(records.on_disk().unwrap(), (0, 1), "the intent is closed");
    let refused = manager.ensure(&wants).await.expect_err("it does not count as preloaded");
    assert!(refused.access_denied, "it is here");
    backend.on_pull_of(APP, ScriptedPull::fails("denied"));
    let pulls = EnsureRequest { policy: PullPolicy::IfNotPresent, ..pod(None) };
    assert!(manager.ensure(&pulls).await.expect_err("nothing shown").access_denied);
    let elsewhere = EnsureRequest { image: "registry.example/absent:1".into(), ..wants.clone() };
    assert!(!manager.ensure(&elsewhere).await.expect_err("absent").access_denied);
    backend.on_pull_of(APP, ScriptedPull::ok("sha256:app", 7));
    manager.ensure(&pod(Some("bob"))).await.unwrap();
    manager.ensure(&wants).await.unwrap();

    backend.on_pull_of(APP, ScriptedPull::ok("sha256:open", 7));
    manager.pull_directly(spec, None, None).await.unwrap();
    manager.ensure(&EnsureRequest { policy: PullPolicy::Never, ..pod(None) }).await.unwrap();
}
