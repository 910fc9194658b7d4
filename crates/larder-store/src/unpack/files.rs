//! Writes files to an EROFS disk, or below a directory: those of an archive that
//! [`write_merged_files`](super::write_merged_files) wrote, and those of one layer.
//!
//! An archive is read as that of a layer, with the same checks; only no digest is known beforehand.

use std::io::{self, Read};
use std::path::Path;

use larder::reference::Digest;
use larder_erofs::{ErofsOptions, ErofsWalkEntry};

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::directory_writer::{DirectoryForm, DirectoryWriter, SkippedMetadata};
use super::first_paths::{self, FirstPaths};
use super::layer_entries::{EntryData, entry_of};
use super::layer_writer::PendingLayer;
use super::merged_layers::{LayerReader, MergedEntry, MergedLayers};
use super::stream::{BufferSource, TarStream, from_reader};
use super::{OverlayForm, UnpackError, UnpackOptions};
use crate::disk::SpaceReserve;
use crate::erofs::digest::bytes_of;

/// Entries that [`extract_files`] writes beside plain files. With none of it, a user who can reach the files cannot
/// become root by them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtractOptions {
    /// Set-user-ID and set-group-ID bits, and file capabilities. Without root, they are left out all the same.
    pub suid: bool,
    /// Device nodes.
    pub dev: bool,
}

/// Entries that [`extract_files`] left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SkippedFiles {
    /// Devices, as wanted or since this process may not make them.
    pub devices: u64,
    /// Files whose set-user-ID and set-group-ID bits, or capabilities, were dropped as wanted.
    pub suid: u64,
    /// Extended attributes that this process or the filesystem may not set.
    pub xattrs: u64,
}

/// Writes the files to a new EROFS disk, which is the same for the same files and ID. It is not synced.
pub fn write_erofs_disk(files: impl Read, id: &Digest, path: &Path) -> Result<(), UnpackError> {
    let options = UnpackOptions::for_accepted_layer();
    let mut feed = from_reader(files);
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, None, &options), &options);
    let form = ErofsOptions { uuid: bytes_of(id), whiteouts: false, ..ErofsOptions::default() };
    let (mut disk, _) = PendingLayer::read(&mut archive, path, form, &options)?;
    archive.read_rest()?;
    disk.pause()?;
    disk.finish(&MergedLayers::default(), &options.progress).map(drop)
}

/// Writes the files below a directory, which exists and is empty. No name leads out of it. Without root, the files
/// belong to this process, which can read them all.
pub fn extract_files(
    files: impl Read,
    dir: &Path,
    wanted: ExtractOptions,
) -> Result<SkippedFiles, UnpackError> {
    let options = UnpackOptions::for_accepted_layer();
    let mut feed = from_reader(files);
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, None, &options), &options);
    let owners = rustix::process::geteuid().is_root();
    let mut writer = DirectoryWriter::new(
        dir,
        DirectoryForm { owners, devices: wanted.dev, overlay: None, reserve: None },
    )?;
    let mut suid = 0;
    while let Some(mut entry) = archive.next()? {
        // Without root, set-id bits were meant for another owner.
        let is_dropped = (!wanted.suid || !owners) && drop_privileges(&mut entry);
        suid += u64::from(is_dropped);
        writer.add(&entry, &mut EntryContent(&mut archive))?;
    }
    archive.read_rest()?;
    let SkippedMetadata { devices, xattrs } = writer.finish()?;
    Ok(SkippedFiles { devices, suid, xattrs })
}

/// The content of the entry that an archive is at.
struct EntryContent<'a, 'b, F>(&'a mut LayerArchive<'b, F>);

impl<F: BufferSource> Read for EntryContent<'_, '_, F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let piece = self.0.content().map_err(io::Error::other)?;
        let length = piece.len().min(into.len());
        into[..length].copy_from_slice(&piece[..length]);
        self.0.consume(length);
        Ok(length)
    }
}

/// Whether a file had what runs it with other rights than those of its user. On a directory, the bits mean something
/// else.
fn drop_privileges(entry: &mut LayerEntry) -> bool {
    if entry.kind == LayerEntryKind::Directory {
        return false;
    }
    let before = (entry.mode, entry.xattrs.len());
    entry.mode &= 0o1777;
    entry.xattrs.retain(|(name, _)| name != b"security.capability");
    // A hard link names a file that was counted.
    entry.kind != LayerEntryKind::HardLink && before != (entry.mode, entry.xattrs.len())
}

/// Writes the files of a layer below an empty directory that is to be a lower directory of overlays. Not synced.
/// Devices, attributes and owners that this process may not make or set are left out. The reserve stays free.
pub(crate) fn extract_layer(
    layer: &LayerReader,
    dir: &Path,
    overlay: OverlayForm,
    reserve: SpaceReserve,
) -> Result<(), UnpackError> {
    let unreadable = |error| UnpackError::file("read", "the layer", error);
    let owners = rustix::process::geteuid().is_root();
    let form = DirectoryForm { owners, devices: true, overlay: Some(overlay), reserve: Some(reserve) };
    let mut writer = DirectoryWriter::new(dir, form)?;
    let mut first_paths = FirstPaths::default();
    for found in layer.walk().map_err(|error| unreadable(error.into()))? {
        let ErofsWalkEntry { path, inode } = found.map_err(|error| unreadable(error.into()))?;
        let mut entry = entry_of(layer, &inode, path.clone()).map_err(unreadable)?;
        let limit = first_paths::MAX_BYTES as u64;
        let too_many = |_| UnpackError::over(limit, "bytes of paths with several names");
        let first = first_paths.of(&MergedEntry { layer: 0, path, inode }).map_err(too_many)?;
        if let Some(first) = first {
            (entry.kind, entry.link) = (LayerEntryKind::HardLink, first.to_vec());
        }
        if entry.path.is_empty() {
            entry.path.push(b'.');
        }
        writer.add(&entry, &mut EntryData::of(layer, &inode, &entry))?;
        if layer.is_opaque(&inode).map_err(|error| unreadable(error.into()))? {
            writer.mark_opaque();
        }
    }
    writer.finish().map(drop)
}
