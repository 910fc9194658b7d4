//! Indexes of layers: where a part of a layer's blob can be decompressed from.
//!
//! With its index, a damaged layer is repaired with a few ranges of its blob. An index is a file of its own, so that it
//! outlives damage of the layer. Nothing is believed because an index says so: what it leads to is compared with the
//! digests of the layer's record. One that is damaged, or of another layer, is as good as none.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder::reference::Digest;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::StoreError;
use super::error::StoreErrorContext as _;
use super::handle::{OpenStore, Store};
use super::layout::names_in;
use super::records::{LayerKey, LayerRecord};
use super::usage::taken;
use crate::disk::{DiskSpace, ensure_dir, measure, replace};
use crate::erofs::ErofsFile;
use crate::erofs::digest::DamagedPiece;
use crate::lazy::missing_pieces::{MissingPiecesError, PieceBatch, damaged_pieces, missing_pieces};
use crate::lazy::skeleton::PlacedChunk;
use crate::lazy::toc::BlobPart;
use crate::unpack::{Checkpoint, DetectedCompression, parts_between};

const MAGIC: &[u8; 16] = b"larder-index\0\0\0\x01";
const SHA256: usize = 32;
/// The largest index that is read: windows of a layer take half of it.
const MAX_BYTES: u64 = 16 << 20;

/// Index of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerIndex {
    pub(crate) head: LayerIndexHead,
    /// In the order of their offsets.
    pub(crate) checkpoints: Vec<Checkpoint>,
}

/// The file of an index, as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum IndexFile {
    /// There is none.
    Missing,
    /// Its bytes cannot be read, or do not have their digest.
    Damaged,
    /// An index, perhaps of another layer or blob.
    Index(LayerIndex),
}

/// The layer that an index is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerIndexHead {
    /// Digest of the plain archive.
    pub(crate) diff_id: Digest,
    /// Digest and size of the blob.
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) compression: DetectedCompression,
    /// Size and digest of the layer's file.
    pub(crate) erofs: ErofsFile,
}

impl LayerIndex {
    fn encode(&self) -> io::Result<Vec<u8>> {
        let head = serde_json::to_vec(&self.head)?;
        let too_long = |_| io::Error::from(io::ErrorKind::FileTooLarge);
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).map(u32::to_le_bytes).map_err(too_long);
        let mut bytes = [&MAGIC[..], &length(&head)?, &head].concat();
        for checkpoint in &self.checkpoints {
            bytes.extend(checkpoint.compressed.to_le_bytes());
            bytes.extend(checkpoint.plain.to_le_bytes());
            bytes.extend(checkpoint.crc.to_le_bytes());
            bytes.extend(length(&checkpoint.window)?);
            bytes.extend(&checkpoint.window);
        }
        bytes.extend(Sha256::digest(&bytes));
        Ok(bytes)
    }

    /// Reads an index; `None` if it is damaged.
    fn decode(bytes: &[u8]) -> Option<LayerIndex> {
        let (bytes, digest) = bytes.split_last_chunk::<SHA256>()?;
        if Sha256::digest(bytes)[..] != *digest {
            return None;
        }
        let mut rest = Fields(bytes.strip_prefix(MAGIC)?);
        let head = rest.u32()?;
        let head: LayerIndexHead = serde_json::from_slice(rest.bytes(head)?).ok()?;
        let mut checkpoints: Vec<Checkpoint> = Vec::new();
        while !rest.0.is_empty() {
            let (compressed, plain, crc, window) = (rest.u64()?, rest.u64()?, rest.u32()?, rest.u32()?);
            let window = rest.bytes(window)?.to_vec();
            let checkpoint = Checkpoint { compressed, plain, crc, window };
            if checkpoints.last().is_some_and(|last| !last.precedes(&checkpoint)) {
                return None;
            }
            checkpoints.push(checkpoint);
        }
        Some(LayerIndex { head, checkpoints })
    }

    /// The parts of the layer's blob, each from one checkpoint to the next.
    fn parts(&self, layer: &LayerRecord) -> Vec<Arc<BlobPart>> {
        let LayerIndexHead { compression, size, .. } = self.head;
        let parts = parts_between(&self.checkpoints, size, layer.facts.plain_bytes).into_iter();
        parts.map(|part| Arc::new(BlobPart { compression, part })).collect()
    }

    /// Damaged pieces of the layer, by parts of this blob; or why that is needed as a whole.
    pub(crate) fn damaged_pieces(
        &self,
        file: &File,
        layer: &LayerRecord,
        damaged: Vec<DamagedPiece>,
        blob: &Digest,
    ) -> Result<Vec<PieceBatch>, MissingPiecesError> {
        if self.head.digest != *blob {
            return Err(MissingPiecesError::OtherBlob);
        }
        damaged_pieces(file, &layer.erofs, damaged, &self.parts(layer), self.head.size)
    }

    /// Whether this is the index of this layer, made of this blob.
    fn is_of(&self, layer: &LayerRecord) -> bool {
        let LayerIndexHead { diff_id, digest, size, erofs, .. } = &self.head;
        let facts = &layer.facts;
        (diff_id, digest, *size) == (&facts.diff_id, &facts.digest, facts.compressed_bytes)
            && *erofs == layer.erofs
    }
}

/// Fields of an index that are yet to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: u32) -> Option<&'a [u8]> {
        let (field, rest) = self.0.split_at_checked(count as usize)?;
        self.0 = rest;
        Some(field)
    }

    fn array<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

