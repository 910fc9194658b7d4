//! Connections to the database file, and the one table in which all records are.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, Statement};
use serde::Serialize;

use super::{DbError, DbRead, DbResult, DbTable, IMAGES, encode, log_of};
use crate::disk::Disk;

/// `larder` as SQLite's mark of whose file it is.
const APPLICATION: i64 = 0x6c61_7264;

/// Sections that are no table: for each table, how many rows it has and the sum of their checksums.
const TOTALS: DbTable = DbTable("totals");

/// Holds the file lock in this process and the index of the log in memory: reading needs no room on the disk. The
/// store's own lock keeps other processes out.
const VFS: &str = "unix-excl";

/// Makes a database at the path of an empty file.
pub(super) fn create(path: &Path) -> DbResult<()> {
    let connection = Connection::open_with_flags_and_vfs(path, OpenFlags::SQLITE_OPEN_READ_WRITE, VFS)?;
    connection.execute_batch(&format!(
        "PRAGMA journal_mode = MEMORY;
         PRAGMA application_id = {APPLICATION};
         CREATE TABLE record (
             section TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, crc INTEGER NOT NULL,
             PRIMARY KEY (section, key)
         ) STRICT, WITHOUT ROWID;
         PRAGMA journal_mode = WAL;",
    ))?;
    Ok(())
}

/// Opens a database that is there.
pub(super) fn connect(path: &Path, cache_bytes: usize) -> DbResult<Connection> {
    let connection = Connection::open_with_flags_and_vfs(path, OpenFlags::SQLITE_OPEN_READ_WRITE, VFS)?;
    // The log stays when the database is closed: on a full disk there might be no room for a new one.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    let cache_kib = cache_bytes / 1024;
    connection.execute_batch(&format!(
        "PRAGMA synchronous = FULL;
         PRAGMA wal_autocheckpoint = 0;
         PRAGMA cell_size_check = ON;
         PRAGMA trusted_schema = OFF;
         PRAGMA temp_store = MEMORY;
         PRAGMA cache_size = -{cache_kib};",
    ))?;
    Ok(connection)
}

/// Copies what is in the log into the database, and syncs it. What a read still needs of the log stays there.
pub(super) fn copy_log(disk: &dyn Disk, path: &Path, connection: &Connection) -> DbResult<()> {
    let mut copied = Ok(());
    let mut copy = || copied = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    disk.database_step(path, &mut copy)?;
    Ok(copied?)
}

/// Like [`copy_log`], and makes the log empty.
pub(super) fn empty_log(disk: &dyn Disk, path: &Path, connection: &Connection) -> DbResult<()> {
    copy_log(disk, path, connection)?;
    let mut emptied = Ok(false);
    let mut empty = || {
        emptied = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, bool>(0));
    };
    disk.database_step(&log_of(path), &mut empty)?;
    // It reports a log that a read still needs by a column only.
    let is_busy = emptied?;
    if is_busy { Err(DbError::Io(std::io::ErrorKind::ResourceBusy.into())) } else { Ok(()) }
}

/// Checks the structure of the file, the checksum of each row, and that no row is missing.
pub(super) fn verify(connection: &Connection) -> DbResult<()> {
    let text = |pragma| connection.query_row(pragma, [], |row| row.get::<_, String>(0));
    let structure = text("PRAGMA integrity_check(1)")?;
    if structure != "ok" {
        return Err(DbError::damaged(structure.replace('\n', " ")));
    }
    let application: i64 = connection.query_row("PRAGMA application_id", [], |row| row.get(0))?;
    if application != APPLICATION || text("PRAGMA journal_mode")? != "wal" {
        return Err(DbError::damaged("the header is not that of an index"));
    }
    let (mut found, mut noted) = (BTreeMap::new(), BTreeMap::new());
    let mut rows = connection.prepare("SELECT section, key, value, crc FROM record")?;
    let mut rows = rows.query([])?;
    while let Some(row) = rows.next()? {
        let (section, key) = (
            row.get_ref(0)?.as_str().map_err(|error| invalid(&error))?,
            row.get_ref(1)?.as_str().map_err(|error| invalid(&error))?,
        );
        let (value, crc) =
            (row.get_ref(2)?.as_blob().map_err(|error| invalid(&error))?, row.get::<_, i64>(3)?);
        if crc != checksum(section, key, value) {
            return Err(wrong_checksum(section, key));
        }
        if section == TOTALS.0 {
            noted.insert(key.to_owned(), Totals::parse(value)?);
        } else {
            found.entry(section.to_owned()).or_insert_with(Totals::default).add(crc);
        }
    }
    noted.retain(|_, totals| *totals != Totals::default());
    if found != noted {
        return Err(DbError::damaged("rows are missing"));
    }
    Ok(())
}

