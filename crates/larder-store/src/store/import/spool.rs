//! Spools entries of a stream in the store's `staging` directory, as far as free disk space minus the reserve allows.

use std::io::{Read, Write as _};
use std::path::PathBuf;

use larder::threads::in_place;

use super::archive::TarScanner;
use super::error::ImportError;
use crate::disk::DiskSpace;
use crate::store::Store;
use crate::store::admission::{RemovableSpace, SpaceEstimate, admit};
use crate::store::error::StoreErrorContext as _;

/// After so many bytes it is looked again how much is free.
const LOOK_EVERY: u64 = 4 << 20;
/// Bytes that a file counts beside its content.
const FILE: u64 = 4096;

/// A directory that is deleted when this is dropped.
#[derive(Debug)]
pub(super) struct Spool {
    store: Store,
    dir: PathBuf,
    reserve: DiskSpace,
    files: u64,
    /// Bytes kept since the last measurement.
    since_look: u64,
}

impl Spool {
    pub(super) fn new(store: &Store, reserve: DiskSpace) -> Result<Spool, ImportError> {
        let dir = store.0.layout.new_staging();
        store.0.disk.create_dir(&dir).context("create a directory for the archive")?;
        Ok(Spool { store: store.clone(), dir, reserve, files: 0, since_look: 0 })
    }

    /// Keeps the content of the entry at which `walk` is, of `size` bytes; the file that has it.
    pub(super) fn keep<R: Read>(
        &mut self,
        walk: &mut TarScanner<R>,
        size: u64,
    ) -> Result<PathBuf, ImportError> {
        const DOING: &str = "store a part of the archive";
        self.files += 1;
        self.check_space(FILE, DiskSpace { bytes: size, inodes: 1 })?;
        let path = self.dir.join(self.files.to_string());
        let mut file = fs_err::File::create_new(&path).context(DOING)?;
        let mut left = size;
        walk.read_content(|piece| {
            let bytes = piece.len() as u64;
            self.check_space(bytes, DiskSpace { bytes: left, inodes: 0 })?;
            left = left.saturating_sub(bytes);
            Ok(file.write_all(piece).context(DOING)?)
        })?;
        Ok(path)
    }

    /// Counts what is about to be kept, and looks now and then whether what the entry still needs fits.
    fn check_space(&mut self, bytes: u64, still: DiskSpace) -> Result<(), ImportError> {
        self.since_look += bytes;
        if self.since_look < LOOK_EVERY {
            return Ok(());
        }
        self.since_look = 0;
        let need = SpaceEstimate { likely: still, least: still };
        Ok(admit(need, self.store.unpromised()?, self.reserve, RemovableSpace::NONE)?)
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        // If this fails it is cleaned when the store is opened.
        let _ = in_place(|| self.store.0.discard(&self.dir));
        self.store.0.trash.kick();
    }
}
