//! The database: the only module that uses redb.
//!
//! Tables map text to a record, written as its version, a space, and JSON. Reads see a snapshot of the moment in which they
//! began and never wait for writes. A write is durable when it returns, or it did not happen.
//!
//! redb refuses all operations after an I/O error, since it cannot know what is on disk. The database is then reopened,
//! which repairs it: one failed write, as on a full disk, does not end the daemon.

use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use larder::hint::Hint;
use redb::{
    Database, ReadTransaction, ReadableDatabase as _, ReadableTable, StorageBackend, TableDefinition,
    TableHandle as _, WriteTransaction,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::StoreError;
use super::records::VERSION;
use crate::disk::{Disk, DiskFile, FileOpenMode, read_exact_at};

/// A table.
pub(crate) type RedbTable = TableDefinition<'static, &'static str, &'static [u8]>;

/// Image id to [`ImageRecord`](super::records::ImageRecord).
pub(crate) const IMAGES: RedbTable = TableDefinition::new("images");
/// Image id to [`Listed`](super::listing::Listed).
pub(crate) const LISTED: RedbTable = TableDefinition::new("listed");
/// Full name, with tag or digest, to image id.
pub(crate) const NAMES: RedbTable = TableDefinition::new("names");
/// Layer key to [`LayerRecord`](super::records::LayerRecord).
pub(crate) const LAYERS: RedbTable = TableDefinition::new("layers");
/// `layer/KEY/IMAGE` and `blob/DIGEST/IMAGE`, to nothing: which images need a layer or a blob.
pub(crate) const USES: RedbTable = TableDefinition::new("uses");
/// Lease id to [`LeaseRecord`](super::records::LeaseRecord).
pub(crate) const LEASES: RedbTable = TableDefinition::new("leases");
/// Mount id to [`MountRecord`](super::records::MountRecord).
pub(crate) const MOUNTS: RedbTable = TableDefinition::new("mounts");
/// What is known of the store as a whole.
pub(crate) const META: RedbTable = TableDefinition::new("meta");

const TABLES: [RedbTable; 8] = [IMAGES, LISTED, NAMES, LAYERS, USES, LEASES, MOUNTS, META];

/// Why a database operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DbError {
    /// The disk failed, or the file is damaged.
    #[error(transparent)]
    Storage(Box<redb::Error>),
    /// A record cannot be read.
    #[error("damaged record {key:?}")]
    Record {
        /// Its key.
        key: String,
        /// What is wrong with it.
        #[source]
        cause: serde_json::Error,
    },
    /// A later larder wrote this record.
    #[error("record {key:?} has unsupported version {found:?}: expected {VERSION}")]
    Newer {
        /// Its key.
        key: String,
        /// What it says its version is.
        found: String,
    },
}

impl DbError {
    /// What the reader could try next.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            DbError::Storage(error) => match error.as_ref() {
                redb::Error::Io(cause) => super::error::hint_of_io(cause),
                _ => Some(super::error::rebuild()),
            },
            DbError::Record { .. } => Some(super::error::rebuild()),
            DbError::Newer { .. } => Some("use the version of larder that wrote it, or a later one".into()),
        }
    }

    pub(crate) fn is_no_space(&self) -> bool {
        matches!(self, DbError::Storage(error)
            if matches!(error.as_ref(), redb::Error::Io(cause) if super::error::is_no_space(cause)))
    }

    /// Whether redb will refuse everything from now on.
    fn is_final(&self) -> bool {
        matches!(self, DbError::Storage(error)
            if matches!(error.as_ref(), redb::Error::Io(_) | redb::Error::PreviousIo | redb::Error::DatabaseClosed))
    }
}

/// redb has an error for each operation; all of them turn into the one that holds them all.
macro_rules! from_redb {
    ($($error:ty),*) => {$(
        impl From<$error> for DbError {
            fn from(error: $error) -> DbError {
                DbError::Storage(Box::new(error.into()))
            }
        }
    )*};
}
from_redb!(
    redb::CommitError,
    redb::DatabaseError,
    redb::SetDurabilityError,
    redb::StorageError,
    redb::TableError,
    redb::TransactionError
);

pub(crate) type DbResult<T> = Result<T, DbError>;

/// Why a transaction leaves nothing.
#[derive(Debug)]
pub(crate) enum TransactionAbort {
    /// The database failed.
    Failed(DbError),
    /// What was asked cannot be done.
    Refused(StoreError),
}

