//! The database: the only module, with its submodules, that uses SQLite.
//!
//! Tables map text to a record, written as JSON. Reads see a snapshot of the moment in which they
//! began and never wait for writes. A write is durable when it returns, or it did not happen.
//!
//! A write is two steps: the transaction is written to the write-ahead log and synced, then copied into the database
//! and synced there. If the first fails, the log is emptied; if the second fails, the next one repeats it. So a failed
//! sync is no reason to trust less, nor to reopen.
//!
//! Each row has a checksum, each table has the number and the sum of the checksums of its rows, and opening verifies
//! all of them: SQLite itself checks structure, not content.

mod connection;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder::hint::Hint;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rusqlite::{Connection, ErrorCode, ffi};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use self::connection::{DbReadTransaction, DbTransaction};
use super::error::StoreError;
use crate::disk::{Disk, FileOpenMode};

/// A table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DbTable(&'static str);

/// Image id to [`ImageRecord`](super::records::ImageRecord).
pub(crate) const IMAGES: DbTable = DbTable("images");
/// Full name, with tag or digest, to image id.
pub(crate) const NAMES: DbTable = DbTable("names");
/// Layer key to [`LayerRecord`](super::records::LayerRecord).
pub(crate) const LAYERS: DbTable = DbTable("layers");
/// `layer/KEY/IMAGE` and `blob/DIGEST/IMAGE`, to nothing: which images need a layer or a blob.
pub(crate) const USES: DbTable = DbTable("uses");
/// Layer key to the [`BlobSource`](super::blob_source::BlobSource)s that have sent the layer, the oldest first.
pub(crate) const TRANSFERS: DbTable = DbTable("transfers");
/// Lease id to [`LeaseRecord`](super::records::LeaseRecord).
pub(crate) const LEASES: DbTable = DbTable("leases");
/// Mount id to [`MountRecord`](super::records::MountRecord).
pub(crate) const MOUNTS: DbTable = DbTable("mounts");
/// Key of containerd to [`SnapshotRecord`](super::snapshot_records::SnapshotRecord).
pub(crate) const SNAPSHOTS: DbTable = DbTable("snapshots");
/// `PARENT/CHILD`, by number, to nothing: which snapshots are based on a snapshot.
pub(crate) const SNAPSHOT_CHILDREN: DbTable = DbTable("snapshot-children");
/// Repository to the [`StartReads`](crate::lazy::start_reads::StartReads) of its images.
pub(crate) const START_READS: DbTable = DbTable("start-reads");
/// Layer key to [`RemnantRecord`](super::remnants::RemnantRecord).
pub(crate) const REMNANTS: DbTable = DbTable("remnants");
/// Records about the store as a whole.
pub(crate) const META: DbTable = DbTable("meta");

/// Disk space of the log in bytes, whatever is in it: as much as the removal of an image with a hundred layers writes.
const LOG_RESERVE: u64 = 1 << 20;

/// Connections for reading that are kept open for the next read.
const IDLE_READERS: usize = 2;
/// Reads at a time. SQLite keeps the descriptor of a connection that was closed until the last connection is.
const MAX_READERS: usize = 16;

/// Why a database operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DbError {
    /// The disk refused a step.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is missing, or not as it was written.
    #[error("damaged: {detail}")]
    Damaged {
        /// Description of the damage.
        detail: String,
    },
    /// SQLite refused a step for another reason.
    #[error(transparent)]
    Sqlite(Box<rusqlite::Error>),
    /// A record cannot be read.
    #[error("damaged record {key:?}")]
    Record {
        /// Its key.
        key: String,
        /// Error of the parser.
        #[source]
        cause: serde_json::Error,
    },
}

impl DbError {
    /// Returns the next step that the reader could try.
    pub fn hint(&self) -> Option<Hint> {
        Some(match self {
            DbError::Io(cause) => return super::error::hint_of_io(cause),
            DbError::Sqlite(_) => Hint::from("the kernel log shows errors of the disk; ")
                .command(["fsck", "--rebuild"])
                .text(" rebuilds the database from the images on disk"),
            DbError::Damaged { .. } | DbError::Record { .. } => super::error::rebuild(),
        })
    }

