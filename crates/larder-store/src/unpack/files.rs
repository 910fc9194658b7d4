//! What becomes of files that [`write_merged_files`](super::write_merged_files) wrote: one EROFS image, or a directory.
//!
//! Both go the way of a layer, with the same checks; only no digest is known beforehand.

use std::io::Read;
use std::path::Path;

use larder::reference::Digest;
use larder_erofs::ImageOptions;

use super::archive::LayerArchive;
use super::image::{PendingImage, uuid_of};
use super::stream::{TarStream, from_reader};
use super::writer::LayerWriter;
use super::{ImageMemory, OwnerMode, UnpackError, UnpackOptions, UnpackTarget};

/// Bytes of memory for names: ten million of them.
const MAX_TREE: usize = 512 << 20;

/// What [`extract_files`] had to leave out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SkippedFiles {
    /// Devices that this process may not make.
    pub devices: u64,
    /// Extended attributes that this process or the filesystem may not set.
    pub xattrs: u64,
}

/// Writes the files to a new EROFS image, which is the same for the same files and ID. It is not synced.
pub fn write_disk_image(files: impl Read, id: &Digest, path: &Path) -> Result<(), UnpackError> {
    let options = UnpackOptions { image_memory: ImageMemory::new(MAX_TREE), ..UnpackOptions::default() };
    let mut feed = from_reader(files);
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, id, &options), &options);
    let form = ImageOptions { uuid: uuid_of(id), max_tree_bytes: MAX_TREE };
    let (mut image, _) = PendingImage::read(&mut archive, path, form, &options)?;
    archive.read_rest()?;
    image.pause()?;
    image.finish(Vec::new(), Path::new(NO_MANIFEST)).map(drop)
}

/// Not read by anything: the root is described, and no directory is implied.
const NO_MANIFEST: &str = "/dev/null";

/// Writes the files below a directory, which exists and is empty. No link leads out of it. Without root, the files belong to
/// this process, which can read them all.
pub fn extract_files(files: impl Read, dir: &Path) -> Result<SkippedFiles, UnpackError> {
    let options = UnpackOptions::default();
    let mut feed = from_reader(files);
    // The digest is computed and not compared.
    let unknown = Digest::sha256(b"");
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, &unknown, &options), &options);
    let target = UnpackTarget { root: dir, files: Path::new(NO_MANIFEST) };
    let mut writer = LayerWriter::new(target, &options, None)?;
    while let Some(mut entry) = archive.next()? {
        if options.owners == OwnerMode::Record {
            entry.mode &= 0o1777; // set-id bits were meant for another owner
        }
        writer.add(&entry, &mut archive)?;
    }
    archive.read_rest()?;
    let written = writer.finish()?;
    Ok(SkippedFiles { devices: written.skipped_devices, xattrs: written.skipped_xattrs })
}