impl TransactionAbort {
    fn explain(self, doing: &'static str) -> StoreError {
        match self {
            TransactionAbort::Failed(cause) => StoreError::Database { operation: doing, cause },
            TransactionAbort::Refused(error) => error,
        }
    }
}

impl From<DbError> for TransactionAbort {
    fn from(error: DbError) -> TransactionAbort {
        TransactionAbort::Failed(error)
    }
}

impl From<StoreError> for TransactionAbort {
    fn from(error: StoreError) -> TransactionAbort {
        TransactionAbort::Refused(error)
    }
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Db {
    /// Held for reading by every transaction, for writing by who opens it again. `None` when that failed.
    database: RwLock<Option<Database>>,
    disk: Arc<dyn Disk>,
    path: PathBuf,
    cache_bytes: usize,
}

impl Db {
    /// Opens a database that is there.
    pub(crate) fn open(disk: &Arc<dyn Disk>, path: &Path, cache_bytes: usize) -> DbResult<Db> {
        let db = Db { database: RwLock::new(None), disk: disk.clone(), path: path.to_owned(), cache_bytes };
        db.reopen()?;
        Ok(db)
    }

    /// Makes a database with what `write_first` writes, instead of the one that may be at `path`. It appears as a whole: redb
    /// cannot open one whose creation was interrupted by a power loss.
    pub(crate) fn create(
        disk: &dyn Disk,
        path: &Path,
        write_first: impl FnOnce(&DbTransaction) -> DbResult<()>,
    ) -> DbResult<()> {
        let new = path.with_extension("redb.new");
        let failed = |cause| DbError::from(redb::StorageError::Io(cause));
        disk.remove_file(&new).map_err(failed)?;
        let file = disk.open(&new, FileOpenMode::CreateNew).map_err(failed)?;
        let database = redb::Builder::new().create_with_backend(RedbFile(file.clone()))?;
        let writer = DbTransaction(database.begin_write()?);
        for table in TABLES {
            writer.0.open_table(table)?;
        }
        write_first(&writer)?;
        writer.0.commit()?;
        drop(database);
        file.sync_data().and_then(|()| disk.rename(&new, path)).map_err(failed)?;
        path.parent().map_or(Ok(()), |dir| disk.sync_dir(dir)).map_err(failed)
    }

    fn open_file(&self) -> DbResult<Database> {
        let file = self.disk.open(&self.path, FileOpenMode::Existing).map_err(redb::StorageError::Io)?;
        Ok(redb::Builder::new().set_cache_size(self.cache_bytes).create_with_backend(RedbFile(file))?)
    }

    /// Closes the database and reopens it, once no operation uses it.
    fn reopen(&self) -> DbResult<()> {
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        // Closed first: two of them on one file would each think that they know what is free.
        *database = None;
        *database = Some(self.open_file()?);
        Ok(())
    }

    fn with<T>(
        &self,
        run: impl FnOnce(&Database) -> Result<T, TransactionAbort>,
    ) -> Result<T, TransactionAbort> {
        {
            let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(database) = database.as_ref() {
                return run(database);
            }
        }
        self.reopen()?;
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        match database.as_ref() {
            Some(database) => run(database),
            None => Err(DbError::Storage(Box::new(redb::Error::DatabaseClosed)).into()),
        }
    }

    /// Runs `run` on the state of this moment. It must not call the database again.
    pub(crate) fn read<T>(
        &self,
        doing: &'static str,
        run: impl FnOnce(&DbSnapshot) -> DbResult<T>,
    ) -> Result<T, StoreError> {
        let read = self.with(|database| {
            let reader = DbSnapshot(database.begin_read().map_err(DbError::from)?);
            Ok(run(&reader)?)
        });
        read.map_err(|abort| abort.explain(doing))
    }

    /// Runs `run`, and makes what it wrote durable if it succeeds. One at a time; it must not call the database again.
    pub(crate) fn write<T>(
        &self,
        doing: &'static str,
        run: impl FnOnce(&DbTransaction) -> Result<T, TransactionAbort>,
    ) -> Result<T, StoreError> {
        let written = self.with(|database| {
            let writer = DbTransaction(database.begin_write().map_err(DbError::from)?);
            let value = run(&writer)?;
            writer.0.commit().map_err(DbError::from)?;
            Ok(value)
        });
        if matches!(&written, Err(TransactionAbort::Failed(error)) if error.is_final())
            || (written.is_err() && self.is_broken())
        {
            // If this fails as well, the next call tries again.
            let _ = self.reopen();
        }
        written.map_err(|abort| abort.explain(doing))
    }

