//! A small ext4 whose disk can be full while the filesystem has room: what is written then is lost, as on a disk that
//! breaks. Its blocks are in a tmpfs that a filler takes up. As root only.

use std::io::Write as _;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

use crate::process::run;
use crate::{LoopDisk, LoopFilesystem, PeerError, PeerResult};

/// Size of the filesystem.
const MIB: u64 = 80;

/// The disk. Dropping it unmounts and removes it.
#[derive(Debug)]
pub struct OverbookedDisk {
    disk: LoopDisk,
    tmpfs: TmpfsDir,
}

/// A tmpfs, mounted as long as this lives.
#[derive(Debug)]
struct TmpfsDir(TempDir);

impl Drop for TmpfsDir {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

impl Deref for OverbookedDisk {
    type Target = LoopDisk;

    fn deref(&self) -> &LoopDisk {
        &self.disk
    }
}

impl OverbookedDisk {
    /// Makes and mounts one; `None`, with a loud message, where that is not possible.
    ///
    /// # Panics
    /// When it is not possible and the environment variable `CI` is set.
    pub fn new() -> PeerResult<Option<OverbookedDisk>> {
        if !LoopFilesystem::Ext4.is_available() {
            return Ok(None);
        }
        let tmpfs = TmpfsDir(tempfile::tempdir()?);
        let mounted = mount("tmpfs", tmpfs.0.path(), "tmpfs", MountFlags::empty(), Some(c"size=96m"));
        mounted.map_err(|error| PeerError::new("mount a tmpfs", error))?;
        let image = tmpfs.0.path().join("image");
        let disk = LoopDisk::on_image(&image, LoopFilesystem::Ext4, MIB, &["-N", "2000"])?;
        let opened = fs_err::OpenOptions::new().write(true).open(&image)?;
        // The filesystem's own tables must have a place whatever the data has.
        let reserved = fallocate(&opened, FallocateFlags::KEEP_SIZE, 0, MIB << 20);
        reserved.map_err(|error| PeerError::new("reserve the blocks of a disk", error))?;
        Ok(Some(OverbookedDisk { disk, tmpfs }))
    }

    fn filler(&self) -> PathBuf {
        self.tmpfs.0.path().join("filler")
    }

    /// Writes that are not on the disk yet get no place on it.
    pub fn fill(&self) -> PeerResult<()> {
        run(Command::new("fstrim").arg(self.disk.path()))?;
        let mut filler = fs_err::File::create(self.filler())?;
        let page = [1; 4096];
        while filler.write_all(&page).is_ok() {}
        Ok(())
    }

    /// Ends that.
    pub fn make_room(&self) -> PeerResult<()> {
        Ok(fs_err::remove_file(self.filler())?)
    }
}
