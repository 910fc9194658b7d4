//! What becomes of files that [`write_merged_files`](super::write_merged_files) wrote: one EROFS image, or a directory.
//!
//! Both go the way of a layer, with the same checks; only no digest is known beforehand.

use std::io::Read;
use std::path::Path;

use larder::reference::Digest;
use larder_erofs::ErofsOptions;

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::image::{PendingImage, uuid_of};
use super::stream::{TarStream, from_reader};
use super::writer::LayerWriter;
use super::{ImageMemory, OwnerMode, UnpackError, UnpackOptions, UnpackTarget};

/// Bytes of memory for names: ten million of them.
const MAX_TREE: usize = 512 << 20;

/// What [`extract_files`] writes beside plain files. With none of it, a user who can reach the files cannot become root by
/// them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtractOptions {
    /// Set-user-ID and set-group-ID bits, and file capabilities. Without root, they are left out all the same.
    pub suid: bool,
    /// Device nodes.
    pub dev: bool,
}

/// What [`extract_files`] left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SkippedFiles {
    /// Devices, as wanted or since this process may not make them.
    pub devices: u64,
    /// Files whose set-user-ID and set-group-ID bits, or capabilities, were dropped as wanted.
    pub suid: u64,
    /// Extended attributes that this process or the filesystem may not set.
    pub xattrs: u64,
}

/// Writes the files to a new EROFS image, which is the same for the same files and ID. It is not synced.
pub fn write_disk_image(files: impl Read, id: &Digest, path: &Path) -> Result<(), UnpackError> {
    let options = UnpackOptions { image_memory: ImageMemory::new(MAX_TREE), ..UnpackOptions::default() };
    let mut feed = from_reader(files);
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, id, &options), &options);
    let form = ErofsOptions { uuid: uuid_of(id), max_tree_bytes: MAX_TREE };
    let (mut image, _) = PendingImage::read(&mut archive, path, form, &options)?;
    archive.read_rest()?;
    image.pause()?;
    image.finish(Vec::new(), Path::new(NO_MANIFEST)).map(drop)
}

/// Not read by anything: the root is described, and no directory is implied.
const NO_MANIFEST: &str = "/dev/null";

/// Writes the files below a directory, which exists and is empty. No link leads out of it. Without root, the files belong to
/// this process, which can read them all.
pub fn extract_files(
    files: impl Read,
    dir: &Path,
    wanted: ExtractOptions,
) -> Result<SkippedFiles, UnpackError> {
    let options = UnpackOptions::default();
    let mut feed = from_reader(files);
    // The digest is computed and not compared.
    let unknown = Digest::sha256(b"");
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, &unknown, &options), &options);
    let target = UnpackTarget { root: dir, files: Path::new(NO_MANIFEST) };
    let mut writer = LayerWriter::new(target, &options, None)?;
    let mut skipped = SkippedFiles::default();
    while let Some(mut entry) = archive.next()? {
        if !wanted.dev && matches!(entry.kind, LayerEntryKind::CharDevice | LayerEntryKind::BlockDevice) {
            skipped.devices += 1;
            continue;
        }
        // Without root, set-id bits were meant for another owner.
        let is_dropped = (!wanted.suid || options.owners == OwnerMode::Record) && drop_privileges(&mut entry);
        skipped.suid += u64::from(is_dropped);
        writer.add(&entry, &mut archive)?;
    }
    archive.read_rest()?;
    let written = writer.finish()?;
    skipped.devices += written.skipped_devices;
    Ok(SkippedFiles { xattrs: written.skipped_xattrs, ..skipped })
}

/// Whether a file had what runs it with other rights than those of its user. On a directory, the bits mean something else.
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
