//! Describes the files of a layer as an archive would.

use std::io::{self, Read};

use larder_erofs::{ErofsInode, InodeKind};

use super::archive::{LayerEntry, LayerEntryKind, SparseExtent};
use super::merged_layers::LayerReader;

/// Parts of a sparse file, at most: what the archive reader allows.
const MAX_EXTENTS: usize = 10_000;

/// The entry of an inode under this path.
pub(super) fn entry_of(layer: &LayerReader, inode: &ErofsInode, path: Vec<u8>) -> io::Result<LayerEntry> {
    let (mut link, mut size) = (Vec::new(), 0);
    let kind = match inode.kind {
        InodeKind::File => {
            size = inode.size;
            let extents = sparse_extents(layer, inode)?;
            extents.map_or(LayerEntryKind::File, LayerEntryKind::Sparse)
        }
        InodeKind::Directory => LayerEntryKind::Directory,
        InodeKind::Symlink => {
            link = layer.symlink_target(inode)?;
            LayerEntryKind::Symlink
        }
        InodeKind::CharDevice => LayerEntryKind::CharDevice,
        InodeKind::BlockDevice => LayerEntryKind::BlockDevice,
        InodeKind::Fifo => LayerEntryKind::Fifo,
    };
    Ok(LayerEntry {
        path,
        kind,
        link,
        size,
        mode: inode.mode,
        uid: inode.uid,
        gid: inode.gid,
        mtime: inode.mtime,
        device: inode.rdev,
        xattrs: layer.xattrs(inode)?,
    })
}

/// The parts of a file that have data; `None` if it has no holes, or too many parts.
fn sparse_extents(layer: &LayerReader, file: &ErofsInode) -> io::Result<Option<Vec<SparseExtent>>> {
    let (mut extents, mut has_holes) = (Vec::new(), false);
    for extent in layer.extents(file) {
        let extent = extent?;
        if extent.layer_offset.is_none() {
            has_holes = true;
        } else if extents.len() == MAX_EXTENTS {
            return Ok(None);
        } else {
            extents.push((extent.offset, extent.length));
        }
    }
    Ok(has_holes.then_some(extents))
}

/// The bytes of a file's extents, one after the other.
pub(super) struct EntryData<'a> {
    layer: &'a LayerReader,
    file: &'a ErofsInode,
    /// Remaining extents, the next one last.
    extents: Vec<SparseExtent>,
}

impl<'a> EntryData<'a> {
    /// The content of the file that `entry` describes.
    pub(super) fn of(layer: &'a LayerReader, file: &'a ErofsInode, entry: &LayerEntry) -> EntryData<'a> {
        let mut extents = match &entry.kind {
            LayerEntryKind::Sparse(extents) => extents.clone(),
            _ => vec![(0, entry.size)],
        };
        extents.reverse();
        EntryData { layer, file, extents }
    }
}

impl Read for EntryData<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some((offset, length)) = self.extents.last_mut() {
            if *length == 0 {
                self.extents.pop();
                continue;
            }
            let wanted = usize::try_from(*length).unwrap_or(usize::MAX).min(buffer.len());
            let read = self.layer.read_at(self.file, &mut buffer[..wanted], *offset)?;
            *offset += read as u64;
            *length -= read as u64;
            return Ok(read);
        }
        Ok(0)
    }
}
