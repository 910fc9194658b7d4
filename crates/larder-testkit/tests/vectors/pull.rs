//! `backoff.json`, `puller.json`, `pull_policy.json`: the pull room in kubelet's mode, under simulated time.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder::credentials::{LazyLookup, PullSecret, SecretCoordinates};
use larder::events::{Event, EventSink, Reason};
use larder::pod::{ObjectRef, Pod};
use larder::pull::{
    Backoff, EnsureLabels, EnsureRequest, Manager, PullConfig, PullMetrics, PullPolicy, PullTimeRecorder,
    PullTimes,
};
use larder::records::{PullRecords, RecordedCredentials, RecordsError};
use larder_testkit::fake_backend::{Call, FakeBackend, Op, Pull, error, image};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{Answer, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<Answer> {
    Some(match op {
        "backoff_sequence" => parse(input).map(backoff_sequence),
        "throttle_sequence" => parse(input).map(|input| simulated(throttle_sequence(input))),
        "pulling_time" => parse(input).map(pulling_time),
        "concurrency" => parse(input).map(|input| simulated(concurrency(input))),
        "start_order" => parse(input).map(|input| simulated(start_order(input))),
        "waiting_events" => parse(input).map(|input| simulated(waiting_events(input))),
        "ensure_sequence" => parse(input).and_then(|input| simulated(ensure_sequence(input))),
        _ => return None,
    })
}

/// Runs a case under a clock that only the case moves.
pub(crate) fn simulated<T>(case: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O starts");
    runtime.block_on(case)
}

/// Lets all tasks run until none can go on by itself.
async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

// === backoff.json ===

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BackoffSequence {
    initial_ms: u64,
    max_ms: u64,
    steps: Vec<BackoffStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "do", rename_all = "snake_case")]
enum BackoffStep {
    Fail {
        at_ms: u64,
        key: String,
    },
    Check {
        at_ms: u64,
        key: String,
    },
    Get {
        #[serde(rename = "at_ms")]
        _at_ms: u64,
        key: String,
    },
    Gc {
        at_ms: u64,
        #[serde(default, rename = "key")]
        _key: String,
    },
    Reset {
        #[serde(rename = "at_ms")]
        _at_ms: u64,
        key: String,
    },
}

fn backoff_sequence(input: BackoffSequence) -> Value {
    let start = Instant::now();
    let mut backoff = Backoff::new(ms(input.initial_ms), ms(input.max_ms));
    let millis = |d: Duration| json!({"delay_ms": d.as_millis()});
    let steps = input.steps.into_iter().map(|step| match step {
        BackoffStep::Fail { at_ms, key } => millis(backoff.fail(&key, start + ms(at_ms))),
        BackoffStep::Check { at_ms, key } => {
            json!({"in_backoff": backoff.remaining(&key, start + ms(at_ms)).is_some()})
        }
        BackoffStep::Get { key, .. } => millis(backoff.delay(&key)),
        BackoffStep::Gc { at_ms, .. } => {
            backoff.gc(start + ms(at_ms));
            json!({})
        }
        BackoffStep::Reset { key, .. } => {
            backoff.reset(&key);
            json!({})
        }
    });
    json!({"steps": steps.collect::<Vec<_>>()})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ThrottleSequence {
    qps: u32,
    burst: u32,
    requests_at_ms: Vec<u64>,
}

async fn throttle_sequence(input: ThrottleSequence) -> Value {
    let backend = FakeBackend::new();
    let config =
        PullConfig { registry_pull_qps: input.qps, registry_burst: input.burst, ..unthrottled(false, None) };
    let start = Instant::now();
    let manager = Manager::builder(Arc::new(backend.clone())).config(config).build();
    let mut accepted = Vec::new();
    for (i, at) in input.requests_at_ms.into_iter().enumerate() {
        tokio::time::advance((start + ms(at)).saturating_duration_since(Instant::now())).await;
        backend.on_pull(Pull::ok("sha256:new", 1));
        let pod = Pod { uid: format!("uid-{i}"), ..Pod::default() };
        accepted.push(manager.ensure(&EnsureRequest::new("app:v1", PullPolicy::Always, pod)).await.is_ok());
    }
    json!({"accepted": accepted})
}

// === puller.json ===

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullingTime {
    tracked: bool,
    steps: Vec<PullingTimeStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "do", rename_all = "snake_case")]
