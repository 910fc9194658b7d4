//! Remnants: what is kept of removed layers, so that containers of their next pull start before the data is here.
//!
//! A remnant is the file of a layer without its data: the first block, and all from the metadata to the digests of the
//! pieces. With the layer's index, which stays where it is, a pull fetches the data piece by piece. The latest ones are
//! kept, within a part of the disk, and used only for sources that had sent the layer: its metadata has names of files,
//! and short files.

use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use larder::image_service::local_disk;
use larder::reference::DigestHasher;
use serde::{Deserialize, Serialize};

use super::blob_source::{BlobSource, is_proved};
use super::claims::ClaimRequest;
use super::db::{DbRead, DbReadTransaction, DbResult, DbTransaction, LAYERS, REMNANTS, TRANSFERS};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layer_file::LAYER_FILE;
use super::layers::LayerStaging;
use super::layout::names_in;
use super::records::{LayerKey, LayerRecord};
use super::references::{ItemReference, ReferencedItem};
use super::usage::taken;
use crate::disk::{DiskSpace, FileOpenMode, ensure_dir, free_space};
use crate::erofs::ErofsFile;
use crate::erofs::digest::{FIRST_BLOCK, LayerCheck, pieces_of};
use crate::lazy::group::open_to_check;

/// A remnant takes less than this part of its layer's file; more would be fetched about as fast.
const PART_OF_LAYER: u64 = 8;
/// Bytes of a remnant, at most: a removal waits until they are copied.
const MAX_BYTES: u64 = 64 << 20;
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
    /// Bytes of the file without its data; `None` if they are too many.
    fn remnant_bytes(&self) -> Option<u64> {
        let is_known = self.metadata_start > 0 && !self.sha256_of_pieces.is_empty();
        let bytes = FIRST_BLOCK + self.end_of_digests().checked_sub(self.metadata_start)?;
        (is_known && bytes < MAX_BYTES.min(self.bytes / PART_OF_LAYER)).then_some(bytes)
    }
}

/// The file of a removed layer that is made from its remnant.
pub(crate) struct StagedRemnant {
    pub(crate) staging: LayerStaging,
    /// The layer, as it was.
    pub(crate) layer: LayerRecord,
    /// Keeps the layer's index.
    pub(crate) _hold: ItemReference,
}

impl Store {
    /// Makes the file of a removed layer from its remnant, if there is one that this request may use: its blob is the
    /// one that the remnant's index is of.
    pub(crate) fn stage_remnant(&self, request: &ClaimRequest) -> Result<Option<StagedRemnant>, StoreError> {
        let doing = "use the remnant of a layer";
        if self.has_layer(request.keys())? {
            return Ok(None);
        }
        for key in request.keys() {
            let hold = self.0.references.add(ReferencedItem::Layer(key.clone()));
            let get = |reader: &DbReadTransaction| reader.get::<RemnantRecord>(REMNANTS, key.as_str());
            let source = request.source();
            let is_usable = |found: &RemnantRecord| {
                let facts = &found.layer.facts;
                (&facts.digest, facts.compressed_bytes) == (&source.digest, source.size)
                    && is_proved(&found.transfers, source)
            };
            let Some(remnant) = self.0.db.read(doing, get)?.filter(is_usable) else { continue };
            let (staging, path) = (self.begin_layer()?, self.0.layout.remnant(key));
            let (to, erofs) = (staging.dir().join(LAYER_FILE), &remnant.layer.erofs);
            let copied = open_to_check(&path).and_then(|from| self.0.copy_remnant(&from, &to, erofs));
            match copied {
                Ok(sha256) if sha256 == remnant.sha256 => {
                    return Ok(Some(StagedRemnant { staging, layer: remnant.layer, _hold: hold }));
                }
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                    tracing::info!(layer = %key, %error, "cannot use what is kept of a removed layer");
                }
                _ => {
                    tracing::warn!(layer = %key, "what is kept of a removed layer is damaged: the layer is fetched");
                    drop(hold);
                    self.0.discard_remnants(&[remnant])?;
                }
            }
        }
        Ok(None)
    }
}

/// A layer that leaves the database, and the sources that had sent it.
pub(super) type RemovedLayer = (LayerRecord, Vec<BlobSource>);
/// A removed layer, and its file, which may be in the trash.
pub(super) type OpenRemoved<'a> = (&'a RemovedLayer, File);

impl OpenStore {
    /// Space that a remnant of this layer takes, with its index; nothing if none can be kept.
    pub(super) fn remnant_space(&self, layer: &LayerRecord) -> DiskSpace {
        let index = self.layout.index(&layer.key);
        let Some(bytes) = layer.erofs.remnant_bytes().filter(|_| index.exists()) else {
            return DiskSpace::ZERO;
        };
        DiskSpace { bytes: bytes.next_multiple_of(FIRST_BLOCK), inodes: 1 } + taken(&index)
    }

