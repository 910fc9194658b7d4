//! `larder lease`: keeps an image from garbage collection for a while, lists such leases, and ends them.

use std::time::Duration;

use larder::reference::{ImageId, ImageName};
use larder_agent::client::Client;
use larder_api::v1::{ImageLease, LeaseOwner, LeaseRequest, LeaseResponse, LeasesRequest};
use serde::Serialize;

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
    session.out.line(format_args!("leased {name} until {}", leased.ends.unwrap_or_default()));
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
    let rows: Vec<LeaseRecord> = leases.into_iter().map(LeaseRecord::from).collect();
    output::show(&session.out, format, &rows, || table(&rows, format.is_wide()));
    Ok(CommandOutcome::Done)
}

/// A lease on an image. The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LeaseRecord {
    id: ImageId,
    names: Vec<String>,
    /// `ensure` or `lease`.
    owner: &'static str,
    seconds_left: u64,
    ends: String,
}

impl From<ImageLease> for LeaseRecord {
    fn from(lease: ImageLease) -> Self {
        let owner = match lease.owner() {
            LeaseOwner::Request => "lease",
            LeaseOwner::Ensure | LeaseOwner::Unspecified => "ensure",
        };
        let ImageLease { id, names, seconds_left, ends, .. } = lease;
        LeaseRecord { id: id.into(), names, owner, seconds_left, ends }
    }
}

fn table(rows: &[LeaseRecord], wide: bool) -> TextTable {
    let mut table = TextTable::new(["IMAGE", "OWNER", "EXPIRES IN", "EXPIRES"]);
    for row in rows {
        let owner = if row.owner == "lease" { "larder lease" } else { "ensure, pull or load" };
        let left = size::whole_seconds(Duration::from_secs(row.seconds_left));
        let image = names::image_names(&row.names, row.id.as_str(), wide);
        table.row([image, owner.to_owned(), left, row.ends.clone()]);
    }
    table
}
