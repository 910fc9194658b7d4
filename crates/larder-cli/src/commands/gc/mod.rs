//! `larder gc`: one round of collection, or what it would do.

pub(super) mod holders;
pub(super) mod report;
mod tell;

use larder::gc::{GcError, Goal, KeepWarning, holders as who_holds, plan, plan_round};

use crate::args::{Connection, GcArgs};
use crate::collect::{self, Collecting};
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output;
use report::Report;

pub(super) async fn run(args: &GcArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let collecting = collect::collecting(connection, &args.limits, out)?;
    if args.dry_run { dry_run(args, &collecting, out).await } else { one_round(args, &collecting, out).await }
}

/// The plan alone. What is present and used is looked at, and written down.
async fn dry_run(args: &GcArgs, collecting: &Collecting, out: &Out) -> Result<Outcome, Failure> {
    let collector = &collecting.collector;
    let scene = match args.goal() {
        Goal::AllUnused => collect::scene(collector).await?,
        _ => collector.scene_with_disk().await.map_err(collect::failure)?,
    };
    warn(&collector.warnings(&scene), out);
    let planned = match args.goal() {
        Goal::Thresholds => plan_round(&scene, &collector.policy()),
        goal => plan(&scene, &collector.policy(), goal),
    };
    let enough = planned.reachable;
    let report = Report::of_plan(&planned, scene.disk);
    match args.output.data() {
        Some(format) => output::data(out, format, &report),
        None => tell::plan(&report, &collector.policy(), out),
    }
    if !enough {
        holders::tell(&who_holds(&scene, &collector.policy()), out);
    }
    Ok(if enough { Outcome::Done } else { Outcome::Failed })
}

async fn one_round(args: &GcArgs, collecting: &Collecting, out: &Out) -> Result<Outcome, Failure> {
    let collector = &collecting.collector;
    let round = collector.round(args.goal()).await;
    warn(&round.report.warnings, out);
    let report = Report::of_round(args.goal(), &round);
    match args.output.data() {
        Some(format) => output::data(out, format, &report),
        // Where it ended before anything was looked at, there is nothing to tell but why.
        None if round.report.plans.is_empty() => {}
        None => tell::round(&report, &collector.policy(), args.output.is_wide(), out),
    }
    let Some(error) = round.error else { return Ok(Outcome::Done) };
    let insufficient = matches!(error, GcError::Insufficient(_));
    let outcome = collect::failure(error).print(out);
    if insufficient {
        let scene = collector.scene_with_disk().await.map_err(collect::failure)?;
        holders::tell(&who_holds(&scene, &collector.policy()), out);
    }
    Ok(outcome)
}

fn warn(warnings: &[KeepWarning], out: &Out) {
    for warning in warnings {
        out.warning(warning);
    }
}