    /// Space of the remnant that a layer leaves when it is removed; zero if it leaves none.
    pub(super) fn kept_of(&self, layer: &LayerRecord) -> DiskSpace {
        let is_kept = self.config.keep_remnants && layer.is_mountable();
        if is_kept { layer.remnant } else { DiskSpace::ZERO }
    }

    /// The layer to keep a remnant of when it leaves the database; `None` if there is none.
    pub(super) fn removed_layer(
        &self,
        writer: &DbTransaction,
        layer: &LayerRecord,
    ) -> DbResult<Option<RemovedLayer>> {
        if self.kept_of(layer) == DiskSpace::ZERO {
            return Ok(None);
        }
        let transfers: Option<Vec<BlobSource>> = writer.get(TRANSFERS, layer.key.as_str())?;
        let sending = layer.partial.iter().map(|partial| partial.blob.clone());
        let transfers = transfers.unwrap_or_default().into_iter().chain(sending).collect();
        Ok(Some((layer.clone(), transfers)))
    }

    /// Moves the file of a layer that has left the database to the trash. Returns the file, if it can be opened: its
    /// remnant is copied from it. While content is locked.
    pub(super) fn discard_removed<'a>(
        &self,
        removed: &'a RemovedLayer,
    ) -> io::Result<Option<OpenRemoved<'a>>> {
        let key = &removed.0.key;
        match open_to_check(&self.layout.layer(key)) {
            Ok(file) => self.discard_layer_file(key).map(|()| Some((removed, file))),
            Err(error) => {
                tracing::info!(layer = %key, %error, "nothing is kept of a removed layer");
                self.discard_layer(key).map(|()| None)
            }
        }
    }

    /// Keeps the remnants of layers whose files are in the trash. Not while content is locked: it copies them.
    pub(super) fn keep_remnants(&self, removed: Vec<OpenRemoved<'_>>) {
        for (removed, file) in removed {
            if let Err(error) = self.keep_remnant(removed, &file) {
                let (key, error) = (&removed.0.key, larder::error_chain(&error));
                tracing::info!(layer = %key, error, "nothing is kept of a removed layer");
                let _guard = self.lock_content();
                // A pull that is under way may have written another one.
                if matches!(self.index_of(&removed.0), Ok(Some(_))) {
                    self.discard_stray_index(key);
                }
            }
        }
    }

    fn keep_remnant(&self, removed: &RemovedLayer, file: &File) -> Result<(), StoreError> {
        let staged = self.layout.new_staging();
        let kept = self.keep_remnant_by(removed, file, &staged);
        if kept.is_err() {
            // If this fails too, it is removed when the store is opened.
            let _ = self.disk.remove_file(&staged);
        }
        kept
    }

    fn keep_remnant_by(
        &self,
        (layer, transfers): &RemovedLayer,
        file: &File,
        staged: &Path,
    ) -> Result<(), StoreError> {
        let doing = "keep the remnant of a layer";
        let free = free_space(self.layout.root()).context(doing)?;
        if free.bytes < self.config.reserve.bytes.saturating_add(layer.remnant.bytes) {
            return Err(io::Error::from(io::ErrorKind::StorageFull)).context(doing);
        }
        check_metadata(file, layer).context(doing)?;
        let sha256 = self.copy_remnant(file, staged, &layer.erofs).context(doing)?;
        let _guard = self.lock_content();
        if self.layout.layer(&layer.key).exists() {
            // Another pull has fetched it since.
            return Err(io::Error::from(io::ErrorKind::AlreadyExists)).context(doing);
        }
        if self.index_of(layer)?.is_none() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "its index is damaged, or of another blob",
            ))
            .context(doing);
        }
        self.db.write(doing, |writer| {
            let numbers = writer.all::<RemnantRecord>(REMNANTS)?.into_iter().map(|remnant| remnant.number);
            let record = RemnantRecord {
                layer: LayerRecord { partial: None, ..layer.clone() },
                transfers: transfers.clone(),
                sha256,
                number: numbers.max().unwrap_or_default() + 1,
            };
            Ok(writer.put(REMNANTS, layer.key.as_str(), &record)?)
        })?;
        let placed = ensure_dir(&*self.disk, &self.layout.remnants())
            .and_then(|()| self.disk.rename(staged, &self.layout.remnant(&layer.key)));
        placed.context(doing).inspect_err(|_| {
            // If this fails too, it is removed when the store is opened.
            let _ = self.remove_remnants(&[&layer.key]);
        })
    }

    /// Copies the parts of a layer's file that its remnant has, from a layer or a remnant. Returns their digest.
    fn copy_remnant(&self, from: &File, to: &Path, erofs: &ErofsFile) -> io::Result<String> {
        let to = self.disk.open(to, FileOpenMode::CreateNew)?;
        let sha256 = read_remnant(from, erofs, |bytes, at| to.write_all_at(bytes, at))?;
        to.sync_data()?;
        Ok(sha256)
    }

    /// Returns the damage of a remnant or of its index, if any.
    pub(crate) fn check_remnant(
        &self,
        remnant: &RemnantRecord,
        check: LayerCheck,
    ) -> Result<Option<&'static str>, StoreError> {
        let doing = "check the remnant of a layer";
        let RemnantRecord { layer, sha256, .. } = remnant;
        let path = self.layout.remnant(&layer.key);
        let file = match open_to_check(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some("missing")),
            file => file.context(doing)?,
        };
        if file.metadata().context(doing)?.len() != layer.erofs.end_of_digests() {
            return Ok(Some("size differs"));
        }
        if !matches!(check, LayerCheck::Size) {
            match read_remnant(&file, &layer.erofs, |_, _| Ok(())) {
                Ok(found) if found == *sha256 => {}
                Ok(_) => return Ok(Some("content differs")),
                Err(_) => return Ok(Some("unreadable")),
            }
        }
        // A layer that is here may have the index of another blob.
        let has_index = self.layout.layer(&layer.key).exists() || self.index_of(layer)?.is_some();
        Ok((!has_index).then_some("its index is missing or damaged"))
    }

    /// Remnants that are not kept any more: the oldest beyond the space for all, and those of layers that are here
    /// again, whose removal has failed.
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

    /// The files of a remnant: with the layer's index, unless the layer is here.
    fn remnant_files(&self, key: &LayerKey) -> Vec<PathBuf> {
        let index = (!self.layout.layer(key).exists()).then(|| self.layout.index(key));
        std::iter::once(self.layout.remnant(key)).chain(index).collect()
    }

    /// Space that removing a remnant frees.
    pub(super) fn taken_by_remnant(&self, remnant: &RemnantRecord) -> DiskSpace {
        self.remnant_files(&remnant.layer.key).iter().map(|file| taken(file)).sum()
    }

    /// Removes remnants that no pull uses. Returns the space that this frees.
    pub(crate) fn discard_remnants(&self, remnants: &[RemnantRecord]) -> Result<DiskSpace, StoreError> {
        if remnants.is_empty() {
            return Ok(DiskSpace::ZERO);
        }
        let _guard = self.lock_content();
        let is_held = |key: &LayerKey| self.references.has(&ReferencedItem::Layer(key.clone()));
        let keys = remnants.iter().map(|remnant| &remnant.layer.key);
        let keys: Vec<&LayerKey> = keys.filter(|key| !is_held(key)).collect();
        self.remove_remnants(&keys)
    }

    /// Removes the remnants of layers that have all their data again: a removal keeps another. While content is locked.
    pub(super) fn discard_superseded_remnants<'a>(&self, layers: impl Iterator<Item = &'a LayerKey>) {
        let keys: Vec<&LayerKey> = layers.filter(|key| self.layout.remnant(key).exists()).collect();
        if keys.is_empty() {
            return;
        }
        if let Err(error) = self.remove_remnants(&keys) {
            tracing::info!(
                error = larder::error_chain(&error),
                "remnants of layers are left to the next sweep"
            );
        }
    }

    fn remove_remnants(&self, keys: &[&LayerKey]) -> Result<DiskSpace, StoreError> {
        let doing = "remove remnants of layers";
        self.db.write(doing, |writer| {
            keys.iter().try_for_each(|key| writer.delete(REMNANTS, key.as_str()))?;
            Ok(())
        })?;
        let mut freed = DiskSpace::ZERO;
        for file in keys.iter().flat_map(|key| self.remnant_files(key)) {
            freed += taken(&file);
            self.disk.remove_file(&file).context(doing)?;
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

/// Reads the parts of a layer's file that its remnant has, with the offset of each. Returns their digest.
fn read_remnant(
    file: &File,
    erofs: &ErofsFile,
    mut visit: impl FnMut(&[u8], u64) -> io::Result<()>,
) -> io::Result<String> {
    let (mut digest, mut buffer) = (DigestHasher::sha256(), vec![0; BUFFER]);
    for range in [0..FIRST_BLOCK, erofs.metadata_start..erofs.end_of_digests()] {
        let mut at = range.start;
        while at < range.end {
            let length = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(BUFFER);
            let bytes = &mut buffer[..length];
            file.read_exact_at(bytes, at)?;
            visit(bytes, at)?;
            digest.update(&*bytes);
            at += length as u64;
        }
    }
    Ok(digest.finish().hex().to_owned())
}

/// Fails if metadata of a layer's file is damaged. That of pieces whose data is missing was checked before.
fn check_metadata(file: &File, layer: &LayerRecord) -> io::Result<()> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "its metadata is damaged");
    let data = FIRST_BLOCK..layer.erofs.metadata_start;
    for piece in pieces_of(file, &layer.erofs)?.ok_or_else(damaged)? {
        let is_inside = data.start <= piece.range.start && piece.range.end <= data.end;
        let has_data = piece.range.start < data.end && data.start < piece.range.end;
        let is_unknown = is_inside || (has_data && layer.partial.is_some());
        if !is_unknown && !piece.is_in(file)? {
            return Err(damaged());
        }
    }
    Ok(())
}