enum PullingTimeStep {
    Started { at_ms: u64 },
    Finished { at_ms: u64 },
}

fn pulling_time(input: PullingTime) -> Value {
    let start = Instant::now();
    let times = PullTimes::default();
    if input.tracked {
        times.track("uid-1");
    }
    for step in input.steps {
        match step {
            PullingTimeStep::Started { at_ms } => times.started_pulling("uid-1", start + ms(at_ms)),
            PullingTimeStep::Finished { at_ms } => times.finished_pulling("uid-1", start + ms(at_ms)),
        }
    }
    json!({"total_ms": times.total("uid-1").as_millis(), "open": times.open("uid-1")})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Concurrency {
    serialize_image_pulls: bool,
    max_parallel_image_pulls: Option<u32>,
    steps: Vec<ConcurrencyStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "do", rename_all = "snake_case")]
enum ConcurrencyStep {
    Request { count: usize },
    Finish { count: usize },
    Fail { count: usize },
}

/// Kubelet's mode without a throttle.
fn unthrottled(serialize_image_pulls: bool, max_parallel_image_pulls: Option<u32>) -> PullConfig {
    PullConfig {
        serialize_image_pulls,
        max_parallel_image_pulls: max_parallel_image_pulls.and_then(NonZeroU32::new),
        registry_pull_qps: 0,
        ..PullConfig::kubelet()
    }
}

/// A manager whose runtime pulls end only when the case says so, and the requests made of it.
struct Held {
    backend: FakeBackend,
    events: Arc<Events>,
    manager: Arc<Manager>,
    requests: usize,
}

impl Held {
    fn new(config: PullConfig) -> Self {
        let (backend, events) = (FakeBackend::new(), Arc::new(Events::default()));
        backend.hold_pulls();
        let manager =
            Manager::builder(Arc::new(backend.clone())).config(config).events(events.clone()).build();
        Held { backend, events, manager: Arc::new(manager), requests: 0 }
    }

    async fn request(&mut self, image: &str) {
        let pod = Pod { uid: format!("uid-{}", self.requests), ..Pod::default() };
        self.requests += 1;
        let target = Some(ObjectRef::new(&pod, ""));
        let request = EnsureRequest { target, ..EnsureRequest::new(image, PullPolicy::Always, pod) };
        let manager = self.manager.clone();
        tokio::spawn(async move { manager.ensure(&request).await });
        settle().await;
    }

    async fn end_one(&self, pull: Pull) {
        self.backend.finish_pull(pull).expect("a runtime pull is running");
        settle().await;
    }

    /// Images as requested, in the order in which the runtime was asked for them.
    fn runtime_pulls(&self) -> Vec<String> {
        let pulls = self.backend.calls().into_iter().filter_map(|call| match call {
            Call::Pull { image, .. } => Some(image.trim_end_matches(":latest").to_owned()),
            _ => None,
        });
        pulls.collect()
    }
}

