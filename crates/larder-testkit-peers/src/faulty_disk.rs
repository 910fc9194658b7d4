//! A disk that fails, or loses power, at a step of the test's choice.
//!
//! It works on a real directory, so that code that bypasses the interface (reading, unpacking) sees real files. Beside
//! it, in memory, it keeps what would survive a power cut: what was synced. [`FaultyDisk::restarted`] makes a new
//! directory of that. Every step that changes something counts, syncs included; a write that meets the fault is torn in
//! the middle.
//!
//! Owners, modes, times, links and hard links survive; extended attributes and devices do not.

mod model;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_store::disk::{Disk, DiskFile, FileOpenMode, FilesystemSync, RealDisk};

use self::model::{DiskModel, OpenFilesByInode, SeededChoice, UnsyncedWrite};

/// The fault and its step. Steps count from 0, since [`FaultyDisk::arm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFault {
    /// Nothing.
    None,
    /// This step fails with an error of this kind; those after it work.
    FailsAt(u64, io::ErrorKind),
    /// The power is cut in this step: it and all that come after fail.
    LosesPowerAt(u64),
}

/// Result of a power cut for data that was not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnsyncedData {
    /// Nothing of it.
    Nothing,
    /// All of it: as if only the process was killed.
    Everything,
    /// Some of it, chosen by this seed: of each directory the old or the new entries, of each file some of the writes.
    Some(u64),
}

/// The disk. Clones share it; the last one deletes its directory.
#[derive(Clone)]
pub struct FaultyDisk(Arc<SharedDisk>);

struct SharedDisk {
    dir: tempfile::TempDir,
    boot: u64,
    state: Mutex<DiskFaultState>,
}

struct DiskFaultState {
    fault: DiskFault,
    steps: u64,
    off: bool,
    /// Files as last synced.
    durable: DiskModel,
    /// Writes to files since they were synced, by inode.
    unsynced: HashMap<u64, Vec<UnsyncedWrite>>,
    /// Open files by inode, so that no number is used again.
    pins: OpenFilesByInode,
}

impl FaultyDisk {
    /// An empty disk without a fault.
    #[allow(clippy::new_without_default, reason = "it makes a directory on the real disk")]
    pub fn new() -> FaultyDisk {
        FaultyDisk::in_dir(dir(), 1)
    }

    fn in_dir(dir: tempfile::TempDir, boot: u64) -> FaultyDisk {
        let mut pins = OpenFilesByInode::new();
        let durable = DiskModel::of(dir.path(), &mut pins).expect("the directory can be read");
        let state = DiskFaultState {
            fault: DiskFault::None,
            steps: 0,
            off: false,
            durable,
            unsynced: HashMap::new(),
            pins,
        };
        FaultyDisk(Arc::new(SharedDisk { dir, boot, state: Mutex::new(state) }))
    }

    /// Its directory.
    pub fn root(&self) -> &Path {
        self.0.dir.path()
    }

    /// Lets this go wrong, counting steps from now.
    pub fn arm(&self, fault: DiskFault) {
        let mut state = self.0.state();
        (state.fault, state.steps) = (fault, 0);
    }

    /// Steps since the last [`arm`](FaultyDisk::arm).
    pub fn steps(&self) -> u64 {
        self.0.state().steps
    }

    /// Whether the fault was met.
    pub fn has_failed(&self) -> bool {
        let state = self.0.state();
        match state.fault {
            DiskFault::None => false,
            DiskFault::FailsAt(at, _) | DiskFault::LosesPowerAt(at) => state.steps > at,
        }
    }

    /// The disk at the next boot of the machine, without a fault until it is armed.
    ///
    /// # Panics
    /// When the real disk fails.
    #[must_use]
    pub fn restarted(&self, survives: UnsyncedData) -> FaultyDisk {
        let state = self.0.state();
        let dir = dir();
        let written =
            || DiskModel::of(self.root(), &mut OpenFilesByInode::new()).expect("the directory can be read");
        let (left, boot) = match survives {
            UnsyncedData::Nothing => (state.durable.clone(), self.0.boot + 1),
            UnsyncedData::Everything => (written(), self.0.boot),
            UnsyncedData::Some(seed) => {
                (state.durable.mixed(&written(), &state.unsynced, SeededChoice::new(seed)), self.0.boot + 1)
            }
        };
        left.write_to(dir.path()).expect("what survived can be written");
        FaultyDisk::in_dir(dir, boot)
    }
}

impl fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyDisk").field("root", &self.root()).finish_non_exhaustive()
    }
}

impl SharedDisk {
    fn state(&self) -> MutexGuard<'_, DiskFaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a step; an error if it is the faulty one.
    fn step(&self) -> io::Result<()> {
        let mut state = self.state();
        let number = state.steps;
        state.steps += 1;
        if state.off {
            return Err(power_is_off());
        }
        match state.fault {
            DiskFault::FailsAt(at, kind) if at == number => {
                Err(io::Error::new(kind, format!("step {number} was to fail")))
            }
            DiskFault::LosesPowerAt(at) if at == number => {
                state.off = true;
                Err(power_is_off())
            }
            _ => Ok(()),
        }
    }