    pub(crate) fn is_no_space(&self) -> bool {
        matches!(self, DbError::Io(cause) if super::error::is_no_space(cause))
    }

    /// Whether the file cannot be used any more, so that a rebuilt one should replace it.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, DbError::Damaged { .. })
    }

    pub(super) fn damaged(detail: impl Into<String>) -> DbError {
        DbError::Damaged { detail: detail.into() }
    }
}

impl From<rusqlite::Error> for DbError {
    fn from(error: rusqlite::Error) -> DbError {
        // Read back, it is too short, or a block of the disk is lost.
        let unreadable = [ffi::SQLITE_IOERR_READ, ffi::SQLITE_IOERR_SHORT_READ, ffi::SQLITE_IOERR_CORRUPTFS];
        match error.sqlite_error_code() {
            _ if error.sqlite_extended_error_code().is_some_and(|code| unreadable.contains(&code)) => {
                DbError::damaged(error.to_string())
            }
            Some(ErrorCode::DiskFull) => DbError::Io(rustix::io::Errno::NOSPC.into()),
            Some(
                ErrorCode::SystemIoFailure
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
                | ErrorCode::PermissionDenied
                | ErrorCode::OutOfMemory
                | ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::OperationInterrupted
                | ErrorCode::OperationAborted
                | ErrorCode::ApiMisuse,
            ) => DbError::Sqlite(Box::new(error)),
            // A text that is no UTF-8, a column of another type, a table that is not there: all statements are right.
            _ => DbError::damaged(error.to_string()),
        }
    }
}

pub(crate) type DbResult<T> = Result<T, DbError>;

/// Why a transaction leaves nothing.
#[derive(Debug)]
pub(crate) enum TransactionAbort {
    /// The database failed.
    Failed(DbError),
    /// The requested change is not possible.
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

/// Connections for reading.
#[derive(Debug, Default)]
struct Readers {
    idle: Vec<Connection>,
    /// Number of reads that use one.
    busy: usize,
}

/// A read that is under way.
struct ReadSlot<'a>(&'a Db);

impl Drop for ReadSlot<'_> {
    fn drop(&mut self) {
        self.0.readers().busy -= 1;
        self.0.read_ended.notify_one();
    }
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Db {
    writer: Mutex<Connection>,
    readers: Mutex<Readers>,
    read_ended: Condvar,
    disk: Arc<dyn Disk>,
    path: PathBuf,
    cache_bytes: usize,
    /// The log has a transaction that was reported as failed: it could not be emptied yet.
    has_failed_transaction: AtomicBool,
}

impl Db {
    /// Opens a database that is there, and verifies all of it.
    pub(crate) fn open(disk: &Arc<dyn Disk>, path: &Path, cache_bytes: usize) -> DbResult<Db> {
        let db = Db::open_unchanged(disk, path, cache_bytes)?;
        // What a process that died left in the log may not be durable; nothing is to be built on it before it is.
        match connection::copy_log(&*db.disk, &db.path, &db.writer()) {
            // On a full disk the database cannot grow. The log has all of it, and room for a removal.
            Err(error) if error.is_no_space() => {
                db.disk.open(&log_of(path), FileOpenMode::Existing)?.sync_data()?;
            }
            copied => copied?,
        }
        db.reserve_log()?;
        Ok(db)
    }

