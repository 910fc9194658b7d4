//! Content of files: which parts of the layer file it is, and which parts are holes.

use std::io::{self, Read};

use crate::error::{ErofsReadError, LayerDamage};
use crate::format::{BLOCK, DataLayout, HOLE, MAX_CHUNK_BITS};
use crate::input::ErofsInput;

use super::{ErofsInode, ErofsReader, InodeKind};

/// Entries of a chunk map that are read at once.
const MAP_PIECE: usize = 256;

/// A part of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErofsExtent {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes; not 0.
    pub length: u64,
    /// Offset of the bytes in the layer file; `None` for a hole.
    pub layer_offset: Option<u64>,
}

impl ErofsExtent {
    fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// Whether `next`, which follows in the file, follows in the layer as well.
    fn continues_with(&self, next: &ErofsExtent) -> bool {
        match (self.layer_offset, next.layer_offset) {
            (Some(own), Some(next)) => own.checked_add(self.length) == Some(next),
            (own, next) => own == next,
        }
    }
}

impl<I: ErofsInput> ErofsReader<I> {
    /// The parts of a file's content in order, from its beginning to its end.
    pub fn extents(&self, file: &ErofsInode) -> ErofsExtents<'_, I> {
        ErofsExtents { layer: self, file: *file, next: None, offset: 0, layer_end: 0 }
    }

    /// Reads content from `offset` on; holes are zeros. Returns fewer bytes than `buffer` has only at the end of the
    /// file.
    pub fn read_at(
        &self,
        file: &ErofsInode,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<usize, ErofsReadError> {
        let left = usize::try_from(file.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        self.read_exact_at(file, &mut buffer[..length], offset)?;
        Ok(length)
    }

    /// Content of a file from its beginning to its end.
    pub fn reader(&self, file: &ErofsInode) -> ErofsFileReader<'_, I> {
        ErofsFileReader { layer: self, file: *file, offset: 0 }
    }

    /// Reads content that lies inside the file.
    pub(super) fn read_exact_at(
        &self,
        file: &ErofsInode,
        buffer: &mut [u8],
        offset: u64,
    ) -> Result<(), ErofsReadError> {
        let mut done = 0;
        while done < buffer.len() {
            let extent = self.extent_at(file, offset + done as u64)?;
            let length = usize::try_from(extent.length).unwrap_or(usize::MAX).min(buffer.len() - done);
            let part = &mut buffer[done..done + length];
            match extent.layer_offset {
                Some(at) => self.read_metadata(file, part, at)?,
                None => part.fill(0),
            }
            done += length;
        }
        Ok(())
    }

    /// Checks that the blocks, tail or map of an inode lie inside the filesystem.
    pub(super) fn check_extent(&self, inode: &ErofsInode) -> Result<(), LayerDamage> {
        let in_blocks = inode.size - Self::tail_bytes(inode);
        let behind = match inode.layout {
            DataLayout::Chunks if inode.place & !MAX_CHUNK_BITS != 0 => return Err(LayerDamage::Format),
            DataLayout::Chunks => inode.size.div_ceil(chunk_size(inode)) * 4,
            _ => Self::tail_bytes(inode),
        };
        let blocks_end = match inode.layout {
            DataLayout::Chunks => 0,
            _ if in_blocks == 0 => 0,
            _ => u64::from(inode.place) * BLOCK as u64 + in_blocks,
        };
        let behind_end = self.end_of_xattrs(inode).checked_add(behind);
        if blocks_end > self.size || behind_end.is_none_or(|end| end > self.size) {
            return Err(LayerDamage::Offset);
        }
        Ok(())
    }

    /// Content from `offset` on, which must be inside the file; not more than lies together in the layer.
    pub(super) fn extent_at(&self, file: &ErofsInode, offset: u64) -> Result<ErofsExtent, ErofsReadError> {
        if offset >= file.size
            || !matches!(file.kind, InodeKind::File | InodeKind::Directory | InodeKind::Symlink)
        {
            return Err(file.damaged(LayerDamage::Offset));
        }
        if file.layout == DataLayout::Chunks {
            return self.chunks_at(file, offset);
        }
        let in_blocks = file.size - Self::tail_bytes(file);
        let (layer_offset, end) = if offset < in_blocks {
            (u64::from(file.place) * BLOCK as u64 + offset, in_blocks)
        } else {
            (self.end_of_xattrs(file) + (offset - in_blocks), file.size)
        };
        Ok(ErofsExtent { offset, length: end - offset, layer_offset: Some(layer_offset) })
    }

    /// Bytes behind the inode.
    fn tail_bytes(inode: &ErofsInode) -> u64 {
        if inode.layout == DataLayout::Inline { inode.size % BLOCK as u64 } else { 0 }
    }

    fn chunks_at(&self, file: &ErofsInode, offset: u64) -> Result<ErofsExtent, ErofsReadError> {
        let chunk_size = chunk_size(file);
        let (first, within) = (offset / chunk_size, offset % chunk_size);
        let left = file.size.div_ceil(chunk_size) - first;
        let mut map = [0; 4 * MAP_PIECE];
        let map = &mut map[..4 * usize::try_from(left).unwrap_or(MAP_PIECE).min(MAP_PIECE)];
        self.read_metadata(file, map, self.end_of_xattrs(file) + 4 * first)?;
        let mut blocks =
            map.chunks_exact(4).map(|entry| u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]));
        let address = |block: u32| (block != HOLE).then(|| u64::from(block) * BLOCK as u64);
        let begin = blocks.next().and_then(address);
        let mut chunks = 1;
        for block in blocks {
            let follows = match begin {
                Some(begin) => {
                    address(block).is_some_and(|at| begin.checked_add(chunks * chunk_size) == Some(at))
                }
                None => block == HOLE,
            };
            if !follows {
                break;
            }
            chunks += 1;
        }
        let end = (first + chunks).saturating_mul(chunk_size).min(file.size);
        let extent =
            ErofsExtent { offset, length: end - offset, layer_offset: begin.map(|begin| begin + within) };
        let layer_end = extent.layer_offset.map_or(Some(0), |begin| begin.checked_add(extent.length));
        if layer_end.is_none_or(|end| end > self.size) {
            return Err(file.damaged(LayerDamage::Offset));
        }
        Ok(extent)
    }
}

