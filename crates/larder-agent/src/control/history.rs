//! The journal of removals.

use std::path::Path;

use larder::gc::{HistoryFile, RemovalHistoryEntry};
use larder_api::EnumWord as _;
use larder_api::v1::{HistoryEntry, HistoryResponse, RemovalTrigger};

use super::report::time;
use crate::error::Error;

/// The newest removals, oldest first; 0 is all. May block.
pub(super) fn read(journal: &Path, newest: u32) -> Result<HistoryResponse, Error> {
    let (mut entries, unreadable) = HistoryFile::new(journal.to_owned())
        .entries()
        .map_err(|error| Error::failed(format!("cannot read the removal history: {error}")))?;
    let total = entries.len() as u64;
    if newest > 0 {
        entries.drain(..entries.len().saturating_sub(newest as usize));
    }
    Ok(HistoryResponse {
        entries: entries.into_iter().map(shown).collect(),
        unreadable: unreadable as u64,
        total,
        path: journal.display().to_string(),
    })
}

fn shown(entry: RemovalHistoryEntry) -> HistoryEntry {
    HistoryEntry {
        time: time(entry.at),
        id: entry.id.into(),
        names: entry.names,
        trigger: RemovalTrigger::from_word(&entry.reason).into(),
        why: entry.why,
        promised_bytes: entry.promised.bytes,
        promised_inodes: entry.promised.inodes,
        estimated: entry.estimated,
        freed_bytes: entry.freed.map(|freed| freed.bytes),
        freed_inodes: entry.freed.map(|freed| freed.inodes),
    }
}
