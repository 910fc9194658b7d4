//! The end of a layer: directories, numbers of links, superblock.
//!
//! All directories' sizes are known before the first is written, and so are the places of all inodes. Data of large
//! directories comes first, then the inodes, each with the rest of its directory's data.

use crate::error::{EntryProblem, ErofsError};
use crate::format::{BLOCK, INODE, NLINK_OFFSET, ROOT_NID, ROOT_OFFSET, SLOT, Superblock};
use crate::metadata_blocks::MetadataBlocks;
use crate::output::{Appender, ErofsOutput, block_address};
use crate::tree::{DirId, ROOT, TreeDirectory, TreeNode};

use super::directories::{DirectoryLayout, DirectoryListing, InodeNumbers};
use super::{ErofsSummary, ErofsWriter};

/// Writes directories.
struct DirectoryWriter<'a> {
    listing: DirectoryListing<'a>,
    numbers: InodeNumbers<'a>,
    /// First block of all directories' data.
    first_block: u32,
}

/// The place that comes next among the inodes of directories.
#[derive(Default)]
struct InodeCursor(u64);

impl InodeCursor {
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
        self.resolve_links()?;
        let lower_links = self.lower_links().count() as u64;
        self.blocks.flush(&mut self.to)?;
        self.tree.seal();
        let ErofsWriter { mut to, tree, blocks, .. } = self;
        let listing = DirectoryListing::new(&tree);
        let first_block = to.block()?;
        let (slots, data_blocks) = place_directories(&listing)?;
        let first = (u64::from(first_block) + data_blocks) * (BLOCK / SLOT) as u64;
        let numbers = InodeNumbers { blocks: &blocks, slots: &slots, first };
        let mut writer = DirectoryWriter { listing, numbers, first_block };
        writer.write_data(&mut to)?;
        writer.write_inodes(&mut to)?;
        let size = to.position();
        let inodes = writer.write_links(&blocks, &mut to)?;
        let mut block = writer.root()?;
        let superblock = Superblock {
            blocks: block_address(size / BLOCK as u64)?,
            inodes,
            metadata_block: 0,
            root: ROOT_NID,
            uuid: self.options.uuid,
            has_chunks: self.has_chunks,
        };
        superblock.put(&mut block);
        to.output.write_at(0, &block)?;
        let summary = ErofsSummary {
            size,
            inodes,
            hides_lowers: self.hides_lowers,
            skipped_xattrs: self.skipped_xattrs,
            lower_links,
        };
        Ok((to.output, summary))
    }
}

/// Bytes of a block behind its beginning that the root's inode, or any other one, may take.
fn room(dir: DirId) -> usize {
    if dir == ROOT { BLOCK - ROOT_OFFSET } else { BLOCK }
}

/// Of each directory but the root, its slot among the inodes of directories. And the number of blocks of data.
fn place_directories(listing: &DirectoryListing<'_>) -> Result<(Vec<u32>, u64), ErofsError> {
    let mut slots = vec![0; listing.live.len()];
    let (mut cursor, mut blocks) = (InodeCursor::default(), 0);
    for (dir, directory) in listing.directories() {
        let layout = listing.layout(dir, &directory, room(dir))?;
        blocks += u64::from(layout.blocks);
        if dir != ROOT {
            let slot = cursor.place(&layout) / SLOT as u64;
            slots[dir as usize] = u32::try_from(slot).map_err(|_| ErofsError::LayerTooLarge)?;
        }
    }
    Ok((slots, blocks))
}

impl DirectoryWriter<'_> {
    fn write_data<O: ErofsOutput>(&self, to: &mut Appender<O>) -> Result<(), ErofsError> {
        for (dir, directory) in self.listing.directories() {
            let layout = self.listing.layout(dir, &directory, room(dir))?;
            for block in self.listing.encode(dir, &self.numbers).take(layout.blocks as usize) {
                to.append(&block)?;
                to.pad()?;
            }
        }
        Ok(())
    }

    fn write_inodes<O: ErofsOutput>(&mut self, to: &mut Appender<O>) -> Result<(), ErofsError> {
        let (base, mut cursor) = (to.position(), InodeCursor::default());
        let mut next_block = self.first_block;
        for (dir, directory) in self.listing.directories() {
            let mut layout = self.listing.layout(dir, &directory, room(dir))?;
            if dir != ROOT {
                let offset = cursor.place(&layout);
                to.append_zeros(base + offset - to.position())?;
                to.append(&self.encode(dir, &mut layout, next_block))?;
            }
            next_block += layout.blocks;
        }
        to.pad()
    }

    /// An inode, its attributes, and the data that follows.
    fn encode(&self, dir: DirId, layout: &mut DirectoryLayout, first_block: u32) -> Vec<u8> {
        if layout.blocks > 0 {
            layout.inode.place = first_block;
        }
        let mut record = layout.inode.encode(&layout.xattrs);
        if layout.tail > 0 {
            record.extend(self.listing.encode(dir, &self.numbers).skip(layout.blocks as usize).flatten());
        }
        record
    }

    /// Block 0 with the root's inode. The root's data is the first of all directories'.
    fn root(&self) -> Result<[u8; BLOCK], ErofsError> {
        let mut block = [0; BLOCK];
        let root: TreeDirectory = self.listing.tree.directory(ROOT);
        let mut layout = self.listing.layout(ROOT, &root, room(ROOT))?;
        let record = self.encode(ROOT, &mut layout, self.first_block);
        let end = ROOT_OFFSET + record.len();
        let place = block.get_mut(ROOT_OFFSET..end);
        let place = place.ok_or_else(|| ErofsError::rejected(b"/", EntryProblem::XattrSpace))?;
        place.copy_from_slice(&record);
        Ok(block)
    }

    /// Writes the number of names of each inode that has several. Returns the number of all inodes.
    fn write_links<O: ErofsOutput>(
        &self,
        blocks: &MetadataBlocks,
        to: &mut Appender<O>,
    ) -> Result<u64, ErofsError> {
        let tree = self.listing.tree;
        let is_shared = |node: &TreeNode| node.is_linked();
        let nodes = || self.listing.nodes().map(|node| tree.node(node));
        let mut shared = Vec::with_capacity(nodes().filter(is_shared).count());
        shared.extend(nodes().filter(is_shared).map(|node| node.target));
        shared.sort_unstable();
        let mut inodes = 1 + nodes().filter(|node| !node.is_linked()).count() as u64;
        for names in shared.chunk_by(|one, other| one == other) {
            inodes += 1;
            if names.len() > 1 {
                let links = u32::try_from(names.len()).unwrap_or(u32::MAX);
                let offset = blocks.inode_number(names[0]) * SLOT as u64 + NLINK_OFFSET;
                to.output.write_at(offset, &links.to_le_bytes())?;
            }
        }
        Ok(inodes)
    }
}
