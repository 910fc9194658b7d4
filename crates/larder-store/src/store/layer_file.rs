//! The file of a layer: an EROFS filesystem, and behind it what the store needs.
//!
//! ```text
//! EROFS | archive record | implied directories | digests of the pieces | record | trailer
//! ```
//!
//! The kernel does not look behind the filesystem.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use crate::disk::DiskFile;
use crate::lazy::group::open_to_check;

/// Name of the layer's file while the layer is staged.
pub const LAYER_FILE: &str = "layer.erofs";
/// Name of the archive record while the layer is staged.
pub const ARCHIVE_RECORD: &str = "archive.v1";

/// Begins the trailer; length and CRC32 of the record follow, each in 8 hexadecimal digits after a space, and a
/// newline.
const MAGIC: &str = "larder layer 1";
const TRAILER: usize = MAGIC.len() + 9 + 9 + 1;

/// The copy of the record of a layer at this path.
pub(crate) fn read_record(layer: &Path) -> io::Result<Vec<u8>> {
    let mut file = open_to_check(layer)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk as _, FileOpenMode, RealDisk};

    #[test]
    fn a_record_behind_a_layer_is_read_and_its_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let layer = dir.path().join("layer");
        fs_err::write(&layer, [7; 5000]).unwrap();
        let file = RealDisk.open(&layer, FileOpenMode::Existing).unwrap();
        read_record(&layer).expect_err("there is none yet");
        write_record(&*file, 5000, b"a long record").unwrap();
        write_record(&*file, 5000, b"record").unwrap();
        assert_eq!(read_record(&layer).unwrap(), b"record");
        let whole = fs_err::read(&layer).unwrap();
        assert_eq!(&whole[5000..5006], b"record");
        for at in 5000..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs_err::write(&layer, &damaged).unwrap();
            assert!(read_record(&layer).is_err(), "byte {at} changed");
            fs_err::write(&layer, &whole[..at]).unwrap();
            assert!(read_record(&layer).is_err(), "cut at {at}");
        }
    }
}
