//! `larder pull`: pulls, and prints the ids.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::PullOptions;
use larder::events::{Event, EventReason, EventSink, LogSink};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, ImagePresence as Pulled, PullConfig, PullPolicy};
use larder::reference::ImageName;
use larder_agent::client::EnsureCalls;
use serde::Serialize;
use tokio::time::Instant;

use super::ensure::{argument_uid, check_argument};
use super::ensure_runner::{self, EnsureOutcomeRecord, EnsureResult, EnsureResults, EnsureRun};
use super::pull_failure;
use crate::args::PullArgs;
use crate::credential_setup;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptSignals;
use crate::output::progress::ProgressLines;
use crate::output::{self, size};
use crate::printer::{Printer, progress_possible};
use crate::session::{CommandSession, ImageAccess, PullSettings};
use larder_agent::registry::UserCredentials;

pub(super) async fn run(
    args: &PullArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    args.pulling.adjust(PullConfig::default())?;
    let (mut requests, outcome) = requests(&args.images, out);
    for request in &mut requests {
        args.call.apply(session.timeout(), request);
    }
    if requests.is_empty() {
        show(args, &[], out);
        return Ok(outcome);
    }
    let images = requests.iter().map(|request| request.image.as_str());
    let credentials = credential_setup::gather(&args.credentials, args.pulling.tokens(), images, out)?;
    let candidates = Arc::clone(&credentials.candidates);
    for EnsureRequest { image, .. } in &requests {
        tracing::info!("credentials for {image}: {}", candidates.report(image.as_str(), &[]));
    }
    let interrupt = interrupt.handle();
    let started = Instant::now();
    let pulls = PullSettings {
        flags: args.pulling.clone(),
        given: Vec::new(),
        credentials: Arc::clone(&credentials.programs),
    };
    let access = ImageAccess::pull(pulls, Duration::ZERO);
    let client = match interrupt.or(session.open(&access)).await {
        Some(Ok(client)) => client,
        not_opened => {
            show(args, &rows(&requests, &vec![EnsureResult::Unfinished; requests.len()]), out);
            return match not_opened {
                Some(Err(error)) => Err(error.into()),
                _ => Ok(ensure_runner::print_unfinished(
                    requests.iter().map(|request| request.image.as_str()),
                    out,
                )),
            };
        }
    };

    let progress = Arc::new(ProgressLines::new(!args.quiet && progress_possible()));
    ensure_runner::warn_about_ignored_flags(&client, &args.pulling, &candidates, out);
    let events = Arc::new(ImageWarnings(Arc::clone(out)));
    let calls = EnsureCalls::new(client, credentials.secret, events, true);
    out.keep_above(&progress);
    let run = EnsureRun {
        session,
        access: &access,
        interrupt: &interrupt,
        retry_for: Duration::ZERO,
        events: &LogSink,
        progress: &progress,
    };
    let (calls, EnsureResults { results, lost }) = run.ensure(calls, &requests).await;

    show(args, &rows(&requests, &results), out);
    let reported = report(args, &requests, &results, &candidates, out);
    if results.len() > 1 && !args.quiet && args.output.is_none() {
        out.summary(summary(&results, started.elapsed()));
    }
    if !results.iter().any(|result| matches!(result, EnsureResult::Unfinished)) {
        let images = requests.iter().map(|request| &request.image).zip(&results);
        ensure_runner::point_at_similar(images, calls.client(), &interrupt, out).await;
    }
    Ok(outcome
        .max(reported)
        .max(ensure_runner::end(&calls, &requests, EnsureResults { results, lost }, &interrupt, out).await))
}

/// Prints what people should know of an image, and logs the other events.
struct ImageWarnings(Arc<Printer>);

impl EventSink for ImageWarnings {
    fn record(&self, event: Event) {
        match event.reason {
            EventReason::ImageWarning => self.0.warning(&event.message),
            _ => LogSink.record(event),
        }
    }
}

