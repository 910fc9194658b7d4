//! `larder ensure`: reads images from arguments and manifests, makes them present, prints the results.

mod dry_run;
mod inputs;
mod summary;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use larder::events::EventSink;
use larder::hint::Hint;
use larder::pull::{EnsureError, EnsureReason, EnsureRequest, PullConfig};
use larder_agent::client::EnsureCalls;
use larder_agent::image_name;
use larder_agent::registry::UserCredentials;
use tokio::time::Instant;

use super::ensure_runner::{self, EnsureResult, EnsureResults, EnsureRun};
use super::pull_failure;
use crate::args::EnsureArgs;
use crate::credential_setup::{self, CredentialSetup};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptSignals;
use crate::output::events::{EventPrinterSink, EventStyle};
use crate::output::progress::ProgressLines;
use crate::printer::{Printer, progress_possible};
use crate::session::{CommandSession, ImageAccess, PullSettings};
use inputs::EnsureInputs;
pub(super) use inputs::{EnsureJob, ensure_jobs};
pub(super) use inputs::{argument_uid, check_argument, hint_at_file};
use summary::EnsureSummary;

pub(super) async fn run(
    args: &EnsureArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    args.pulling.adjust(PullConfig::default())?;
    let gathered = inputs::gather(args)?;
    gathered.print_problems(out);
    if gathered.jobs.iter().all(EnsureJob::has_bad_name) {
        return nothing_to_do(args, &gathered, out);
    }
    let images = gathered.jobs.iter().map(|job| job.request.image.as_str());
    let credentials = credential_setup::gather(&args.credentials, args.pulling.tokens(), images, out)?;
    let candidates = Arc::clone(&credentials.candidates);
    for EnsureJob { request: EnsureRequest { image, secrets, .. }, .. } in &gathered.jobs {
        tracing::info!("credentials for {image}: {}", candidates.report(image.as_str(), secrets));
    }
    if args.dry_run {
        return dry_run::run(args, &gathered, &credentials, session).await;
    }
    let interrupt = interrupt.handle();
    let started = Instant::now();
    let access = ImageAccess::pull(pull_settings(args, &credentials), args.retry_for);
    let client = match interrupt.or(session.open(&access)).await {
        Some(Ok(client)) => client,
        not_opened => {
            let error = not_opened.and_then(Result::err).map(|error| session.explain(error.into(), false));
            return Ok(nothing_done(args, &gathered, error, out));
        }
    };

    let progress = ProgressLines::new(!args.quiet && progress_possible());
    let progress = Arc::new(if args.output.data().is_some() { progress.recorded() } else { progress });
    out.keep_above(&progress);
    let events = Arc::new(event_log(args, &gathered, out));
    if args.verify.is_given() && client.daemon().is_some() {
        out.warning("--verify has no effect: the daemon uses its own verification policy");
    }
    ensure_runner::warn_about_ignored_flags(&client, &args.pulling, &candidates, out);
    let calls = EnsureCalls::new(client, credentials.secret, Arc::clone(&events) as Arc<dyn EventSink>, true);
    let mut requests: Vec<_> = gathered.jobs.iter().map(|job| job.request.clone()).collect();
    for request in &mut requests {
        args.call.apply(session.timeout(), request);
    }
    let run = EnsureRun {
        session,
        access: &access,
        interrupt: &interrupt,
        retry_for: args.retry_for.saturating_sub(started.elapsed()),
        events: &*events,
        progress: &progress,
    };
    let (calls, EnsureResults { results, lost }) = run.ensure(calls, &requests).await;

    let mut summary =
        EnsureSummary::new(&gathered, &results, events.records()).with_progress(progress.course());
    // One list for all images. Without it, sizes are unknown, which is no error.
    if summary.lacks_sizes()
        && !summary.has_unfinished()
        && let Some(Ok(images)) = interrupt.or(calls.client().images()).await
    {
        summary.fill_sizes(&images);
    }
    summary.show(args, out);
    advise(&gathered, &results, &candidates, out);
    if !summary.has_unfinished() {
        let images = gathered.jobs.iter().map(|job| &job.request.image).zip(&results);
        ensure_runner::point_at_similar(images, calls.client(), &interrupt, out).await;
    }
    let outcome = summary.outcome().max(gathered.outcome());
    Ok(outcome
        .max(ensure_runner::end(&calls, &requests, EnsureResults { results, lost }, &interrupt, out).await))
}

