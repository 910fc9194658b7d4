//! Runs many ensures side by side through the control API, for `ensure` and `pull`.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use larder::backend::CallErrorKind;
use larder::events::{Event, EventSink};
use larder::pull::{EnsureError, EnsureReason, EnsureRequest, EnsuredImage, ImagePresence};
use larder::reference::{ImageId, ImageName, Reference};
use larder_agent::client::{Client, EnsureCalls};
use larder_agent::image_name;
use larder_agent::registry::UserCredentials;
use serde::Serialize;
use tokio::time::{self, Instant};

use super::ensure::hint_at_file;
use super::make_room;
use crate::args::PullFlags;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptHandle;
use crate::output::progress::ProgressLines;
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

mod stall_notices;

/// How often kubelet looks again at a pod that does not run: each look is an event.
const SYNC_PERIOD: Duration = Duration::from_secs(10);
/// How soon it looks after a failure, since that changes the pod's status: this look finds the back-off.
const FIRST_SYNC: Duration = Duration::from_secs(1);
/// How often progress is drawn.
const DRAW_PERIOD: Duration = Duration::from_millis(125);

/// Warns about flags without effect on a daemon.
pub(super) fn warn_about_ignored_flags(
    client: &Client,
    flags: &PullFlags,
    candidates: &UserCredentials,
    out: &Printer,
) {
    if client.daemon().is_some() && candidates.has_programs() {
        out.warning("credential helpers and providers have no effect: the daemon uses its own");
    }
    if client.daemon().is_some() && flags.is_given() {
        out.warning("pull flags have no effect: the daemon uses its own settings");
    }
}

/// How an ensure ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EnsureResult {
    /// The image is present.
    Ensured(EnsuredImage),
    /// It is not.
    Failed(EnsureError),
    /// The run was interrupted before it was known.
    Unfinished,
}

/// How an ensure ended, in the fields that `ensure` and `pull` have in common with `-o json`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EnsureOutcomeRecord {
    /// `Present`, `Pulled`, `Failed`, `Unfinished`.
    pub(super) result: &'static str,
    /// Such as `ErrImagePull`; `None` unless failed.
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
    pub(super) id: Option<ImageId>,
    pub(super) size_bytes: Option<u64>,
    pub(super) pull_seconds: Option<f64>,
    pub(super) total_seconds: Option<f64>,
    /// Bytes that are still to come; `None` if it is complete.
    pub(super) missing_bytes: Option<u64>,
}

impl EnsureOutcomeRecord {
    pub(super) fn of(result: &EnsureResult) -> EnsureOutcomeRecord {
        let unfinished = EnsureOutcomeRecord { result: "Unfinished", ..EnsureOutcomeRecord::default() };
        match result {
            EnsureResult::Unfinished => unfinished,
            EnsureResult::Failed(error) => EnsureOutcomeRecord {
                result: "Failed",
                reason: Some(error.reason.to_string()),
                message: Some(error.message.clone()).filter(|message| !message.is_empty()),
                ..unfinished
            },
            EnsureResult::Ensured(EnsuredImage { image_ref, message, outcome }) => {
                let present = EnsureOutcomeRecord {
                    result: "Present",
                    message: Some(message.clone()).filter(|message| !message.is_empty()),
                    id: Some(image_ref.clone()),
                    ..unfinished
                };
                match outcome {
                    ImagePresence::Present => present,
                    &ImagePresence::Pulled { size_bytes, pull_duration, total_duration, ref fill } => {
                        EnsureOutcomeRecord {
                            result: "Pulled",
                            size_bytes: Some(size_bytes).filter(|size| *size > 0),
                            pull_seconds: Some(pull_duration.as_secs_f64()),
                            total_seconds: Some(total_duration.as_secs_f64()),
                            missing_bytes: fill.as_ref().map(|fill| fill.missing_bytes),
                            ..present
                        }
                    }
                }
            }
        }
    }
}

/// How all of them ended.
pub(super) struct EnsureResults {
    /// In the order of the requests.
    pub(super) results: Vec<EnsureResult>,
    /// Why the rest was not finished, if not for an interrupt.
    pub(super) lost: Option<Failure>,
}

/// Where the progress of pulls is shown.
#[derive(Clone, Copy)]
pub(super) struct ProgressOutput<'a> {
    /// Draws on a terminal.
    pub(super) progress: &'a ProgressLines,
    /// Prints notes and warnings.
    pub(super) out: &'a Printer,
}

/// One run of `ensure` or `pull`.
pub(super) struct EnsureRun<'a> {
    pub(super) session: &'a CommandSession,
    pub(super) access: &'a ImageAccess,
    pub(super) interrupt: &'a InterruptHandle,
    /// How long images that failed are tried again.
    pub(super) retry_for: Duration,
    /// Receives the events of failures.
    pub(super) events: &'a dyn EventSink,
    pub(super) progress: &'a ProgressLines,
}