/// The sum of several images in one line.
fn summary(results: &[EnsureResult], time: Duration) -> String {
    let pulled = results.iter().filter_map(|result| match result {
        EnsureResult::Ensured(ensured) => match ensured.outcome {
            Pulled::Pulled { size_bytes, .. } => Some(size_bytes),
            Pulled::Present => Some(0),
        },
        EnsureResult::Failed(_) | EnsureResult::Unfinished => None,
    });
    let sizes: Vec<u64> = pulled.collect();
    let size = size::bytes(sizes.iter().sum());
    let mut text =
        format!("{} of {} images pulled ({size}) in {}", sizes.len(), results.len(), size::duration(time));
    let count =
        |is_counted: fn(&EnsureResult) -> bool| results.iter().filter(|result| is_counted(result)).count();
    let others = [
        (count(|result| matches!(result, EnsureResult::Failed(_))), "failed"),
        (count(|result| matches!(result, EnsureResult::Unfinished)), "unfinished"),
    ];
    for (count, outcome) in others.into_iter().filter(|(count, _)| *count > 0) {
        text = format!("{text}, {count} {outcome}");
    }
    text
}

/// Prints the result of each finished image.
fn report(
    args: &PullArgs,
    requests: &[EnsureRequest],
    results: &[EnsureResult],
    candidates: &UserCredentials,
    out: &Printer,
) -> CommandOutcome {
    let mut outcome = CommandOutcome::Done;
    for (EnsureRequest { image, .. }, result) in requests.iter().zip(results) {
        match result {
            EnsureResult::Ensured(ensured) => {
                if let Pulled::Pulled { size_bytes, total_duration, .. } = ensured.outcome
                    && !args.quiet
                    && args.output.is_none()
                {
                    let (size, time) = (size::bytes(size_bytes), size::duration(total_duration));
                    out.info(format_args!("pulled {image} ({size}) in {time}"));
                }
                if args.output.is_none() {
                    out.line(&ensured.image_ref);
                }
            }
            EnsureResult::Failed(error) => {
                let advice = pull_failure::next_step(error, || candidates.advice(image.as_str(), &[]));
                let failure = Failure::failed(format!("cannot pull {image}: {error}")).hints(advice);
                outcome = outcome.max(failure.print(out));
            }
            EnsureResult::Unfinished => {}
        }
    }
    outcome
}

/// Result of one image. The shape of `-o json`, with the fields of `larder ensure`.
#[derive(Debug, Serialize)]
struct PullResultRow {
    image: ImageName,
    #[serde(flatten)]
    outcome: EnsureOutcomeRecord,
}

fn rows(requests: &[EnsureRequest], results: &[EnsureResult]) -> Vec<PullResultRow> {
    let each = requests.iter().zip(results);
    each.map(|(request, result)| PullResultRow::new(&request.image, result)).collect()
}

impl PullResultRow {
    fn new(image: &ImageName, result: &EnsureResult) -> Self {
        let mut outcome = EnsureOutcomeRecord::of(result);
        if let EnsureResult::Ensured(_) = result {
            (outcome.result, outcome.message) = ("Pulled", None);
        }
        PullResultRow { image: image.clone(), outcome }
    }
}

/// Prints the data, if data is wanted.
fn show(args: &PullArgs, rows: &[PullResultRow], out: &Printer) {
    if let Some(format) = args.output {
        output::data(out, format, &rows);
    }
}

/// Builds the requests for the image manager, and reports whether some names were bad.
fn requests(images: &[ImageName], out: &Printer) -> (Vec<EnsureRequest>, CommandOutcome) {
    let mut outcome = CommandOutcome::Done;
    let mut requests = Vec::new();
    for image in images {
        match check_argument(image.as_str()) {
            Ok(()) => {
                let pod = Pod { uid: argument_uid(image), ..Pod::default() };
                let options = PullOptions { accept_only_platform: true, ..PullOptions::default() };
                requests
                    .push(EnsureRequest { options, ..EnsureRequest::new(image, PullPolicy::Always, pod) });
            }
            Err(problem) => {
                out.error(&problem, problem.hints());
                outcome = CommandOutcome::BadInput;
            }
        }
    }
    (requests, outcome)
}
