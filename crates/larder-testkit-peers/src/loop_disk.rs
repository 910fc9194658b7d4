//! A small filesystem in a file, mounted as long as its value lives. As root only.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use larder::gc::DiskSpace;
use rustix::fs::{statvfs, syncfs};
use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

use super::packages::find_program;
use super::process::run;
use super::{PeerError, PeerResult};

/// Kinds of filesystems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoopFilesystem {
    /// Blocks of 4 KiB and no reserve for root.
    Ext4,
    /// As mkfs makes it.
    Xfs,
    /// As mkfs makes it.
    Btrfs,
}

impl LoopFilesystem {
    /// All of them.
    pub const ALL: [LoopFilesystem; 3] = [LoopFilesystem::Ext4, LoopFilesystem::Xfs, LoopFilesystem::Btrfs];

    /// The one that the environment variable `LARDER_TEST_FILESYSTEM` names, or ext4.
    ///
    /// # Panics
    /// When it names none of them.
    pub fn of_environment() -> LoopFilesystem {
        let Some(name) = std::env::var_os("LARDER_TEST_FILESYSTEM") else { return LoopFilesystem::Ext4 };
        let known = LoopFilesystem::ALL.into_iter().find(|kind| name == kind.name());
        known.unwrap_or_else(|| panic!("LARDER_TEST_FILESYSTEM={}: not ext4, xfs or btrfs", name.display()))
    }

    /// As `mount -t` takes it.
    pub fn name(self) -> &'static str {
        match self {
            LoopFilesystem::Ext4 => "ext4",
            LoopFilesystem::Xfs => "xfs",
            LoopFilesystem::Btrfs => "btrfs",
        }
    }

    /// Least size in MiB with which mkfs makes one.
    fn least_mib(self) -> u64 {
        match self {
            LoopFilesystem::Ext4 => 1,
            LoopFilesystem::Xfs => 300,
            LoopFilesystem::Btrfs => 128,
        }
    }

    /// Whether this process can make and mount one. Prints a loud message if it cannot.
    ///
    /// # Panics
    /// When it cannot and the environment variable `CI` is set.
    pub fn is_available(self) -> bool {
        let mkfs = format!("mkfs.{self}");
        if rustix::process::geteuid().is_root() && find_program(&mkfs).is_some() {
            return true;
        }
        assert!(std::env::var_os("CI").is_none(), "CI must not skip {self}: run as root, with {mkfs}");
        eprintln!("==== SKIPPED, NOT TESTED: {self} on a loop device needs root and {mkfs} ====");
        false
    }
}

impl fmt::Display for LoopFilesystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The filesystem. Dropping it unmounts and removes it.
#[derive(Debug)]
pub struct LoopDisk {
    dir: TempDir,
    image: PathBuf,
    mounts: AtomicU64,
}

impl LoopDisk {
    /// Makes and mounts one of `mib` MiB, or of the least size of its kind. `options` go to mkfs. The file with its
    /// blocks is in the temporary directory.
    pub fn new(kind: LoopFilesystem, mib: u64, options: &[&str]) -> PeerResult<LoopDisk> {
        let dir = tempfile::tempdir()?;
        let image = dir.path().join("image");
        LoopDisk::with_image(dir, image, kind, mib, options)
    }

    /// Like [`new`](LoopDisk::new), with its blocks in the new file `image`.
    pub fn on_image(image: &Path, kind: LoopFilesystem, mib: u64, options: &[&str]) -> PeerResult<LoopDisk> {
        LoopDisk::with_image(tempfile::tempdir()?, image.to_owned(), kind, mib, options)
    }

    fn with_image(
        dir: TempDir,
        image: PathBuf,
        kind: LoopFilesystem,
        mib: u64,
        options: &[&str],
    ) -> PeerResult<LoopDisk> {
        fs_err::File::create(&image)?.set_len(mib.max(kind.least_mib()) << 20)?;
        let program = format!("mkfs.{kind}");
        let mut mkfs = Command::new(find_program(&program).unwrap_or_else(|| program.into()));
        match kind {
            // Blocks as on nodes: mkfs would make smaller ones on so small a disk.
            LoopFilesystem::Ext4 => mkfs.args(["-q", "-F", "-b", "4096", "-m", "0"]),
            LoopFilesystem::Xfs | LoopFilesystem::Btrfs => mkfs.args(["-q", "-f"]),
        };
        run(mkfs.args(options).arg(&image))?;
        let disk = LoopDisk { dir, image, mounts: AtomicU64::new(0) };
        fs_err::create_dir(disk.path())?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// A temporary directory outside of it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Bytes and inodes that are free, after a sync; and all bytes.
    pub fn free(&self) -> PeerResult<(DiskSpace, u64)> {
        self.sync()?;
        let stat = statvfs(self.path()).map_err(|error| PeerError::new("measure the filesystem", error))?;
        let free = DiskSpace { bytes: stat.f_bavail * stat.f_frsize, inodes: stat.f_favail };
        Ok((free, stat.f_blocks * stat.f_frsize))
    }

    /// Syncs it, as any process may. An error of a write that failed before is received here.
    pub fn sync(&self) -> PeerResult<()> {
        let opened = fs_err::File::open(self.path())?;
        syncfs(opened).map_err(|error| PeerError::new("sync the filesystem", error))
    }

    /// Unmounts it and mounts it again: nothing of it is in the page cache then.
    pub fn remount(&self) -> PeerResult<()> {
        unmount(self.path(), UnmountFlags::empty()).map_err(|error| PeerError::new("unmount", error))?;
        self.mount()
    }

    /// Changes an ext4 with options of tune2fs, and mounts it again.
    pub fn tune(&self, options: &[&str]) -> PeerResult<()> {
        unmount(self.path(), UnmountFlags::empty()).map_err(|error| PeerError::new("unmount", error))?;
        let program = find_program("tune2fs").unwrap_or_else(|| "tune2fs".into());
        run(Command::new(program).args(options).arg(&self.image))?;
        self.mount()
    }

    /// Names the time since it was mounted, as if the machine had started then.
    pub fn boot_id(&self) -> String {
        format!("boot-{}", self.mounts.load(Ordering::Relaxed))
    }

    fn mount(&self) -> PeerResult<()> {
        self.mounts.fetch_add(1, Ordering::Relaxed);
        run(Command::new("mount").args(["-o", "loop"]).args([&self.image, &self.path()])).map(drop)
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // What is still open in it keeps it until it is closed.
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}
