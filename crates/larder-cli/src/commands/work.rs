//! Runs many ensures side by side through the control API, for `ensure` and `pull`.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use larder::credentials::{Sources, Tokens};
use larder::events::{Event, EventSink};
use larder::pull::{EnsureError, EnsureReason, EnsureRequest, Ensured};
use larder_agent::client::{Client, Pulls};
use larder_agent::config::{Origin, Source};
use tokio::time::{self, Instant};

use crate::args::Pulling as PullingFlags;
use crate::candidates::Candidates;
use crate::exit::Outcome;
use crate::failure::{Failure, Report as _};
use crate::interrupt::Handled;
use crate::out::Out;
use crate::output::progress::Progress;
use crate::session::{Need, Pulling, Session};

mod slow;

/// How often kubelet looks again at a pod that does not run: each look is an event.
const SYNC_PERIOD: Duration = Duration::from_secs(10);
/// How soon it looks after a failure, since that changes the pod's status: this look finds the back-off.
const FIRST_SYNC: Duration = Duration::from_secs(1);
/// How often progress is drawn.
const DRAW_PERIOD: Duration = Duration::from_millis(125);

/// What a command that pulls needs. `settings` are those that its other flags give a value.
pub(super) fn need(
    flags: &PullingFlags,
    credentials: &Arc<dyn Fn() -> Sources + Send + Sync>,
    settings: Vec<Source>,
) -> Need {
    let adjusted = flags.clone();
    let tokens = (flags.tokens() == Tokens::Ignore).then(|| Source::Given {
        by: Origin::Flag("--kubelet"),
        key: "pull.credentialTokens",
        value: "ignore".to_owned(),
    });
    let pulling = Pulling {
        adjust: Box::new(move |settings| adjusted.adjust(settings)),
        given: flags.given(),
        settings: settings.into_iter().chain(tokens).collect(),
        credentials: Arc::clone(credentials),
    };
    Need { pulling: Some(pulling), ..Need::use_images().creating() }
}

/// Says what of the flags does not reach a daemon.
pub(super) fn warn_of_the_daemons_own(
    client: &Client,
    flags: &PullingFlags,
    candidates: &Candidates,
    out: &Out,
) {
    if client.daemon().is_some() && candidates.has_programs() {
        out.warning("the daemon asks the credential helpers and providers of its own configuration only");
    }
    if client.daemon().is_some() && flags.is_given() {
        out.warning("the daemon queues pulls as its configuration says, and not as the flags do");
    }
}

/// How an ensure ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The image is present.
    Ensured(Ensured),
    /// It is not.
    Failed(EnsureError),
    /// The run was interrupted before it was known.
    Unfinished,
}

/// Where the course of pulls is shown.
#[derive(Clone, Copy)]
pub(super) struct Shown<'a> {
    /// What draws on a terminal.
    pub(super) progress: &'a Progress,
    /// What is told elsewhere.
    pub(super) out: &'a Out,
}

/// How all of them ended.
pub(super) struct Ended {
    /// In the order of the requests.
    pub(super) verdicts: Vec<Verdict>,
    /// Why the rest was not finished, if not for an interrupt.
    pub(super) lost: Option<Failure>,
}

/// Makes all images present at once and tells how each ended. Ends early, with the rest
/// [unfinished](Verdict::Unfinished), when `interrupt` is done, or who does the work is gone.
pub(super) async fn ensure_all(
    pulls: &Pulls,
    requests: &[EnsureRequest],
    retry_for: Duration,
    events: &dyn EventSink,
    shown: Shown<'_>,
    interrupt: impl Future<Output = ()>,
) -> Ended {
    let Shown { progress, out } = shown;
    let mut lost = None;
    let mut verdicts = vec![Verdict::Unfinished; requests.len()];
    let deadline = Instant::now().checked_add(retry_for);
    let each = requests
        .iter()
        .enumerate()
        .map(|(index, request)| async move { (index, keep_trying(pulls, request, deadline, events).await) });
    let mut running: FuturesUnordered<_> = each.collect();
    // What is over at once, as when all is present, draws nothing.
    let mut draw = time::interval_at(Instant::now() + DRAW_PERIOD, DRAW_PERIOD);
    draw.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    let slow = slow::tell(pulls, progress, out);
    tokio::pin!(interrupt, slow);
    loop {
        tokio::select! {
            ended = running.next() => match ended {
                Some((index, verdict)) => verdicts[index] = verdict,
                None => break,
            },
            () = &mut interrupt => break,
            failure = pulls.lost() => {
                lost = Some(failure);
                break;
            }
            () = &mut slow => {}
            _ = draw.tick(), if progress.is_wanted() => {
                progress.update(&pulls.pulls(), requests.len() - running.len(), requests.len(), Instant::now());
            }
        }
    }
    progress.clear();
    Ended { verdicts, lost }
}