/// Bytes of a chunk: below 2^44.
fn chunk_size(file: &ErofsInode) -> u64 {
    (BLOCK as u64) << (file.place & MAX_CHUNK_BITS)
}

/// Parts of a file's content, in order; the parts with data of a sparse file are in order in the layer as well, so that
/// they are never more than the layer has. It ends after an error.
#[derive(Debug)]
pub struct ErofsExtents<'a, I> {
    layer: &'a ErofsReader<I>,
    file: ErofsInode,
    next: Option<ErofsExtent>,
    offset: u64,
    /// Where the last part with data ends in the layer.
    layer_end: u64,
}

impl<I: ErofsInput> ErofsExtents<'_, I> {
    fn read(&mut self) -> Result<Option<ErofsExtent>, ErofsReadError> {
        if self.offset >= self.file.size {
            return Ok(None);
        }
        let extent = self.layer.extent_at(&self.file, self.offset)?;
        self.offset = extent.end();
        if self.file.layout == DataLayout::Chunks
            && let Some(begin) = extent.layer_offset
        {
            if begin < self.layer_end {
                return Err(self.file.damaged(LayerDamage::ChunkOrder));
            }
            self.layer_end = begin + extent.length;
        }
        Ok(Some(extent))
    }

    /// The next part, with all that continues it.
    fn read_whole(&mut self) -> Result<Option<ErofsExtent>, ErofsReadError> {
        let mut whole = match self.next.take() {
            Some(extent) => Some(extent),
            None => self.read()?,
        };
        while let Some(extent) = &mut whole {
            match self.read()? {
                Some(next) if extent.continues_with(&next) => extent.length += next.length,
                next => {
                    self.next = next;
                    break;
                }
            }
        }
        Ok(whole)
    }
}

impl<I: ErofsInput> Iterator for ErofsExtents<'_, I> {
    type Item = Result<ErofsExtent, ErofsReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        let extent = self.read_whole();
        if extent.is_err() {
            (self.offset, self.next) = (u64::MAX, None);
        }
        extent.transpose()
    }
}

/// Reads a file from its beginning to its end.
#[derive(Debug)]
pub struct ErofsFileReader<'a, I> {
    layer: &'a ErofsReader<I>,
    file: ErofsInode,
    offset: u64,
}

impl<I: ErofsInput> Read for ErofsFileReader<'_, I> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.layer.read_at(&self.file, buffer, self.offset)?;
        self.offset += length as u64;
        Ok(length)
    }
}
