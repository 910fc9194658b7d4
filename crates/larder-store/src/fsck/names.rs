//! Checks the database: records must be readable, names and references must match the images.

use std::collections::{BTreeMap, BTreeSet};

use super::report::{FsckReport, RepairState, StoreDamage};
use crate::lazy::start_reads::StartReads;
use crate::snapshots::{find_snapshots, keep_lost_snapshots};
use crate::store::commit::{for_uses, put_uses};
use crate::store::db::{
    DbError, DbRead, DbResult, DbTable, DbTransaction, IMAGES, LAYERS, LEASES, MOUNTS, NAMES, REMNANTS,
    SNAPSHOTS, START_READS, TRANSFERS, USES, decode, encode,
};
use crate::store::error::StoreErrorContext as _;
use crate::store::layer_file::read_record;
use crate::store::listing::{disk_bytes, put_image};
use crate::store::remnants::RemnantRecord;
use crate::store::{
    BlobSource, ImageRecord, LayerKey, LayerRecord, LeaseRecord, MountRecord, OpenStore, SnapshotRecord,
    StoreError,
};

impl OpenStore {
    /// Records that cannot be read. They are replaced by their copies where there are any.
    pub(super) fn check_records(&self, repair: bool, report: &mut FsckReport) -> Result<(), StoreError> {
        let doing = "check the database's records";
        let mut bad: Vec<(DbTable, DbError)> = Vec::new();
        self.db.read(doing, |reader| {
            unreadable::<ImageRecord>(reader, IMAGES, &mut bad)?;
            unreadable::<LayerRecord>(reader, LAYERS, &mut bad)?;
            unreadable::<Vec<BlobSource>>(reader, TRANSFERS, &mut bad)?;
            unreadable::<LeaseRecord>(reader, LEASES, &mut bad)?;
            unreadable::<MountRecord>(reader, MOUNTS, &mut bad)?;
            unreadable::<SnapshotRecord>(reader, SNAPSHOTS, &mut bad)?;
            unreadable::<StartReads>(reader, START_READS, &mut bad)?;
            unreadable::<RemnantRecord>(reader, REMNANTS, &mut bad)
        })?;
        let lost_snapshots = repair && bad.iter().any(|(table, _)| *table == SNAPSHOTS);
        for (table, error) in bad {
            let DbError::Record { key, cause } = error else { continue }; // any other one has ended the read
            let reason = cause.to_string();
            if repair {
                self.restore_record(table, &key)?;
            }
            report.add(StoreDamage::Record { key, reason }, RepairState::when(repair, RepairState::Repaired));
        }
        if lost_snapshots {
            let known: Vec<SnapshotRecord> = self.db.read(doing, |reader| reader.all(SNAPSHOTS))?;
            let known = known.iter().map(|snapshot| snapshot.id).collect();
            keep_lost_snapshots(&*self.disk, &self.layout, &known).context(doing)?;
        }
        Ok(())
    }

    fn restore_record(&self, table: DbTable, key: &str) -> Result<(), StoreError> {
        let copy = if table == IMAGES {
            let path = larder::reference::Digest::parse(key).ok().map(|id| self.layout.image(&id));
            path.and_then(|path| fs_err::read(path).ok())
                .filter(|copy| decode::<ImageRecord>(key, copy).is_ok())
        } else if table == LAYERS {
            let path = LayerKey::parse(key).map(|key| self.layout.layer(&key));
            path.and_then(|path| read_record(&path).ok())
                .filter(|copy| decode::<LayerRecord>(key, copy).is_ok())
        } else if table == SNAPSHOTS {
            let copies = find_snapshots(&self.layout, BTreeMap::new()).unwrap_or_default();
            copies.get(key).and_then(|snapshot| encode(key, snapshot).ok())
        } else {
            None
        };
        self.db.write("restore a record", |writer| {
            match &copy {
                Some(copy) => writer.put_raw(table, key, copy)?,
                None => writer.delete(table, key)?,
            }
            Ok(())
        })
    }

