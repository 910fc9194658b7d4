//! Upgrades a store of format 1, whose index was a redb file, when it is opened.
//!
//! redb ends the process on some damaged files. So the attempt is noted first: where an earlier one did not come to its
//! end, the index is rebuilt from the files beside it instead, as any other that is damaged.

use std::path::Path;

use redb::{ReadableDatabase as _, ReadableTable as _, TableDefinition};

use super::db::{Db, DbResult, TABLES};
use super::layout::StoreLayout;
use crate::disk::{Disk, FileOpenMode};

/// A row of the old index: table, key and value, which is kept as it is.
type Row = (usize, String, Vec<u8>);

/// Makes the index of format 2. It counts once [`finish`] has written the format.
pub(super) fn from_format_1(disk: &dyn Disk, layout: &StoreLayout) -> DbResult<()> {
    let (old, attempt) = (layout.root().join("larder.redb"), layout.root().join("upgrade"));
    if attempt.exists() || !old.exists() {
        return Ok(());
    }
    disk.open(&attempt, FileOpenMode::CreateNew)?.sync_data()?;
    disk.sync_dir(layout.root())?;
    match rows(&old) {
        Ok(rows) => {
            let created = Db::create(disk, &layout.database(), |writer| {
                rows.iter().try_for_each(|(table, key, value)| writer.put_raw(TABLES[*table], key, value))
            });
            if created.is_err() {
                // The old index was read: the next attempt reads it again. If this fails, that one rebuilds.
                let _ = disk.remove_file(&attempt);
            }
            created
        }
        Err(error) => {
            tracing::warn!(%error, database = %old.display(), "cannot read the database of format 1");
            Ok(())
        }
    }
}

/// Writes the new format, and removes what only a store of format 1 has. The old index stays, under another name, if it
/// could not be read.
pub(super) fn finish(
    disk: &dyn Disk,
    layout: &StoreLayout,
    write_format: impl FnOnce(&dyn Disk, &StoreLayout) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let path = |name| layout.root().join(name);
    write_format(disk, layout)?;
    if !layout.database().exists() && path("larder.redb").exists() {
        disk.rename(&path("larder.redb"), &path("larder.redb.old"))?;
    }
    ["larder.redb", "larder.redb.new", "upgrade"]
        .into_iter()
        .try_for_each(|name| disk.remove_file(&path(name)))
}

fn rows(path: &Path) -> Result<Vec<Row>, Box<redb::Error>> {
    let read = || -> Result<Vec<Row>, redb::Error> {
        let database = redb::Database::open(path)?;
        let reader = database.begin_read()?;
        let mut rows = Vec::new();
        for (number, table) in TABLES.iter().enumerate() {
            let table: TableDefinition<'_, &str, &[u8]> = TableDefinition::new(table.name());
            for row in reader.open_table(table)?.iter()? {
                let (key, value) = row?;
                rows.push((number, key.value().to_owned(), value.value().to_owned()));
            }
        }
        Ok(rows)
    };
    read().map_err(Box::new)
}
