//! `larder prune`: removes dangling images, or with `-a` every unused image, after a question.

use larder_api::v1::collect_request::Goal;
use larder_api::v1::{CollectRequest, EndedLeases, ImageDecision};

use super::gc;
use crate::args::PruneArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::interrupt::InterruptSignals;
use crate::output::PrintFormat;
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(
    args: &PruneArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let client = session.open(&ImageAccess::collect()).await?;
    let goal = if args.all { Goal::AllUnused(true) } else { Goal::Dangling(true) };
    let ended_leases = EndedLeases::Pulls.into();
    let request = CollectRequest { goal: Some(goal), ended_leases, ..CollectRequest::default() };
    let plan = client.ask(async |mut calls| calls.plan(request).await).await?;
    if args.dry_run {
        return Ok(gc::show(PrintFormat::Table, plan, out));
    }
    if !args.all {
        note_retained(&plan.images, out);
    }
    if !args.force && !gc::confirm_round(&request, &plan, &interrupt.handle(), out).await? {
        return Ok(CommandOutcome::Failed);
    }
    if plan.removals.is_empty() {
        if args.all {
            gc::report::count_retained(&plan.images, out);
        }
        out.info("nothing to remove");
        return Ok(CommandOutcome::Done);
    }
    // The daemon decides again: an image may have a tag or a lease since the question.
    let done = client.wait(async |mut calls| calls.collect(request).await).await?;
    Ok(gc::show(PrintFormat::Table, done, out))
}

/// Returns true for an image without a tag, as docker counts: a digest is no tag.
fn is_dangling(image: &ImageDecision) -> bool {
    image.names.iter().all(|name| name.contains('@'))
}

/// Says why dangling images are retained.
fn note_retained(images: &[ImageDecision], out: &Printer) {
    for image in images.iter().filter(|image| is_dangling(image) && !image.remove) {
        out.info(format_args!("note: retained {}: {}", image.id, image.why));
    }
}
