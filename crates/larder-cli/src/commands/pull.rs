//! `larder pull` and `larder complete`: pull, and print the ids.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::{Image, ImageFill, PullOptions, PullUntil};
use larder::events::{Event, EventReason, EventSink, LogSink};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, ImagePresence as Pulled, PullConfig, PullPolicy};
use larder::reference::{ImageName, Reference};
use larder_agent::client::{Client, EnsureCalls};
use larder_api::convert;
use larder_api::v1::InspectRequest;
use serde::Serialize;
use tokio::time::Instant;

use super::ensure::{argument_uid, check_argument};
use super::ensure_runner::{self, EnsureOutcomeRecord, EnsureResult, EnsureResults, EnsureRun};
use super::pull_failure;
use crate::args::PullWorkArgs;
use crate::credential_setup;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::InterruptSignals;
use crate::output::progress::ProgressLines;
use crate::output::{self, size};
use crate::printer::{Printer, progress_possible};
use crate::session::{CommandSession, ImageAccess, PullSettings};
use larder_agent::registry::UserCredentials;

/// Which images a command pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PulledSet {
    /// Images that the registry has under the names now.
    Named(PullUntil),
    /// Missing data of images that are present under the names.
    Present,
}

impl PulledSet {
    /// State of the image at which a pull returns.
    fn until(self) -> PullUntil {
        match self {
            PulledSet::Named(until) => until,
            PulledSet::Present => PullUntil::Complete,
        }
    }
}

