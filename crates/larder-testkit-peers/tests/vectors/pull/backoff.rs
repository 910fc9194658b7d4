//! `backoff.json`: how long a failed pull is held back, and how many pulls a rate lets through.

use std::time::Duration;

use larder::internals::Backoff;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, ImageManager, PullConfig, PullPolicy};
use larder_testkit::fake_backend::ScriptedPull;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::backend_under_test::BackendUnderTest;
use super::{ms, unthrottled};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BackoffSequence {
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

pub(super) fn backoff_sequence(input: BackoffSequence) -> Value {
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
pub(super) struct ThrottleSequence {
    qps: u32,
    burst: u32,
    requests_at_ms: Vec<u64>,
}

/// Asks for one image again and again.
pub(super) async fn throttle_sequence(input: ThrottleSequence, stage: BackendUnderTest) -> Value {
    let config =
        PullConfig { registry_pull_qps: input.qps, registry_burst: input.burst, ..unthrottled(false, None) };
    let start = Instant::now();
    let manager = ImageManager::new(stage.backend.clone()).with_config(&config);
    let mut accepted = Vec::new();
    for (i, at) in input.requests_at_ms.into_iter().enumerate() {
        tokio::time::advance((start + ms(at)).saturating_duration_since(Instant::now())).await;
        stage.script.on_pull(ScriptedPull::ok("sha256:new", 1));
        let pod = Pod { uid: format!("uid-{i}"), ..Pod::default() };
        accepted.push(manager.ensure(&EnsureRequest::new("app:v1", PullPolicy::Always, pod)).await.is_ok());
    }
    json!({"accepted": accepted})
}
