//! `pull_policy.json`: everything that ensuring an image does, attempt by attempt.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder::credentials::{PullSecret, SecretCoordinates};
use larder::pod::{ObjectRef, Pod};
use larder::pull::{EnsureRequest, ImageManager, PullConfig, PullPolicy};
use larder::reference::ImageId;
use larder_testkit::fake_backend::{BackendCall, BackendOp, ScriptedPull, error};
use serde::Deserialize;
use serde_json::{Value, json};

use super::backend_under_test::BackendUnderTest;
use super::recorders::{
    EventRecorder, LabelRecorder, MustAttemptPullAnswer, PullTimeCounter, ScriptedRecords,
};
use super::{ms, unthrottled};
use crate::CaseResult;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EnsureSequence {
    image: String,
    policy: String,
    #[serde(default)]
    present: BTreeMap<String, String>,
    #[serde(default = "yes")]
    ensure_secret_pulled_images: bool,
    #[serde(default = "default_backoff")]
    backoff: BackoffBounds,
    throttle: Option<ThrottleInput>,
    #[serde(default)]
    serialize_image_pulls: bool,
    attempts: Vec<EnsureAttempt>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BackoffBounds {
    initial_ms: u64,
    max_ms: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ThrottleInput {
    qps: u32,
    burst: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EnsureAttempt {
    advance_ms: u64,
    image: Option<String>,
    policy: Option<String>,
    pod_uid: Option<String>,
    inspect_error: Option<String>,
    pull: Option<PullAnswer>,
    must_attempt_pull: Option<MustAttemptPullAnswer>,
    record_intent_error: Option<String>,
    #[serde(default)]
    invalid_secret: bool,
    #[serde(default)]
    no_event_target: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullAnswer {
    image_ref: Option<String>,
    #[serde(default)]
    size: u64,
    size_error: Option<String>,
    error: Option<String>,
}

fn yes() -> bool {
    true
}

fn default_backoff() -> BackoffBounds {
    BackoffBounds { initial_ms: 10_000, max_ms: 300_000 }
}

/// One attempt after another, each with what the runtime and the records answer to it.
pub(super) async fn ensure_sequence(input: EnsureSequence, stage: BackendUnderTest) -> CaseResult {
    for (name, id) in &input.present {
        stage.add_present(name, id).await?;
    }
    let config = PullConfig {
        backoff_initial: ms(input.backoff.initial_ms),
        backoff_max: ms(input.backoff.max_ms),
        registry_pull_qps: input.throttle.as_ref().map_or(0, |rate| rate.qps),
        registry_burst: input.throttle.as_ref().map_or(0, |rate| rate.burst),
        ..unthrottled(input.serialize_image_pulls, None)
    };
    let (events, records) = (Arc::new(EventRecorder::default()), Arc::new(ScriptedRecords::default()));
    let (labels, marks) = (Arc::new(LabelRecorder::default()), Arc::new(PullTimeCounter::default()));
    let mut manager = ImageManager::new(stage.backend.clone())
        .with_config(&config)
        .with_events(events.clone())
        .with_metrics(labels.clone())
        .with_times(marks.clone());
    if input.ensure_secret_pulled_images {
        manager = manager.with_records(records.clone());
    }

    let mut attempts = Vec::new();
    for attempt in &input.attempts {
        tokio::time::advance(ms(attempt.advance_ms)).await;
        records.answer(attempt.must_attempt_pull.clone(), attempt.record_intent_error.clone());
        if let Some(text) = &attempt.inspect_error {
            // Only called by policies that check for the image first; the others must not call it.
            let policy = attempt.policy.as_ref().unwrap_or(&input.policy);
            if policy != "Always" {
                stage.script.fail_next(BackendOp::Status, error(text));
            }
        }
        if let Some(pull) = &attempt.pull {
            stage.script.on_pull(scripted(pull)?);
        }
        let result = manager.ensure(&request(&input, attempt)).await;
        let (image_ref, message, error) = match result {
            Ok(ensured) => (ensured.image_ref, ensured.message, None),
            Err(error) => (ImageId::default(), error.message, Some(error.reason.to_string())),
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
            "runtime_calls": runtime_calls(&stage.script.take_calls())?,
            "pull_manager_calls": records.take(),
            "pulling_started": pulling_started,
            "pulling_finished": pulling_finished,
            "metric": labels.take(),
        }));
    }
    Ok(json!({"attempts": attempts}))
}

fn scripted(pull: &PullAnswer) -> Result<ScriptedPull, String> {
    match pull {
        PullAnswer { error: Some(text), image_ref: None, .. } => Ok(ScriptedPull::fails(text)),
        PullAnswer { error: None, image_ref: Some(image_ref), size, size_error } => {
            let pull = ScriptedPull::ok(image_ref, *size);
            Ok(match size_error {
                Some(text) => pull.then_status_fails(text),
                None => pull,
            })
        }
        _ => Err("a pull either fails or gives a reference".into()),
    }
}

fn request(input: &EnsureSequence, attempt: &EnsureAttempt) -> EnsureRequest {
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
fn runtime_calls(calls: &[BackendCall]) -> Result<Vec<Value>, String> {
    let mut pulled = false;
    let named = calls.iter().map(|call| match call {
        BackendCall::Status { image } if pulled => Ok(json!({"call": "GetImageSize", "image": image})),
        BackendCall::Status { image } => Ok(json!({"call": "GetImageRef", "image": image})),
        BackendCall::Pull { image, .. } => {
            pulled = true;
            Ok(json!({"call": "PullImage", "image": image}))
        }
        other => Err(format!("unexpected call {other:?}")),
    });
    named.collect()
}
