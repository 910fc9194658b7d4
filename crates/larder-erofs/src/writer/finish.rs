//! The end of a layer: its metadata, which follows all data, and the superblock.
//!
//! Inodes of directories come first, the root before all others, each with the rest of its directory's data; then data
//! of large directories; then all other inodes, from the temporary file. All sizes are known before the first byte is
//! written, and so are the places of all inodes.

use std::iter::Peekable;

use crate::error::ErofsError;
use crate::format::{BLOCK, FIRST_SLOT, INODE, NLINK_OFFSET, SLOT, SLOTS_PER_BLOCK, Superblock};
use crate::metadata_blocks::MetadataBlocks;
use crate::output::{Appender, ErofsOutput, block_address};
use crate::tree::{ROOT, TreeNode};

use super::directories::{DirectoryLayout, DirectoryListing, InodeNumbers};
use super::{ErofsSummary, ErofsWriter};

/// Writes directories.
struct DirectoryWriter<'a> {
    listing: DirectoryListing<'a>,
    numbers: InodeNumbers,
    /// First block of all directories' data.
    first_block: u32,
}

/// The place that comes next among the inodes of directories.
struct InodeCursor(u64);

impl InodeCursor {
    fn new() -> InodeCursor {
        InodeCursor((FIRST_SLOT * SLOT) as u64)
    }

    /// Offset of an inode. What follows it and its attributes must not cross a block.
    fn place(&mut self, layout: &DirectoryLayout) -> u64 {
        let head = (INODE + layout.xattrs.len()) as u64;
        let tail = layout.tail as u64;
        let block = BLOCK as u64;
        self.0 = self.0.next_multiple_of(SLOT as u64);
        if self.0 % block + head + tail > block {
            self.0 = self.0.next_multiple_of(block);
        }
        let offset = self.0;
        self.0 += head + tail;
        offset
    }
}

impl<O: ErofsOutput> ErofsWriter<O> {
    /// Completes the layer. Hard links to files that were not added are left out.
    pub fn finish(mut self) -> Result<(O, ErofsSummary), ErofsError> {
        if let Some(file) = &self.file {
            return Err(file.incomplete());
        }
        self.resolve_links(&|| false)?;
        let lower_links = self.lower_links().count() as u64;
        self.tree.seal();
        let ErofsWriter { mut to, tree, blocks, .. } = self;
        let metadata_block = to.block()?;
        let writer = DirectoryWriter::new(DirectoryListing::new(&tree), metadata_block)?;
        writer.write_inodes(&mut to)?;
        writer.write_data(&mut to)?;
        tree.check()?;
        let linked = writer.linked_slots();
        let inodes = writer.inodes(&linked);
        write_other_inodes(blocks, &linked, &mut to)?;
        let size = to.position();
        let mut block = [0; BLOCK];
        let root = u16::try_from(writer.numbers.of_directory(ROOT)).map_err(|_| ErofsError::LayerTooLarge)?;
        let superblock = Superblock {
            blocks: block_address(size / BLOCK as u64)?,
            inodes,
            metadata_block,
            root,
            uuid: self.options.uuid,
            has_chunks: self.has_chunks,
        };
        superblock.put(&mut block);
        to.output.write_at(0, &block)?;
        let summary = ErofsSummary {
            size,
            metadata_start: u64::from(metadata_block) * BLOCK as u64,
            inodes,
            hides_lowers: self.hides_lowers,
            skipped_xattrs: self.skipped_xattrs,
            lower_links,
        };
        Ok((to.output, summary))
    }
}