    /// Whether redb has given up.
    fn is_broken(&self) -> bool {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        database.as_ref().is_none_or(|database| match database.begin_write() {
            Ok(transaction) => transaction.abort().is_err(),
            Err(_) => true,
        })
    }
}

/// What can be read, inside and outside of a write.
pub(crate) trait DbRead {
    /// The raw value of this key.
    fn value(&self, table: RedbTable, key: &str) -> DbResult<Option<Vec<u8>>>;

    /// Visits the entries whose key starts with `prefix`, in order, until `visit` returns false. It must not touch
    /// the database.
    fn visit(
        &self,
        table: RedbTable,
        prefix: &str,
        visit: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
    ) -> DbResult<()>;

    /// The record of this key.
    fn get<T: DeserializeOwned>(&self, table: RedbTable, key: &str) -> DbResult<Option<T>> {
        self.value(table, key)?.map(|value| decode(key, &value)).transpose()
    }

    /// Visits all records of a table, in order.
    fn for_each<T: DeserializeOwned>(&self, table: RedbTable, mut visit: impl FnMut(T)) -> DbResult<()> {
        self.visit(table, "", &mut |key, value| {
            visit(decode(key, value)?);
            Ok(true)
        })
    }

    /// All records of a table, in order.
    fn all<T: DeserializeOwned>(&self, table: RedbTable) -> DbResult<Vec<T>> {
        let mut records = Vec::new();
        self.for_each(table, |record| records.push(record))?;
        Ok(records)
    }

    /// What comes after the prefix in each key that has it.
    fn endings(&self, table: RedbTable, prefix: &str) -> DbResult<Vec<String>> {
        let mut endings = Vec::new();
        self.visit(table, prefix, &mut |key, _| {
            endings.push(key[prefix.len()..].to_owned());
            Ok(true)
        })?;
        Ok(endings)
    }

    /// Whether any key starts like this.
    fn any(&self, table: RedbTable, prefix: &str) -> DbResult<bool> {
        let mut found = false;
        self.visit(table, prefix, &mut |_, _| {
            found = true;
            Ok(false)
        })?;
        Ok(found)
    }
}

/// Whether two tables are one.
pub(crate) fn same(one: RedbTable, other: RedbTable) -> bool {
    one.name() == other.name()
}

/// A look at the database as it was at one moment.
pub(crate) struct DbSnapshot(ReadTransaction);

impl DbRead for DbSnapshot {
    fn value(&self, table: RedbTable, key: &str) -> DbResult<Option<Vec<u8>>> {
        value_of(&self.0.open_table(table)?, key)
    }

    fn visit(
        &self,
        table: RedbTable,
        prefix: &str,
        visit: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
    ) -> DbResult<()> {
        visit_table(&self.0.open_table(table)?, prefix, visit)
    }
}

/// A change under way.
pub(crate) struct DbTransaction(WriteTransaction);

impl DbRead for DbTransaction {
    fn value(&self, table: RedbTable, key: &str) -> DbResult<Option<Vec<u8>>> {
        value_of(&self.0.open_table(table)?, key)
    }

    fn visit(
        &self,
        table: RedbTable,
        prefix: &str,
        visit: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
    ) -> DbResult<()> {
        visit_table(&self.0.open_table(table)?, prefix, visit)
    }
}

impl DbTransaction {
    pub(crate) fn put<T: Serialize>(&self, table: RedbTable, key: &str, record: &T) -> DbResult<()> {
        self.put_raw(table, key, &encode(key, record)?)
    }

    pub(crate) fn put_raw(&self, table: RedbTable, key: &str, value: &[u8]) -> DbResult<()> {
        self.0.open_table(table)?.insert(key, value)?;
        Ok(())
    }

    /// Succeeds when there is no such key.
    pub(crate) fn delete(&self, table: RedbTable, key: &str) -> DbResult<()> {
        self.0.open_table(table)?.remove(key)?;
        Ok(())
    }