pub(super) async fn run(
    args: &PullWorkArgs,
    set: PulledSet,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    args.pulling.adjust(PullConfig::default())?;
    let (mut requests, mut outcome) = requests(&args.images, set.until(), out);
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

    let mut names: Vec<ImageName> = requests.iter().map(|request| request.image.clone()).collect();
    if set == PulledSet::Present {
        outcome = outcome.max(select_present(&mut requests, &mut names, &client, out).await?);
    }
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

    // Results are about the names that were given.
    requests.iter_mut().zip(names).for_each(|(request, name)| request.image = name);
    show(args, &rows(&requests, &results), out);
    let reported = report(args, &requests, &results, &candidates, out);
    if set == PulledSet::Present {
        report_missing(&requests, &results, calls.client(), out).await;
    }
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

/// Prints how much is still missing of the images that could not be completed: what is here is kept.
async fn report_missing(
    requests: &[EnsureRequest],
    results: &[EnsureResult],
    client: &Client,
    out: &Printer,
) {
    for (EnsureRequest { image, .. }, result) in requests.iter().zip(results) {
        if !matches!(result, EnsureResult::Failed(_)) {
            continue;
        }
        let asked = InspectRequest { image: image.to_string(), exact: true };
        let Ok(found) = client.ask(async |mut calls| calls.inspect(asked).await).await else { continue };
        let found = found.image.map(convert::image_from).unwrap_or_default();
        if let Some(fill) = &found.fill {
            out.info(still_missing(image, fill, found.size));
        }
    }
}

fn still_missing(image: &ImageName, fill: &ImageFill, size: u64) -> String {
    let (missing, size) = (size::bytes(fill.missing_bytes), size::bytes(size));
    format!(
        "note: {image}: {missing} of {size} are missing; what is here is kept, larder complete {image} fetches the rest"
    )
}

/// Makes requests those for what is missing of the present images of their names, and `names` these names; reports
/// names without an image.
async fn select_present(
    requests: &mut Vec<EnsureRequest>,
    names: &mut Vec<ImageName>,
    client: &Client,
    out: &Printer,
) -> Result<CommandOutcome, Failure> {
    let mut outcome = CommandOutcome::Done;
    let mut present = Vec::new();
    names.clear();
    for request in requests.drain(..) {
        let asked = InspectRequest { image: request.image.to_string(), exact: true };
        match client.ask(async |mut calls| calls.inspect(asked).await).await {
            Ok(found) => {
                names.push(request.image.clone());
                present.push(completing(request, &found.image.map(convert::image_from).unwrap_or_default()));
            }
            Err(failure) if failure.outcome() == CommandOutcome::Unreachable => return Err(failure),
            Err(failure) => outcome = outcome.max(failure.print(out)),
        }
    }
    *requests = present;
    Ok(outcome)
}

/// The request for what is missing of a present image: by the digest that it has in the repository of the requested
/// name, since the tag may mean another image by now. Nothing is pulled for a complete image.
fn completing(request: EnsureRequest, found: &Image) -> EnsureRequest {
    if found.fill.is_none() {
        return EnsureRequest { policy: PullPolicy::IfNotPresent, ..request };
    }
    let repository = |name: &str| Reference::parse(name).ok().map(|name| name.name().to_owned());
    let of = repository(request.image.as_str());
    let by_digest = found.repo_digests.iter().find(|name| of.is_some() && repository(name) == of);
    let image = by_digest.map_or_else(|| request.image.clone(), |name| name.as_str().into());
    EnsureRequest { image, ..request }
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
    args: &PullWorkArgs,
    requests: &[EnsureRequest],
    results: &[EnsureResult],
    candidates: &UserCredentials,
    out: &Printer,
) -> CommandOutcome {
    let mut outcome = CommandOutcome::Done;
    for (EnsureRequest { image, .. }, result) in requests.iter().zip(results) {
        match result {
            EnsureResult::Ensured(ensured) => {
                if let &Pulled::Pulled { size_bytes, total_duration, ref fill, .. } = &ensured.outcome
                    && !args.quiet
                    && args.output.is_none()
                {
                    let (size, time) = (size::bytes(size_bytes), size::duration(total_duration));
                    out.info(format_args!("pulled {image} ({size}) in {time}"));
                    if let Some(fill) = fill {
                        let here = fill.describe(size_bytes);
                        out.info(format_args!("startable: {here} is here, the rest follows"));
                    }
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
fn show(args: &PullWorkArgs, rows: &[PullResultRow], out: &Printer) {
    if let Some(format) = args.output {
        output::data(out, format, &rows);
    }
}

/// Builds the requests for the image manager, and reports whether some names were bad.
fn requests(images: &[ImageName], until: PullUntil, out: &Printer) -> (Vec<EnsureRequest>, CommandOutcome) {
    let mut outcome = CommandOutcome::Done;
    let mut requests = Vec::new();
    for image in images {
        match check_argument(image.as_str()) {
            Ok(()) => {
                let pod = Pod { uid: argument_uid(image), ..Pod::default() };
                let options = PullOptions { accept_only_platform: true, until, ..PullOptions::default() };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_not_completed_says_what_is_missing_and_what_to_do() {
        let fill = ImageFill { missing_bytes: 3_000_000, ..ImageFill::default() };
        let expected = "note: app:1: 3MB of 1.2GB are missing; what is here is kept, larder complete app:1 fetches the \
                        rest";
        assert_eq!(still_missing(&"app:1".into(), &fill, 1_200_000_000), expected);
    }

    #[test]
    fn the_present_image_is_completed_and_not_the_one_that_its_tag_means_now() {
        let digest = |digit: &str| format!("sha256:{}", digit.repeat(64));
        let found = Image {
            repo_digests: vec![
                format!("mirror.example/app@{}", digest("a")),
                format!("r.example/app@{}", digest("b")),
            ],
            fill: Some(ImageFill { missing_bytes: 1, ..ImageFill::default() }),
            ..Image::default()
        };
        let request =
            |name: &str| EnsureRequest::new(ImageName::from(name), PullPolicy::Always, Pod::default());
        let planned = |found: &Image, name: &str| {
            let EnsureRequest { image, policy, .. } = completing(request(name), found);
            (image.to_string(), policy)
        };
        let by_digest = format!("r.example/app@{}", digest("b"));
        assert_eq!(planned(&found, "r.example/app:1"), (by_digest, PullPolicy::Always));
        let loaded = Image { repo_digests: Vec::new(), ..found.clone() };
        assert_eq!(planned(&loaded, "r.example/app:1"), ("r.example/app:1".into(), PullPolicy::Always));
        let complete = Image { fill: None, ..found };
        let expected = ("r.example/app:1".into(), PullPolicy::IfNotPresent);
        assert_eq!(planned(&complete, "r.example/app:1"), expected);
    }
}
