//! Directories that a layer's archive only implies: an overlay shows the nearest layer's owner and mode of a directory,
//! so they get those of the layer below that really contains them. Whether a layer fits other layers below depends on
//! them.
//!
//! A layer's file has their paths behind the filesystem, in a list with its length: each ends in a zero byte, a CRC-32
//! follows the last one. An incomplete layer has it at the same place, so that it can be read while the layer is
//! completed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use larder_erofs::{ErofsInode, ErofsOutput};

use super::merged_layers::{LayerReader, MergedLayers};
use super::metadata::Xattrs;
use crate::erofs::ErofsFile;

/// Paths of all implied directories, in bytes: they are in memory while the layer is completed. Names nested thousands
/// deep are small in the archive and in the layer, their paths are not.
pub(super) const MAX_IMPLIED_PATHS: usize = 16 << 20;

/// What the list begins with; its length follows, in bytes of four.
const MAGIC: &[u8; 8] = b"implied1";
/// Of the beginning.
const HEADER: usize = MAGIC.len() + 4;
const CRC: usize = 4;

/// Writes the list behind the filesystem of a layer's file. Returns its length in bytes: nothing if no directory is
/// implied.
pub(super) fn append_implied(file: &mut impl ErofsOutput, paths: &[Vec<u8>]) -> io::Result<u64> {
    if paths.is_empty() {
        return Ok(0);
    }
    let mut list: Vec<u8> = paths.iter().flat_map(|path| path.iter().copied().chain([0])).collect();
    list.extend_from_slice(&crc32fast::hash(&list).to_le_bytes());
    let length = u32::try_from(list.len()).map_err(io::Error::other)?;
    file.append(MAGIC)?;
    file.append(&length.to_le_bytes())?;
    file.append(&list).map(|()| (HEADER + list.len()) as u64)
}

/// Length of the list at the end of a layer's filesystem, if there is one.
pub(super) fn implied_length(file: &File, end: u64) -> io::Result<u64> {
    let mut header = [0; HEADER];
    match file.read_exact_at(&mut header, end) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
        read => read?,
    }
    let length = header.strip_prefix(MAGIC).and_then(<[u8]>::first_chunk::<4>);
    Ok(length.map_or(0, |length| HEADER as u64 + u64::from(u32::from_le_bytes(*length))))
}

/// Reads the list of a layer's file, at the end of its filesystem.
pub(crate) fn read_implied(file: &File, end: u64, erofs: &ErofsFile) -> io::Result<Vec<Vec<u8>>> {
    if erofs.implied_bytes == 0 {
        return Ok(Vec::new());
    }
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the list of implied directories is damaged");
    let length = usize::try_from(erofs.implied_bytes).unwrap_or(usize::MAX);
    // A path takes a zero byte as well.
    if length > HEADER + 2 * MAX_IMPLIED_PATHS + CRC {
        return Err(damaged());
    }
    let mut list = vec![0; length];
    file.read_exact_at(&mut list, end)?;
    let list = list.strip_prefix(MAGIC).and_then(<[u8]>::split_first_chunk::<4>);
    let (_, list) = list
        .filter(|(length, list)| u32::from_le_bytes(**length) as usize == list.len())
        .ok_or_else(damaged)?;
    let (paths, crc) = list.split_last_chunk::<CRC>().ok_or_else(damaged)?;
    if crc32fast::hash(paths) != u32::from_le_bytes(*crc) {
        return Err(damaged());
    }
    let paths = paths.strip_suffix(&[0]).ok_or_else(damaged)?;
    Ok(paths.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect())
}

/// Returns true when the implied directories of a layer look like those of the layers below. Their times do not count.
pub(crate) fn fits_lowers(
    layer: &LayerReader,
    implied: &[Vec<u8>],
    lowers: &MergedLayers,
) -> io::Result<bool> {
    for path in implied {
        let Some((below, below_xattrs)) = directory_of(lowers, path)? else { continue };
        let Some(own) = layer.find(path)? else { return Ok(false) };
        let looks = |inode: &ErofsInode| (inode.mode, inode.uid, inode.gid);
        let mut xattrs = layer.xattrs(&own)?;
        xattrs.sort_unstable();
        if looks(&own) != looks(&below) || xattrs != below_xattrs {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The directory that layers show at a path, and its extended attributes.
pub(super) fn directory_of(layers: &MergedLayers, path: &[u8]) -> io::Result<Option<(ErofsInode, Xattrs)>> {
    let found = layers.find(path, true)?.filter(|found| found.inode.is_directory());
    let Some(found) = found else { return Ok(None) };
    let mut xattrs = layers.layer(found.layer).xattrs(&found.inode)?;
    xattrs.sort_unstable();
    Ok(Some((found.inode, xattrs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written_and_its_damage_is_noticed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("layer");
        let paths = [&b""[..], b"usr", b"usr/li\nb"].map(<[u8]>::to_vec);
        let mut layer = vec![7; 100];
        let implied_bytes = append_implied(&mut layer, &paths).unwrap();
        let erofs = ErofsFile { bytes: layer.len() as u64, implied_bytes, ..ErofsFile::unknown() };
        let read = |content: &[u8]| {
            fs_err::write(&path, content).unwrap();
            read_implied(fs_err::File::open(&path).unwrap().file(), 100, &erofs)
        };
        assert_eq!(read(&layer).unwrap(), paths);
        for at in 100..layer.len() {
            let mut damaged = layer.clone();
            damaged[at] ^= 1;
            read(&damaged).expect_err("it is damaged");
            read(&layer[..at]).expect_err("it is cut");
        }
    }
}
