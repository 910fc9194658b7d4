//! `larder lease`: keeps one image from garbage collection for a while.

use larder_api::v1alpha1::LeaseRequest;

use super::inspect::names_and_ids;
use crate::args::LeaseArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &LeaseArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let (names, outcome) = names_and_ids(std::slice::from_ref(&args.image), out);
    let [name] = names[..] else { return Ok(outcome) };
    let client = session.open(ImageAccess::write()).await?;
    let request = LeaseRequest { image: name.to_owned(), seconds: args.time.as_secs() };
    let leased = client.ask(async |mut calls| calls.lease(request).await).await?;
    match leased.ends {
        Some(ends) => out.line(format_args!("leased {name} until {ends}")),
        None => out.line(format_args!("ended the lease on {name}")),
    }
    Ok(CommandOutcome::Done)
}
