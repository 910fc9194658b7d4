//! Remnants: what is kept of removed layers, so that containers of their next pull start before the data is here.
//!
//! A remnant is the file of a layer without its data: the first block, and all from the metadata to the digests of the
//! pieces. With the layer's index, which stays where it is, a pull fetches the data piece by piece. The latest ones are
//! kept, within a part of the disk, and used only for those who had sent the layer: its metadata has names of files,
//! and short files.

use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder::image_service::local_disk;
use larder::reference::DigestHasher;
use serde::{Deserialize, Serialize};

use super::blob_source::{BlobSource, is_proved};
use super::claims::ClaimRequest;
use super::db::{DbRead, DbReadTransaction, DbResult, DbTransaction, LAYERS, REMNANTS, TRANSFERS};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layer_file::LAYER_FILE;
use super::layer_index::LayerIndex;
use super::layers::LayerStaging;
use super::layout::names_in;
use super::records::{LayerKey, LayerRecord};
use super::usage::taken;
use crate::disk::{DiskSpace, FileOpenMode, ensure_dir};
use crate::erofs::ErofsFile;
use crate::erofs::digest::FIRST_BLOCK;
use crate::lazy::group::open_to_check;
use crate::lazy::missing_pieces::{MissingPiecesError, missing_pieces};
use crate::lazy::skeleton::PlacedChunk;
use crate::lazy::toc::BlobPart;
use crate::unpack::parts_between;

/// A remnant takes less than this part of its layer's file; more would be fetched about as fast.
const PART_OF_LAYER: u64 = 8;
/// All remnants take less than this part of the filesystem.
const PART_OF_DISK: u64 = 100;
/// Bytes that are copied at once.
const BUFFER: usize = 1 << 20;

/// A remnant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemnantRecord {
    /// The layer, as it was.
    pub(crate) layer: LayerRecord,
    /// The sources that had sent it.
    transfers: Vec<BlobSource>,
    /// Digest of what is kept of its file, in hexadecimal digits.
    sha256: String,
    /// Counts up with each removal.
    number: u64,
}

impl ErofsFile {
    /// Bytes of the file without its data; `None` if they are too many, or it is not made of an archive.
    fn remnant_bytes(&self) -> Option<u64> {
        let is_known = self.metadata_start > 0 && !self.sha256_of_pieces.is_empty() && self.blob_bytes == 0;
        let bytes = FIRST_BLOCK + self.end_of_digests().checked_sub(self.metadata_start)?;
        (is_known && bytes < self.bytes / PART_OF_LAYER).then_some(bytes)
    }
}

impl Store {
    /// Makes the file of a removed layer from its remnant, if there is one that this request may use.
    pub(crate) fn stage_remnant(
        &self,
        request: &ClaimRequest,
    ) -> Result<Option<(LayerStaging, LayerRecord)>, StoreError> {
        let doing = "use the remnant of a layer";
        if self.has_layer(request.keys())? {
            return Ok(None);
        }
        for key in request.keys() {
            let get = |reader: &DbReadTransaction| reader.get::<RemnantRecord>(REMNANTS, key.as_str());
            let found = self.0.db.read(doing, get)?;
            let Some(remnant) = found.filter(|found| is_proved(&found.transfers, request.source())) else {
                continue;
            };
            let (staging, path) = (self.begin_layer()?, self.0.layout.remnant(key));
            let copied = self.0.copy_remnant(&path, &staging.dir().join(LAYER_FILE), &remnant.layer.erofs);
            if copied.is_ok_and(|sha256| sha256 == remnant.sha256) {
                return Ok(Some((staging, remnant.layer)));
            }
            tracing::warn!(layer = %key, "what is kept of a removed layer is damaged: the layer is fetched");
            self.0.discard_remnants(&[remnant])?;
        }
        Ok(None)
    }

