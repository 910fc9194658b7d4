//! `larder gc`: one GC round, or its plan; `larder gc log`: what earlier rounds removed.

mod log;
pub(super) mod report;
pub(super) mod usage_by_state;

use larder_api::v1::{CollectRequest, Collection, CollectionGoal, EndedLeases};

use crate::args::{GcArgs, GcSubcommand};
use crate::confirm;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::interrupt::{InterruptHandle, InterruptSignals};
use crate::output::{self, PrintFormat, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(
    args: &GcArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    if let Some(GcSubcommand::Log(args)) = &args.action {
        return log::run(args, session).await;
    }
    let Some(client) = session.open_to_list(&ImageAccess::collect()).await? else {
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
    // The other goals are limited, and suit timers.
    if args.all_unused && !args.dry_run && !args.force {
        let plan = client.ask(async |mut calls| calls.plan(request).await).await?;
        if !confirm_round(&request, &plan, &interrupt.handle(), &session.out).await? {
            return Ok(CommandOutcome::Failed);
        }
    }
    let collection = if args.dry_run {
        client.ask(async |mut calls| calls.plan(request).await).await?
    } else {
        client.wait(async |mut calls| calls.collect(request).await).await?
    };
    Ok(show(args.output, collection, &session.out))
}

/// Asks before the images of a plan are removed; false if the answer was no.
pub(super) async fn confirm_round(
    request: &CollectRequest,
    plan: &Collection,
    interrupt: &InterruptHandle,
    out: &Printer,
) -> Result<bool, Failure> {
    let leases = request.ended_leases() == EndedLeases::All;
    if (!plan.removals.is_empty() || leases)
        && !confirm::ask_or_require(&action(plan, leases), "--force", interrupt).await?
    {
        out.info("removed nothing");
        return Ok(false);
    }
    Ok(true)
}

/// Returns the action of a plan, in the infinitive.
fn action(plan: &Collection, ends_leases: bool) -> String {
    let kind = if plan.goal() == CollectionGoal::Dangling { "dangling" } else { "unused" };
    let leases = if ends_leases { "end all leases of larder and " } else { "" };
    let freed = format!("{}{}", report::about(plan), size::bytes(plan.promised_bytes));
    let count = plan.removals.len();
    format!("{leases}remove {count} {kind} image{} ({freed})", if count == 1 { "" } else { "s" })
}

/// Prints a plan or the result of a round.
pub(super) fn show(format: PrintFormat, collection: Collection, out: &Printer) -> CommandOutcome {
    for warning in &collection.warnings {
        out.warning(warning);
    }
    match format.data() {
        Some(format) => output::data(out, format, &collection),
        None if collection.dry_run => report::plan(&collection, format.is_wide(), out),
        // A round that ended before its plan has only an error.
        None if !collection.planned => {}
        None => report::round(&collection, format.is_wide(), out),
    }
    let outcome = match collection.error {
        Some(error) => Failure::from(error).print(out),
        None if collection.reached => CommandOutcome::Done,
        None => CommandOutcome::Failed,
    };
    if let Some(by_state) = &collection.usage_by_state {
        let lists_reasons = collection.dry_run || format != PrintFormat::Table;
        usage_by_state::print(by_state, lists_reasons, out);
    }
    outcome
}
