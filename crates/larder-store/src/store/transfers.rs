//! Records which repository has sent which layer: the proof without which no pull uses bytes of the store.
//!
//! Digests, sizes and diff IDs are no secrets, and a registry can invent every answer but the bytes themselves. So a
//! layer is reused only for a source whose bytes were received here and had the digests of the layer.

use larder::reference::{Digest, Reference};

use super::blob_source::{BlobSource, merge_transfers};
use super::db::{DbRead as _, DbResult, DbTransaction, TRANSFERS, decode};
use super::error::StoreError;
use super::handle::{OpenStore, Store};
use super::layers::LayerHandle;
use super::records::{ImageRecord, LayerKey};

/// Records transfers of a layer.
pub(crate) fn put_transfers(writer: &DbTransaction, key: &LayerKey, new: &[BlobSource]) -> DbResult<()> {
    if new.is_empty() {
        return Ok(());
    }
    let mut known: Vec<BlobSource> = writer.get(TRANSFERS, key.as_str())?.unwrap_or_default();
    merge_transfers(&mut known, new);
    writer.put(TRANSFERS, key.as_str(), &known)
}

impl Store {
    /// Returns true if the repository of this name has sent each layer of the image.
    pub fn has_sent_layers(&self, name: &Reference, image: &ImageRecord) -> Result<bool, StoreError> {
        self.0.db.read("look up the transfers of an image", |reader| {
            for key in image.keys() {
                let sent: Vec<BlobSource> = reader.get(TRANSFERS, key.as_str())?.unwrap_or_default();
                if !sent.iter().any(|transfer| transfer.repository == name.name()) {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }
}

impl OpenStore {
    /// The layers that archives have had, by the digest of their blob.
    pub(super) fn archived_layers(&self) -> Result<Vec<(Digest, LayerKey)>, StoreError> {
        self.db.read("list the layers of archives", |reader| {
            let mut archived = Vec::new();
            reader.visit(TRANSFERS, "", &mut |key, value| {
                let sent: Vec<BlobSource> = decode(key, value)?;
                let key = LayerKey::parse(key);
                let of_archives = sent.into_iter().filter(BlobSource::is_archive);
                archived.extend(of_archives.filter_map(|blob| Some((blob.digest, key.clone()?))));
                Ok(true)
            })?;
            Ok(archived)
        })
    }

    /// Records that a source has sent the layer. Durable at once, or with the layer if that waits for a commit.
    pub(super) fn add_transfer(&self, layer: &LayerHandle, source: &BlobSource) -> Result<(), StoreError> {
        // A commit either records it, or has ended.
        let _guard = self.lock_content();
        if layer.has_transfer(source) {
            return Ok(());
        }
        let source = std::slice::from_ref(source);
        layer.note_transfers(source);
        if layer.is_uncommitted() {
            return Ok(());
        }
        self.db
            .write("record the transfer of a layer", |writer| Ok(put_transfers(writer, layer.key(), source)?))
    }
}
