//! Snapshots after a crash, and the copies of their records for rebuilding the database.

use std::collections::{BTreeMap, HashSet};
use std::io;

use crate::disk::replace;
use crate::store::db::{DbRead as _, SNAPSHOTS, decode, encode};
use crate::store::error::StoreErrorContext as _;
use crate::store::layout::{StoreLayout, names_in};
use crate::store::{OpenStore, SnapshotRecord, StoreError};

impl OpenStore {
    /// Removes directories of snapshots that were not recorded, or were removed. Runs when the store is opened.
    pub(crate) fn recover_snapshots(&self) -> Result<(), StoreError> {
        let doing = "compare snapshots with the database";
        for path in self.leftover_snapshots()? {
            self.discard(&path).context(doing)?;
        }
        Ok(())
    }

    /// Directories of no recorded snapshot.
    pub(crate) fn leftover_snapshots(&self) -> Result<Vec<std::path::PathBuf>, StoreError> {
        let doing = "list the directories of snapshots";
        let dirs = names_in(&self.layout.snapshots()).context(doing)?;
        if dirs.is_empty() {
            return Ok(Vec::new());
        }
        let known: Vec<SnapshotRecord> = self.db.read(doing, |reader| reader.all(SNAPSHOTS))?;
        let known: HashSet<String> = known.iter().map(|snapshot| snapshot.id.to_string()).collect();
        let unknown = dirs.into_iter().filter(|name| !known.contains(name));
        Ok(unknown.map(|name| self.layout.snapshots().join(name)).collect())
    }

    /// Writes a copy of the record beside the files. It is for rebuilding a lost database, so nothing depends on it.
    pub(super) fn note_snapshot(&self, snapshot: &SnapshotRecord) {
        let noted = encode(&snapshot.key, snapshot).map_err(io::Error::other).and_then(|bytes| {
            self.snapshot_dir(snapshot.id)?;
            let path = self.layout.snapshot_record(snapshot.id);
            replace(&*self.disk, &self.layout.new_staging(), &path, &bytes)
        });
        if let Err(error) = noted {
            tracing::warn!(snapshot = %snapshot.key, %error, "cannot save a record for rebuilding the database");
        }
    }
}

/// The snapshots of a database that is rebuilt: those that can still be read from it, and the copies of the others. By key.
pub(crate) fn find_snapshots(
    layout: &StoreLayout,
    mut readable: BTreeMap<String, SnapshotRecord>,
) -> io::Result<BTreeMap<String, SnapshotRecord>> {
    let known: HashSet<u64> = readable.values().map(|snapshot| snapshot.id).collect();
    for name in names_in(&layout.snapshots())? {
        let Some(id) = name.parse::<u64>().ok().filter(|id| !known.contains(id)) else { continue };
        let copy = fs_err::read(layout.snapshot_record(id)).ok();
        if let Some(snapshot) = copy.and_then(|copy| decode::<SnapshotRecord>(&name, &copy).ok())
            && snapshot.id == id
        {
            readable.entry(snapshot.key.clone()).or_insert(snapshot);
        }
    }
    Ok(readable)
}
