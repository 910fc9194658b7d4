//! `larder lease`: keeps an image from garbage collection for a while, lists such leases, and ends them.

use std::time::Duration;

use larder::reference::ImageName;
use larder_agent::client::Client;
use larder_api::v1::{ImageLease, LeaseOwner, LeaseRequest, LeaseResponse, LeasesRequest};

use super::inspect::names_and_ids;
use crate::args::{LeaseArgs, LeaseSubcommand};
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure};
use crate::output::table::TextTable;
use crate::output::{self, PrintFormat, names, size};
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &LeaseArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    match (&args.action, &args.image, args.time) {
        (Some(LeaseSubcommand::Rm(args)), ..) => end_leases(&args.images, session).await,
        (Some(LeaseSubcommand::Ls(args)), ..) => list(args.output, session).await,
        (None, Some(image), Some(Duration::ZERO)) => end_leases(std::slice::from_ref(image), session).await,
        (None, Some(image), Some(time)) => add_lease(image, time, session).await,
        (None, ..) => list(args.output, session).await,
    }
}

async fn add_lease(
    image: &ImageName,
    time: Duration,
    session: &CommandSession,
) -> Result<CommandOutcome, Failure> {
    let (names, outcome) = names_and_ids(std::slice::from_ref(image), &session.out);
    let [name] = names[..] else { return Ok(outcome) };
    let client = session.open(&ImageAccess::write()).await?;
    let leased = lease(&client, name, time.as_secs()).await?;
    let (owner, ends) = (leased.owner(), leased.ends.unwrap_or_default());
    session.out.line(format_args!("leased {name} until {ends}"));
    if owner != LeaseOwner::Request {
        session
            .out
            .info(format_args!("note: the lease of {} lasts longer than the requested one", name_of(owner)));
    }
    Ok(outcome)
}

async fn end_leases(images: &[ImageName], session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let (names, mut outcome) = names_and_ids(images, out);
    if names.is_empty() {
        return Ok(outcome);
    }
    let client = session.open(&ImageAccess::write()).await?;
    for name in names {
        match lease(&client, name, 0).await {
            Ok(answer) if answer.ended == Some(false) => out.line(format_args!("no leases on {name}")),
            Ok(_) => out.line(format_args!("ended the leases on {name}")),
            Err(failure) if failure.outcome() == CommandOutcome::Unreachable => return Err(failure),
            Err(failure) => outcome = outcome.max(failure.print(out)),
        }
    }
    Ok(outcome)
}

async fn lease(client: &Client, name: &str, seconds: u64) -> Result<LeaseResponse, Failure> {
    let request = LeaseRequest { image: name.to_owned(), seconds };
    client.ask(async |mut calls| calls.lease(request).await).await
}

async fn list(format: PrintFormat, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let client = session.open(&ImageAccess::write()).await?;
    let leases = client.ask(async |mut calls| calls.leases(LeasesRequest {}).await).await?.leases;
    output::show(&session.out, format, &leases, || table(&leases, format.is_wide()));
    Ok(CommandOutcome::Done)
}

fn name_of(owner: LeaseOwner) -> &'static str {
    match owner {
        LeaseOwner::Request => "larder lease",
        LeaseOwner::Prefetch => "the prefetch list",
        LeaseOwner::Ensure => "ensure, pull or load",
        LeaseOwner::Unspecified => "unknown",
    }
}

fn table(leases: &[ImageLease], wide: bool) -> TextTable {
    let mut table = TextTable::new(["IMAGE", "OWNER", "EXPIRES IN", "EXPIRES"]);
    for lease in leases {
        let left = size::whole_seconds(Duration::from_secs(lease.seconds_left));
        let image = names::image_names(&lease.names, &lease.id, wide);
        table.row([image, name_of(lease.owner()).to_owned(), left, lease.ends.clone()]);
    }
    table
}
