//! `larder history`: what collection has removed.

use larder::gc::{Entry, HistoryFile};
use larder_control::v1alpha1::{HistoryEntry, HistoryRequest, HistoryResponse};

use super::gc::report::time;
use super::gc::tell::{OF_THE_FILE_SYSTEM, is_disturbed};
use crate::args::{Connection, HistoryArgs};
use crate::collect::Place;
use crate::connect;
use crate::daemon::Daemon;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::table::Table;
use crate::output::{self, names, size};

pub(super) async fn run(args: &HistoryArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let history = match Daemon::find(connection)? {
        Some(daemon) => daemon.ask(async |mut client| client.history(HistoryRequest {}).await).await?,
        None => read(&Place::of(connection, &connect::chosen(connection)?)?)?,
    };
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

/// The journal of this place, oldest first.
pub(crate) fn read(place: &Place) -> Result<HistoryResponse, Failure> {
    let (entries, unreadable) = HistoryFile::new(place.history())
        .entries()
        .map_err(|error| Failure::failed(format!("the journal cannot be read: {error}")))?;
    Ok(HistoryResponse {
        entries: entries.into_iter().map(shown).collect(),
        unreadable: unreadable as u64,
        path: place.history().display().to_string(),
    })
}

fn shown(entry: Entry) -> HistoryEntry {
    HistoryEntry {
        time: time(entry.at),
        id: entry.id,
        names: entry.names,
        reason: entry.reason,
        why: entry.why,
        promised_bytes: entry.promised.bytes,
        promised_inodes: entry.promised.inodes,
        estimated: entry.estimated,
        freed_bytes: entry.freed.map(|freed| freed.bytes),
        freed_inodes: entry.freed.map(|freed| freed.inodes),
    }
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
        table.row([seconds, image, row.reason.clone(), promised, freed, row.why.clone()]);
    }
    table
}
