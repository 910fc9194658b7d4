//! `gc.json`, `gc_policy_validation.json`, `node_status_images.json`: collection in kubelet's mode.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, Container, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec,
    ProgressReporter, RemoveOptions, Removed, RuntimeInfo, Sandbox,
};
use larder::credentials::Credential;
use larder::events::{Event, EventSink};
use larder::gc::{
    Clock, ClockReading, Collector, FailureCount, FsStatsProvider, GcGoal, GcPolicy, PostImageGcHook,
    RemovalHistory, RemovalHistoryEntry, UnixMillis, images_for_node_status, size_text,
};
use larder::image_service::{FilesystemError, FsStats};
use larder::pod::SandboxConfig;
use larder::pull::image_size_bucket;
use larder::reference::ImageId;
use larder_testkit::fake_backend::error;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "gc_scenario" => parse(input).map(scenario),
        "format_size" => parse(input).map(|SizeInput { bytes }| json!({"text": size_text(bytes)})),
        "image_size_bucket" => parse(input).map(|SizeInput { bytes }| {
            json!({"label": image_size_bucket(u64::try_from(bytes).unwrap_or(0))})
        }),
        "gc_loop_enabled" => parse(input).map(|policy: PolicyInput| json!({"enabled": policy.policy().is_enabled()})),
        "gc_loop_events" => parse(input).map(loop_events),
        "validate_policy" => parse(input).map(|policy: PolicyInput| {
            json!({"error": policy.policy().problems().first().map(ToString::to_string)})
        }),
        "node_status_images" => parse(input).map(node_status),
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SizeInput {
    bytes: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyInput {
    high_percent: i32,
    #[serde(default)]
    low_percent: i32,
    #[serde(default)]
    min_age_ms: u64,
    #[serde(default)]
    max_age_ms: u64,
}

impl PolicyInput {
    fn policy(&self) -> GcPolicy {
        GcPolicy {
            high_threshold_percent: self.high_percent,
            low_threshold_percent: self.low_percent,
            minimum_age: Duration::from_millis(self.min_age_ms),
            maximum_age: Duration::from_millis(self.max_age_ms),
            ..GcPolicy::kubelet()
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoopEvents {
    results: Vec<Option<String>>,
}

fn loop_events(LoopEvents { results }: LoopEvents) -> Value {
    let mut failures = FailureCount::default();
    let event = |result: Option<String>| {
        let outcome = result.map_or(Ok(()), Err);
        let reported = failures.count(&outcome);
        let message = outcome.err().filter(|_| reported)?;
        Some(json!({"type": "Warning", "reason": "ImageGCFailed", "message": message}))
    };
    json!({"events": results.into_iter().map(event).collect::<Vec<_>>()})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeStatus {
    max_images: i32,
    images: Vec<ImageInput>,
    list_error: String,
}

fn node_status(NodeStatus { max_images, images, list_error }: NodeStatus) -> Value {
    let listed = if list_error.is_empty() {
        Ok(images.into_iter().map(|image| image.image(false)).collect())
    } else {
        Err(error(list_error))
    };
    let (images, error) = match images_for_node_status(max_images, listed) {
        Ok(images) => (images, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let image = |image: &larder::gc::NodeImage| json!({"names": image.names, "size_bytes": image.size_bytes});
    json!({"images": images.iter().map(image).collect::<Vec<_>>(), "error": error})
}

// === gc_scenario ===

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    policy: PolicyInput,
    began_ms: i64,
    #[serde(default)]
    gates: CriGates,
    steps: Vec<ScenarioStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CriGates {
    image_volume: bool,
    runtime_class_in_image_cri_api: bool,
}

impl Default for CriGates {
    fn default() -> Self {
        CriGates { image_volume: true, runtime_class_in_image_cri_api: false }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioStep {
    at_ms: i64,
    #[serde(rename = "do")]
    action: ScenarioAction,
    images: Option<Vec<ImageInput>>,
    containers: Option<Vec<ContainerInput>>,
    fs: Option<FsInput>,
    #[serde(default)]
    fail: CallFailures,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum ScenarioAction {
    Detect,
    Collect,
    DeleteUnused,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
struct ImageInput {
    id: ImageId,
    size: u64,
    #[serde(default)]
    pinned: bool,
    #[serde(default)]
    runtime_handler: String,
    #[serde(default)]
    repo_tags: Vec<String>,
    #[serde(default)]
    repo_digests: Vec<String>,
}

impl ImageInput {
    fn image(self, with_handler: bool) -> Image {
        let runtime_handler = if with_handler { self.runtime_handler } else { String::new() };
        Image {
            spec: Some(ImageSpec { runtime_handler, ..ImageSpec::named(&self.id) }),
            id: self.id,
            size: self.size,
            pinned: self.pinned,
            repo_tags: self.repo_tags,
            repo_digests: self.repo_digests,
            ..Image::default()
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContainerInput {
    image_id: ImageId,
    #[serde(default)]
    runtime_handler: String,
    #[serde(default)]
    mounted_images: Vec<ImageId>,
}

#[derive(Deserialize, Clone, Copy, Default)]
#[serde(deny_unknown_fields, default)]
struct FsInput {
    capacity: u64,
    available: u64,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct CallFailures {
    list_images: Option<String>,
    list_containers: Option<String>,
    container_status: Option<String>,
    fs_stats: Option<String>,
    remove_image: BTreeMap<String, String>,
}

/// The node of one scenario: what the collector sees, and what it did in the current step.
#[derive(Default)]
struct ScenarioState {
    now: i64,
    image_volumes: bool,
    images: Vec<Image>,
    in_use: ContainerInventory,
    fs: FsInput,
    fail: CallFailures,
    did: StepEffects,
}

#[derive(Default)]
struct StepEffects {
    attempted: Vec<String>,
    removed: Vec<String>,
    handlers: Vec<String>,
    freed: u64,
    events: Vec<Value>,
    hook: Option<Vec<ImageId>>,
}

#[derive(Clone, Default)]
struct ScenarioNode(Arc<Mutex<ScenarioState>>);

impl ScenarioNode {
    fn state(&self) -> MutexGuard<'_, ScenarioState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failing(text: Option<&String>) -> Result<(), BackendError> {
    text.map_or(Ok(()), |text| Err(error(text.as_str())))
}

#[async_trait]
impl Backend for ScenarioNode {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        Ok(RuntimeInfo::default())
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        let state = self.state();
        failing(state.fail.list_images.as_ref())?;
        Ok(state.images.clone())
    }

    async fn status(&self, _: &ImageSpec) -> Result<Option<Image>, BackendError> {
        Err(error("collection asks for no status"))
    }

    async fn inspect(&self, _: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        Err(error("collection in kubelet's mode inspects nothing"))
    }

    async fn pull(
        &self,
        _: &ImageSpec,
        _: Option<&Credential>,
        _: Option<&SandboxConfig>,
        _: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        Err(error("collection pulls nothing"))
    }

    async fn remove(&self, image: &ImageSpec, _: &RemoveOptions) -> Result<Removed, BackendError> {
        let mut state = self.state();
        state.did.attempted.push(image.image.to_string());
        failing(state.fail.remove_image.get(image.image.as_str()))?;
        state.did.removed.push(image.image.to_string());
        state.did.handlers.push(image.runtime_handler.clone());
        let handler =
            |image: &Image| image.spec.as_ref().map_or(String::new(), |spec| spec.runtime_handler.clone());
        state.images.retain(|present| {
            present.id != image.image.as_str() || handler(present) != image.runtime_handler
        });
        Ok(Removed::Image { freed: None })
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        Ok(Filesystems::default())
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        let state = self.state();
        failing(state.fail.list_containers.as_ref())?;
        // Kubelet asks for the status of each container, for its image volumes.
        if state.image_volumes && !state.in_use.containers.is_empty() {
            let status =
                state.fail.container_status.as_ref().map(|text| format!("get container status: {text}"));
            failing(status.as_ref())?;
        }
        Ok(state.in_use.clone())
    }
}

#[async_trait]
impl FsStatsProvider for ScenarioNode {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        let state = self.state();
        failing(state.fail.fs_stats.as_ref())?;
        Ok(FsStats { capacity: state.fs.capacity, available: state.fs.available, ..FsStats::default() })
    }
}

impl Clock for ScenarioNode {
    fn read(&self) -> ClockReading {
        ClockReading::wall(UnixMillis(self.state().now))
    }
}

impl EventSink for ScenarioNode {
    fn record(&self, event: Event) {
        let event = json!({"type": event.event_type.to_string(), "reason": event.reason.to_string(),
            "message": event.message});
        self.state().did.events.push(event);
    }
}

impl PostImageGcHook for ScenarioNode {
    fn collected(&self, kept: &[ImageId], _: UnixMillis) {
        self.state().did.hook = Some(kept.to_vec());
    }
}

impl RemovalHistory for ScenarioNode {
    fn record(&self, entry: &RemovalHistoryEntry) -> io::Result<()> {
        self.state().did.freed += entry.promised.bytes;
        Ok(())
    }
}

fn in_use(containers: Vec<ContainerInput>, gates: &CriGates) -> ContainerInventory {
    let mut in_use = ContainerInventory::default();
    for (n, container) in containers.into_iter().enumerate() {
        let runtime_handler =
            if gates.runtime_class_in_image_cri_api { container.runtime_handler } else { String::new() };
        in_use.sandboxes.push(Sandbox { id: n.to_string(), runtime_handler, ..Sandbox::default() });
        in_use.containers.push(Container {
            id: n.to_string(),
            sandbox_id: n.to_string(),
            image_id: container.image_id,
            mounted_images: if gates.image_volume { container.mounted_images } else { Vec::new() },
            ..Container::default()
        });
    }
    in_use
}

fn scenario(Scenario { policy, began_ms, gates, steps }: Scenario) -> Value {
    let node = ScenarioNode::default();
    node.state().now = began_ms;
    node.state().image_volumes = gates.image_volume;
    let shared = Arc::new(node.clone());
    let collector = Collector::builder(shared.clone())
        .policy(policy.policy())
        .disk(shared.clone())
        .clock(shared.clone())
        .events(shared.clone(), "node")
        .hook(shared.clone())
        .history(shared)
        .build();
    let policy = policy.policy();
    let with_handler = gates.runtime_class_in_image_cri_api;
    let answers = steps.into_iter().map(|step| {
        {
            let mut state = node.state();
            (state.now, state.fail, state.did) = (step.at_ms, step.fail, StepEffects::default());
            if let Some(images) = step.images {
                state.images = images.into_iter().map(|image| image.image(with_handler)).collect();
            }
            if let Some(containers) = step.containers {
                state.in_use = in_use(containers, &gates);
            }
            state.fs = step.fs.unwrap_or(state.fs);
        }
        let before = collector.counts();
        let outcome = crate::pull::simulated(async {
            match step.action {
                ScenarioAction::Detect => collector.round(GcGoal::Detect, &policy).await,
                ScenarioAction::Collect => collector.round(GcGoal::Thresholds, &policy).await,
                ScenarioAction::DeleteUnused => collector.round(GcGoal::AllUnused, &policy).await,
            }
        })
        .into_result();
        let after = collector.counts();
        let mut state = node.state();
        let did = std::mem::take(&mut state.did);
        let mut left: Vec<&str> = state.images.iter().map(|image| image.id.as_str()).collect();
        left.sort_unstable();
        let mut answer = json!({
            "attempted": did.attempted,
            "removed": did.removed,
            "freed_bytes": did.freed,
            "error": outcome.err().map(|error| error.to_string()),
            "events": did.events,
            "images_left": left,
            "hook_remaining": did.hook,
            "metrics": {"age": after.age - before.age, "space": after.space - before.space},
        });
        if with_handler {
            answer["removed_handlers"] = json!(did.handlers);
        }
        answer
    });
    json!({"steps": answers.collect::<Vec<_>>()})
}