    /// Like [`open`](Db::open), only to be read: what is in the log stays there.
    pub(crate) fn open_unchanged(disk: &Arc<dyn Disk>, path: &Path, cache_bytes: usize) -> DbResult<Db> {
        if !path.exists() {
            return Err(DbError::damaged("missing"));
        }
        // SQLite does not say why a file cannot be opened.
        for file in [path, &log_of(path)] {
            match fs_err::OpenOptions::new().read(true).write(true).open(file) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error.into()),
                _ => {}
            }
        }
        let db = Db {
            writer: Mutex::new(connection::connect(path, cache_bytes)?),
            readers: Mutex::default(),
            read_ended: Condvar::new(),
            disk: disk.clone(),
            path: path.to_owned(),
            cache_bytes,
            has_failed_transaction: AtomicBool::new(false),
        };
        db.verify()?;
        Ok(db)
    }

    /// Makes a database with what `write_first` writes, instead of the one that may be at `path`. It appears as a
    /// whole.
    pub(crate) fn create(
        disk: &dyn Disk,
        path: &Path,
        write_first: impl FnOnce(&DbTransaction) -> DbResult<()>,
    ) -> DbResult<()> {
        let new = path.with_extension("db.new");
        for leftover in [&new, &log_of(&new)] {
            disk.remove_file(leftover)?;
        }
        disk.open(&new, FileOpenMode::CreateNew)?;
        let mut created = Ok(());
        disk.database_step(&new, &mut || created = connection::create(&new))?;
        created?;
        let connection = connection::connect(&new, 1 << 20)?;
        let transaction = DbTransaction::begin(&connection)?;
        write_first(&transaction)?;
        transaction.commit(disk, &new)?;
        connection::copy_log(disk, &new, &connection)?;
        drop(connection);
        disk.remove_file(&log_of(&new))?;
        // A log of the file that is replaced would be applied to the new one.
        disk.remove_file(&log_of(path))?;
        let dir = path.parent().unwrap_or(path);
        disk.sync_dir(dir)?;
        disk.rename(&new, path)?;
        Ok(disk.sync_dir(dir)?)
    }

    /// Checks the structure of the file, the checksum of each row, and that no row is missing.
    pub(crate) fn verify(&self) -> DbResult<()> {
        connection::verify(&self.writer())
    }

    /// The rows of a table that can still be read where a database is damaged.
    pub(crate) fn salvage(path: &Path, table: DbTable) -> Vec<(String, Vec<u8>)> {
        connection::connect(path, 1 << 20)
            .map_or_else(|_| Vec::new(), |found| connection::salvage(&found, table))
    }

    fn writer(&self) -> MutexGuard<'_, Connection> {
        self.writer.lock()
    }

    fn readers(&self) -> MutexGuard<'_, Readers> {
        self.readers.lock()
    }

    /// Waits until less than [`MAX_READERS`] read. With the slot comes a connection that is idle.
    fn begin_read(&self) -> (ReadSlot<'_>, Option<Connection>) {
        let mut readers = self.readers();
        self.read_ended.wait_while(&mut readers, |readers| readers.busy == MAX_READERS);
        readers.busy += 1;
        (ReadSlot(self), readers.idle.pop())
    }

    /// Runs `run` on the state of this moment. It must not call the database again.
    pub(crate) fn read<T>(
        &self,
        doing: &'static str,
        run: impl FnOnce(&DbReadTransaction) -> DbResult<T>,
    ) -> Result<T, StoreError> {
        let read = || {
            let (_slot, idle) = self.begin_read();
            let connection = idle.map_or_else(|| connection::connect(&self.path, self.cache_bytes), Ok)?;
            let snapshot = DbReadTransaction::begin(&connection)?;
            let value = run(&snapshot)?;
            drop(snapshot);
            let mut readers = self.readers();
            if readers.idle.len() < IDLE_READERS {
                readers.idle.push(connection);
            }
            Ok(value)
        };
        read().map_err(|cause| StoreError::Database { operation: doing, cause })
    }

    /// Runs `run`, and makes what it wrote durable if it succeeds. One at a time; it must not call the database again.
    pub(crate) fn write<T>(
        &self,
        doing: &'static str,
        run: impl FnOnce(&DbTransaction) -> Result<T, TransactionAbort>,
    ) -> Result<T, StoreError> {
        let write = || {
            let writer = self.writer();
            let transaction = DbTransaction::begin(&writer)?;
            let value = run(&transaction)?;
            let committed = transaction.commit(&*self.disk, &self.path);
            match &committed {
                Ok(false) => {}
                Ok(true) => {
                    // It has replaced one that failed. It is durable in the log. If this fails, the next write, or the
                    // next open, copies it.
                    self.has_failed_transaction.store(false, Ordering::Relaxed);
                    self.report(connection::copy_log(&*self.disk, &self.path, &writer));
                }
                Err(error) if error.is_no_space() => {}
                // If only its sync failed, all of it is in the log, and must not be found there later.
                Err(_) => self.empty_log(&writer),
            }
            committed?;
            Ok(value)
        };
        write().map_err(|abort: TransactionAbort| abort.explain(doing))
    }

    /// Takes blocks for the log: images must be removable on a full disk.
    fn reserve_log(&self) -> DbResult<()> {
        self.disk.open(&log_of(&self.path), FileOpenMode::Existing)?.reserve(LOG_RESERVE);
        Ok(())
    }

    /// Removes a failed transaction from the log. If this fails, the next write replaces it, or closing tries once
    /// more.
    fn empty_log(&self, writer: &Connection) {
        let emptied =
            connection::empty_log(&*self.disk, &self.path, writer).and_then(|()| self.reserve_log());
        self.has_failed_transaction.store(emptied.is_err(), Ordering::Relaxed);
        self.report(emptied);
    }

    fn report(&self, cleaned: DbResult<()>) {
        if let Err(error) = cleaned {
            tracing::warn!("cannot copy the log of the database {}: {error}", self.path.display());
        }
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        if self.has_failed_transaction.load(Ordering::Relaxed) {
            // Nothing reads any more.
            self.readers().idle.clear();
            self.empty_log(&self.writer());
        }
    }
}