impl<'a> DirectoryWriter<'a> {
    /// Places all directories in the metadata, which begins with this block.
    fn new(listing: DirectoryListing<'a>, metadata_block: u32) -> Result<DirectoryWriter<'a>, ErofsError> {
        let mut directories = vec![0; listing.live.len()];
        let (mut cursor, mut data_blocks) = (InodeCursor::new(), 0);
        for (dir, directory) in listing.directories() {
            let layout = listing.layout(dir, &directory)?;
            data_blocks += u64::from(layout.blocks);
            let slot = cursor.place(&layout) / SLOT as u64;
            directories[dir as usize] = u32::try_from(slot).map_err(|_| ErofsError::LayerTooLarge)?;
        }
        let inode_blocks = cursor.0.div_ceil(BLOCK as u64);
        let first_block = block_address(u64::from(metadata_block) + inode_blocks)?;
        let first_slot = (inode_blocks + data_blocks) * u64::from(SLOTS_PER_BLOCK);
        Ok(DirectoryWriter { listing, numbers: InodeNumbers { directories, first_slot }, first_block })
    }

    fn write_inodes<O: ErofsOutput>(&self, to: &mut Appender<O>) -> Result<(), ErofsError> {
        let (base, mut cursor) = (to.position(), InodeCursor::new());
        let mut next_block = self.first_block;
        for (dir, directory) in self.listing.directories() {
            let mut layout = self.listing.layout(dir, &directory)?;
            let offset = cursor.place(&layout);
            to.append_zeros(base + offset - to.position())?;
            if layout.blocks > 0 {
                layout.inode.place = next_block;
            }
            next_block += layout.blocks;
            to.append(&layout.inode.encode(&layout.xattrs))?;
            if layout.tail > 0 {
                let blocks = self.listing.encode(dir, &self.numbers);
                blocks.skip(layout.blocks as usize).try_for_each(|tail| to.append(&tail))?;
            }
        }
        to.pad()
    }

    fn write_data<O: ErofsOutput>(&self, to: &mut Appender<O>) -> Result<(), ErofsError> {
        for (dir, directory) in self.listing.directories() {
            let layout = self.listing.layout(dir, &directory)?;
            for block in self.listing.encode(dir, &self.numbers).take(layout.blocks as usize) {
                to.append(&block)?;
                to.pad()?;
            }
        }
        Ok(())
    }

    /// Slots of inodes that may have several names, each as often as it has a name, sorted.
    fn linked_slots(&self) -> Vec<u32> {
        let linked = || self.nodes().filter(|node| node.is_linked()).map(|node| node.target);
        let mut slots = Vec::with_capacity(linked().count());
        slots.extend(linked());
        slots.sort_unstable();
        slots
    }

    /// Number of all inodes that have a name.
    fn inodes(&self, linked_slots: &[u32]) -> u64 {
        let others = self.nodes().filter(|node| !node.is_linked()).count();
        let linked = linked_slots.chunk_by(|one, other| one == other).count();
        1 + (others + linked) as u64
    }

    fn nodes(&self) -> impl Iterator<Item = TreeNode> + '_ {
        self.listing.nodes().map(|node| self.listing.tree.node(node))
    }
}

/// Appends all inodes but those of directories, with the number of names of each inode that has several.
fn write_other_inodes<O: ErofsOutput>(
    blocks: MetadataBlocks,
    linked_slots: &[u32],
    to: &mut Appender<O>,
) -> Result<(), ErofsError> {
    block_address(to.position() / BLOCK as u64 + u64::from(blocks.count()))?;
    let mut links = linked_slots.chunk_by(|one, other| one == other).peekable();
    blocks.read(|first_slot, bytes| {
        put_links(&mut links, first_slot, bytes);
        to.append(bytes)
    })
}

/// Puts the number of names into those inodes that are in these blocks.
fn put_links<'a>(links: &mut Peekable<impl Iterator<Item = &'a [u32]>>, first_slot: u32, blocks: &mut [u8]) {
    while let Some(names) = links.next_if(|names| ((names[0] - first_slot) as usize) < blocks.len() / SLOT) {
        let at = (names[0] - first_slot) as usize * SLOT + NLINK_OFFSET;
        let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
        blocks[at..at + 4].copy_from_slice(&count.to_le_bytes());
    }
}
