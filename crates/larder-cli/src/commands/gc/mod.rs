//! `larder gc`: one GC round, or its plan; `larder gc log`: what earlier rounds removed.

mod log;
pub(super) mod report;
pub(super) mod usage_by_state;

use larder_agent::client::Client;
use larder_api::v1::collect_request::Goal;
use larder_api::v1::{CollectRequest, Collection, CollectionGoal};

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
    let mut request = args.request();
    // The other goals are limited, and suit timers.
    if args.all_unused && !args.dry_run && !args.force {
        let plan = client.ask(async |mut calls| calls.plan(request).await).await?;
        match confirm_round(request, &plan, &client, &interrupt.handle(), &session.out).await? {
            Some(confirmed) => request = confirmed,
            None => return Ok(CommandOutcome::Failed),
        }
    }
    let collection = if args.dry_run {
        client.ask(async |mut calls| calls.plan(request).await).await?
    } else {
        client.wait(async |mut calls| calls.collect(request).await).await?
    };
    Ok(show(args.output, collection, &session.out))
}

/// Asks before the images of a plan are removed, and on a terminal whether also those that are unused, but were pulled just
/// now. The round to carry out; `None` if the answer was no.
pub(super) async fn confirm_round(
    request: CollectRequest,
    plan: &Collection,
    client: &Client,
    interrupt: &InterruptHandle,
    out: &Printer,
) -> Result<Option<CollectRequest>, Failure> {
    let (removed, leases) = (plan.removals.len(), request.force_leases);
    let declined = || {
        out.info("removed nothing");
        Ok(None)
    };
    if (removed > 0 || leases)
        && !confirm::ask_or_require(&action(plan, leases), "--force", interrupt).await?
    {
        return declined();
    }
    if leases || !matches!(request.goal, Some(Goal::AllUnused(_))) || !confirm::can_ask() {
        return Ok(Some(request));
    }
    let wider = CollectRequest { force_leases: true, minimum_age_milliseconds: Some(0), ..request };
    let wide_plan = client.ask(async |mut calls| calls.plan(wider).await).await?;
    let fresh = wide_plan.removals.len().saturating_sub(removed);
    if fresh == 0 {
        return Ok(Some(request));
    }
    let also = if removed > 0 { "also " } else { "" };
    let bytes = size::bytes(wide_plan.promised_bytes.saturating_sub(plan.promised_bytes));
    let question = format!(
        "{also}remove {} ({bytes}) that were pulled or used just now (leased, or younger than the minimum age)?",
        images(fresh, "unused")
    );
    if confirm::ask(&question, interrupt).await? {
        return Ok(Some(wider));
    }
    // It was the only question: a round would still discard downloads.
    if removed == 0 { declined() } else { Ok(Some(request)) }
}

/// Returns the action of a plan, in the infinitive.
fn action(plan: &Collection, ends_leases: bool) -> String {
    let kind = if plan.goal() == CollectionGoal::Dangling { "dangling" } else { "unused" };
    let leases = if ends_leases { "end all leases of larder and " } else { "" };
    let freed = format!("{}{}", report::about(plan), size::bytes(plan.promised_bytes));
    format!("{leases}remove {} ({freed})", images(plan.removals.len(), kind))
}

fn images(count: usize, kind: &str) -> String {
    format!("{count} {kind} image{}", if count == 1 { "" } else { "s" })
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