fn invalid(error: &rusqlite::types::FromSqlError) -> DbError {
    DbError::damaged(error.to_string())
}

fn wrong_checksum(section: &str, key: &str) -> DbError {
    DbError::damaged(format!("the checksum of {section}/{key} differs"))
}

fn checksum(section: &str, key: &str, value: &[u8]) -> i64 {
    let mut hasher = crc32fast::Hasher::new();
    for part in [section.as_bytes(), b"\0", key.as_bytes(), b"\0", value] {
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// The rows of a table: how many there are, and the sum of their checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Totals {
    rows: i64,
    sum: i64,
}

impl Totals {
    fn add(&mut self, crc: i64) {
        self.rows = self.rows.wrapping_add(1);
        self.sum = self.sum.wrapping_add(crc);
    }

    fn subtract(&mut self, crc: i64) {
        self.rows = self.rows.wrapping_sub(1);
        self.sum = self.sum.wrapping_sub(crc);
    }

    fn parse(value: &[u8]) -> DbResult<Totals> {
        let text = std::str::from_utf8(value).ok().and_then(|text| text.split_once(' '));
        let parsed = text.and_then(|(rows, sum)| Some((rows.parse().ok()?, sum.parse().ok()?)));
        let (rows, sum) = parsed.ok_or_else(|| DbError::damaged("the totals of a table cannot be read"))?;
        Ok(Totals { rows, sum })
    }
}

/// The rows of a table that can still be read, of a damaged database: those whose checksum is right.
pub(super) fn salvage(connection: &Connection, table: DbTable) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    // What ends the search early has been reported as the damage.
    let _ = visit(connection, table, "", &mut |key, value| {
        found.push((key.to_owned(), value.to_vec()));
        Ok(true)
    });
    found
}

fn visit(
    connection: &Connection,
    table: DbTable,
    prefix: &str,
    visit: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
) -> DbResult<()> {
    let mut rows = connection
        .prepare("SELECT key, value, crc FROM record WHERE section = ?1 AND key >= ?2 ORDER BY key")?;
    let mut rows = rows.query((table.0, prefix))?;
    while let Some(row) = rows.next()? {
        let (key, value) = (
            row.get_ref(0)?.as_str().map_err(|error| invalid(&error))?,
            row.get_ref(1)?.as_blob().map_err(|error| invalid(&error))?,
        );
        if row.get::<_, i64>(2)? != checksum(table.0, key, value) {
            return Err(wrong_checksum(table.0, key));
        }
        if !key.starts_with(prefix) || !visit(key, value)? {
            break;
        }
    }
    Ok(())
}

/// Finds rows, inside and outside of a change.
pub(crate) struct RowReader<'c> {
    connection: &'c Connection,
    lookup: RefCell<Statement<'c>>,
}

impl<'c> RowReader<'c> {
    fn new(connection: &'c Connection) -> DbResult<RowReader<'c>> {
        let lookup = connection.prepare("SELECT value, crc FROM record WHERE section = ?1 AND key = ?2")?;
        Ok(RowReader { connection, lookup: RefCell::new(lookup) })
    }

    /// The value of a row, and its checksum.
    fn row(&self, table: DbTable, key: &str) -> DbResult<Option<(Vec<u8>, i64)>> {
        let mut lookup = self.lookup.borrow_mut();
        let found = lookup.query_row((table.0, key), |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        let Some((value, crc)) = found else { return Ok(None) };
        let value: Vec<u8> = value;
        if crc != checksum(table.0, key, &value) {
            return Err(wrong_checksum(table.0, key));
        }
        Ok(Some((value, crc)))
    }
}

impl<'c, T: Deref<Target = RowReader<'c>>> DbRead for T {
    fn value(&self, table: DbTable, key: &str) -> DbResult<Option<Vec<u8>>> {
        Ok(self.row(table, key)?.map(|(value, _)| value))
    }

    fn visit(
        &self,
        table: DbTable,
        prefix: &str,
        each: &mut dyn FnMut(&str, &[u8]) -> DbResult<bool>,
    ) -> DbResult<()> {
        visit(self.connection, table, prefix, each)
    }
}

/// A look at the database as it was at one moment.
pub(crate) struct DbReadTransaction<'c>(RowReader<'c>);

impl<'c> DbReadTransaction<'c> {
    pub(super) fn begin(connection: &'c Connection) -> DbResult<DbReadTransaction<'c>> {
        let snapshot = DbReadTransaction(RowReader::new(connection)?);
        connection.execute_batch("BEGIN")?;
        // It begins with what is read first.
        snapshot.0.row(TOTALS, IMAGES.0)?;
        Ok(snapshot)
    }
}

impl Drop for DbReadTransaction<'_> {
    fn drop(&mut self) {
        // After an error there may be no transaction any more; otherwise this cannot fail, since nothing was written.
        let _ = self.0.connection.execute_batch("ROLLBACK");
    }
}

impl<'c> Deref for DbReadTransaction<'c> {
    type Target = RowReader<'c>;

