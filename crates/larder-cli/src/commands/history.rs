//! `larder history`: what collection has removed.

use larder::gc::{Entry, HistoryFile};
use serde::Serialize;

use super::gc::report::time;
use crate::args::{Connection, HistoryArgs};
use crate::collect::Place;
use crate::connect;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use crate::output::table::Table;
use crate::output::{self, size};

pub(super) fn run(args: &HistoryArgs, connection: &Connection, out: &Out) -> Result<Outcome, Failure> {
    let place = Place::of(connection, &connect::chosen(connection)?)?;
    let (entries, unreadable) = HistoryFile::new(place.history())
        .entries()
        .map_err(|error| Failure::failed(format!("the journal cannot be read: {error}")))?;
    if unreadable > 0 {
        out.warning(format_args!(
            "{unreadable} lines of {} cannot be read and are left out",
            place.history().display()
        ));
    }
    let rows: Vec<Row> = entries.into_iter().map(Row::from).collect();
    output::show(out, args.output, &rows, || table(&rows, args.output.is_wide()));
    Ok(Outcome::Done)
}

/// One removal. The shape of `-o json`, oldest first.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    time: Option<String>,
    id: String,
    names: Vec<String>,
    /// `space`, `age`, `demand` or `unused`.
    reason: String,
    why: String,
    promised_bytes: u64,
    promised_inodes: u64,
    estimated: bool,
    freed_bytes: Option<u64>,
    freed_inodes: Option<u64>,
}

impl From<Entry> for Row {
    fn from(entry: Entry) -> Row {
        Row {
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
}

fn table(rows: &[Row], wide: bool) -> Table {
    let mut table = Table::new(["REMOVED", "IMAGE", "FOR", "PROMISED", "FREED", "WHY"]);
    for row in rows {
        let image = match row.names.first() {
            Some(name) if !wide => name.clone(),
            Some(name) => format!("{name} {}", row.id),
            None => row.id.clone(),
        };
        let when = row.time.as_deref().unwrap_or_default();
        let seconds = when.split_once('.').map_or(when.to_owned(), |(whole, _)| format!("{whole}Z"));
        let guess = if row.estimated { "about " } else { "" };
        let promised = format!("{guess}{}", size::bytes(row.promised_bytes));
        let freed = row.freed_bytes.map_or_else(String::new, size::bytes);
        table.row([seconds, image, row.reason.clone(), promised, freed, row.why.clone()]);
    }
    table
}
