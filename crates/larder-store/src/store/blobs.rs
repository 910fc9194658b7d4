//! Manifests and configs: small files named after their digest.

use std::io::{self, Read as _};
use std::path::Path;

use larder::reference::Digest;
use sha2::{Digest as _, Sha256, Sha384, Sha512};

use super::db::{DbRead as _, USES};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::OpenStore;
use super::trash::discard;
use crate::disk::{ensure_dir, replace};
use larder_registry::manifest::MAX_BYTES;

/// A digest being computed.
pub(crate) enum BlobHasher {
    Sha256(Sha256),
    Sha384(Sha384),
    Sha512(Sha512),
}

impl BlobHasher {
    pub(crate) fn sha256() -> BlobHasher {
        BlobHasher::Sha256(Sha256::new())
    }

    /// For digests of the same algorithm as this one.
    pub(crate) fn like(digest: &Digest) -> BlobHasher {
        match digest.algorithm() {
            "sha384" => BlobHasher::Sha384(Sha384::new()),
            "sha512" => BlobHasher::Sha512(Sha512::new()),
            _ => BlobHasher::sha256(),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            BlobHasher::Sha256(hasher) => hasher.update(bytes),
            BlobHasher::Sha384(hasher) => hasher.update(bytes),
            BlobHasher::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// The digest of all bytes.
    pub(crate) fn finish(self) -> Digest {
        match self {
            BlobHasher::Sha256(hasher) => digest("sha256", &hasher.finalize()),
            BlobHasher::Sha384(hasher) => digest("sha384", &hasher.finalize()),
            BlobHasher::Sha512(hasher) => digest("sha512", &hasher.finalize()),
        }
    }
}

fn digest(algorithm: &str, hash: &[u8]) -> Digest {
    use std::fmt::Write as _;
    let text = hash.iter().fold(format!("{algorithm}:"), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a string cannot fail
        text
    });
    Digest::parse(&text).expect("a hash of this algorithm has the length that its digests have")
}

/// Checks that these bytes have this digest.
pub(crate) fn check_digest(bytes: &[u8], wanted: &Digest) -> Result<(), StoreError> {
    let mut hasher = BlobHasher::like(wanted);
    hasher.update(bytes);
    let found = hasher.finish();
    if found == *wanted { Ok(()) } else { Err(StoreError::WrongDigest { wanted: wanted.clone(), found }) }
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
        // One that no image has may be what a commit left whose sync failed: the page cache has bytes that the disk lacks.
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
