//! `puller.json`: how many pulls run at once, in which order, and the status of those that wait.

use std::sync::Arc;

use larder::pod::{ObjectRef, Pod};
use larder::pull::{EnsureRequest, ImageManager, PullConfig, PullPolicy, PullTimeRecorder, PullTimes};
use larder_testkit::fake_backend::{BackendCall, FakeBackend, ScriptedPull};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::recorders::EventRecorder;
use super::{ms, settle, unthrottled};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PullingTime {
    tracked: bool,
    steps: Vec<PullingTimeStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "do", rename_all = "snake_case")]
enum PullingTimeStep {
    Started { at_ms: u64 },
    Finished { at_ms: u64 },
}

pub(super) fn pulling_time(input: PullingTime) -> Value {
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
pub(super) struct Concurrency {
    serialize_image_pulls: bool,
    max_parallel_image_pulls: Option<i32>,
    steps: Vec<ConcurrencyStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "do", rename_all = "snake_case")]
enum ConcurrencyStep {
    Request { count: usize },
    Finish { count: usize },
    Fail { count: usize },
}

/// A manager whose runtime pulls end only when the case says so, and the requests made of it.
struct PausedPullManager {
    backend: FakeBackend,
    events: Arc<EventRecorder>,
    manager: Arc<ImageManager>,
    requests: usize,
}

impl PausedPullManager {
    #[expect(clippy::needless_pass_by_value, reason = "tests write the config in the call")]
    fn new(config: PullConfig) -> Self {
        let (backend, events) = (FakeBackend::new(), Arc::new(EventRecorder::default()));
        backend.hold_pulls();
        let manager =
            ImageManager::new(Arc::new(backend.clone())).with_config(&config).with_events(events.clone());
        PausedPullManager { backend, events, manager: Arc::new(manager), requests: 0 }
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

    async fn end_one(&self, pull: ScriptedPull) {
        self.backend.finish_pull(pull).expect("a runtime pull is running");
        settle().await;
    }

    /// Images as requested, in the order of the calls to the runtime.
    fn runtime_pulls(&self) -> Vec<String> {
        let pulls = self.backend.calls().into_iter().filter_map(|call| match call {
            BackendCall::Pull { image, .. } => Some(image.trim_end_matches(":latest").to_owned()),
            _ => None,
        });
        pulls.collect()
    }
}

pub(super) async fn concurrency(input: Concurrency) -> Value {
    let mut held =
        PausedPullManager::new(unthrottled(input.serialize_image_pulls, input.max_parallel_image_pulls));
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
                    held.end_one(ScriptedPull::ok("sha256:new", 1)).await;
                }
            }
            ConcurrencyStep::Fail { count } => {
                for _ in 0..count {
                    held.end_one(ScriptedPull::fails("404")).await;
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
pub(super) struct StartOrder {
    serialize_image_pulls: bool,
    max_parallel_image_pulls: Option<i32>,
    requests: Vec<String>,
}

pub(super) async fn start_order(input: StartOrder) -> Value {
    let mut held =
        PausedPullManager::new(unthrottled(input.serialize_image_pulls, input.max_parallel_image_pulls));
    for image in &input.requests {
        held.request(image).await;
    }
    for _ in &input.requests {
        held.end_one(ScriptedPull::ok("sha256:new", 1)).await;
    }
    json!({"started": held.runtime_pulls()})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WaitingEvents {
    serialize_image_pulls: bool,
    requests: Vec<String>,
}

pub(super) async fn waiting_events(input: WaitingEvents) -> Value {
    let mut held = PausedPullManager::new(unthrottled(input.serialize_image_pulls, None));
    for image in &input.requests {
        held.request(image).await;
    }
    let events = held.events.take().into_iter().map(|event| {
        let image = event.message.split('"').nth(1).unwrap_or_default().to_owned();
        format!("{} {image}", event.reason)
    });
    json!({"events": events.collect::<Vec<_>>(), "runtime_pulls": held.runtime_pulls()})
}