async fn concurrency(input: Concurrency) -> Value {
    let mut held = Held::new(unthrottled(input.serialize_image_pulls, input.max_parallel_image_pulls));
    let mut steps = Vec::new();
    for step in input.steps {
        match step {
            ConcurrencyStep::Request { count } => {
                for _ in 0..count {
                    held.request("app:v1").await;
                }
            }
            ConcurrencyStep::Finish { count } => {
                for _ in 0..count {
                    held.end_one(Pull::ok("sha256:new", 1)).await;
                }
            }
            ConcurrencyStep::Fail { count } => {
                for _ in 0..count {
                    held.end_one(Pull::fails("404")).await;
                }
            }
        }
        let counts = held.backend.counts();
        steps.push(json!({"running": counts.running, "started_total": counts.started}));
    }
    json!({"steps": steps})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StartOrder {
    serialize_image_pulls: bool,
    max_parallel_image_pulls: Option<u32>,
    requests: Vec<String>,
}

async fn start_order(input: StartOrder) -> Value {
    let mut held = Held::new(unthrottled(input.serialize_image_pulls, input.max_parallel_image_pulls));
    for image in &input.requests {
        held.request(image).await;
    }
    for _ in &input.requests {
        held.end_one(Pull::ok("sha256:new", 1)).await;
    }
    json!({"started": held.runtime_pulls()})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitingEvents {
    serialize_image_pulls: bool,
    requests: Vec<String>,
}

async fn waiting_events(input: WaitingEvents) -> Value {
    let mut held = Held::new(unthrottled(input.serialize_image_pulls, None));
    for image in &input.requests {
        held.request(image).await;
    }
    let events = held.events.take().into_iter().map(|event| {
        let image = event.message.split('"').nth(1).unwrap_or_default().to_owned();
        format!("{} {image}", event.reason)
    });
    json!({"events": events.collect::<Vec<_>>(), "runtime_pulls": held.runtime_pulls()})
}

// === pull_policy.json ===

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnsureSequence {
    image: String,
    policy: String,
    #[serde(default)]
    present: BTreeMap<String, String>,
    #[serde(default = "yes")]
    ensure_secret_pulled_images: bool,
    #[serde(default = "default_backoff")]
    backoff: BackoffBounds,
    throttle: Option<Rate>,
    #[serde(default)]
    serialize_image_pulls: bool,
    attempts: Vec<Attempt>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BackoffBounds {
    initial_ms: u64,
    max_ms: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rate {
    qps: u32,
    burst: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attempt {
    advance_ms: u64,
    image: Option<String>,
    policy: Option<String>,
    pod_uid: Option<String>,
    inspect_error: Option<String>,
    pull: Option<PullOutcome>,
    must_attempt_pull: Option<MustAttemptPull>,
    record_intent_error: Option<String>,
    #[serde(default)]
    invalid_secret: bool,
    #[serde(default)]
    no_event_target: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullOutcome {
    image_ref: Option<String>,
    #[serde(default)]
    size: u64,
    size_error: Option<String>,
    error: Option<String>,
}

#[derive(Deserialize, Clone, Default)]
#[serde(deny_unknown_fields)]
struct MustAttemptPull {
    #[serde(default)]
    required: bool,
    error: Option<String>,
}

fn yes() -> bool {
    true
}

fn default_backoff() -> BackoffBounds {
    BackoffBounds { initial_ms: 10_000, max_ms: 300_000 }
}

async fn ensure_sequence(input: EnsureSequence) -> Answer {
    let backend = FakeBackend::new();
    for (name, id) in &input.present {
        backend.add_image(name, image(id, 1));
    }
    let config = PullConfig {
        backoff_initial: ms(input.backoff.initial_ms),
        backoff_max: ms(input.backoff.max_ms),
        registry_pull_qps: input.throttle.as_ref().map_or(0, |rate| rate.qps),
        registry_burst: input.throttle.as_ref().map_or(0, |rate| rate.burst),
        ..unthrottled(input.serialize_image_pulls, None)
    };
    let (events, records) = (Arc::new(Events::default()), Arc::new(Records::default()));
    let (labels, marks) = (Arc::new(Labels::default()), Arc::new(Marks::default()));
    let mut builder = Manager::builder(Arc::new(backend.clone()))
        .config(config)
        .events(events.clone())
        .metrics(labels.clone())
        .times(marks.clone());
    if input.ensure_secret_pulled_images {
        builder = builder.records(records.clone());
    }
    let manager = builder.build();

    let mut attempts = Vec::new();
    for attempt in &input.attempts {
        tokio::time::advance(ms(attempt.advance_ms)).await;
        records.answer(attempt.must_attempt_pull.clone(), attempt.record_intent_error.clone());
        if let Some(text) = &attempt.inspect_error {
            // Only asked for by policies that look first; for the others it must stay unused.
            let policy = attempt.policy.as_ref().unwrap_or(&input.policy);
            if policy != "Always" {
                backend.fail_next(Op::Status, error(text));
            }
        }
        if let Some(pull) = &attempt.pull {
            backend.on_pull(scripted(pull)?);
        }
        let result = manager.ensure(&request(&input, attempt)).await;
        let (image_ref, message, error) = match result {
            Ok(ensured) => (ensured.image_ref, ensured.message, None),
            Err(error) => (String::new(), error.message, Some(error.reason.to_string())),
        };
        let events = events.take().into_iter().map(|event| {
            json!({"type": event.event_type.to_string(), "reason": event.reason.to_string(), "message": event.message})
        });
        let [pulling_started, pulling_finished] = marks.take();
        attempts.push(json!({
            "image_ref": image_ref,
            "message": message,
            "error": error,
            "events": events.collect::<Vec<_>>(),
            "runtime_calls": runtime_calls(&backend.take_calls())?,
            "pull_manager_calls": records.take(),
            "pulling_started": pulling_started,
            "pulling_finished": pulling_finished,
            "metric": labels.take(),
        }));
    }
    Ok(json!({"attempts": attempts}))
}

fn scripted(pull: &PullOutcome) -> Result<Pull, String> {
    match pull {
        PullOutcome { error: Some(text), image_ref: None, .. } => Ok(Pull::fails(text)),
        PullOutcome { error: None, image_ref: Some(image_ref), size, size_error } => {
            let pull = Pull::ok(image_ref, *size);
            Ok(match size_error {
                Some(text) => pull.then_status_fails(text),
                None => pull,
            })
        }
        _ => Err("a pull either fails or gives a reference".into()),
    }
}

fn request(input: &EnsureSequence, attempt: &Attempt) -> EnsureRequest {
    let uid = attempt.pod_uid.clone().unwrap_or_else(|| "uid-1".into());
    let pod = Pod { uid, namespace: "ns".into(), name: "pod".into(), ..Pod::default() };
    let broken = PullSecret {
        kind: "kubernetes.io/dockerconfigjson".into(),
        coordinates: SecretCoordinates { uid: "uid-s".into(), namespace: "ns".into(), name: "broken".into() },
        data: BTreeMap::from([(".dockerconfigjson".into(), b"not json".to_vec())]),
    };
    let policy = PullPolicy::parse(attempt.policy.as_ref().unwrap_or(&input.policy));
    EnsureRequest {
        target: (!attempt.no_event_target).then(|| ObjectRef::new(&pod, "spec.containers{c}")),
        secrets: attempt.invalid_secret.then_some(broken).into_iter().collect(),
        ..EnsureRequest::new(attempt.image.as_ref().unwrap_or(&input.image), policy, pod)
    }
}

/// Names the calls as kubelet's runtime interface does: a status call after a pull asks for the size, any other for
/// the reference.
fn runtime_calls(calls: &[Call]) -> Result<Vec<Value>, String> {
    let mut pulled = false;
    let named = calls.iter().map(|call| match call {
        Call::Status { image } if pulled => Ok(json!({"call": "GetImageSize", "image": image})),
        Call::Status { image } => Ok(json!({"call": "GetImageRef", "image": image})),
        Call::Pull { image, .. } => {
            pulled = true;
            Ok(json!({"call": "PullImage", "image": image}))
        }
        other => Err(format!("unexpected call {other:?}")),
    });
    named.collect()
}

#[derive(Default)]
struct Events(Mutex<Vec<Event>>);

impl Events {
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *locked(&self.0))
    }
}

impl EventSink for Events {
    fn record(&self, event: Event) {
        // A case compares the events of ensure itself; none of them is the caller's `Failed: Error: ...`.
        assert!(event.reason != Reason::Failed || !event.message.starts_with("Error:"));
        locked(&self.0).push(event);
    }
}

#[derive(Default)]
struct Labels(Mutex<Vec<EnsureLabels>>);

impl Labels {
    /// The labels of the one call since the last time; null if it was not one.
    fn take(&self) -> Value {
        match std::mem::take(&mut *locked(&self.0)).as_slice() {
            [one] => json!({
                "pull_policy": one.pull_policy,
                "present_locally": one.present_locally.to_string(),
                "pull_required": one.pull_required.to_string(),
            }),
            _ => Value::Null,
        }
    }
}

impl PullMetrics for Labels {
    fn ensure_requested(&self, labels: &EnsureLabels) {
        locked(&self.0).push(labels.clone());
    }

    fn image_pulled(&self, _size_bytes: u64, _duration: Duration) {}
}

/// Counts started and finished marks.
#[derive(Default)]
struct Marks(Mutex<[usize; 2]>);

impl Marks {
    fn take(&self) -> [usize; 2] {
        std::mem::take(&mut *locked(&self.0))
    }
}

impl PullTimeRecorder for Marks {
    fn started_pulling(&self, _pod_uid: &str, _now: Instant) {
        locked(&self.0)[0] += 1;
    }

    fn finished_pulling(&self, _pod_uid: &str, _now: Instant) {
        locked(&self.0)[1] += 1;
    }
}

/// A record check that answers as the case says and notes what it was told.
#[derive(Default)]
struct Records {
    answers: Mutex<(MustAttemptPull, Option<String>)>,
    calls: Mutex<Vec<Value>>,
}

impl Records {
    fn answer(&self, must_attempt_pull: Option<MustAttemptPull>, intent_error: Option<String>) {
        *locked(&self.answers) = (must_attempt_pull.unwrap_or_default(), intent_error);
    }

    fn take(&self) -> Vec<Value> {
        std::mem::take(&mut *locked(&self.calls))
    }

    fn note(&self, call: Value) {
        locked(&self.calls).push(call);
    }
}

#[async_trait::async_trait]
impl PullRecords for Records {
    async fn must_attempt_pull(
        &self,
        image: &str,
        image_ref: &str,
        _credentials: &mut LazyLookup<'_>,
    ) -> Result<bool, RecordsError> {
        self.note(json!({"call": "MustAttemptImagePull", "image": image, "image_ref": image_ref}));
        let (answer, _) = &*locked(&self.answers);
        match &answer.error {
            Some(text) => Err(RecordsError(text.clone())),
            None => Ok(answer.required),
        }
    }

    fn record_pull_intent(&self, image: &str) -> Result<(), RecordsError> {
        self.note(json!({"call": "RecordPullIntent", "image": image}));
        let (_, error) = &*locked(&self.answers);
        error.clone().map_or(Ok(()), |text| Err(RecordsError(text)))
    }

    fn record_image_pulled(&self, image: &str, image_ref: &str, credentials: &RecordedCredentials) {
        let credentials = match credentials {
            RecordedCredentials::NodePodsAccessible => json!({"nodePodsAccessible": true}),
            RecordedCredentials::Secret(at, hash) => json!({"kubernetesSecrets": [
                {"uid": at.uid, "namespace": at.namespace, "name": at.name, "credentialHash": hash}]}),
            RecordedCredentials::ServiceAccount(at) => json!({"kubernetesServiceAccounts": [
                {"uid": at.uid, "namespace": at.namespace, "name": at.name}]}),
        };
        self.note(json!({"call": "RecordImagePulled", "image": image, "image_ref": image_ref,
                         "credentials": credentials}));
    }

    fn record_image_pull_failed(&self, image: &str) {
        self.note(json!({"call": "RecordImagePullFailed", "image": image}));
    }
}
