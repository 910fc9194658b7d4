//! Blocks of inodes and file tails while they fill up.
//!
//! A record (an inode, its attributes, the tail of its data) must not cross a block, and records come in any size, so
//! several blocks are open at a time and a record is placed in the fullest one that has room. A block that has to make
//! way for a new one is written to a temporary file, in the place that it has among these blocks: they follow all data
//! in the layer, so the place of an inode among them is known at once, and its number at the end.

use crate::error::ErofsError;
use crate::format::{BLOCK, SLOT, SLOTS_PER_BLOCK};
use crate::output::ErofsScratch;

const OPEN_BLOCKS: usize = 16;
/// Blocks that are read at once.
const PIECE: u32 = 256;

struct OpenBlock {
    number: u32,
    bytes: Vec<u8>,
}

/// All metadata blocks but those of directories.
pub(crate) struct MetadataBlocks {
    open: Vec<OpenBlock>,
    /// Numbers and sizes of blocks that were open, and wait in the temporary file.
    parked: Vec<(u32, usize)>,
    /// Blocks so far.
    count: u32,
    scratch: Box<dyn ErofsScratch>,
    /// Bytes of the temporary file. It has holes where blocks are open.
    written: u64,
}

/// A record longer than a block, and where it goes on.
pub(crate) struct LongRecord {
    /// Of its inode.
    pub(crate) slot: u32,
    offset: u64,
}

impl MetadataBlocks {
    pub(crate) fn new(scratch: Box<dyn ErofsScratch>) -> MetadataBlocks {
        MetadataBlocks {
            open: Vec::with_capacity(OPEN_BLOCKS),
            parked: Vec::new(),
            count: 0,
            scratch,
            written: 0,
        }
    }

    /// Blocks so far.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of memory.
    pub(crate) fn memory(&self) -> usize {
        self.open.len() * BLOCK
    }

    /// Moves the open blocks to the temporary file, until [`MetadataBlocks::unpark`].
    pub(crate) fn park(&mut self) -> Result<(), ErofsError> {
        for block in std::mem::take(&mut self.open) {
            self.write_block(&block)?;
            self.parked.push((block.number, block.bytes.len()));
        }
        self.close();
        Ok(())
    }

    /// Reads the open blocks back: records go to the blocks to which they would have gone.
    pub(crate) fn unpark(&mut self) -> Result<(), ErofsError> {
        for (number, size) in std::mem::take(&mut self.parked) {
            let mut bytes = Vec::with_capacity(BLOCK);
            bytes.resize(size, 0);
            self.scratch.read_exact_at(&mut bytes, u64::from(number) * BLOCK as u64)?;
            self.open.push(OpenBlock { number, bytes });
        }
        Ok(())
    }

    /// Releases descriptors until the next record.
    pub(crate) fn close(&mut self) {
        self.scratch.close();
    }

    /// Stores a record of at most a block. Returns the slot of its inode.
    pub(crate) fn place(&mut self, record: &[u8]) -> Result<u32, ErofsError> {
        let fits = |block: &&mut OpenBlock| block.bytes.len() + record.len() <= BLOCK;
        let fullest = self.open.iter_mut().filter(fits).max_by_key(|block| block.bytes.len());
        if let Some(block) = fullest {
            return put(block, record);
        }
        let bytes = self.make_way()?;
        let mut block = OpenBlock { number: self.reserve(1)?, bytes };
        let slot = put(&mut block, record)?;
        self.open.push(block);
        Ok(slot)
    }

    /// Starts a record of `length` bytes, more than a block.
    pub(crate) fn start_long(&mut self, length: u64) -> Result<LongRecord, ErofsError> {
        let blocks = u32::try_from(length.div_ceil(BLOCK as u64)).map_err(|_| ErofsError::LayerTooLarge)?;
        let number = self.reserve(blocks)?;
        Ok(LongRecord { slot: number * SLOTS_PER_BLOCK, offset: u64::from(number) * BLOCK as u64 })
    }

    /// Stores the next bytes of a record.
    pub(crate) fn write(&mut self, record: &mut LongRecord, bytes: &[u8]) -> Result<(), ErofsError> {
        self.scratch.write_at(record.offset, bytes)?;
        record.offset += bytes.len() as u64;
        self.written = self.written.max(record.offset);
        Ok(())
    }

    /// Passes all blocks on, in order, many at a time, with the slot at which they begin.
    pub(crate) fn read(
        mut self,
        mut next: impl FnMut(u32, &mut [u8]) -> Result<(), ErofsError>,
    ) -> Result<(), ErofsError> {
        let mut buffer = Vec::new();
        for first in (0..self.count).step_by(PIECE as usize) {
            let numbers = first..self.count.min(first + PIECE);
            buffer.clear();
            buffer.resize(numbers.len() * BLOCK, 0);
            let offset = u64::from(first) * BLOCK as u64;
            let written = usize::try_from(self.written.saturating_sub(offset)).unwrap_or(usize::MAX);
            let written = written.min(buffer.len());
            self.scratch.read_exact_at(&mut buffer[..written], offset)?;
            for block in self.open.iter().filter(|block| numbers.contains(&block.number)) {
                let start = (block.number - first) as usize * BLOCK;
                buffer[start..start + block.bytes.len()].copy_from_slice(&block.bytes);
            }
            next(first * SLOTS_PER_BLOCK, &mut buffer)?;
        }
        Ok(())
    }

    /// An empty buffer for a new block, from the fullest of them if there are enough.
    fn make_way(&mut self) -> Result<Vec<u8>, ErofsError> {
        let fullest = self.open.iter().enumerate().max_by_key(|(_, block)| block.bytes.len());
        let Some((fullest, _)) = fullest.filter(|_| self.open.len() == OPEN_BLOCKS) else {
            return Ok(Vec::with_capacity(BLOCK));
        };
        let mut block = self.open.swap_remove(fullest);
        self.write_block(&block)?;
        block.bytes.clear();
        Ok(block.bytes)
    }

    fn write_block(&mut self, block: &OpenBlock) -> Result<(), ErofsError> {
        let offset = u64::from(block.number) * BLOCK as u64;
        self.scratch.write_at(offset, &block.bytes)?;
        self.written = self.written.max(offset + block.bytes.len() as u64);
        Ok(())
    }

    /// The number of the first of so many new blocks.
    fn reserve(&mut self, blocks: u32) -> Result<u32, ErofsError> {
        let number = self.count;
        let count = number.checked_add(blocks).filter(|count| *count < u32::MAX / SLOTS_PER_BLOCK);
        self.count = count.ok_or(ErofsError::LayerTooLarge)?;
        Ok(number)
    }
}

fn put(block: &mut OpenBlock, record: &[u8]) -> Result<u32, ErofsError> {
    let place = u32::try_from(block.bytes.len() / SLOT).map_err(|_| ErofsError::LayerTooLarge)?;
    block.bytes.extend_from_slice(record);
    block.bytes.resize(block.bytes.len().next_multiple_of(SLOT), 0);
    Ok(block.number * SLOTS_PER_BLOCK + place)
}
