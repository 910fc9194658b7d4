//! A layer that is one file: an EROFS image, and behind it what a rebuild of the database needs.
//!
//! ```text
//! image | archive record | list of implied directories, if there are any | record | trailer
//! ```
//!
//! The kernel does not look behind the image. Stores of format 3 have each of the parts as a file in the layer's directory.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use crate::disk::DiskFile;
use crate::erofs::ErofsFile;
use crate::unpack::layer_manifest::ManifestLocation;

/// Name of the directory with the unpacked files, inside of a layer's directory.
pub const FS: &str = "fs";
/// Name of the manifest of the unpacked files, inside of a layer's directory. Of a staged EROFS image, it lists only what depends
/// on lower layers, and is not there if nothing does.
pub const FILES: &str = "files.v1";
/// Name of the EROFS image with the files, while the layer is staged.
pub const IMAGE: &str = "layer.erofs";
/// Name of the [archive record](crate::unpack::ArchiveRecord), inside of a layer's directory. That of an image is at its end.
pub const ARCHIVE: &str = "archive.v1";
/// Name of the copy of a layer's record, for rebuilding the database.
pub(crate) const RECORD: &str = "layer.json";

/// Begins the trailer; length and CRC32 of the record follow, each in 8 hexadecimal digits after a space, and a newline.
const MAGIC: &str = "larder layer 1";
const TRAILER: usize = MAGIC.len() + 9 + 9 + 1;

/// Bytes that are copied at once.
const BUFFER: usize = 128 << 10;

/// The EROFS image of a layer at this path.
pub(crate) fn image_of(layer: &Path) -> PathBuf {
    if layer.is_dir() { layer.join(IMAGE) } else { layer.to_owned() }
}

/// The list of what a layer at this path leaves to the layers below.
pub(crate) fn manifest_of(layer: &Path, image: Option<&ErofsFile>) -> ManifestLocation {
    match image {
        Some(image) if !layer.is_dir() => ManifestLocation { path: layer.to_owned(), offset: image.bytes },
        _ => ManifestLocation { path: layer.join(FILES), offset: 0 },
    }
}

/// The copy of the record of a layer at this path.
pub(crate) fn read_record(layer: &Path) -> io::Result<Vec<u8>> {
    if layer.is_dir() {
        return fs_err::read(layer.join(RECORD));
    }
    let mut file = fs_err::File::open(layer)?;
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the copy of its record is damaged");
    let end = file.metadata()?.len().checked_sub(TRAILER as u64).ok_or_else(damaged)?;
    file.seek(SeekFrom::Start(end))?;
    let mut trailer = [0; TRAILER];
    file.read_exact(&mut trailer)?;
    let (length, crc) = parse_trailer(&trailer).ok_or_else(damaged)?;
    file.seek(SeekFrom::Start(end.checked_sub(u64::from(length)).ok_or_else(damaged)?))?;
    let mut record = Vec::new();
    file.take(u64::from(length)).read_to_end(&mut record)?;
    if crc32fast::hash(&record) == crc { Ok(record) } else { Err(damaged()) }
}

fn parse_trailer(trailer: &[u8]) -> Option<(u32, u32)> {
    let fields = std::str::from_utf8(trailer).ok()?.strip_prefix(MAGIC)?.strip_suffix('\n')?;
    let (length, crc) = fields.strip_prefix(' ')?.split_once(' ')?;
    Some((u32::from_str_radix(length, 16).ok()?, u32::from_str_radix(crc, 16).ok()?))
}

/// Writes a record to the end of a layer's file, at `offset`; it replaces an earlier one.
pub(super) fn write_record(file: &dyn DiskFile, offset: u64, record: &[u8]) -> io::Result<()> {
    let mut bytes = record.to_vec();
    let trailer = format!("{MAGIC} {:08x} {:08x}\n", record.len(), crc32fast::hash(record));
    bytes.extend_from_slice(trailer.as_bytes());
    file.write_all_at(&bytes, offset)?;
    // Even at the same length: XFS keeps blocks behind the end of a file that was opened several times.
    file.set_len(offset + bytes.len() as u64)
}

/// Copies the manifest at `from`, if there is one, to `offset` of a layer's file. Returns where it ends.
pub(super) fn append_manifest(file: &dyn DiskFile, mut offset: u64, from: &Path) -> io::Result<u64> {
    let mut manifest = match fs_err::File::open(from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(offset),
        manifest => manifest?,
    };
    let mut buffer = vec![0; BUFFER];
    loop {
        match manifest.read(&mut buffer) {
            Ok(0) => return Ok(offset),
            Ok(read) => {
                file.write_all_at(&buffer[..read], offset)?;
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk as _, FileOpenMode, RealDisk};

    #[test]
    fn a_record_behind_an_image_is_read_and_its_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (layer, manifest) = (dir.path().join("layer"), dir.path().join("manifest"));
        fs_err::write(&layer, [7; 5000]).unwrap();
        fs_err::write(&manifest, "manifest").unwrap();
        let file = RealDisk.open(&layer, FileOpenMode::Existing).unwrap();
        read_record(&layer).expect_err("there is none yet");
        let end = append_manifest(&*file, 5000, &manifest).unwrap();
        assert_eq!(end, 5008);
        write_record(&*file, end, b"a long record").unwrap();
        write_record(&*file, end, b"record").unwrap();
        assert_eq!(read_record(&layer).unwrap(), b"record");
        let whole = fs_err::read(&layer).unwrap();
        assert_eq!(&whole[5000..5014], b"manifestrecord");
        for at in 5008..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs_err::write(&layer, &damaged).unwrap();
            assert!(read_record(&layer).is_err(), "byte {at} changed");
            fs_err::write(&layer, &whole[..at]).unwrap();
            assert!(read_record(&layer).is_err(), "cut at {at}");
        }
    }
}
