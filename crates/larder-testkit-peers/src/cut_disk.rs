//! The disk of a store whose power is cut: the filesystem is shut down without flushing its journal, as
//! `EXT4_IOC_SHUTDOWN` and XFS do it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_store::disk::{Disk, DiskFile, FileOpenMode, FilesystemSync, RealDisk};

use super::loop_disk::LoopDisk;
use super::packages::find_program;

/// The real disk until its power is cut, before a step or by [`cut`](CutDisk::cut).
#[derive(Debug)]
pub struct CutDisk {
    mountpoint: PathBuf,
    boot: String,
    /// Steps until the cut.
    left: AtomicUsize,
}

impl CutDisk {
    /// The disk as it is mounted now.
    pub fn of(disk: &LoopDisk) -> Arc<CutDisk> {
        let (mountpoint, left) = (disk.path(), AtomicUsize::new(usize::MAX));
        Arc::new(CutDisk { mountpoint, boot: disk.boot_id(), left })
    }

    /// Cuts the power before this step, from now on.
    pub fn cut_before(&self, step: usize) {
        self.left.store(step, Ordering::Release);
    }

    /// Cuts the power now. What was written and not synced is lost, as far as it is not on the disk already.
    ///
    /// # Panics
    /// If `xfs_io` cannot do it.
    pub fn cut(&self) {
        let program = find_program("xfs_io").expect("it comes with mkfs.xfs");
        let cut = Command::new(program).args(["-x", "-c", "shutdown"]).arg(&self.mountpoint).status();
        assert!(cut.is_ok_and(|status| status.success()), "the power cannot be cut");
    }

    /// Whether the power was cut before a step.
    pub fn is_cut(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    fn step(&self) {
        if self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)) == Ok(1) {
            self.cut();
        }
    }
}

impl Disk for CutDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step();
        RealDisk.create_dir(path)
    }

    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        self.step();
        RealDisk.open(path, how)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step();
        RealDisk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step();
        RealDisk.remove_file(path)
    }

    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        self.step();
        RealDisk.remove_tree(path, go_on)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step();
        RealDisk.sync_dir(path)
    }

    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        RealDisk.open_sync(path)
    }

    fn database_step(&self, file: &Path, step: &mut dyn FnMut()) -> io::Result<()> {
        self.step();
        RealDisk.database_step(file, step)
    }

    fn boot_id(&self) -> String {
        self.boot.clone()
    }
}