    fn note(&self, inode: u64, change: UnsyncedWrite) {
        self.state().unsynced.entry(inode).or_default().push(change);
    }
}

/// A temporary directory, in memory where there is such a filesystem: tests make thousands of small files.
fn dir() -> tempfile::TempDir {
    let made = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    made.expect("a temporary directory")
}

fn power_is_off() -> io::Error {
    io::Error::other("the power is off")
}

impl Disk for FaultyDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.0.step()?;
        RealDisk.create_dir(path)
    }

    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let makes = match how {
            FileOpenMode::CreateNew => true,
            FileOpenMode::Create => !path.exists(),
            FileOpenMode::Existing => false,
        };
        if makes {
            self.0.step()?;
        }
        RealDisk.open(path, how)?;
        let file = fs_err::OpenOptions::new().read(true).write(true).open(path)?.into_file();
        let inode = file.metadata()?.ino();
        let mut state = self.0.state();
        state.pins.insert(inode, file.try_clone()?);
        if makes {
            state.unsynced.insert(inode, Vec::new());
        }
        Ok(Arc::new(FaultyFile { disk: self.0.clone(), file, inode, path: path.to_owned() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.step()?;
        RealDisk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        if path.symlink_metadata().is_err() {
            return Ok(());
        }
        self.0.step()?;
        RealDisk.remove_file(path)
    }

    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        self.0.step()?;
        RealDisk.remove_tree(path, go_on)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.step()?;
        let mut guard = self.0.state();
        let state = &mut *guard;
        state.durable.sync_dir(path, &mut state.pins)
    }

    fn open_sync(&self, _: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        Ok(Box::new(self.clone()))
    }

    /// A step that is to fail is not taken. The power is cut when everything is written and nothing synced.
    fn database_step(&self, file: &Path, step: &mut dyn FnMut()) -> io::Result<()> {
        let was_off = self.0.state().off;
        let done = self.0.step();
        let cut = self.0.state().off && !was_off;
        if done.is_err() && !cut {
            return done;
        }
        let content = || fs_err::read(file).unwrap_or_default();
        let before = content();
        step();
        let changes = model::changes(&before, &content());
        let Ok(written) = fs_err::File::open(file) else { return done };
        let written = written.into_file();
        let metadata = written.metadata()?;
        let inode = metadata.ino();
        let mut guard = self.0.state();
        let state = &mut *guard;
        state.pins.entry(inode).or_insert(written);
        if cut {
            state.unsynced.entry(inode).or_default().extend(changes);
            return done;
        }
        state.durable.sync_file(inode, model::FileAttributes::of(&metadata), &changes);
        // SQLite syncs the directory with the first sync of a file that it made.
        match file.parent() {
            Some(dir) if !state.durable.has_entry(dir, inode)? => {
                state.durable.sync_dir(dir, &mut state.pins)
            }
            _ => Ok(()),
        }
    }

    fn boot_id(&self) -> String {
        format!("boot-{}", self.0.boot)
    }
}

impl FilesystemSync for FaultyDisk {
    fn sync(&self) -> io::Result<()> {
        self.0.step()?;
        let mut guard = self.0.state();
        let state = &mut *guard;
        state.durable = DiskModel::of(self.0.dir.path(), &mut state.pins)?;
        for changes in state.unsynced.values_mut() {
            changes.clear();
        }
        Ok(())
    }
}

struct FaultyFile {
    disk: Arc<SharedDisk>,
    file: File,
    inode: u64,
    path: PathBuf,
}

impl fmt::Debug for FaultyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FaultyFile").field(&self.path).finish()
    }
}

impl FaultyFile {
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)?;
        self.disk.note(self.inode, UnsyncedWrite::Write { offset, bytes: bytes.to_vec() });
        Ok(())
    }
}