    /// Pieces of a layer that has no data, by its index; or why its data can only be fetched as a whole.
    pub(crate) fn missing_pieces(
        &self,
        file: &File,
        layer: &LayerRecord,
    ) -> Result<Result<Vec<PlacedChunk>, MissingPiecesError>, StoreError> {
        let Some(LayerIndex { head, checkpoints }) = self.index_of(layer)? else {
            return Ok(Err(MissingPiecesError::NoIndex));
        };
        let compression = head.compression;
        let parts = parts_between(&checkpoints, head.size, layer.facts.plain_bytes).into_iter();
        let parts: Vec<Arc<BlobPart>> = parts.map(|part| Arc::new(BlobPart { compression, part })).collect();
        Ok(missing_pieces(file, &layer.erofs, &parts))
    }
}

/// A layer that leaves the database, and the sources that had sent it.
pub(super) type RemovedLayer = (LayerRecord, Vec<BlobSource>);

impl OpenStore {
    /// Space that a remnant of this layer takes, with its index; nothing if none can be kept.
    pub(super) fn remnant_space(&self, layer: &LayerRecord) -> DiskSpace {
        let index = self.layout.index(&layer.key);
        let Some(bytes) = layer.erofs.remnant_bytes().filter(|_| index.exists()) else {
            return DiskSpace::ZERO;
        };
        DiskSpace { bytes: bytes.next_multiple_of(FIRST_BLOCK), inodes: 1 } + taken(&index)
    }

    /// The layer to keep a remnant of when it leaves the database; `None` if there is none.
    pub(super) fn removed_layer(
        &self,
        writer: &DbTransaction,
        layer: &LayerRecord,
    ) -> DbResult<Option<RemovedLayer>> {
        if !layer.is_mountable() || layer.remnant == DiskSpace::ZERO || !self.config.keep_remnants {
            return Ok(None);
        }
        let transfers: Option<Vec<BlobSource>> = writer.get(TRANSFERS, layer.key.as_str())?;
        let sending = layer.partial.iter().map(|partial| partial.blob.clone());
        let transfers = transfers.unwrap_or_default().into_iter().chain(sending).collect();
        Ok(Some((LayerRecord { partial: None, ..layer.clone() }, transfers)))
    }

    /// Removes the file of a layer that has left the database, and keeps its remnant. While content is locked.
    pub(super) fn reduce_to_remnant(&self, removed: &RemovedLayer) -> io::Result<()> {
        let key = &removed.0.key;
        if let Err(error) = self.keep_remnant(removed) {
            tracing::info!(layer = %key, error = larder::error_chain(&error), "nothing is kept of a removed layer");
            return self.discard_layer(key);
        }
        self.discard_layer_file(key)
    }

    fn keep_remnant(&self, (layer, transfers): &RemovedLayer) -> Result<(), StoreError> {
        let doing = "keep the remnant of a layer";
        let staged = self.layout.new_staging();
        let sha256 =
            self.copy_remnant(&self.layout.layer(&layer.key), &staged, &layer.erofs).context(doing)?;
        self.db.write(doing, |writer| {
            let numbers = writer.all::<RemnantRecord>(REMNANTS)?.into_iter().map(|remnant| remnant.number);
            let record = RemnantRecord {
                layer: layer.clone(),
                transfers: transfers.clone(),
                sha256,
                number: numbers.max().unwrap_or_default() + 1,
            };
            Ok(writer.put(REMNANTS, layer.key.as_str(), &record)?)
        })?;
        ensure_dir(&*self.disk, &self.layout.remnants()).context(doing)?;
        self.disk.rename(&staged, &self.layout.remnant(&layer.key)).context(doing)
    }

    /// Copies the parts of a layer's file that its remnant has, from a layer or a remnant. Returns their digest.
    fn copy_remnant(&self, from: &Path, to: &Path, erofs: &ErofsFile) -> io::Result<String> {
        let from = open_to_check(from)?;
        let to = self.disk.open(to, FileOpenMode::CreateNew)?;
        let (mut digest, mut buffer) = (DigestHasher::sha256(), vec![0; BUFFER]);
        for range in [0..FIRST_BLOCK, erofs.metadata_start..erofs.end_of_digests()] {
            let mut at = range.start;
            while at < range.end {
                let length = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(BUFFER);
                let bytes = &mut buffer[..length];
                from.read_exact_at(bytes, at)?;
                to.write_all_at(bytes, at)?;
                digest.update(&*bytes);
                at += length as u64;
            }
        }
        Ok(digest.finish().hex().to_owned())
    }

