//! `larder pull`: pulls, and prints the ids.

use std::sync::Arc;

use larder::events::LogSink;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, Manager, Outcome as Pulled, PullPolicy};

use super::ensure::check_argument;
use super::trouble::Trouble;
use super::work::{self, Shown, Verdict};
use crate::args::{Connection, PullArgs};
use crate::connect;
use crate::credentials;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out::{Out, progress_possible};
use crate::output::progress::Progress;
use crate::output::size;

pub(super) async fn run(
    args: &PullArgs,
    connection: &Connection,
    out: &Arc<Out>,
    interrupt: Interrupt,
) -> Result<Outcome, Failure> {
    let config = args.pulling.config()?;
    let (requests, mut outcome) = requests(&args.images, out);
    if requests.is_empty() {
        return Ok(outcome);
    }
    let images = requests.iter().map(|request| request.image.as_str());
    let (credentials, candidates) =
        credentials::sources(&args.credentials, args.pulling.tokens(), images, out)?;
    for EnsureRequest { image, .. } in &requests {
        tracing::info!("credentials for {image}: {}", candidates.tell(image, &[]));
    }
    let interrupt = interrupt.handle();
    let Some(reached) = interrupt.or(connect::reach(connection)).await else {
        return Ok(work::tell_unfinished(requests.iter().map(|request| request.image.as_str()), out));
    };
    let backend = reached?;

    let manager = Manager::builder(Arc::clone(&backend)).config(config).credentials(credentials).build();
    let progress = Arc::new(Progress::new(!args.quiet && progress_possible()));
    out.keep_above(&progress);
    let verdicts = work::ensure_all(
        &manager,
        &requests,
        std::time::Duration::ZERO,
        &LogSink,
        Shown { backend: &*backend, progress: &progress, out },
        interrupt.asked(),
    )
    .await;

    let mut failed = false;
    let mut unfinished = Vec::new();
    for (request, verdict) in requests.iter().zip(&verdicts) {
        let image = &request.image;
        match verdict {
            Verdict::Ensured(ensured) => {
                if let (Pulled::Pulled { size_bytes, total_duration, .. }, false) =
                    (ensured.outcome, args.quiet)
                {
                    let (size, time) = (size::bytes(size_bytes), size::duration(total_duration));
                    out.note(format_args!("Pulled {image} ({size}) in {time}"));
                }
                out.line(&ensured.image_ref);
            }
            Verdict::Failed(error) => {
                failed = true;
                let failure = Failure::failed(format!("could not pull {image}: {error}"));
                let failure = match Trouble::of(&error.message) {
                    Trouble::Denied => failure.hint(candidates.advice(image, &[])),
                    Trouble::NotFound | Trouble::Other => failure,
                };
                outcome = outcome.max(failure.print(out));
            }
            Verdict::Unfinished => unfinished.push(image.as_str()),
        }
    }
    if !unfinished.is_empty() {
        outcome = outcome.max(work::tell_unfinished(unfinished, out));
    } else if failed {
        outcome = outcome.max(work::is_it_gone(&*backend, &interrupt, out).await);
    }
    Ok(outcome)
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