/// The write-ahead log of a database, which SQLite keeps beside it.
pub(crate) fn log_of(path: &Path) -> PathBuf {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    log.into()
}

/// Reads of the database, inside and outside of a write.
pub(crate) trait DbRead {
    /// The raw value of this key.
    fn value(&self, table: DbTable, key: &str) -> DbResult<Option<Vec<u8>>>;

    /// Visits the entries whose key starts with `prefix`, in order, until `visit` returns false. It must not touch
    /// the database.
    fn visit(
        &self,
        table: DbTable,
        prefix: &str,
        visit: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
    ) -> DbResult<()>;

    /// The record of this key.
    fn get<T: DeserializeOwned>(&self, table: DbTable, key: &str) -> DbResult<Option<T>> {
        self.value(table, key)?.map(|value| decode(key, &value)).transpose()
    }

    /// Visits all records of a table, in order.
    fn for_each<T: DeserializeOwned>(&self, table: DbTable, mut visit: impl FnMut(T)) -> DbResult<()> {
        self.visit(table, "", &mut |key, value| {
            visit(decode(key, value)?);
            Ok(true)
        })
    }

    /// All records of a table, in order.
    fn all<T: DeserializeOwned>(&self, table: DbTable) -> DbResult<Vec<T>> {
        let mut records = Vec::new();
        self.for_each(table, |record| records.push(record))?;
        Ok(records)
    }

    /// Returns the rest after the prefix of each key that has it.
    fn endings(&self, table: DbTable, prefix: &str) -> DbResult<Vec<String>> {
        let mut endings = Vec::new();
        self.visit(table, prefix, &mut |key, _| {
            endings.push(key[prefix.len()..].to_owned());
            Ok(true)
        })?;
        Ok(endings)
    }

    /// Whether any key starts like this.
    fn any(&self, table: DbTable, prefix: &str) -> DbResult<bool> {
        let mut found = false;
        self.visit(table, prefix, &mut |_, _| {
            found = true;
            Ok(false)
        })?;
        Ok(found)
    }
}

/// The JSON text of a record, as the database and the copies beside it have it.
pub(crate) fn encode<T: Serialize>(key: &str, record: &T) -> DbResult<Vec<u8>> {
    serde_json::to_vec(record).map_err(|cause| DbError::Record { key: key.to_owned(), cause })
}

