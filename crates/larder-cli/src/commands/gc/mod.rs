//! `larder gc`: one round of collection, or what it would do.

pub(super) mod holders;
pub(super) mod tell;

use larder_api::v1alpha1::Collection;

use crate::args::GcArgs;
use crate::exit::Outcome;
use crate::failure::{Failure, Report as _};
use crate::out::Out;
use crate::output::{self, Format};
use crate::session::{Need, Session};

pub(super) async fn run(args: &GcArgs, session: &Session) -> Result<Outcome, Failure> {
    let client = session.open(Need::collect()).await?;
    let request = args.request();
    let collection = if args.dry_run {
        client.ask(async |mut calls| calls.plan(request).await).await?
    } else {
        client.wait(async |mut calls| calls.collect(request).await).await?
    };
    Ok(show(args, collection, &session.out))
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
