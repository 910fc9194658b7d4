//! Manifests and configs: small files named after their digest.

use std::io::{self, Read as _};
use std::path::Path;

use larder::reference::Digest;

use super::db::{DbRead as _, USES};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::OpenStore;
use super::trash::discard;
use crate::disk::{ensure_dir, replace};
use larder_registry::manifest::MAX_BYTES;

/// Checks that these bytes have this digest.
pub(crate) fn check_digest(bytes: &[u8], wanted: &Digest) -> Result<(), StoreError> {
    wanted.check(bytes).map_err(|found| StoreError::WrongDigest { wanted: wanted.clone(), found })
}

/// A blob's bytes; `None` when it is not there. Blobs larger than any manifest may be are damaged.
pub(crate) fn read_blob(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match fs_err::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

impl OpenStore {
    /// Puts a blob in its place; durable with the next sync. The caller holds it, so that no removal takes it away.
    pub(super) fn put_blob(&self, digest: &Digest, bytes: &[u8]) -> Result<(), StoreError> {
        check_digest(bytes, digest)?;
        let path = self.layout.blob(digest);
        let doing = "store a manifest or config";
        // One that no image has may be what a commit left whose sync failed: the page cache has bytes that the disk
        // lacks.
        let committed = self.db.read(doing, |reader| reader.any(USES, &format!("blob/{digest}/")))?;
        if committed && read_blob(&path).context(doing)?.is_some_and(|present| present == bytes) {
            return Ok(());
        }
        if let Some(dir) = path.parent() {
            ensure_dir(&*self.disk, dir).context(doing)?;
        }
        replace(&*self.disk, &self.layout.new_staging(), &path, bytes).context(doing)
    }

    /// Moves what lies at `path` to the trash, if anything does.
    pub(crate) fn discard(&self, path: &Path) -> io::Result<()> {
        discard(&*self.disk, path, &self.layout.new_trash())
    }
}
