//! The records of containerd's snapshots, and which layers they need.
//!
//! A snapshot has a number for its directory, a key by which containerd knows it, and a parent. Rows in
//! `snapshot-children` name both by number, so that a commit, which changes the key, changes no child.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use super::db::{DbRead, DbResult, DbTransaction, META, SNAPSHOT_CHILDREN, SNAPSHOTS};
use super::records::LayerKey;
use crate::disk::DiskSpace;

/// Key in `meta` of the highest number that a snapshot had.
const LAST_ID: &str = "last-snapshot";

/// The kinds of containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotKind {
    /// Read-only, of a committed snapshot.
    View,
    /// Writable: of a container, or of a layer being unpacked.
    Active,
    /// Read-only, and a possible parent.
    Committed,
}

/// A snapshot that containerd made through larder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// Names its directory in `snapshots`.
    pub id: u64,
    /// containerd's name for it: `k8s.io/12/NAME`.
    pub key: String,
    /// Key of the committed snapshot that it is based on; empty: none.
    pub parent: String,
    /// Kind.
    pub kind: SnapshotKind,
    /// As set by containerd. None has an empty value.
    pub labels: BTreeMap<String, String>,
    /// When it was made or committed, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When it or its labels were last changed, in nanoseconds since 1970.
    pub updated_ns: u64,
    /// Its files are this layer of the store; `None`: they are in its own directory.
    pub layer: Option<LayerKey>,
    /// Disk usage of a committed snapshot, without its parents.
    pub usage: DiskSpace,
}

impl SnapshotRecord {
    fn child_row(&self, parent: &SnapshotRecord) -> String {
        format!("{}/{}", parent.id, self.id)
    }
}

/// The snapshot of this key.
pub(crate) fn get_snapshot(source: &impl DbRead, key: &str) -> DbResult<Option<SnapshotRecord>> {
    source.get(SNAPSHOTS, key)
}

/// The snapshots that this one is based on, the nearest first. A parent that is missing ends the list.
pub(crate) fn ancestors(source: &impl DbRead, of: &SnapshotRecord) -> DbResult<Vec<SnapshotRecord>> {
    let mut found: Vec<SnapshotRecord> = Vec::new();
    let mut next = of.parent.clone();
    while !next.is_empty()
        && let Some(parent) = get_snapshot(source, &next)?
    {
        next.clone_from(&parent.parent);
        found.push(parent);
    }
    Ok(found)
}

/// Whether a snapshot is based on this one.
pub(crate) fn has_children(source: &impl DbRead, of: &SnapshotRecord) -> DbResult<bool> {
    source.any(SNAPSHOT_CHILDREN, &format!("{}/", of.id))
}

/// A number that no snapshot had.
pub(crate) fn next_id(writer: &DbTransaction) -> DbResult<u64> {
    let id = writer.get::<u64>(META, LAST_ID)?.unwrap_or(0).saturating_add(1);
    writer.put(META, LAST_ID, &id)?;
    Ok(id)
}

/// Writes a snapshot, instead of the one of the same key.
pub(crate) fn put_snapshot(writer: &DbTransaction, snapshot: &SnapshotRecord) -> DbResult<()> {
    if let Some(parent) = get_snapshot(writer, &snapshot.parent)? {
        writer.put_raw(SNAPSHOT_CHILDREN, &snapshot.child_row(&parent), b"")?;
    }
    writer.put(SNAPSHOTS, &snapshot.key, snapshot)
}

/// Writes the snapshots of a rebuilt database. Numbers go on after theirs.
pub(crate) fn put_rebuilt(
    writer: &DbTransaction,
    snapshots: &BTreeMap<String, SnapshotRecord>,
) -> DbResult<()> {
    snapshots.values().try_for_each(|snapshot| writer.put(SNAPSHOTS, &snapshot.key, snapshot))?;
    snapshots.values().try_for_each(|snapshot| put_snapshot(writer, snapshot))?;
    match snapshots.values().map(|snapshot| snapshot.id).max() {
        Some(last) => writer.put(META, LAST_ID, &last),
        None => Ok(()),
    }
}

/// Drops a snapshot without children.
pub(crate) fn delete_snapshot(writer: &DbTransaction, snapshot: &SnapshotRecord) -> DbResult<()> {
    if let Some(parent) = get_snapshot(writer, &snapshot.parent)? {
        writer.delete(SNAPSHOT_CHILDREN, &snapshot.child_row(&parent))?;
    }
    writer.delete(SNAPSHOTS, &snapshot.key)
}

/// Visits each layer of the store that a snapshot has.
pub(crate) fn each_snapshot_layer(source: &impl DbRead, mut visit: impl FnMut(LayerKey)) -> DbResult<()> {
    source.for_each(SNAPSHOTS, |snapshot: SnapshotRecord| {
        if let Some(key) = snapshot.layer {
            visit(key);
        }
    })
}

/// The layers below snapshots that can be mounted.
pub(crate) fn mountable_layers(source: &impl DbRead) -> DbResult<HashSet<LayerKey>> {
    let all: Vec<SnapshotRecord> = source.all(SNAPSHOTS)?;
    let by_key: BTreeMap<&str, &SnapshotRecord> =
        all.iter().map(|snapshot| (snapshot.key.as_str(), snapshot)).collect();
    let mut seen = HashSet::new();
    for snapshot in all.iter().filter(|snapshot| snapshot.kind != SnapshotKind::Committed) {
        let mut next = by_key.get(snapshot.parent.as_str());
        while let Some(parent) = next.filter(|parent| seen.insert(parent.id)) {
            next = by_key.get(parent.parent.as_str());
        }
    }
    let layers = all.iter().filter(|snapshot| seen.contains(&snapshot.id));
    Ok(layers.filter_map(|snapshot| snapshot.layer.clone()).collect())
}