impl Store {
    /// Keeps the index of a layer, before the layer's size is recorded. One with a single checkpoint leads to the whole
    /// blob, and is not kept.
    pub(crate) fn put_index(&self, key: &LayerKey, index: &LayerIndex) -> Result<(), StoreError> {
        let doing = "write the index of a layer";
        if index.checkpoints.len() < 2 {
            return Ok(());
        }
        let bytes = index.encode().context(doing)?;
        ensure_dir(&*self.0.disk, &self.0.layout.indexes()).context(doing)?;
        let (staged, path) = (self.0.layout.new_staging(), self.0.layout.index(key));
        replace(&*self.0.disk, &staged, &path, &bytes).context(doing)
    }

    /// Pieces of a layer that has no data, by its index; or why its data can only be fetched as a whole.
    pub(crate) fn missing_pieces(
        &self,
        file: &File,
        layer: &LayerRecord,
    ) -> Result<Result<Vec<PlacedChunk>, MissingPiecesError>, StoreError> {
        let index = self.index_of(layer)?.ok_or(MissingPiecesError::NoIndex);
        Ok(index.and_then(|index| missing_pieces(file, &layer.erofs, &index.parts(layer))))
    }

    /// The index of a layer; `None` if there is none, or it is damaged, or of another layer.
    pub(crate) fn index_of(&self, layer: &LayerRecord) -> Result<Option<LayerIndex>, StoreError> {
        self.0.index_of(layer)
    }
}

impl OpenStore {
    /// Reads the index of a layer, whatever layer and blob it is of.
    pub(crate) fn read_index(&self, key: &LayerKey) -> Result<IndexFile, StoreError> {
        let doing = "read the index of a layer";
        let file = match fs_err::File::open(self.layout.index(key)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(IndexFile::Missing),
            file => file.context(doing)?,
        };
        let mut bytes = Vec::new();
        if file.take(MAX_BYTES).read_to_end(&mut bytes).is_err() {
            return Ok(IndexFile::Damaged);
        }
        Ok(LayerIndex::decode(&bytes).map_or(IndexFile::Damaged, IndexFile::Index))
    }

    pub(super) fn index_of(&self, layer: &LayerRecord) -> Result<Option<LayerIndex>, StoreError> {
        match self.read_index(&layer.key)? {
            IndexFile::Index(index) if index.is_of(layer) => Ok(Some(index)),
            _ => Ok(None),
        }
    }

    /// Disk usage of a layer's file at this path, and of the layer's index.
    pub(super) fn measure_layer(&self, path: &Path, key: &LayerKey) -> Result<DiskSpace, StoreError> {
        Ok(measure(path).context("measure a layer")? + self.index_space(key))
    }

    /// Disk usage now of what is here of a layer, with its index; its record has what it takes once it is complete.
    pub(super) fn space_here(&self, key: &LayerKey) -> DiskSpace {
        taken(&self.layout.layer(key)) + self.index_space(key)
    }

    /// Disk usage of a layer's index.
    pub(crate) fn index_space(&self, key: &LayerKey) -> DiskSpace {
        taken(&self.layout.index(key))
    }

    /// Removes an index that neither a layer nor a remnant needs.
    pub(crate) fn discard_stray_index(&self, key: &LayerKey) {
        if !self.layout.layer(key).exists() && !self.layout.remnant(key).exists() {
            // If this fails, it is cleaned when the store is opened.
            let _ = self.disk.remove_file(&self.layout.index(key));
        }
    }

    /// Indexes of layers that are not here, and files that are none.
    pub(crate) fn leftover_indexes(&self) -> io::Result<Vec<PathBuf>> {
        let mut leftovers = names_in(&self.layout.indexes())?;
        let is_needed =
            |key: LayerKey| self.layout.layer(&key).exists() || self.layout.remnant(&key).exists();
        leftovers.retain(|name| !LayerKey::parse(name).is_some_and(is_needed));
        Ok(leftovers.into_iter().map(|name| self.layout.indexes().join(name)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> LayerIndex {
        let digest = Digest::sha256(b"");
        let erofs =
            ErofsFile { bytes: 2_500_000, sha256_of_pieces: digest.hex().to_owned(), ..ErofsFile::unknown() };
        let (diff_id, compression) = (digest.clone(), DetectedCompression::Gzip);
        let head = LayerIndexHead { diff_id, digest, size: 900, compression, erofs };
        let at = |compressed, plain, window: &[u8]| Checkpoint {
            compressed,
            plain,
            crc: 5,
            window: window.to_vec(),
        };
        let checkpoints = vec![at(0, 0, b""), at(300, 5000, b"window"), at(700, 9000, b"another")];
        LayerIndex { head, checkpoints }
    }

    #[test]
    fn an_index_is_read_as_it_was_written_and_no_damage_is_overlooked() {
        let bytes = index().encode().unwrap();
        assert_eq!(LayerIndex::decode(&bytes), Some(index()));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert_eq!(LayerIndex::decode(&damaged), None, "byte {at}");
            assert_eq!(LayerIndex::decode(&bytes[..at]), None, "cut at {at}");
        }
    }

    #[test]
    fn an_index_that_a_stranger_wrote_is_bounded_and_in_order() {
        let with_digest = |bytes: &[u8]| [bytes, &Sha256::digest(bytes)].concat();
        let whole = index().encode().unwrap();
        let bytes = &whole[..whole.len() - SHA256];
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] = 0xff;
            LayerIndex::decode(&with_digest(&changed));
            LayerIndex::decode(&with_digest(&bytes[..at]));
        }
        let mut disordered = index();
        disordered.checkpoints.swap(1, 2);
        assert_eq!(LayerIndex::decode(&disordered.encode().unwrap()), None);
    }
}