impl EnsureRun<'_> {
    /// Makes all images present, through another process if the command that this one works through ends before, and
    /// with more disk space if the user lets GC free some.
    pub(super) async fn ensure(
        &self,
        calls: EnsureCalls,
        requests: &[EnsureRequest],
    ) -> (EnsureCalls, EnsureResults) {
        let out = &*self.session.out;
        let shown = ProgressOutput { progress: self.progress, out };
        let ensure = async |calls: &EnsureCalls, requests: &[EnsureRequest]| {
            let interrupted = self.interrupt.interrupted();
            ensure_all(calls, requests, self.retry_for, self.events, shown, interrupted).await
        };
        let ended = ensure(&calls, requests).await;
        let (calls, ended) = self.take_over(calls, requests, ended, &ensure).await;
        let (calls, ended) = make_room::retry(calls, ended, requests, self.interrupt, out, &ensure).await;
        if requests.iter().zip(&ended.results).any(reached_time_limit) {
            self.session.note_time_limit();
        }
        (calls, ended)
    }

    /// Requests what the command that this one worked through left unfinished, of the process that has the images now.
    async fn take_over(
        &self,
        calls: EnsureCalls,
        requests: &[EnsureRequest],
        mut ended: EnsureResults,
        ensure: impl AsyncFn(&EnsureCalls, &[EnsureRequest]) -> EnsureResults,
    ) -> (EnsureCalls, EnsureResults) {
        if ended.lost.is_none() || !calls.client().is_joined() {
            return (calls, ended);
        }
        tracing::info!("the other larder command has ended: retrying once");
        ended.lost = None;
        let calls = match self.interrupt.or(self.session.open(self.access)).await {
            Some(Ok(client)) => calls.through(client),
            not_opened => {
                ended.lost = not_opened.and_then(Result::err).map(Failure::from);
                return (calls, ended);
            }
        };
        let unfinished: Vec<usize> =
            (0..requests.len()).filter(|&index| ended.results[index] == EnsureResult::Unfinished).collect();
        let rest: Vec<_> = unfinished.iter().map(|&index| requests[index].clone()).collect();
        let retried = ensure(&calls, &rest).await;
        for (index, result) in unfinished.into_iter().zip(retried.results) {
            ended.results[index] = result;
        }
        (calls, EnsureResults { lost: retried.lost, ..ended })
    }
}

/// Returns true if the time limit of the request has ended it.
fn reached_time_limit((request, result): (&EnsureRequest, &EnsureResult)) -> bool {
    let EnsureResult::Failed(EnsureError { failure: Some(failure), .. }) = result else { return false };
    request.time_limit.is_some() && failure.kind == CallErrorKind::DeadlineExceeded
}

/// Makes all images present in parallel and returns the result of each. Ends early, with the rest
/// [unfinished](EnsureResult::Unfinished), when `interrupt` is done, or the process that does the work has ended.
async fn ensure_all(
    calls: &EnsureCalls,
    requests: &[EnsureRequest],
    retry_for: Duration,
    events: &dyn EventSink,
    shown: ProgressOutput<'_>,
    interrupt: impl Future<Output = ()>,
) -> EnsureResults {
    let ProgressOutput { progress, out } = shown;
    let mut lost = None;
    let mut results = vec![EnsureResult::Unfinished; requests.len()];
    let deadline = Instant::now().checked_add(retry_for);
    let each = requests.iter().enumerate().map(|(index, request)| async move {
        (index, ensure_with_retries(calls, request, deadline, events).await)
    });
    let mut running: FuturesUnordered<_> = each.collect();
    // A run that is over at once, as when all is present, draws nothing.
    let mut draw = time::interval_at(Instant::now() + DRAW_PERIOD, DRAW_PERIOD);
    draw.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    let slow = stall_notices::print_stalls(calls, progress, out);
    tokio::pin!(interrupt, slow);
    loop {
        tokio::select! {
            ended = running.next() => match ended {
                Some((index, result)) => results[index] = result,
                None => break,
            },
            () = &mut interrupt => break,
            failure = calls.lost() => {
                lost = Some(failure);
                break;
            }
            () = &mut slow => {}
            _ = draw.tick(), if progress.is_wanted() => {
                progress.update(&calls.pulls(), requests.len() - running.len(), requests.len(), Instant::now());
            }
        }
    }
    progress.clear();
    EnsureResults { results, lost }
}

