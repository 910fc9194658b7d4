//! `larder gc log`: the images that GC removed.

use larder_api::EnumWord as _;
use larder_api::v1::{HistoryEntry, HistoryRequest};

use super::report::{FREED_MEANING, differs_from_plan};
use crate::args::GcLogArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, names, size};
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &GcLogArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let client = session.open(&ImageAccess::write()).await?;
    let history = client.ask(async |mut calls| calls.history(HistoryRequest::default()).await).await?;
    if history.unreadable > 0 {
        out.warning(format_args!("skipped {} unreadable lines of {}", history.unreadable, history.path));
    }
    output::show(out, args.output, &history.entries, || table(&history.entries, args.output.is_wide()));
    let differs = |entry: &HistoryEntry| {
        entry.freed_bytes.is_some_and(|freed| differs_from_plan(entry.promised_bytes, freed))
    };
    if args.output.data().is_none() && history.entries.iter().any(differs) {
        out.info(format_args!("note: {FREED_MEANING}"));
    }
    Ok(CommandOutcome::Done)
}

fn table(rows: &[HistoryEntry], wide: bool) -> TextTable {
    let mut table = TextTable::new(["TIME", "IMAGE", "TRIGGER", "EXPECTED", "FREED", "REASON"]);
    for row in rows {
        let named = names::image_names(&row.names, &row.id, wide);
        let image = if wide && !row.names.is_empty() { format!("{named} {}", row.id) } else { named };
        let when = row.time.as_deref().unwrap_or_default();
        let seconds = when.split_once('.').map_or(when.to_owned(), |(whole, _)| format!("{whole}Z"));
        let guess = if row.estimated { "about " } else { "" };
        let promised = format!("{guess}{}", size::bytes(row.promised_bytes));
        let freed = row.freed_bytes.map_or_else(String::new, size::bytes);
        table.row([seconds, image, row.trigger().word().to_owned(), promised, freed, row.why.clone()]);
    }
    table
}