/// The record in this JSON text. `key` is for the error.
pub(crate) fn decode<T: DeserializeOwned>(key: &str, value: &[u8]) -> DbResult<T> {
    serde_json::from_slice(value).map_err(|cause| DbError::Record { key: key.to_owned(), cause })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;
    use crate::fsck::FsckOptions;
    use crate::store::{Store, StoreConfig};

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
            Ok(decode::<()>("x", b"{")?)
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
        for bad in [&b""[..], b"1 {", b"x", b"{}", b"99999999999999999999999999"] {
            let error = decode::<u32>("images/x", bad).expect_err("damaged");
            assert!(error.to_string().contains("images/x"), "{error}");
        }
    }

    #[test]
    fn rows_that_changed_or_vanished_are_damage() {
        for damage in
            ["UPDATE record SET value = X'312038' WHERE key = 'a'", "DELETE FROM record WHERE key = 'a'"]
        {
            let dir = tempfile::tempdir().unwrap();
            let db = open(dir.path());
            db.write("test", |writer| Ok(writer.put(META, "a", &7)?)).unwrap();
            db.verify().unwrap();
            assert_eq!(db.writer().execute(damage, []).unwrap(), 1);
            assert!(db.verify().unwrap_err().is_damage(), "{damage}");
            let (disk, path) = (db.disk.clone(), db.path.clone());
            drop(db);
            assert!(Db::open(&disk, &path, 1 << 20).unwrap_err().is_damage(), "{damage}");
        }
    }

    #[test]
    fn a_check_of_an_open_store_verifies_its_index() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
        store.0.db.write("test", |writer| Ok(writer.put(META, "a", &7)?)).unwrap();
        store.fsck(&FsckOptions::default()).unwrap();
        store.0.db.writer().execute("DELETE FROM record WHERE key = 'a'", []).unwrap();
        let error = store.fsck(&FsckOptions::default()).unwrap_err();
        assert!(larder::error_chain(&error).contains("rows are missing"), "{error:?}");
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

    #[test]
    fn reads_at_once_leave_few_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let db = open(dir.path());
        let is_of_database = |descriptor: io::Result<fs_err::DirEntry>| {
            fs_err::read_link(descriptor.unwrap().path()).is_ok_and(|file| file == db.path)
        };
        let (begun, gate) = (std::sync::atomic::AtomicUsize::new(0), std::sync::RwLock::new(()));
        let closed = gate.write().unwrap();
        std::thread::scope(|threads| {
            for _ in 0..3 * MAX_READERS {
                threads.spawn(|| {
                    let read = |_: &DbReadTransaction| {
                        begun.fetch_add(1, Ordering::SeqCst);
                        drop(gate.read());
                        Ok(())
                    };
                    db.read("test", read).unwrap();
                });
            }
            while begun.load(Ordering::SeqCst) < MAX_READERS {
                std::thread::yield_now();
            }
            drop(closed);
        });
        assert_eq!(begun.into_inner(), 3 * MAX_READERS);
        let descriptors = fs_err::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|found| is_of_database(found).then_some(()));
        assert_eq!(descriptors.count(), MAX_READERS + 1);
    }

    #[test]
    fn a_log_that_a_read_needs_is_not_taken_for_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let db = open(dir.path());
        let log = log_of(&db.path);
        let writer = db.writer();
        writer.busy_timeout(std::time::Duration::ZERO).unwrap();
        let transaction = DbTransaction::begin(&writer).unwrap();
        transaction.put(META, "a", &7).unwrap();
        assert!(transaction.commit(&*db.disk, &db.path).unwrap());
        let reader = connection::connect(&db.path, 1 << 20).unwrap();
        let snapshot = DbReadTransaction::begin(&reader).unwrap();
        connection::empty_log(&*db.disk, &db.path, &writer).expect_err("it is read");
        assert!(fs_err::metadata(&log).unwrap().len() > 0);
        drop(snapshot);
        connection::empty_log(&*db.disk, &db.path, &writer).unwrap();
        assert_eq!(fs_err::metadata(&log).unwrap().len(), 0);
    }
}