    /// Removes every entry.
    pub(crate) fn clear(&self, table: RedbTable) -> DbResult<()> {
        self.0.open_table(table)?.retain(|_, _| false)?;
        Ok(())
    }
}

fn value_of(table: &impl ReadableTable<&'static str, &'static [u8]>, key: &str) -> DbResult<Option<Vec<u8>>> {
    Ok(table.get(key)?.map(|value| value.value().to_vec()))
}

fn visit_table(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    prefix: &str,
    visit: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
) -> DbResult<()> {
    for entry in table.range::<&str>((Bound::Included(prefix), Bound::Unbounded))? {
        let (key, value) = entry?;
        let key = key.value();
        if !key.starts_with(prefix) || !visit(key, value.value())? {
            break;
        }
    }
    Ok(())
}

/// A record as it is kept: `VERSION JSON`.
pub(crate) fn encode<T: Serialize>(key: &str, record: &T) -> DbResult<Vec<u8>> {
    let mut value = format!("{VERSION} ").into_bytes();
    serde_json::to_writer(&mut value, record)
        .map_err(|cause| DbError::Record { key: key.to_owned(), cause })?;
    Ok(value)
}

/// The record that was kept. `key` is for the error.
pub(crate) fn decode<T: DeserializeOwned>(key: &str, value: &[u8]) -> DbResult<T> {
    let (version, json) =
        value.iter().position(|b| *b == b' ').map_or((value, &[][..]), |at| (&value[..at], &value[at + 1..]));
    if version != VERSION.to_string().as_bytes() {
        let found = String::from_utf8_lossy(&version[..version.len().min(20)]).into_owned();
        return Err(DbError::Newer { key: key.to_owned(), found });
    }
    serde_json::from_slice(json).map_err(|cause| DbError::Record { key: key.to_owned(), cause })
}

/// A file of ours as redb wants it.
#[derive(Debug)]
struct RedbFile(Arc<dyn DiskFile>);

impl StorageBackend for RedbFile {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        read_exact_at(&*self.0, out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let grows = len > self.0.len()?;
        self.0.set_len(len)?;
        // redb writes the new length into its header with the next commit, and panics when it opens a file that is
        // shorter than its header says. A power cut may keep the header and lose the length, unless it is durable.
        if grows { self.0.sync_data() } else { Ok(()) }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;

    fn open(dir: &Path) -> Db {
        let (disk, path): (Arc<dyn Disk>, _) = (Arc::new(RealDisk), dir.join("db"));
        if !path.exists() {
            Db::create(&*disk, &path, |_| Ok(())).unwrap();
        }
        Db::open(&disk, &path, 1 << 20).unwrap()
    }

    #[test]
    fn written_rows_are_present_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        open(dir.path()).write("test", |writer| Ok(writer.put(META, "a", &7)?)).unwrap();
        let db = open(dir.path());
        assert_eq!(db.read("test", |reader| reader.get::<u32>(META, "a")).unwrap(), Some(7));
        assert_eq!(db.read("test", |reader| reader.get::<u32>(META, "b")).unwrap(), None);
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let db = open(dir.path());
        let failed: Result<(), StoreError> = db.write("test", |writer| {
            writer.put(META, "a", &7)?;
            Ok(decode::<()>("x", b"2 null")?)
        });
        assert!(matches!(failed, Err(StoreError::Database { .. })), "{failed:?}");
        assert_eq!(db.read("test", |reader| reader.get::<u32>(META, "a")).unwrap(), None);
    }

    #[test]
    fn a_read_sees_one_moment() {
        let dir = tempfile::tempdir().unwrap();
        let db = open(dir.path());
        db.read("test", |reader| {
            std::thread::scope(|scope| {
                scope.spawn(|| db.write("test", |writer| Ok(writer.put(META, "a", &7)?)).unwrap());
            });
            assert_eq!(reader.get::<u32>(META, "a")?, None);
            Ok(())
        })
        .unwrap();
        assert_eq!(db.read("test", |reader| reader.get::<u32>(META, "a")).unwrap(), Some(7));
    }

    #[test]
    fn damaged_records_are_named() {
        for bad in [&b""[..], b"1", b"1 {", b"x {}", b"99999999999999999999999999 {}"] {
            let error = decode::<u32>("images/x", bad).expect_err("damaged");
            assert!(error.to_string().contains("images/x"), "{error}");
        }
    }

    #[test]
    fn prefixes_end_where_they_end() {
        let dir = tempfile::tempdir().unwrap();
        let db = open(dir.path());
        db.write("test", |writer| {
            ["a/1", "a/2", "a0", "b/1"].iter().try_for_each(|key| writer.put_raw(USES, key, b""))?;
            Ok(())
        })
        .unwrap();
        assert_eq!(db.read("test", |reader| reader.endings(USES, "a/")).unwrap(), ["1", "2"]);
        assert!(!db.read("test", |reader| reader.any(USES, "c")).unwrap());
    }
}
