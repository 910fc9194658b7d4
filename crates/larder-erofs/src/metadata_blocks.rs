//! Blocks of inodes and file tails while they fill up.
//!
//! A record (an inode, its attributes, the tail of its data) must not cross a block, and records come in any size, so
//! several blocks are open at a time and a record is placed in the fullest one that has room. A block is appended
//! to the layer when it has to make way for a new one; only then its address is known. Until the end an inode is known by its
//! slot: number of the metadata block and place in it.

use crate::chunked::ChunkedVec;
use crate::error::ErofsError;
use crate::format::{BLOCK, HOLE, SLOT};
use crate::output::{Appender, ErofsOutput};

const OPEN_BLOCKS: usize = 16;
#[expect(clippy::cast_possible_truncation, reason = "128")]
const SLOTS_PER_BLOCK: u32 = (BLOCK / SLOT) as u32;

struct OpenBlock {
    number: u32,
    bytes: Vec<u8>,
}

/// All metadata blocks but those of directories.
pub(crate) struct MetadataBlocks {
    open: Vec<OpenBlock>,
    /// Of each block, its address in the layer.
    addresses: ChunkedVec<u32>,
}

impl MetadataBlocks {
    pub(crate) fn new() -> MetadataBlocks {
        MetadataBlocks { open: Vec::with_capacity(OPEN_BLOCKS), addresses: ChunkedVec::new() }
    }

    /// Bytes of memory.
    pub(crate) fn memory(&self) -> usize {
        self.addresses.memory()
    }

    /// Stores a record of at most a block. Appends at most one block. Returns its slot.
    pub(crate) fn place<O: ErofsOutput>(
        &mut self,
        record: &[u8],
        to: &mut Appender<O>,
    ) -> Result<u32, ErofsError> {
        let fits = |block: &&mut OpenBlock| block.bytes.len() + record.len() <= BLOCK;
        let fullest = self.open.iter_mut().filter(fits).max_by_key(|block| block.bytes.len());
        if let Some(block) = fullest {
            return put(block, record);
        }
        let bytes = self.make_way(to)?;
        let mut block = OpenBlock { number: self.number(HOLE)?, bytes };
        let slot = put(&mut block, record)?;
        self.open.push(block);
        Ok(slot)
    }

    /// Starts a record that is longer than a block, and appends its beginning; the caller appends the rest. Returns its
    /// slot.
    pub(crate) fn start_long<O: ErofsOutput>(
        &mut self,
        beginning: &[u8],
        to: &mut Appender<O>,
    ) -> Result<u32, ErofsError> {
        let block = to.block()?;
        to.append(beginning)?;
        first_slot(self.number(block)?)
    }

    /// Appends all that is still open.
    pub(crate) fn flush<O: ErofsOutput>(&mut self, to: &mut Appender<O>) -> Result<(), ErofsError> {
        for block in std::mem::take(&mut self.open) {
            self.close(&block, to)?;
        }
        Ok(())
    }

    /// Offset of an inode in the layer, in units of slots. Its block must have been appended.
    pub(crate) fn inode_number(&self, slot: u32) -> u64 {
        let address = self.addresses.get(slot / SLOTS_PER_BLOCK);
        u64::from(address) * u64::from(SLOTS_PER_BLOCK) + u64::from(slot % SLOTS_PER_BLOCK)
    }

    /// An empty buffer for a new block, from the fullest of them if there are enough.
    fn make_way<O: ErofsOutput>(&mut self, to: &mut Appender<O>) -> Result<Vec<u8>, ErofsError> {
        let fullest = self.open.iter().enumerate().max_by_key(|(_, block)| block.bytes.len());
        let Some((fullest, _)) = fullest.filter(|_| self.open.len() == OPEN_BLOCKS) else {
            return Ok(Vec::with_capacity(BLOCK));
        };
        let mut block = self.open.swap_remove(fullest);
        self.close(&block, to)?;
        block.bytes.clear();
        Ok(block.bytes)
    }

    fn close<O: ErofsOutput>(&mut self, block: &OpenBlock, to: &mut Appender<O>) -> Result<(), ErofsError> {
        *self.addresses.get_mut(block.number) = to.block()?;
        to.append(&block.bytes)?;
        to.pad()
    }

    fn number(&mut self, address: u32) -> Result<u32, ErofsError> {
        let number = u32::try_from(self.addresses.len()).map_err(|_| ErofsError::LayerTooLarge)?;
        self.addresses.push(address);
        Ok(number)
    }
}

fn put(block: &mut OpenBlock, record: &[u8]) -> Result<u32, ErofsError> {
    let place = u32::try_from(block.bytes.len() / SLOT).map_err(|_| ErofsError::LayerTooLarge)?;
    block.bytes.extend_from_slice(record);
    block.bytes.resize(block.bytes.len().next_multiple_of(SLOT), 0);
    Ok(first_slot(block.number)? + place)
}

fn first_slot(number: u32) -> Result<u32, ErofsError> {
    number
        .checked_mul(SLOTS_PER_BLOCK)
        .filter(|first| *first < u32::MAX - SLOTS_PER_BLOCK)
        .ok_or(ErofsError::LayerTooLarge)
}
