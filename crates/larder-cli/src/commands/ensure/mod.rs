//! `larder ensure`: read what is wanted, make it present, tell what happened.

mod gather;
mod summary;

use std::collections::HashMap;
use std::sync::Arc;

use larder::events::EventSink;
use larder::pull::Manager;

use super::work::{self, Verdict};
use crate::args::{Connection, EnsureArgs};
use crate::connect;
use crate::credentials;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::{Out, progress_possible};
use crate::output::events::{EventLog, Look};
use crate::output::progress::Progress;
use gather::Gathered;
pub(super) use gather::check_argument;
use summary::Summary;

pub(super) async fn run(
    args: &EnsureArgs,
    connection: &Connection,
    out: &Arc<Out>,
) -> Result<Outcome, Failure> {
    let config = args.pulling.config()?;
    let gathered = gather::gather(args)?;
    gathered.tell(out);
    if gathered.jobs.is_empty() {
        return nothing_to_do(args, &gathered, out);
    }
    let images = gathered.jobs.iter().map(|job| job.request.image.as_str());
    let credentials = credentials::sources(&args.credentials, images, out)?;
    let backend = connect::backend(connection)?;
    backend.info().await?;

    let progress = Arc::new(Progress::new(progress_possible()));
    let events = Arc::new(event_log(args, &gathered, out, &progress));
    let manager = Manager::builder(Arc::clone(&backend))
        .config(config)
        .credentials(credentials)
        .events(Arc::clone(&events) as Arc<dyn EventSink>)
        .build();
    let requests: Vec<_> = gathered.jobs.iter().map(|job| job.request.clone()).collect();
    let verdicts =
        work::ensure_all(&manager, &requests, args.retry_for, &*events, &progress, work::interrupted()).await;

    let summary = Summary::new(&gathered, &verdicts, events.records());
    summary.show(args.output, args.retry_for, out);
    let mut outcome = summary.outcome();
    if !gathered.problems.is_empty() {
        outcome = outcome.max(Outcome::BadInput);
    }
    if verdicts.iter().any(|verdict| matches!(verdict, Verdict::Failed(_)))
        && let Some(error) = work::gone(&*backend).await
    {
        outcome = outcome.max(Failure::from(error).print(out));
    }
    Ok(outcome)
}

/// Nothing of the input can be ensured.
fn nothing_to_do(args: &EnsureArgs, gathered: &Gathered, out: &Out) -> Result<Outcome, Failure> {
    if args.output.data().is_some() {
        Summary::new(gathered, &[], Vec::new()).show(args.output, args.retry_for, out);
    }
    if !gathered.problems.is_empty() {
        return Ok(Outcome::BadInput); // and each problem was told
    }
    let files: Vec<_> = args.filename.iter().map(|file| file.display().to_string()).collect();
    Err(Failure::bad_input(format!("nothing to ensure: no pod and no pod template in {}", files.join(", ")))
        .hint("larder ensure --help lists the kinds that larder reads"))
}

fn event_log(args: &EnsureArgs, gathered: &Gathered, out: &Arc<Out>, progress: &Arc<Progress>) -> EventLog {
    let look = match args.output.data() {
        Some(_) => Look::Silent,
        None if args.output.is_wide() => Look::Wide,
        None => Look::Short,
    };
    let labels: HashMap<_, _> =
        gathered.jobs.iter().map(|job| (job.request.pod.uid.clone(), job.label.clone())).collect();
    EventLog::new(Arc::clone(out), Arc::clone(progress), look, labels)
}