impl DiskFile for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let was_off = self.disk.state().off;
        if let Err(error) = self.disk.step() {
            if !was_off {
                self.write(&bytes[..bytes.len() / 2], offset)?; // torn
            }
            return Err(error);
        }
        self.write(bytes, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.step()?;
        self.file.set_len(len)?;
        self.disk.note(self.inode, UnsyncedWrite::SetLen(len));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.step()?;
        let mut guard = self.disk.state();
        let state = &mut *guard;
        let changes = state.unsynced.get_mut(&self.inode).map(std::mem::take).unwrap_or_default();
        let attributes = model::FileAttributes::of(&self.file.metadata()?);
        state.durable.sync_file(self.inode, attributes, &changes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(disk: &FaultyDisk, path: &Path, bytes: &[u8]) -> io::Result<Arc<dyn DiskFile>> {
        let file = disk.open(path, FileOpenMode::Create)?;
        file.write_all_at(bytes, 0)?;
        Ok(file)
    }

    fn read(disk: &FaultyDisk, name: &str) -> Option<String> {
        fs_err::read_to_string(disk.root().join(name)).ok()
    }

    #[test]
    fn unsynced_data_is_lost() {
        let disk = FaultyDisk::new();
        let (synced, lost) = (disk.root().join("synced"), disk.root().join("lost"));
        write(&disk, &synced, b"old").unwrap();
        disk.sync().unwrap();
        write(&disk, &synced, b"new").unwrap();
        write(&disk, &lost, b"x").unwrap();
        let after = disk.restarted(UnsyncedData::Nothing);
        assert_eq!((read(&after, "synced").as_deref(), read(&after, "lost")), (Some("old"), None));
        let killed = disk.restarted(UnsyncedData::Everything);
        assert_eq!(
            (read(&killed, "synced").as_deref(), read(&killed, "lost").as_deref()),
            (Some("new"), Some("x"))
        );
        assert_eq!(killed.boot_id(), disk.boot_id());
        assert_ne!(after.boot_id(), disk.boot_id());
    }

    #[test]
    fn a_synced_file_needs_its_name_synced_too() {
        let disk = FaultyDisk::new();
        write(&disk, &disk.root().join("a"), b"content").unwrap().sync_data().unwrap();
        assert_eq!(read(&disk.restarted(UnsyncedData::Nothing), "a"), None);
        disk.sync_dir(disk.root()).unwrap();
        assert_eq!(read(&disk.restarted(UnsyncedData::Nothing), "a").as_deref(), Some("content"));
    }

    #[test]
    fn a_synced_name_needs_its_content_synced_too() {
        let disk = FaultyDisk::new();
        write(&disk, &disk.root().join("a"), b"content").unwrap();
        disk.sync_dir(disk.root()).unwrap();
        assert_eq!(read(&disk.restarted(UnsyncedData::Nothing), "a").as_deref(), Some(""));
    }

    #[test]
    fn a_removal_or_rename_that_was_not_synced_did_not_happen() {
        let disk = FaultyDisk::new();
        let (a, b) = (disk.root().join("a"), disk.root().join("b"));
        write(&disk, &a, b"a").unwrap();
        write(&disk, &b, b"b").unwrap();
        disk.sync().unwrap();
        disk.remove_file(&b).unwrap();
        // It takes the number of the file that was removed, if anything can.
        write(&disk, &disk.root().join("c"), b"c").unwrap().sync_data().unwrap();
        disk.rename(&a, &b).unwrap();
        let after = disk.restarted(UnsyncedData::Nothing);
        assert_eq!((read(&after, "a").as_deref(), read(&after, "b").as_deref()), (Some("a"), Some("b")));
        disk.sync_dir(disk.root()).unwrap();
        let after = disk.restarted(UnsyncedData::Nothing);
        assert_eq!((read(&after, "a"), read(&after, "b").as_deref()), (None, Some("a")));
    }

    #[test]
    fn power_is_lost_at_the_requested_step_and_remains_off() {
        let disk = FaultyDisk::new();
        disk.arm(DiskFault::LosesPowerAt(1));
        let file = disk.open(&disk.root().join("a"), FileOpenMode::CreateNew).expect("step 0 works");
        file.write_all_at(b"content", 0).expect_err("step 1 does not");
        assert!(disk.has_failed());
        disk.create_dir(&disk.root().join("b")).expect_err("nor does anything after it");
        assert_eq!(read(&disk.restarted(UnsyncedData::Everything), "a").as_deref(), Some("con"), "torn");
    }

    #[test]
    fn a_failure_is_one_step_and_no_more() {
        let disk = FaultyDisk::new();
        disk.arm(DiskFault::FailsAt(0, io::ErrorKind::StorageFull));
        let error = disk.create_dir(&disk.root().join("a")).expect_err("step 0 fails");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        disk.create_dir(&disk.root().join("a")).expect("step 1 works");
    }

    #[test]
    fn some_of_what_was_not_synced_may_survive() {
        let disk = FaultyDisk::new();
        let file = write(&disk, &disk.root().join("a"), b"--------").unwrap();
        disk.sync().unwrap();
        for at in 0..8 {
            file.write_all_at(b"x", at).unwrap();
        }
        let seen: std::collections::BTreeSet<String> =
            (0..50).filter_map(|seed| read(&disk.restarted(UnsyncedData::Some(seed)), "a")).collect();
        assert!(seen.len() > 10, "{seen:?}");
        assert_eq!(
            read(&disk.restarted(UnsyncedData::Some(7)), "a"),
            read(&disk.restarted(UnsyncedData::Some(7)), "a")
        );
    }
}