/// Tries until it works or the time is over (never, without a deadline), looking again as kubelet does: soon after a
/// failure, then every few seconds, and as soon as the back-off is over.
async fn ensure_with_retries(
    calls: &EnsureCalls,
    request: &EnsureRequest,
    deadline: Option<Instant>,
    events: &dyn EventSink,
) -> EnsureResult {
    loop {
        let error = match calls.ensure(request).await {
            Ok(ensured) => return EnsureResult::Ensured(ensured),
            Err(error) => error,
        };
        record_failure(request, &error, events);
        let period = match error.reason {
            EnsureReason::ImagePullBackOff => SYNC_PERIOD,
            _ if error.retry_in.is_some() => FIRST_SYNC,
            _ => SYNC_PERIOD,
        };
        let next = Instant::now() + error.retry_in.unwrap_or(SYNC_PERIOD).min(period);
        // A retry cannot fix an invalid name.
        if deadline.is_some_and(|deadline| next > deadline) || error.reason == EnsureReason::InvalidImageName
        {
            return EnsureResult::Failed(error);
        }
        time::sleep_until(next).await;
    }
}

/// The event that kubelet sends after any failed ensure.
fn record_failure(request: &EnsureRequest, error: &EnsureError, events: &dyn EventSink) {
    if let Some(object) = request.target.clone() {
        events.record(Event::failed(object, error));
    }
}

/// Prints an error if the backend is unreachable: checked after something failed, because a pull's error does not say.
async fn report_lost_backend(
    calls: &EnsureCalls,
    interrupt: &InterruptHandle,
    out: &Printer,
) -> CommandOutcome {
    match interrupt.or(calls.client().check_backend()).await {
        None => CommandOutcome::Interrupted,
        Some(Err(failure)) if failure.outcome() == CommandOutcome::Unreachable => failure.print(out),
        Some(_) => CommandOutcome::Done,
    }
}

/// Prints why not all images were finished, or whether those that failed did so because the backend is gone.
pub(super) async fn end(
    calls: &EnsureCalls,
    requests: &[EnsureRequest],
    ended: EnsureResults,
    interrupt: &InterruptHandle,
    out: &Printer,
) -> CommandOutcome {
    let EnsureResults { results, lost } = ended;
    let unfinished: Vec<&str> = requests
        .iter()
        .zip(&results)
        .filter(|(_, result)| matches!(result, EnsureResult::Unfinished))
        .map(|(request, _)| request.image.as_str())
        .collect();
    if let Some(failure) = lost {
        failure.print(out)
    } else if !unfinished.is_empty() {
        print_unfinished(unfinished, out)
    } else if results.iter().any(|result| matches!(result, EnsureResult::Failed(_))) {
        report_lost_backend(calls, interrupt, out).await
    } else {
        CommandOutcome::Done
    }
}

/// How many unfinished images are named.
const NAMED: usize = 10;

/// Prints which images an interrupt has left unfinished.
pub(super) fn print_unfinished<'a>(
    images: impl IntoIterator<Item = &'a str>,
    out: &Printer,
) -> CommandOutcome {
    let mut known = BTreeSet::new();
    let images: Vec<_> = images.into_iter().filter(|image| known.insert(*image)).collect();
    let named = images[..images.len().min(NAMED)].join(", ");
    let more = match images.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let resume = "rerun the command to resume; larder's own store keeps what was downloaded";
    out.error(format_args!("interrupted; not finished: {named}{more}"), &[resume.into()]);
    CommandOutcome::Interrupted
}

/// Names present images that failed ones may mean: both take names as kubelet does, and never a part of one.
pub(super) async fn point_at_similar(
    results: impl Iterator<Item = (&ImageName, &EnsureResult)>,
    client: &Client,
    interrupt: &InterruptHandle,
    out: &Printer,
) {
    // A registry that was named is the one that was meant, whatever keeps it from answering.
    let names_registry = |image: &ImageName| {
        Reference::parse(image.as_str()).is_ok_and(|name| image.as_str().starts_with(name.registry()))
    };
    let is_failed = |(image, result): &(&ImageName, &EnsureResult)| match result {
        EnsureResult::Failed(error) => {
            let kind = error.failure.as_ref().map(|failure| failure.kind);
            let may_be_other = match kind {
                Some(CallErrorKind::NotFound) | None => true,
                Some(CallErrorKind::InsufficientSpace { .. }) => false,
                Some(_) => !names_registry(image),
            };
            may_be_other && !error.access_denied && error.reason != EnsureReason::InvalidImageName
        }
        _ => false,
    };
    // No similar name is meant by a digest.
    let failed: BTreeSet<&str> = results
        .filter(is_failed)
        .map(|(image, _)| image.as_str())
        .filter(|image| !image.contains('@'))
        .collect();
    if failed.is_empty() {
        return;
    }
    failed.iter().filter_map(|image| hint_at_file(image)).for_each(|hint| out.hint(hint));
    let Some(Ok(images)) = interrupt.or(client.images()).await else { return };
    let names: Vec<String> = images.into_iter().flat_map(|image| image.repo_tags).collect();
    for image in failed.into_iter().filter(|image| !names.iter().any(|name| name == image)) {
        let similar = image_name::present_like(image, &names);
        if !similar.is_empty() {
            let similar = similar.join(", ");
            out.hint(format!("similar images are present: {similar}; {image} is taken as a whole name"));
        }
    }
}

#[cfg(test)]
mod tests;