    /// Remnants that are not kept any more: of layers that are here again, and the oldest beyond the space for all.
    pub(super) fn excess_remnants(&self) -> Result<Vec<RemnantRecord>, StoreError> {
        let doing = "list remnants of layers";
        let mut remnants: Vec<RemnantRecord> = self.db.read(doing, |reader| reader.all(REMNANTS))?;
        if remnants.is_empty() {
            return Ok(remnants);
        }
        remnants.sort_unstable_by_key(|remnant| Reverse(remnant.number));
        let disk = local_disk(self.layout.root()).context(doing)?.map_or(0, |disk| disk.capacity);
        let allowed = if self.config.keep_remnants { disk / PART_OF_DISK } else { 0 };
        let mut total = 0_u64;
        self.db.read(doing, |reader| {
            let mut excess = Vec::new();
            for remnant in remnants {
                let here: Option<LayerRecord> = reader.get(LAYERS, remnant.layer.key.as_str())?;
                let bytes = total.saturating_add(remnant.layer.remnant.bytes);
                if here.is_some_and(|layer| layer.is_whole()) || bytes > allowed {
                    excess.push(remnant);
                } else {
                    total = bytes;
                }
            }
            Ok(excess)
        })
    }

    /// Removes remnants. Returns the space that this frees.
    pub(super) fn discard_remnants(&self, remnants: &[RemnantRecord]) -> Result<DiskSpace, StoreError> {
        let doing = "remove remnants of layers";
        if remnants.is_empty() {
            return Ok(DiskSpace::ZERO);
        }
        let _guard = self.lock_content();
        self.db.write(doing, |writer| {
            for remnant in remnants {
                writer.delete(REMNANTS, remnant.layer.key.as_str())?;
            }
            Ok(())
        })?;
        let mut freed = DiskSpace::ZERO;
        for RemnantRecord { layer, .. } in remnants {
            let mut files = vec![self.layout.remnant(&layer.key)];
            if !self.layout.layer(&layer.key).exists() {
                files.push(self.layout.index(&layer.key));
            }
            for file in files {
                freed += taken(&file);
                self.disk.remove_file(&file).context(doing)?;
            }
        }
        Ok(freed)
    }

    /// Forgets remnants whose files are not here.
    pub(super) fn recover_remnants(&self) -> Result<(), StoreError> {
        let doing = "clean up remnants of layers";
        for path in self.leftover_remnants()? {
            self.discard(&path).context(doing)?;
        }
        let mut lost: Vec<RemnantRecord> = self.db.read(doing, |reader| reader.all(REMNANTS))?;
        lost.retain(|remnant| !self.layout.remnant(&remnant.layer.key).exists());
        self.discard_remnants(&lost).map(drop)
    }

    /// Files in the directory of remnants that the database does not know.
    pub(crate) fn leftover_remnants(&self) -> Result<Vec<PathBuf>, StoreError> {
        let doing = "find leftover remnants of layers";
        let known = self.db.read(doing, |reader| reader.endings(REMNANTS, ""))?;
        let mut names = names_in(&self.layout.remnants()).context(doing)?;
        names.retain(|name| known.binary_search(name).is_err());
        Ok(names.into_iter().map(|name| self.layout.remnants().join(name)).collect())
    }

    /// Disk usage of all remnants, with the indexes of layers that are not here.
    pub(super) fn remnant_usage(&self) -> Result<DiskSpace, StoreError> {
        let doing = "measure remnants of layers";
        let mut usage = taken(&self.layout.remnants());
        for name in names_in(&self.layout.remnants()).context(doing)? {
            usage += taken(&self.layout.remnants().join(&name));
            if let Some(key) = LayerKey::parse(&name).filter(|key| !self.layout.layer(key).exists()) {
                usage += taken(&self.layout.index(&key));
            }
        }
        Ok(usage)
    }
}
