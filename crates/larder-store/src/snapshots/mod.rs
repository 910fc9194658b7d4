//! containerd's snapshots: what its containers run from, and the layers that it unpacks itself.
//!
//! ```text
//! create (active, view) -> mounts -> commit        adopt (a layer of the store becomes a committed snapshot)
//!            '---------------------------'---> remove
//! ```
//!
//! Each snapshot has a directory `snapshots/ID` with `fs`: its files, or a link to the layer of the store that has
//! them, and `work` for the overlay of an active one. Kinds, errors and the order of checks are those of containerd's
//! overlayfs snapshotter.
//!
//! Guarantees: a row is durable before the call answers, and its directory is made again where a crash took it; the
//! files of a committed snapshot are durable; layers that a snapshot has are not removed; only snapshots that were made
//! through this module are listed, since containerd removes those that it does not know.

mod adopt;
mod error;
mod mounts;
mod recover;
mod sync;

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

pub use error::SnapshotError;
pub use mounts::SnapshotMount;
pub(crate) use recover::{find_snapshots, keep_lost_snapshots};

use crate::disk::{DiskSpace, measure};
use crate::store::db::{DbRead as _, DbResult, DbTransaction, SNAPSHOTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::snapshot_records::{
    ancestors, delete_snapshot, get_snapshot, has_children, next_id, put_snapshot,
};
use crate::store::{OpenStore, SnapshotKind, SnapshotRecord, Store, StoreError};

/// Label with which containerd asks for a snapshot to unpack a layer into; others are of containers.
const UNPACKED: &str = "containerd.io/snapshot.ref";

/// A snapshot to be made.
#[derive(Debug, Clone)]
pub struct NewSnapshot {
    /// Its key.
    pub key: String,
    /// Key of the committed snapshot that it is based on; empty: none.
    pub parent: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

impl Store {
    /// Makes a writable snapshot, or a view, and returns how to mount it.
    pub fn create_snapshot(
        &self,
        new: NewSnapshot,
        writable: bool,
        now: SystemTime,
    ) -> Result<Vec<SnapshotMount>, SnapshotError> {
        let kind = if writable { SnapshotKind::Active } else { SnapshotKind::View };
        let (snapshot, below) = self.0.change_snapshots("record a snapshot", |writer| {
            let snapshot = match begin_record(writer, new, kind, now)? {
                Ok(snapshot) => snapshot,
                Err(refused) => return Ok(Err(refused)),
            };
            put_snapshot(writer, &snapshot)?;
            let below = ancestors(writer, &snapshot)?;
            Ok(Ok((snapshot, below)))
        })?;
        let mounts = self.mounts_of(&snapshot, &below);
        if mounts.is_err() {
            // The answer says that there is none.
            self.0.forget_snapshot(&snapshot)?;
        } else {
            self.0.note_snapshot(&snapshot);
            if writable && !snapshot.labels.contains_key(UNPACKED) {
                self.0.begun_uses.note(below.into_iter().rev().filter_map(|below| below.layer).collect());
            }
        }
        mounts
    }

    /// How to mount an active snapshot or a view. Mounts the layers below it, where a reboot ended their mounts.
    pub fn snapshot_mounts(&self, key: &str) -> Result<Vec<SnapshotMount>, SnapshotError> {
        let found = self.0.db.read("look up a snapshot", |reader| {
            let Some(snapshot) = get_snapshot(reader, key)? else { return Ok(None) };
            let below = ancestors(reader, &snapshot)?;
            Ok(Some((snapshot, below)))
        })?;
        let (snapshot, below) = found.ok_or_else(|| SnapshotError::not_found(key))?;
        if snapshot.kind == SnapshotKind::Committed {
            return Err(SnapshotError::precondition(key, "not active or view"));
        }
        self.mounts_of(&snapshot, &below)
    }

    /// Makes an active snapshot a committed one of another key, after its files are durable. `parent` must be empty or
    /// its parent.
    pub fn commit_snapshot(&self, key: &str, new: NewSnapshot, now: SystemTime) -> Result<(), SnapshotError> {
        let doing = "commit a snapshot";
        let usage = match self.0.db.read(doing, |reader| get_snapshot(reader, key))? {
            Some(active) if active.kind == SnapshotKind::Active => self.0.settle_snapshot(&active)?,
            _ => DiskSpace::ZERO, // refused below, after what containerd checks first
        };
        let committed = self.0.change_snapshots(doing, |writer| {
            if get_snapshot(writer, &new.key)?.is_some() {
                return Ok(Err(SnapshotError::exists(&new.key)));
            }
            let Some(active) = get_snapshot(writer, key)? else {
                return Ok(Err(SnapshotError::not_found(key)));
            };
            if active.kind != SnapshotKind::Active {
                return Ok(Err(SnapshotError::precondition(key, "not active")));
            }
            if !new.parent.is_empty() && new.parent != active.parent {
                return Ok(Err(SnapshotError::invalid(key, "a commit cannot change its parent")));
            }
            delete_snapshot(writer, &active)?;
            let (created_ns, kind) = (nanoseconds(now), SnapshotKind::Committed);
            let labels = without_empty(new.labels);
            let times = (created_ns, created_ns);
            let committed = SnapshotRecord {
                key: new.key,
                kind,
                labels,
                created_ns: times.0,
                updated_ns: times.1,
                usage,
                ..active
            };
            put_snapshot(writer, &committed)?;
            Ok(Ok(committed))
        })?;
        self.0.note_snapshot(&committed);
        Ok(())
    }

    /// Removes a snapshot without children. Its files are deleted in the background.
    pub fn remove_snapshot(&self, key: &str) -> Result<(), SnapshotError> {
        let removed = self.0.change_snapshots("remove a snapshot", |writer| {
            let Some(snapshot) = get_snapshot(writer, key)? else {
                return Ok(Err(SnapshotError::not_found(key)));
            };
            if has_children(writer, &snapshot)? {
                return Ok(Err(SnapshotError::precondition(key, "cannot remove a snapshot with a child")));
            }
            delete_snapshot(writer, &snapshot)?;
            Ok(Ok(snapshot))
        })?;
        // It is removed; what fails now is repeated when the store is opened.
        if let Err(error) = self.0.release_snapshot(&removed) {
            tracing::warn!(snapshot = key, %error, "cannot delete the files of a removed snapshot");
        }
        Ok(())
    }

    /// The snapshot of this key.
    pub fn snapshot(&self, key: &str) -> Result<SnapshotRecord, SnapshotError> {
        let found = self.0.db.read("look up a snapshot", |reader| get_snapshot(reader, key))?;
        found.ok_or_else(|| SnapshotError::not_found(key))
    }

    /// All snapshots, ordered by key.
    pub fn snapshots(&self) -> Result<Vec<SnapshotRecord>, StoreError> {
        self.0.db.read("list snapshots", |reader| reader.all(SNAPSHOTS))
    }

    /// Changes the labels of a snapshot.
    pub fn label_snapshot(
        &self,
        key: &str,
        change: impl FnOnce(&mut BTreeMap<String, String>),
        now: SystemTime,
    ) -> Result<SnapshotRecord, SnapshotError> {
        let changed = self.0.change_snapshots("label a snapshot", |writer| {
            let Some(mut snapshot) = get_snapshot(writer, key)? else {
                return Ok(Err(SnapshotError::not_found(key)));
            };
            change(&mut snapshot.labels);
            snapshot.labels = without_empty(snapshot.labels);
            snapshot.updated_ns = nanoseconds(now);
            writer.put(SNAPSHOTS, key, &snapshot)?;
            Ok(Ok(snapshot))
        })?;
        self.0.note_snapshot(&changed);
        Ok(changed)
    }

    /// Returns the disk usage of a snapshot, without its parents. What an active one has written is counted now; a
    /// view has nothing of its own.
    pub fn snapshot_usage(&self, key: &str) -> Result<DiskSpace, SnapshotError> {
        let snapshot = self.snapshot(key)?;
        if snapshot.kind != SnapshotKind::Active {
            return Ok(snapshot.usage);
        }
        let fs = self.0.layout.snapshot_fs(snapshot.id);
        Ok(measure(&fs).context("measure a snapshot")?)
    }

    /// Frees the space of removed snapshots, and of layers that nothing needs any more.
    pub fn clean_snapshots(&self) -> Result<(), StoreError> {
        self.0.sweep()?;
        self.0.trash.kick();
        Ok(())
    }
}

/// Outcome of a change that containerd may be refused.
type Decision<T> = DbResult<Result<T, SnapshotError>>;

impl OpenStore {
    /// Runs a change, which must write nothing where it refuses.
    fn change_snapshots<T>(
        &self,
        doing: &'static str,
        change: impl FnOnce(&DbTransaction) -> Decision<T>,
    ) -> Result<T, SnapshotError> {
        self.db.write(doing, |writer| Ok(change(writer)?))?
    }

    fn forget_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), StoreError> {
        self.db.write("remove a snapshot", |writer| Ok(delete_snapshot(writer, snapshot)?))?;
        self.release_snapshot(snapshot)
    }

    /// Gives back what a removed snapshot had.
    fn release_snapshot(&self, removed: &SnapshotRecord) -> Result<(), StoreError> {
        self.discard(&self.layout.snapshot(removed.id)).context("remove the files of a snapshot")?;
        self.trash.kick();
        if removed.kind != SnapshotKind::Committed {
            self.release_layers()?;
        }
        if removed.layer.is_some() {
            self.sweep()?;
        }
        Ok(())
    }

    /// Makes the files of an active snapshot durable; returns what they take.
    fn settle_snapshot(&self, active: &SnapshotRecord) -> Result<DiskSpace, StoreError> {
        let fs = self.layout.snapshot_fs(active.id);
        let usage = measure(&fs).context("measure a snapshot")?;
        self.sync_snapshot(active.id, usage.inodes).context("sync the files of a snapshot")?;
        Ok(usage)
    }
}

/// The record of a snapshot that may be made.
fn begin_record(
    writer: &DbTransaction,
    new: NewSnapshot,
    kind: SnapshotKind,
    now: SystemTime,
) -> Decision<SnapshotRecord> {
    if !new.parent.is_empty() {
        match get_snapshot(writer, &new.parent)? {
            None => return Ok(Err(SnapshotError::not_found(&new.parent))),
            Some(parent) if parent.kind != SnapshotKind::Committed => {
                return Ok(Err(SnapshotError::invalid(&new.parent, "a parent must be committed")));
            }
            Some(_) => {}
        }
    }
    if get_snapshot(writer, &new.key)?.is_some() {
        return Ok(Err(SnapshotError::exists(&new.key)));
    }
    let NewSnapshot { key, parent, labels } = new;
    let (id, created_ns) = (next_id(writer)?, nanoseconds(now));
    let labels = without_empty(labels);
    let (updated_ns, layer, usage) = (created_ns, None, DiskSpace::ZERO);
    Ok(Ok(SnapshotRecord { id, key, parent, kind, labels, created_ns, updated_ns, layer, usage }))
}

/// containerd drops labels without a value.
fn without_empty(mut labels: BTreeMap<String, String>) -> BTreeMap<String, String> {
    labels.retain(|_, value| !value.is_empty());
    labels
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
