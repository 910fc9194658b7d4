//! The real filesystem.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err::os::unix::fs::OpenOptionsExt as _;

use rustix::fs::FallocateFlags;

use super::{Disk, DiskFile, FileOpenMode, FilesystemSync, remove};

/// The filesystem of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        std::fs::DirBuilder::new().mode(0o700).create(path).map_err(|error| explain("create", path, &error))
    }

    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let mut options = fs_err::OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        match how {
            FileOpenMode::CreateNew => options.create_new(true),
            FileOpenMode::Create => options.create(true).truncate(false),
            FileOpenMode::Existing => &mut options,
        };
        let (file, path) = options.open(path)?.into_parts();
        Ok(Arc::new(RealFile { file, path }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs_err::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        match fs_err::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        remove::tree(path, go_on).map_err(|error| explain("remove", path, &error))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        fs_err::File::open(path)?.sync_all()
    }

    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        let (file, path) = fs_err::File::open(path)?.into_parts();
        Ok(Box::new(RealSync(RealFile { file, path })))
    }

    fn boot_id(&self) -> String {
        fs_err::read_to_string("/proc/sys/kernel/random/boot_id").map_or_else(
            // Without it nothing unsynced is trusted.
            |_| String::new(),
            |id| id.trim().to_owned(),
        )
    }
}

/// The error with its path, of the same kind.
fn explain(doing: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("failed to {doing} `{}`: {error}", path.display()))
}

#[derive(Debug)]
struct RealFile {
    file: std::fs::File,
    path: PathBuf,
}

/// The kernel reports a failed write once to each descriptor that was open when it failed.
#[derive(Debug)]
struct RealSync(RealFile);

impl FilesystemSync for RealSync {
    fn sync(&self) -> io::Result<()> {
        let RealFile { file, path } = &self.0;
        rustix::fs::syncfs(file).map_err(|error| explain("sync the filesystem of", path, &error.into()))
    }
}

impl DiskFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        let metadata = self.file.metadata().map_err(|error| explain("inspect", &self.path, &error))?;
        Ok(metadata.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset).map_err(|error| explain("read", &self.path, &error))
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|error| explain("write to", &self.path, &error))
    }

    fn reserve(&self, bytes: u64) {
        let _ = rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes);
    }

    fn drop_cache(&self) -> io::Result<()> {
        let dropped = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        dropped.map_err(|error| explain("drop the cache of", &self.path, &error.into()))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len).map_err(|error| explain("resize", &self.path, &error))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data().map_err(|error| explain("sync", &self.path, &error))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all().map_err(|error| explain("sync", &self.path, &error))
    }
}