    /// Checks that names and references match the images. A repair rebuilds them from the images.
    pub(super) fn check_names(&self, repair: bool, report: &mut FsckReport) -> Result<(), StoreError> {
        let doing = "check the database's names";
        let Some(detail) = self.db.read(doing, |reader| first_difference(reader))? else { return Ok(()) };
        if repair {
            self.db.write("rebuild the database's names", |writer| Ok(write_names(writer)?))?;
        }
        report.add(StoreDamage::Index { detail }, RepairState::when(repair, RepairState::Repaired));
        Ok(())
    }
}

fn unreadable<T: serde::de::DeserializeOwned>(
    source: &impl DbRead,
    table: DbTable,
    bad: &mut Vec<(DbTable, DbError)>,
) -> DbResult<()> {
    source.visit(table, "", &mut |key, value| {
        if let Err(error) = decode::<T>(key, value) {
            bad.push((table, error));
        }
        Ok(true)
    })
}

/// Returns the first difference between names and images, if any.
fn first_difference(source: &impl DbRead) -> DbResult<Option<String>> {
    let mut names = BTreeMap::new();
    source.visit(NAMES, "", &mut |name, id| {
        names.insert(name.to_owned(), String::from_utf8_lossy(id).into_owned());
        Ok(true)
    })?;
    let mut uses: BTreeSet<String> = source.endings(USES, "")?.into_iter().collect();
    let mut difference = None;
    for image in source.all::<ImageRecord>(IMAGES)? {
        for name in image.names() {
            let id = names.remove(name);
            if id.as_deref() != Some(image.id.as_str()) {
                difference.get_or_insert_with(|| format!("the name {name} does not point to {}", image.id));
            }
        }
        if image.disk_bytes != disk_bytes(source, &image)? {
            difference.get_or_insert_with(|| format!("the size of {} is out of date", image.id));
        }
        for_uses(&image, |key| {
            if !uses.remove(key) {
                difference.get_or_insert_with(|| format!("the reference {key} is missing"));
            }
            Ok(())
        })?;
    }
    if let Some((name, id)) = names.pop_first() {
        difference.get_or_insert_with(|| format!("the name {name} points to {id}, which does not have it"));
    }
    if let Some(key) = uses.pop_first() {
        difference.get_or_insert_with(|| format!("the reference {key} has no image"));
    }
    Ok(difference)
}

/// Rebuilds names and references. If several images claim a name, the one pulled last gets it.
pub(super) fn write_names(writer: &DbTransaction) -> DbResult<()> {
    writer.clear(NAMES)?;
    writer.clear(USES)?;
    let mut images: Vec<ImageRecord> = writer.all(IMAGES)?;
    images.sort_by(|a, b| (b.pulled_at, &b.id).cmp(&(a.pulled_at, &a.id)));
    let mut taken = BTreeSet::new();
    for mut image in images {
        image.tags.retain(|name| taken.insert(name.clone()));
        image.digests.retain(|name| taken.insert(name.clone()));
        for name in image.names() {
            writer.put_raw(NAMES, name, image.id.as_str().as_bytes())?;
        }
        put_uses(writer, &image)?;
        put_image(writer, &mut image)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fsck::FsckOptions;
    use crate::store::{Store, StoreConfig};

    #[test]
    fn unreadable_records_of_caches_are_found_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
        for table in [REMNANTS, START_READS] {
            let put = |writer: &DbTransaction| Ok(writer.put_raw(table, "key", b"{")?);
            store.0.db.write("damage a record", put).unwrap();
            let check = |repair| store.fsck(&FsckOptions { repair, ..FsckOptions::default() });
            let repaired = check(true).unwrap();
            assert!(matches!(
                repaired.problems[..],
                [crate::fsck::FsckProblem { found: StoreDamage::Record { .. }, .. }]
            ));
            assert_eq!(check(false).unwrap().problems, []);
        }
    }
}
