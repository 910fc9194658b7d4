//! Disk access for every operation that a crash could interrupt.
//!
//! Included: the steps of the database, blobs, files being fetched, and the operations that make files appear and
//! disappear (create, rename, remove, sync). Not included: reading, and unpacking of layers, which writes in bulk into
//! directories that are not visible until an operation of this module renames them.
//!
//! [`RealDisk`] is the one in use; `larder_testkit_peers::faulty_disk` has one that fails, or loses power, at any step.
//! All errors name the path.

mod measure;
mod real;
mod remove;
mod reserve;
mod size_accuracy;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

pub(crate) use measure::measure_one;
pub use measure::{DiskSpace, measure};
pub use real::RealDisk;
pub(crate) use reserve::free_space;
pub use reserve::{ReserveReached, SpaceReserve};
pub(crate) use size_accuracy::SizeAccuracy;

/// How [`Disk::open`] opens a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileOpenMode {
    /// It must not exist yet. Made with mode 0600.
    CreateNew,
    /// It is made if it does not exist, with mode 0600, and keeps what it has.
    Create,
    /// It must exist.
    Existing,
}

/// Steps on a filesystem. Paths are absolute.
pub trait Disk: fmt::Debug + Send + Sync + 'static {
    /// Makes a directory of mode 0700; fails when something is there already.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Opens a file for reading and writing.
    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>>;

    /// Renames a file, or a directory, replacing a file or an empty directory of the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file; succeeds when there is none.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes a file or a directory with all that is in it, whatever its modes; follows no links. Stops between two
    /// entries, with [`io::ErrorKind::Interrupted`], once `go_on` says no. Succeeds when nothing is there.
    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()>;

    /// Returns once the entries of this directory are durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Opens the filesystem that holds `path`, to sync it after writes that follow.
    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>>;

    /// Lets the database take a step, in which it writes and syncs `file` by itself. An error of the database is not
    /// this one: it means that there was no such step.
    fn database_step(&self, file: &Path, step: &mut dyn FnMut()) -> io::Result<()> {
        let _ = file;
        step();
        Ok(())
    }

    /// Boot ID of the machine: what was written without a sync is guaranteed to exist only while
    /// this stays the same.
    fn boot_id(&self) -> String;
}

/// An open filesystem of a [`Disk`].
pub trait FilesystemSync: fmt::Debug + Send + Sync {
    /// Returns once everything written so far to the filesystem is durable. Fails if a write failed since this was
    /// opened, or since the last call: also one that the kernel made on its own, and whose error another process has
    /// received. Errors from before it was opened may go unreported.
    fn sync(&self) -> io::Result<()>;
}

/// An open file of a [`Disk`]. Calls may overlap.
pub trait DiskFile: fmt::Debug + Send + Sync {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether there is nothing in it.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads up to a buffer full; fewer bytes than asked, but at least one, where the file goes on.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of it.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Takes blocks for the first `bytes` of the file, whatever its length is and stays, so that writing them later
    /// needs no room. Without effect where the filesystem cannot, or is full.
    fn reserve(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Forgets what is in memory of content that was written to the disk: it is read from there. Without effect where
    /// there is no such memory.
    fn drop_cache(&self) -> io::Result<()> {
        Ok(())
    }

    /// Cuts the file, or extends it with zeros that take no room.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Returns once content and length are durable.
    fn sync_data(&self) -> io::Result<()>;

    /// Returns once content, length and attributes are durable.
    fn sync_all(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// Makes a directory unless it is there.
pub(crate) fn ensure_dir(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    match disk.create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

/// Writes a file under a temporary name beside it, then renames it, so that readers see the old or the new one. The
/// caller sees to durability.
pub fn replace(disk: &dyn Disk, temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    disk.remove_file(temporary)?;
    let file = disk.open(temporary, FileOpenMode::CreateNew)?;
    let written = file.write_all_at(bytes, 0);
    drop(file);
    let renamed = written.and_then(|()| disk.rename(temporary, path));
    if renamed.is_err() {
        // The first error is reported; a leftover is cleaned when the store opens.
        let _ = disk.remove_file(temporary);
    }
    renamed
}
