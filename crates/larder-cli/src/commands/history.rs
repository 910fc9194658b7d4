//! `larder history`: what collection has removed.

use larder_api::EnumWord as _;
use larder_api::v1alpha1::{HistoryEntry, HistoryRequest};

use super::gc::report::{OF_THE_FILE_SYSTEM, is_disturbed};
use crate::args::HistoryArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::output::table::TextTable;
use crate::output::{self, names, size};
use crate::session::{CommandSession, ImageAccess};

pub(super) async fn run(args: &HistoryArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let client = session.open(ImageAccess::write()).await?;
    let history = client.ask(async |mut calls| calls.history(HistoryRequest {}).await).await?;
    if history.unreadable > 0 {
        out.warning(format_args!(
            "{} lines of {} cannot be read and are left out",
            history.unreadable, history.path
        ));
    }
    output::show(out, args.output, &history.entries, || table(&history.entries, args.output.is_wide()));
    let disturbed = |entry: &HistoryEntry| {
        entry.freed_bytes.is_some_and(|freed| is_disturbed(entry.promised_bytes, freed))
    };
    if args.output.data().is_none() && history.entries.iter().any(disturbed) {
        out.info(format_args!("note: {OF_THE_FILE_SYSTEM}"));
    }
    Ok(CommandOutcome::Done)
}

fn table(rows: &[HistoryEntry], wide: bool) -> TextTable {
    let mut table = TextTable::new(["REMOVED", "IMAGE", "FOR", "PROMISED", "FREED", "WHY"]);
    for row in rows {
        let named = names::image_names(&row.names, &row.id, wide);
        let image = if wide && !row.names.is_empty() { format!("{named} {}", row.id) } else { named };
        let when = row.time.as_deref().unwrap_or_default();
        let seconds = when.split_once('.').map_or(when.to_owned(), |(whole, _)| format!("{whole}Z"));
        let guess = if row.estimated { "about " } else { "" };
        let promised = format!("{guess}{}", size::bytes(row.promised_bytes));
        let freed = row.freed_bytes.map_or_else(String::new, size::bytes);
        table.row([seconds, image, row.reason().word().to_owned(), promised, freed, row.why.clone()]);
    }
    table
}