    fn deref(&self) -> &RowReader<'c> {
        &self.0
    }
}

/// A change under way. It leaves nothing unless it is committed.
pub(crate) struct DbTransaction<'c> {
    connection: &'c Connection,
    rows: RowReader<'c>,
    put: RefCell<Statement<'c>>,
    delete: RefCell<Statement<'c>>,
    /// The totals of the tables that it changed.
    totals: RefCell<BTreeMap<DbTable, Totals>>,
}

impl<'c> DbTransaction<'c> {
    pub(super) fn begin(connection: &'c Connection) -> DbResult<DbTransaction<'c>> {
        let put = "INSERT OR REPLACE INTO record (section, key, value, crc) VALUES (?1, ?2, ?3, ?4)";
        let delete = "DELETE FROM record WHERE section = ?1 AND key = ?2";
        let transaction = DbTransaction {
            connection,
            rows: RowReader::new(connection)?,
            put: RefCell::new(connection.prepare(put)?),
            delete: RefCell::new(connection.prepare(delete)?),
            totals: RefCell::default(),
        };
        connection.execute_batch("BEGIN IMMEDIATE")?;
        Ok(transaction)
    }

    /// Makes the change durable in the log. Returns whether there was any.
    pub(super) fn commit(self, disk: &dyn Disk, path: &Path) -> DbResult<bool> {
        let changed = self.totals.take();
        for (table, Totals { rows, sum }) in &changed {
            let value = format!("{rows} {sum}").into_bytes();
            let crc = checksum(TOTALS.0, table.0, &value);
            self.put.borrow_mut().execute((TOTALS.0, table.0, value, crc))?;
        }
        if changed.is_empty() {
            return Ok(false);
        }
        let mut committed = Ok(());
        disk.database_step(&log_of(path), &mut || committed = self.connection.execute_batch("COMMIT"))?;
        committed?;
        Ok(true)
    }

    pub(crate) fn put<T: Serialize>(&self, table: DbTable, key: &str, record: &T) -> DbResult<()> {
        self.put_raw(table, key, &encode(key, record)?)
    }

    pub(crate) fn put_raw(&self, table: DbTable, key: &str, value: &[u8]) -> DbResult<()> {
        let before = self.rows.row(table, key)?;
        if before.as_ref().is_some_and(|(before, _)| before == value) {
            return Ok(());
        }
        let crc = checksum(table.0, key, value);
        self.put.borrow_mut().execute((table.0, key, value, crc))?;
        self.count(table, |totals| {
            if let Some((_, before)) = before {
                totals.subtract(before);
            }
            totals.add(crc);
        })
    }

    /// Succeeds when there is no such key.
    pub(crate) fn delete(&self, table: DbTable, key: &str) -> DbResult<()> {
        let Some((_, before)) = self.rows.row(table, key)? else { return Ok(()) };
        self.delete.borrow_mut().execute((table.0, key))?;
        self.count(table, |totals| totals.subtract(before))
    }

    /// Removes every entry.
    pub(crate) fn clear(&self, table: DbTable) -> DbResult<()> {
        self.connection.execute("DELETE FROM record WHERE section = ?1", [table.0])?;
        self.count(table, |totals| *totals = Totals::default())
    }

    fn count(&self, table: DbTable, change: impl FnOnce(&mut Totals)) -> DbResult<()> {
        let mut changed = self.totals.borrow_mut();
        let mut totals = match changed.get(&table) {
            Some(totals) => *totals,
            None => self
                .rows
                .row(TOTALS, table.0)?
                .map_or(Ok(Totals::default()), |(value, _)| Totals::parse(&value))?,
        };
        change(&mut totals);
        changed.insert(table, totals);
        Ok(())
    }
}

impl Drop for DbTransaction<'_> {
    fn drop(&mut self) {
        if !self.connection.is_autocommit() {
            // What fails here fails again, and is reported, when the next transaction begins.
            let _ = self.connection.execute_batch("ROLLBACK");
        }
    }
}

impl<'c> Deref for DbTransaction<'c> {
    type Target = RowReader<'c>;

    fn deref(&self) -> &RowReader<'c> {
        &self.rows
    }
}
