//! `backoff.json`, `puller.json`, `pull_policy.json`: the pull room in kubelet's mode, under simulated time.
//!
//! A fake plays the runtime of a case. Where the case means something there, it is also run with
//! larder's own store in the runtime's place; `backend_under_test.rs` says how.

mod backend_under_test;
mod backoff;
mod policy;
mod puller;
mod recorders;

use std::time::Duration;

use larder::pull::PullConfig;
use serde_json::Value;

use crate::{CaseResult, parse};
use backend_under_test::BackendUnderTest;

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "backoff_sequence" => parse(input).map(backoff::backoff_sequence),
        "throttle_sequence" => {
            parse(input).map(|input| simulated(backoff::throttle_sequence(input, BackendUnderTest::fake())))
        }
        "pulling_time" => parse(input).map(puller::pulling_time),
        "concurrency" => parse(input).map(|input| simulated(puller::concurrency(input))),
        "start_order" => parse(input).map(|input| simulated(puller::start_order(input))),
        "waiting_events" => parse(input).map(|input| simulated(puller::waiting_events(input))),
        "ensure_sequence" => {
            parse(input).and_then(|input| simulated(policy::ensure_sequence(input, BackendUnderTest::fake())))
        }
        _ => return None,
    })
}

/// Returns the result of larder's own store for a case. `None` for ops that mean nothing there: those about
/// back-off, queues and times alone ask no backend, or end a runtime's pulls by hand. What crosses a runtime's socket
/// is not the store's affair either. How many pulls run at once on the store, a scenario of the command line counts.
pub(crate) fn on_store(op: &str, input: &Value) -> Option<CaseResult> {
    let stage = match op {
        "throttle_sequence" | "ensure_sequence" if backend_under_test::can_be_had(input) => {
            BackendUnderTest::store()
        }
        _ => return None,
    };
    Some(match op {
        "throttle_sequence" => parse(input).map(|input| simulated(backoff::throttle_sequence(input, stage))),
        _ => parse(input).and_then(|input| simulated(policy::ensure_sequence(input, stage))),
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

/// Lets all tasks run until each waits for an input.
async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Kubelet's mode without a throttle. A bound below 1 is none.
fn unthrottled(serialize_image_pulls: bool, max_parallel_image_pulls: Option<i32>) -> PullConfig {
    PullConfig {
        serialize_image_pulls,
        max_parallel_image_pulls: PullConfig::parallel_bound(max_parallel_image_pulls),
        registry_pull_qps: 0,
        ..PullConfig::kubelet()
    }
}
