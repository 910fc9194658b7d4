//! `larder ensure`: read what is wanted, make it present, tell what happened.

mod gather;
mod summary;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use larder::events::EventSink;
use larder::hint::Hint;
use larder::pull::{EnsureError, EnsureReason, EnsureRequest, PullConfig};
use larder_agent::client::Pulls;
use larder_agent::image_name;
use tokio::time::Instant;

use super::trouble::{self, Trouble};
use super::work::{self, Ended, Shown, Verdict};
use crate::args::EnsureArgs;
use crate::candidates::Candidates;
use crate::credentials;
use crate::exit::Outcome;
use crate::failure::{Failure, Report as _};
use crate::interrupt::Interrupt;
use crate::out::{Out, progress_possible};
use crate::output::events::{EventLog, Look};
use crate::output::progress::Progress;
use crate::session::Session;
use gather::Gathered;
pub(super) use gather::check_argument;
pub(super) use gather::{Job, wishes_for};
use summary::Summary;

pub(super) async fn run(
    args: &EnsureArgs,
    session: &Session,
    interrupt: Interrupt,
) -> Result<Outcome, Failure> {
    let out = &session.out;
    args.pulling.adjust(PullConfig::default())?;
    let gathered = gather::gather(args)?;
    gathered.tell(out);
    if gathered.jobs.iter().all(Job::has_bad_name) {
        return nothing_to_do(args, &gathered, out);
    }
    let images = gathered.jobs.iter().map(|job| job.request.image.as_str());
    let credentials = credentials::gather(&args.credentials, args.pulling.tokens(), images, out)?;
    let candidates = Arc::clone(&credentials.candidates);
    for Job { request: EnsureRequest { image, secrets, .. }, .. } in &gathered.jobs {
        tracing::info!("credentials for {image}: {}", candidates.tell(image.as_str(), secrets));
    }
    let interrupt = interrupt.handle();
    let started = Instant::now();
    let need = || work::need(&args.pulling, &credentials.programs, args.verify.settings());
    let client = match interrupt.or(session.reach_within(args.retry_for, need)).await {
        Some(Ok(client)) => client,
        unreached => {
            let why = unreached.and_then(Result::err).map(|failure| session.explain(failure, false));
            return Ok(nothing_done(args, &gathered, why, out));
        }
    };

    let progress = Progress::new(progress_possible());
    let progress = Arc::new(if args.output.data().is_some() { progress.recorded() } else { progress });
    out.keep_above(&progress);
    let events = Arc::new(event_log(args, &gathered, out));
    if args.verify.is_given() && client.daemon().is_some() {
        out.warning("the daemon verifies credentials as its configuration says, and not as --verify does");
    }
    work::warn_of_the_daemons_own(&client, &args.pulling, &candidates, out);
    let pulls = Pulls::new(client, credentials.secret, Arc::clone(&events) as Arc<dyn EventSink>, true);
    let requests: Vec<_> = gathered.jobs.iter().map(|job| job.request.clone()).collect();
    let retry_for = args.retry_for.saturating_sub(started.elapsed());
    let shown = Shown { progress: &progress, out };
    let ensure = async |pulls: &Pulls, requests: &[EnsureRequest]| {
        work::ensure_all(pulls, requests, retry_for, &*events, shown, interrupt.asked()).await
    };
    let (pulls, Ended { verdicts, lost }) =
        work::ensure_or_take_over(session, pulls, &requests, &interrupt, need, ensure).await;

    let mut summary = Summary::new(&gathered, &verdicts, events.records()).with_course(progress.course());
    // One list for all of them. What cannot be had stays unknown: it is not what was asked for.
    if summary.lacks_sizes()
        && !summary.has_unfinished()
        && let Some(Ok(images)) = interrupt.or(pulls.client().images()).await
    {
        summary.fill_sizes(&images);
    }
    summary.show(args.output, args.retry_for, out);
    advise(&gathered, &verdicts, &candidates, out);
    let outcome = summary.outcome().max(gathered.outcome());
    Ok(outcome.max(work::end(&pulls, &requests, Ended { verdicts, lost }, &interrupt, out).await))
}

/// Says what to try next, as the backend says it; and of each image that a registry has denied which credentials were
/// tried, or why none fitted.
fn advise(gathered: &Gathered, verdicts: &[Verdict], candidates: &Candidates, out: &Out) {
    let mut told = BTreeSet::new();
    for (Job { request, .. }, verdict) in gathered.jobs.iter().zip(verdicts) {
        if let Verdict::Failed(error) = verdict {
            let denied = || candidates.advice(request.image.as_str(), &request.secrets);
            let advice = Trouble::advice(error, denied);
            for advice in trouble::withheld(&request.image, error).into_iter().chain(advice) {
                if told.insert(advice.to_string()) {
                    out.hint(advice);
                }
            }
        }
    }
}

/// The backend was not reached, for this reason or because of an interrupt. Programs still get their data.
fn nothing_done(args: &EnsureArgs, gathered: &Gathered, why: Option<Failure>, out: &Out) -> Outcome {
    let summary = Summary::new(gathered, &untried(gathered), Vec::new());
    if args.output.data().is_some() {
        summary.show(args.output, args.retry_for, out);
    }
    let outcome = match why {
        Some(failure) => failure.print(out),
        None => work::tell_unfinished(summary.unfinished(), out),
    };
    outcome.max(gathered.outcome())
}

/// What is known of images when nothing was tried: those with bad names fail whatever is tried.
fn untried(gathered: &Gathered) -> Vec<Verdict> {
    let verdict = |job: &Job| match image_name::check(job.request.image.as_str()) {
        Ok(()) => Verdict::Unfinished,
        Err(bad) => Verdict::Failed(EnsureError {
            reason: EnsureReason::InvalidImageName,
            message: bad.message,
            retry_in: None,
            advice: None,
            withheld: false,
        }),
    };
    gathered.jobs.iter().map(verdict).collect()
}

/// Nothing of the input can be ensured: there is nothing, or all of it has bad names. The runtime is not asked.
fn nothing_to_do(args: &EnsureArgs, gathered: &Gathered, out: &Out) -> Result<Outcome, Failure> {
    if args.output.data().is_some() {
        let summary = Summary::new(gathered, &untried(gathered), Vec::new());
        summary.show(args.output, args.retry_for, out);
    }
    if !gathered.problems.is_empty() {
        return Ok(Outcome::BadInput); // and each problem was told
    }
    let files: Vec<_> = args.filename.iter().map(|file| file.display().to_string()).collect();
    Err(Failure::bad_input(format!("nothing to ensure: no pod and no pod template in {}", files.join(", ")))
        .hint(Hint::new().command(["ensure", "--help"]).text(" lists the kinds that larder reads")))
}

fn event_log(args: &EnsureArgs, gathered: &Gathered, out: &Arc<Out>) -> EventLog {
    let look = match args.output.data() {
        Some(_) => Look::Silent,
        None if args.output.is_wide() => Look::Wide,
        None => Look::Short,
    };
    let labels: HashMap<_, _> =
        gathered.jobs.iter().map(|job| (job.request.pod.uid.clone(), job.label.clone())).collect();
    EventLog::new(Arc::clone(out), look, labels)
}
