//! `larder history`: what collection has removed.

use larder_api::Word as _;
use larder_api::v1alpha1::{HistoryEntry, HistoryRequest};

use super::gc::tell::{OF_THE_FILE_SYSTEM, is_disturbed};
use crate::args::HistoryArgs;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::output::table::Table;
use crate::output::{self, names, size};
use crate::session::{Need, Session};

pub(super) async fn run(args: &HistoryArgs, session: &Session) -> Result<Outcome, Failure> {
    let out = &session.out;
    let client = session.open(Need::use_images()).await?;
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
        out.note(format_args!("note: {OF_THE_FILE_SYSTEM}"));
    }
    Ok(Outcome::Done)
}

fn table(rows: &[HistoryEntry], wide: bool) -> Table {
    let mut table = Table::new(["REMOVED", "IMAGE", "FOR", "PROMISED", "FREED", "WHY"]);
    for row in rows {
        let named = names::told(&row.names, &row.id, wide);
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