/// Makes images present with `ensure`, as [`ensure_all`] does. Where the command that this one works through ends
/// before all of them are, what is not finished is asked for once more, of the process that has the images then.
pub(super) async fn ensure_or_take_over(
    session: &Session,
    pulls: Pulls,
    requests: &[EnsureRequest],
    interrupt: &Handled,
    need: impl FnOnce() -> Need,
    ensure: impl AsyncFn(&Pulls, &[EnsureRequest]) -> Ended,
) -> (Pulls, Ended) {
    let mut ended = ensure(&pulls, requests).await;
    if ended.lost.is_none() || !pulls.client().is_joined() {
        return (pulls, ended);
    }
    tracing::info!("the larder command that this one worked through has ended: trying once more");
    ended.lost = None;
    let pulls = match interrupt.or(session.reach(need())).await {
        Some(Ok(client)) => pulls.through(client),
        unreached => {
            ended.lost = unreached.and_then(Result::err);
            return (pulls, ended);
        }
    };
    let unfinished: Vec<usize> =
        (0..requests.len()).filter(|&index| ended.verdicts[index] == Verdict::Unfinished).collect();
    let rest: Vec<_> = unfinished.iter().map(|&index| requests[index].clone()).collect();
    let again = ensure(&pulls, &rest).await;
    for (index, verdict) in unfinished.into_iter().zip(again.verdicts) {
        ended.verdicts[index] = verdict;
    }
    (pulls, Ended { lost: again.lost, ..ended })
}

/// Tries until it works or the time is over (never, without a deadline), looking again as kubelet does: soon after a
/// failure, then every few seconds, and as soon as the back-off is over.
async fn keep_trying(
    pulls: &Pulls,
    request: &EnsureRequest,
    deadline: Option<Instant>,
    events: &dyn EventSink,
) -> Verdict {
    loop {
        let error = match pulls.ensure(request).await {
            Ok(ensured) => return Verdict::Ensured(ensured),
            Err(error) => error,
        };
        tell_failure(request, &error, events);
        let period = match error.reason {
            EnsureReason::ImagePullBackOff => SYNC_PERIOD,
            _ if error.retry_in.is_some() => FIRST_SYNC,
            _ => SYNC_PERIOD,
        };
        let next = Instant::now() + error.retry_in.unwrap_or(SYNC_PERIOD).min(period);
        // A bad name stays bad.
        if deadline.is_some_and(|deadline| next > deadline) || error.reason == EnsureReason::InvalidImageName
        {
            return Verdict::Failed(error);
        }
        time::sleep_until(next).await;
    }
}

/// The event that kubelet sends after any failed ensure.
fn tell_failure(request: &EnsureRequest, error: &EnsureError, events: &dyn EventSink) {
    if let Some(object) = request.target.clone() {
        events.record(Event::failed(object, error));
    }
}

/// Whether the backend is gone, which then is told: asked after something failed, because a pull's error does not say.
async fn is_it_gone(pulls: &Pulls, interrupt: &Handled, out: &Out) -> Outcome {
    match interrupt.or(pulls.client().answers()).await {
        None => Outcome::Interrupted,
        Some(Err(failure)) if failure.outcome() == Outcome::Unreachable => failure.print(out),
        Some(_) => Outcome::Done,
    }
}

/// Tells why not all images were finished, or whether those that failed did so because the backend is gone.
pub(super) async fn end(
    pulls: &Pulls,
    requests: &[EnsureRequest],
    ended: Ended,
    interrupt: &Handled,
    out: &Out,
) -> Outcome {
    let Ended { verdicts, lost } = ended;
    let unfinished: Vec<&str> = requests
        .iter()
        .zip(&verdicts)
        .filter(|(_, verdict)| matches!(verdict, Verdict::Unfinished))
        .map(|(request, _)| request.image.as_str())
        .collect();
    if let Some(failure) = lost {
        failure.print(out)
    } else if !unfinished.is_empty() {
        tell_unfinished(unfinished, out)
    } else if verdicts.iter().any(|verdict| matches!(verdict, Verdict::Failed(_))) {
        is_it_gone(pulls, interrupt, out).await
    } else {
        Outcome::Done
    }
}

/// How many unfinished images are named.
const NAMED: usize = 10;

/// Tells which images an interrupt has left unfinished.
pub(super) fn tell_unfinished<'a>(images: impl IntoIterator<Item = &'a str>, out: &Out) -> Outcome {
    let mut known = BTreeSet::new();
    let images: Vec<_> = images.into_iter().filter(|image| known.insert(*image)).collect();
    let named = images[..images.len().min(NAMED)].join(", ");
    let more = match images.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    out.error(format_args!("interrupted; not finished: {named}{more}"), &[]);
    Outcome::Interrupted
}

#[cfg(test)]
mod tests;
