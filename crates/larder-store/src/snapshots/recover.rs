//! Snapshots after a crash, and the copies of their records for rebuilding the database.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::PathBuf;

use crate::disk::{Disk, FileOpenMode, ensure_dir};
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
    pub(crate) fn leftover_snapshots(&self) -> Result<Vec<PathBuf>, StoreError> {
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

    /// Writes a copy of the record beside the files, durable when this returns. It is for rebuilding a lost database,
    /// so nothing else depends on it.
    pub(super) fn note_snapshot(&self, snapshot: &SnapshotRecord) {
        let noted = encode(&snapshot.key, snapshot).map_err(io::Error::other).and_then(|bytes| {
            self.snapshot_dir(snapshot.id)?;
            let staged = self.layout.new_staging();
            let file = self.disk.open(&staged, FileOpenMode::CreateNew)?;
            file.write_all_at(&bytes, 0)?;
            file.sync_data()?;
            self.disk.rename(&staged, &self.layout.snapshot_record(snapshot.id))?;
            self.disk.sync_dir(&self.layout.snapshot(snapshot.id))?;
            self.disk.sync_dir(&self.layout.snapshots())
        });
        if let Err(error) = noted {
            tracing::warn!(snapshot = %snapshot.key, %error, "cannot save a record for rebuilding the database");
        }
    }
}

/// Moves the directories of snapshots that are not `known` to `lost-snapshots`, if they have files of their own: an
/// active snapshot has what a container wrote. Returns where they are now.
pub(crate) fn keep_lost_snapshots(
    disk: &dyn Disk,
    layout: &StoreLayout,
    known: &HashSet<u64>,
) -> io::Result<Vec<PathBuf>> {
    let mut lost = names_in(&layout.snapshots())?;
    lost.retain(|name| !name.parse().is_ok_and(|id| known.contains(&id)));
    let mut kept = Vec::new();
    for dir in lost.iter().map(|name| layout.snapshots().join(name)) {
        // That of a layer is a link.
        if dir.join("fs").is_symlink() || names_in(&dir.join("fs")).is_ok_and(|files| files.is_empty()) {
            continue;
        }
        ensure_dir(disk, &layout.lost_snapshots())?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut target = layout.lost_snapshots().join(&name);
        for number in 2.. {
            if !target.exists() {
                break;
            }
            target = layout.lost_snapshots().join(format!("{name}-{number}"));
        }
        disk.rename(&dir, &target)?;
        kept.push(target);
    }
    if !kept.is_empty() {
        disk.sync_dir(&layout.lost_snapshots())?;
        disk.sync_dir(layout.root())?;
    }
    Ok(kept)
}

/// The snapshots of a database that is rebuilt: those that can still be read from it, and the copies of the others. By
/// key.
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
