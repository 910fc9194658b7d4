//! `larder history`: the steps in which an image was built, from its config.

use larder::hint::Hint;
use larder_agent::build_history::{BuildStep, build_steps};
use larder_api::v1alpha1::InspectRequest;

use super::inspect::names_and_ids;
use crate::args::HistoryArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, size};
use crate::session::{CommandSession, ImageAccess};

/// Characters of a command in the narrow table.
const SHOWN: usize = 60;

pub(super) async fn run(args: &HistoryArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let Some(image) = &args.image else {
        return Err(Failure::bad_input("no image given")
            .hint(Hint::new().command(["gc", "log"]).text(" lists the images that GC removed")));
    };
    let (names, outcome) = names_and_ids(std::slice::from_ref(image), &session.out);
    let [name] = names[..] else { return Ok(outcome) };
    let client = session.open(ImageAccess::read()).await?;
    let request = InspectRequest { image: name.to_owned() };
    let details = client.ask(async |mut calls| calls.inspect(request).await).await?;
    let steps = build_steps(&details.info).ok_or_else(|| {
        Failure::failed(format!("{name}: the backend does not report the history of images"))
            .hint(format!("on Docker: docker history {name}"))
    })?;
    output::show(&session.out, args.output, &steps, || table(&steps, args.output.is_wide()));
    Ok(CommandOutcome::Done)
}

fn table(steps: &[BuildStep], wide: bool) -> TextTable {
    let mut table = TextTable::new(["CREATED", "SIZE", "CREATED BY", "COMMENT"]);
    for step in steps {
        let size = match (step.empty_layer, step.size_bytes) {
            (true, _) => size::bytes(0),
            (false, size) => size.map_or_else(String::new, size::bytes),
        };
        let command = step.created_by.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown = match command.char_indices().nth(SHOWN) {
            Some((end, _)) if !wide => format!("{}...", &command[..end]),
            _ => command,
        };
        table.row([step.created.clone().unwrap_or_default(), size, shown, step.comment.clone()]);
    }
    table
}
