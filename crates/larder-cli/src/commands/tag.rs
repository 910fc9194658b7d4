//! `larder tag`: gives an image another name.

use larder_api::v1::TagRequest;

use super::inspect::names_and_ids;
use crate::args::TagArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &TagArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let (names, outcome) = names_and_ids(std::slice::from_ref(&args.source), &session.out);
    let [source] = names[..] else { return Ok(outcome) };
    let client = session.open(&ImageAccess::write()).await?;
    let request = TagRequest { source: source.to_owned(), target: args.target.to_string() };
    let tagged = client.wait(async |mut calls| calls.tag(request).await).await?;
    session.out.line(format_args!("tagged {} as {}", tagged.id, tagged.name));
    Ok(CommandOutcome::Done)
}
