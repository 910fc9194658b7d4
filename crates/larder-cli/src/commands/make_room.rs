//! After pulls that failed for lack of disk space: offers on a terminal to run a GC round for them, and pulls again.

use larder::pull::EnsureRequest;
use larder_agent::client::{Client, EnsureCalls};
use larder_api::v1::CollectRequest;
use larder_api::v1::collect_request::Goal;

use super::ensure_runner::{EnsureResult, EnsureResults};
use crate::confirm;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptHandle;
use crate::output::size;
use crate::printer::Printer;

/// Returns what `ended` has; images that lacked space are tried once more with `ensure`, if the user lets GC free some.
pub(super) async fn retry(
    pulls: EnsureCalls,
    mut ended: EnsureResults,
    requests: &[EnsureRequest],
    interrupt: &InterruptHandle,
    out: &Printer,
    ensure: impl AsyncFn(&EnsureCalls, &[EnsureRequest]) -> EnsureResults,
) -> (EnsureCalls, EnsureResults) {
    let short: Vec<(usize, u64)> = ended
        .results
        .iter()
        .enumerate()
        .filter_map(|(index, result)| Some((index, reclaim_bytes(result)?)))
        .collect();
    if short.is_empty() || ended.lost.is_some() || !confirm::can_ask() {
        return (pulls, ended);
    }
    let bytes = short.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
    match free_space(pulls.client(), bytes, interrupt, out).await {
        Ok(true) => {}
        Ok(false) => return (pulls, ended),
        Err(failure) => {
            failure.print(out);
            return (pulls, ended);
        }
    }
    let pulls = pulls.begin_run();
    let failed: Vec<EnsureRequest> = short.iter().map(|(index, _)| requests[*index].clone()).collect();
    let retried = ensure(&pulls, &failed).await;
    for ((index, _), result) in short.into_iter().zip(retried.results) {
        ended.results[index] = result;
    }
    (pulls, EnsureResults { lost: retried.lost, ..ended })
}

/// Returns the bytes that GC has to free for an image that the backend refused for lack of space; `None` if GC does
/// not help.
fn reclaim_bytes(result: &EnsureResult) -> Option<u64> {
    match result {
        EnsureResult::Failed(error) => Some(error.failure.as_ref()?.kind.reclaim_bytes()?.likely),
        _ => None,
    }
}

/// Says what GC can free now, and frees it if the user agrees. Returns whether it freed something.
async fn free_space(
    client: &Client,
    bytes: u64,
    interrupt: &InterruptHandle,
    out: &Printer,
) -> Result<bool, Failure> {
    let request = CollectRequest { goal: Some(Goal::FreeBytes(bytes)), ..CollectRequest::default() };
    let plan = client.ask(async |mut calls| calls.plan(request).await).await?;
    let beside = plan.reclaimed.and_then(|reclaimed| reclaimed.total).unwrap_or_default().size_bytes;
    let freed = plan.promised_bytes.saturating_add(beside);
    if freed == 0 {
        out.info("note: not enough disk space, and GC can free nothing now: images are in use, kept, leased or new");
        return Ok(false);
    }
    let images = size::count(plan.removals.len() as u64, "unused image");
    let question = format!(
        "not enough disk space: remove {images}, which frees {}, and pull again?",
        size::bytes(freed)
    );
    if !confirm::ask(&question, interrupt).await? {
        return Ok(false);
    }
    let done = client.wait(async |mut calls| calls.collect(request).await).await?;
    if let Some(error) = done.error {
        Failure::from(error).print(out);
    }
    let freed = u64::try_from(done.freed_bytes.unwrap_or_default()).unwrap_or_default();
    let removed = size::count(done.removals.len() as u64, "image");
    out.info(format_args!("removed {removed}, freed {}", size::bytes(freed)));
    Ok(!done.removals.is_empty() || freed > 0)
}
