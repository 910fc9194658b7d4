//! `larder gc`: one GC round, or its plan.

pub(super) mod report;
pub(super) mod usage_by_state;

use larder_api::v1alpha1::Collection;

use crate::args::GcArgs;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output::{self, PrintFormat};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &GcArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let Some(client) = session.open_to_list(ImageAccess::collect()).await? else {
        let nothing = Collection {
            dry_run: args.dry_run,
            goal: args.goal().into(),
            reached: true,
            planned: true,
            freed_bytes: (!args.dry_run).then_some(0),
            ..Collection::default()
        };
        if let Some(format) = args.output.data() {
            output::data(&session.out, format, &nothing);
        } else {
            session.out.line(if args.dry_run { "would remove nothing" } else { "removed nothing" });
        }
        return Ok(CommandOutcome::Done);
    };
    let request = args.request();
    let collection = if args.dry_run {
        client.ask(async |mut calls| calls.plan(request).await).await?
    } else {
        client.wait(async |mut calls| calls.collect(request).await).await?
    };
    Ok(show(args, collection, &session.out))
}

fn show(args: &GcArgs, collection: Collection, out: &Printer) -> CommandOutcome {
    for warning in &collection.warnings {
        out.warning(warning);
    }
    match args.output.data() {
        Some(format) => output::data(out, format, &collection),
        None if collection.dry_run => report::plan(&collection, args.output.is_wide(), out),
        // A round that ended before its plan has only an error.
        None if !collection.planned => {}
        None => report::round(&collection, args.output.is_wide(), out),
    }
    let outcome = match collection.error {
        Some(error) => Failure::from(error).print(out),
        None if collection.reached => CommandOutcome::Done,
        None => CommandOutcome::Failed,
    };
    if let Some(by_state) = &collection.usage_by_state {
        let lists_reasons = collection.dry_run || args.output != PrintFormat::Table;
        usage_by_state::print(by_state, lists_reasons, out);
    }
    outcome
}
