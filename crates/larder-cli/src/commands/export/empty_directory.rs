//! The directory that an export fills.

use std::io;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A directory for files. Unless it is kept, it is emptied again, and removed if it was created.
pub(crate) struct EmptyDirectory {
    path: PathBuf,
    created: bool,
    kept: bool,
}

impl EmptyDirectory {
    /// Opens or creates it.
    pub(crate) fn open(dir: &Path) -> Result<EmptyDirectory, Failure> {
        let shown = dir.display();
        let failed = |error: io::Error| Failure::failed(format!("{shown}: {error}"));
        let created = match std::fs::create_dir(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(failed(error)),
        };
        let path = std::fs::canonicalize(dir).map_err(failed)?;
        if !path.is_dir() {
            return Err(Failure::bad_input(format!("{shown}: is not a directory")));
        }
        if fs_err::read_dir(&path).map_err(|error| Failure::failed(error.to_string()))?.next().is_some() {
            return Err(Failure::bad_input(format!("{shown}: directory is not empty"))
                .hint("name an empty or a new directory; files are never merged"));
        }
        Ok(EmptyDirectory { path, created, kept: false })
    }

    /// Where it is, without links in its path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its files are complete.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }

    fn clear(&self) -> io::Result<()> {
        if self.created {
            return std::fs::remove_dir_all(&self.path);
        }
        for entry in fs_err::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(entry.path())?;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

impl Drop for EmptyDirectory {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.clear()
        {
            tracing::warn!("cannot remove an incomplete export: {error}");
        }
    }
}
