//! Containers and mounts that may have read zeros of an incomplete layer: they were there when its guard was lost.

use std::collections::HashSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::db::{DbRead, DbResult, DbTransaction, META, MOUNTS, SNAPSHOTS};
use super::handle::Store;
use super::records::{LayerKey, MountRecord};
use super::snapshot_records::{SnapshotKind, SnapshotRecord, ancestors};

/// Key in `meta` of the record.
const SUSPECTS: &str = "suspects";

/// A container or a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Suspect {
    /// The snapshot of a container, or a view, by its number and its key.
    Snapshot(u64, String),
    /// An image that `larder mount` has mounted, by the number of the mount.
    Mount(String, PathBuf),
}

impl Suspect {
    /// True while its snapshot or mount is recorded.
    fn remains(&self, reader: &impl DbRead) -> DbResult<bool> {
        Ok(match self {
            Suspect::Snapshot(id, key) => {
                reader.get::<SnapshotRecord>(SNAPSHOTS, key)?.is_some_and(|found| found.id == *id)
            }
            Suspect::Mount(id, _) => reader.get::<MountRecord>(MOUNTS, id)?.is_some(),
        })
    }
}

/// Records what has one of these layers mounted. Returns the layers that are.
pub(super) fn record(writer: &DbTransaction, layers: &HashSet<LayerKey>) -> DbResult<HashSet<LayerKey>> {
    let (mut suspects, mut read) = (remaining(writer)?, HashSet::new());
    let mut add = |suspect: Suspect, has: Vec<LayerKey>| {
        let has: Vec<LayerKey> = has.into_iter().filter(|key| layers.contains(key)).collect();
        if !has.is_empty() && !suspects.contains(&suspect) {
            suspects.push(suspect);
        }
        read.extend(has);
    };
    for snapshot in writer.all::<SnapshotRecord>(SNAPSHOTS)? {
        if snapshot.kind != SnapshotKind::Committed {
            let below = ancestors(writer, &snapshot)?;
            let has = below.into_iter().filter_map(|below| below.layer).collect();
            add(Suspect::Snapshot(snapshot.id, snapshot.key), has);
        }
    }
    for mount in writer.all::<MountRecord>(MOUNTS)? {
        add(Suspect::Mount(mount.id, mount.target), mount.layers);
    }
    writer.put(META, SUSPECTS, &suspects)?;
    Ok(read)
}

fn remaining(reader: &impl DbRead) -> DbResult<Vec<Suspect>> {
    let mut remaining = Vec::new();
    for suspect in reader.get::<Vec<Suspect>>(META, SUSPECTS)?.unwrap_or_default() {
        if suspect.remains(reader)? {
            remaining.push(suspect);
        }
    }
    Ok(remaining)
}

impl Store {
    /// Containers and mounts that may have read zeros, and are still there.
    pub fn suspects(&self) -> Result<Vec<Suspect>, StoreError> {
        self.0.db.read("list suspect containers", |reader| remaining(reader))
    }
}