fn pull_settings(args: &EnsureArgs, credentials: &CredentialSetup) -> PullSettings {
    PullSettings {
        flags: args.pulling.clone(),
        given: args.verify.settings(),
        credentials: Arc::clone(&credentials.programs),
    }
}

/// Says what to try next, as the backend says it; and of each image that a registry has denied which credentials were
/// tried, or why none fitted.
fn advise(gathered: &EnsureInputs, results: &[EnsureResult], candidates: &UserCredentials, out: &Printer) {
    let mut printed = BTreeSet::new();
    for (EnsureJob { request, .. }, result) in gathered.jobs.iter().zip(results) {
        if let EnsureResult::Failed(error) = result {
            let denied = || candidates.advice(request.image.as_str(), &request.secrets);
            let advice = pull_failure::next_step(error, denied);
            for advice in pull_failure::access_denied_hint(&request.image, error).into_iter().chain(advice) {
                if printed.insert(advice.to_string()) {
                    out.hint(advice);
                }
            }
        }
    }
}

/// The backend was not reached, for this reason or because of an interrupt. Programs still get their data.
fn nothing_done(
    args: &EnsureArgs,
    gathered: &EnsureInputs,
    why: Option<Failure>,
    out: &Printer,
) -> CommandOutcome {
    let summary = EnsureSummary::new(gathered, &untried(gathered), Vec::new());
    if args.output.data().is_some() {
        summary.show(args, out);
    }
    let outcome = match why {
        Some(failure) => failure.print(out),
        None => ensure_runner::print_unfinished(summary.unfinished(), out),
    };
    outcome.max(gathered.outcome())
}

/// Returns the results when nothing was tried: images with bad names fail whatever is tried.
fn untried(gathered: &EnsureInputs) -> Vec<EnsureResult> {
    let result = |job: &EnsureJob| match image_name::check(job.request.image.as_str()) {
        Ok(()) => EnsureResult::Unfinished,
        Err(bad) => EnsureResult::Failed(EnsureError {
            reason: EnsureReason::InvalidImageName,
            message: bad.message,
            retry_in: None,
            failure: None,
            access_denied: false,
            credentials_withheld: false,
        }),
    };
    gathered.jobs.iter().map(result).collect()
}

/// Nothing of the input can be ensured: there is nothing, or all of it has bad names. The runtime is not asked.
fn nothing_to_do(
    args: &EnsureArgs,
    gathered: &EnsureInputs,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    if args.output.data().is_some() {
        let summary = EnsureSummary::new(gathered, &untried(gathered), Vec::new());
        summary.show(args, out);
    }
    if !gathered.problems.is_empty() {
        return Ok(CommandOutcome::BadInput); // and each problem was printed
    }
    let files: Vec<_> = args.filename.iter().map(|file| file.display().to_string()).collect();
    Err(Failure::bad_input(format!("nothing to ensure: no pod and no pod template in {}", files.join(", ")))
        .hint(Hint::new().command(["help", "ensure"]).text(" lists the kinds that larder reads")))
}

fn event_log(args: &EnsureArgs, gathered: &EnsureInputs, out: &Arc<Printer>) -> EventPrinterSink {
    let look = match args.output.data() {
        Some(_) => EventStyle::Silent,
        None if args.quiet => EventStyle::Silent,
        None if args.output.is_wide() => EventStyle::Wide,
        None => EventStyle::Short,
    };
    let labels: HashMap<_, _> =
        gathered.jobs.iter().map(|job| (job.request.pod.uid.clone(), job.label.clone())).collect();
    EventPrinterSink::new(Arc::clone(out), look, labels)
}
