//! `larder explain`: the GC decision on one image, or access to it.

pub(super) mod access;
pub(super) mod lines;
mod pull_record_lines;

use larder_api::v1::ExplainRequest;

use super::inspect::names_and_ids;
use crate::args::{ExplainArgs, ExplainSubcommand};
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output;
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &ExplainArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    if let Some(ExplainSubcommand::Access(args)) = &args.what {
        return access::run(args, session).await;
    }
    let (names, outcome) = names_and_ids(args.image.as_slice(), out);
    let [name] = names[..] else { return Ok(outcome) };
    let request = ExplainRequest { image: name.to_owned(), limits: Some(args.limits.request()) };
    let client = session.open(&ImageAccess::collect()).await?;
    let explanation = client.ask(async |mut calls| calls.explain(request).await).await?;
    match args.output.data() {
        Some(format) => output::data(out, format, &explanation),
        None => lines::lines(name, &explanation, out.given()).iter().for_each(|line| out.line(line)),
    }
    Ok(CommandOutcome::Done)
}
