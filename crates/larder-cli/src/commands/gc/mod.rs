//! `larder gc`: one round of collection, or what it would do.

pub(super) mod holders;
pub(super) mod report;
pub(super) mod tell;

use larder::gc::{Collector, GcError, GcPolicy, Goal, holders as who_holds, plan, plan_round};
use larder_control::v1alpha1::Collection;

use crate::args::{Connection, GcArgs};
use crate::collect;
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::{self, Format};

pub(super) async fn run(args: &GcArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let request = args.request();
    let collection = match Daemon::find(connection)? {
        Some(daemon) if args.dry_run => daemon.ask(async |mut client| client.plan(request).await).await?,
        Some(daemon) => daemon.wait(async |mut client| client.collect(request).await).await?,
        None => {
            let collecting = collect::collecting(connection, &request, out)?;
            let (collector, goal) = (&collecting.collector, collect::goal(&request));
            if args.dry_run {
                dry_run(collector, &collector.policy(), goal).await?
            } else {
                one_round(collector, &collector.policy(), goal).await
            }
        }
    };
    Ok(show(args, collection, out))
}

/// The plan alone. What is present and used is looked at, and written down.
pub(crate) async fn dry_run(
    collector: &Collector,
    policy: &GcPolicy,
    goal: Goal,
) -> Result<Collection, Failure> {
    let scene = match goal {
        Goal::AllUnused => collect::scene(collector).await?,
        _ => match collector.scene_with_disk().await {
            Ok(scene) => scene,
            Err(error) => return Err(collect::failure_of(collector, error).await),
        },
    };
    let planned = match goal {
        Goal::Thresholds => plan_round(&scene, policy),
        goal => plan(&scene, policy, goal),
    };
    let enough = planned.reachable;
    Ok(Collection {
        warnings: collector.warnings(&scene).iter().map(ToString::to_string).collect(),
        held_by: (!enough).then(|| holders::held_by(&who_holds(&scene, policy))),
        ..report::of_plan(&planned, scene.disk, policy)
    })
}

/// One round. That it did not do all that it should is told in it.
pub(crate) async fn one_round(collector: &Collector, policy: &GcPolicy, goal: Goal) -> Collection {
    let round = collector.round_by(policy, goal).await;
    let held_by = match &round.error {
        Some(GcError::Insufficient(_)) => {
            let scene = collector.scene_with_disk().await.ok();
            scene.map(|scene| holders::held_by(&who_holds(&scene, policy)))
        }
        _ => None,
    };
    let error = match round.error.clone() {
        Some(error) => Some((&collect::failure_of(collector, error).await).into()),
        None => None,
    };
    Collection {
        warnings: round.report.warnings.iter().map(ToString::to_string).collect(),
        held_by,
        error,
        ..report::of_round(goal, &round, policy)
    }
}

fn show(args: &GcArgs, collection: Collection, out: &Out) -> Outcome {
    for warning in &collection.warnings {
        out.warning(warning);
    }
    match args.output.data() {
        Some(format) => output::data(out, format, &collection),
        None if collection.dry_run => tell::plan(&collection, args.output.is_wide(), out),
        // Where it ended before anything was looked at, there is nothing to tell but why.
        None if !collection.planned => {}
        None => tell::round(&collection, args.output.is_wide(), out),
    }
    let outcome = match collection.error {
        Some(error) => Failure::from(error).print(out),
        None if collection.reached => Outcome::Done,
        None => Outcome::Failed,
    };
    if let Some(held_by) = &collection.held_by {
        let told_of_each = collection.dry_run || args.output != Format::Table;
        holders::tell(held_by, told_of_each, out);
    }
    outcome
}
