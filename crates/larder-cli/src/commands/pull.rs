//! `larder pull`: pulls, and prints the ids.

use std::sync::Arc;
use std::time::Duration;

use larder::events::LogSink;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, Outcome as Pulled, PullConfig, PullPolicy};
use larder_agent::client::Pulls;
use serde::Serialize;

use super::ensure::check_argument;
use super::trouble::Trouble;
use super::work::{self, Ended, Shown, Verdict};
use crate::args::PullArgs;
use crate::candidates::Candidates;
use crate::credentials;
use crate::exit::Outcome;
use crate::failure::{Failure, Report as _};
use crate::interrupt::Interrupt;
use crate::out::{Out, progress_possible};
use crate::output::progress::Progress;
use crate::output::{self, size};
use crate::session::Session;

pub(super) async fn run(
    args: &PullArgs,
    session: &Session,
    interrupt: Interrupt,
) -> Result<Outcome, Failure> {
    let out = &session.out;
    args.pulling.adjust(PullConfig::default())?;
    let (requests, outcome) = requests(&args.images, out);
    if requests.is_empty() {
        show(args, &[], out);
        return Ok(outcome);
    }
    let images = requests.iter().map(|request| request.image.as_str());
    let credentials = credentials::gather(&args.credentials, args.pulling.tokens(), images, out)?;
    let candidates = Arc::clone(&credentials.candidates);
    for EnsureRequest { image, .. } in &requests {
        tracing::info!("credentials for {image}: {}", candidates.tell(image.as_str(), &[]));
    }
    let interrupt = interrupt.handle();
    let need = || work::need(&args.pulling, &credentials.programs, Vec::new());
    let client = match interrupt.or(session.reach(need())).await {
        Some(Ok(client)) => client,
        unreached => {
            show(args, &rows(&requests, &vec![Verdict::Unfinished; requests.len()]), out);
            return match unreached {
                Some(Err(failure)) => Err(failure),
                _ => Ok(work::tell_unfinished(requests.iter().map(|request| request.image.as_str()), out)),
            };
        }
    };

    let progress = Arc::new(Progress::new(!args.quiet && progress_possible()));
    work::warn_of_the_daemons_own(&client, &args.pulling, &candidates, out);
    let pulls = Pulls::new(client, credentials.secret, Arc::new(LogSink), true);
    out.keep_above(&progress);
    let shown = Shown { progress: &progress, out };
    let ensure = async |pulls: &Pulls, requests: &[EnsureRequest]| {
        work::ensure_all(pulls, requests, Duration::ZERO, &LogSink, shown, interrupt.asked()).await
    };
    let (pulls, Ended { verdicts, lost }) =
        work::ensure_or_take_over(session, pulls, &requests, &interrupt, need, ensure).await;

    show(args, &rows(&requests, &verdicts), out);
    let reported = report(args, &requests, &verdicts, &candidates, out);
    Ok(outcome
        .max(reported)
        .max(work::end(&pulls, &requests, Ended { verdicts, lost }, &interrupt, out).await))
}

/// Tells how each image that was finished ended.
fn report(
    args: &PullArgs,
    requests: &[EnsureRequest],
    verdicts: &[Verdict],
    candidates: &Candidates,
    out: &Out,
) -> Outcome {
    let mut outcome = Outcome::Done;
    for (EnsureRequest { image, .. }, verdict) in requests.iter().zip(verdicts) {
        match verdict {
            Verdict::Ensured(ensured) => {
                if let Pulled::Pulled { size_bytes, total_duration, .. } = ensured.outcome
                    && !args.quiet
                    && args.output.is_none()
                {
                    let (size, time) = (size::bytes(size_bytes), size::duration(total_duration));
                    out.note(format_args!("Pulled {image} ({size}) in {time}"));
                }
                if args.output.is_none() {
                    out.line(&ensured.image_ref);
                }
            }
            Verdict::Failed(error) => {
                let advice = Trouble::advice(error, || candidates.advice(image.as_str(), &[]));
                let failure = Failure::failed(format!("could not pull {image}: {error}")).hints(advice);
                outcome = outcome.max(failure.print(out));
            }
            Verdict::Unfinished => {}
        }
    }
    outcome
}

/// What came of one image. The shape of `-o json`, with the fields of `larder ensure`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    image: String,
    /// `Pulled`, `Failed`, `Unfinished`.
    result: &'static str,
    /// Such as `ErrImagePull`.
    reason: Option<String>,
    message: Option<String>,
    id: Option<String>,
    size_bytes: Option<u64>,
    pull_seconds: Option<f64>,
    total_seconds: Option<f64>,
}

fn rows(requests: &[EnsureRequest], verdicts: &[Verdict]) -> Vec<Row> {
    let each = requests.iter().zip(verdicts);
    each.map(|(request, verdict)| Row::new(request.image.as_str(), verdict)).collect()
}

impl Row {
    fn new(image: &str, verdict: &Verdict) -> Self {
        let row = Row {
            image: image.to_owned(),
            result: "Unfinished",
            reason: None,
            message: None,
            id: None,
            size_bytes: None,
            pull_seconds: None,
            total_seconds: None,
        };
        match verdict {
            Verdict::Unfinished => row,
            Verdict::Failed(error) => Row {
                result: "Failed",
                reason: Some(error.reason.to_string()),
                message: Some(error.message.clone()),
                ..row
            },
            Verdict::Ensured(ensured) => {
                let row = Row { result: "Pulled", id: Some(ensured.image_ref.to_string()), ..row };
                match ensured.outcome {
                    Pulled::Present => row,
                    Pulled::Pulled { size_bytes, pull_duration, total_duration } => Row {
                        size_bytes: Some(size_bytes).filter(|size| *size > 0),
                        pull_seconds: Some(pull_duration.as_secs_f64()),
                        total_seconds: Some(total_duration.as_secs_f64()),
                        ..row
                    },
                }
            }
        }
    }
}

/// Prints the data, if data is wanted.
fn show(args: &PullArgs, rows: &[Row], out: &Out) {
    if let Some(format) = args.output {
        output::data(out, format, &rows);
    }
}

/// What to ask of the image manager, and whether some names were bad.
fn requests(images: &[String], out: &Out) -> (Vec<EnsureRequest>, Outcome) {
    let mut outcome = Outcome::Done;
    let mut requests = Vec::new();
    for image in images {
        match check_argument(image) {
            Ok(()) => {
                let pod = Pod { uid: image.clone(), ..Pod::default() };
                requests.push(EnsureRequest::new(image, PullPolicy::Always, pod));
            }
            Err(problem) => {
                out.error(&problem, problem.hints());
                outcome = Outcome::BadInput;
            }
        }
    }
    (requests, outcome)
}
