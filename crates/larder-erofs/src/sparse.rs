//! Files with holes: which chunks they consist of, and which of them have data.
//!
//! A file of chunks has a map with one block address for each chunk. Small chunks need a large map, large chunks are
//! filled up with zeros, so the size is chosen that costs least.

use std::iter;

use crate::error::EntryProblem;
use crate::format::{BLOCK, HOLE, MAX_CHUNK_BITS};

/// Bytes for maps and padding, at most.
const MAX_OVERHEAD: u64 = 256 << 20;

/// How a sparse file is stored.
#[derive(Debug)]
pub(crate) struct ChunkLayout {
    pub(crate) size: u64,
    /// With data only, in order.
    extents: Vec<(u64, u64)>,
    /// Base-2 logarithm of the blocks in a chunk.
    pub(crate) block_bits: u32,
}

impl ChunkLayout {
    /// The cheapest layout. `None` for a file without holes.
    pub(crate) fn choose(size: u64, extents: &[(u64, u64)]) -> Result<Option<ChunkLayout>, EntryProblem> {
        let data = sparse_content(size, extents).ok_or(EntryProblem::SparseMap)?;
        if data == size {
            return Ok(None);
        }
        let extents: Vec<_> = extents.iter().copied().filter(|(_, length)| *length > 0).collect();
        let mut layout = ChunkLayout { size, extents, block_bits: 0 };
        let cost_of = |block_bits| {
            layout.block_bits = block_bits;
            (layout.cost(), block_bits)
        };
        let (cost, block_bits) = (0..=MAX_CHUNK_BITS).map(cost_of).min().unwrap_or_default();
        if cost.saturating_sub(data) > MAX_OVERHEAD {
            return Err(EntryProblem::SparseOverhead);
        }
        layout.block_bits = block_bits;
        Ok(Some(layout))
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_size(&self) -> u64 {
        (BLOCK as u64) << self.block_bits
    }

    /// Bytes of data, without holes.
    pub(crate) fn data_size(&self) -> u64 {
        self.extents.iter().map(|(_, length)| length).sum()
    }

    /// Entries of the map.
    pub(crate) fn chunks(&self) -> u64 {
        self.size.div_ceil(self.chunk_size())
    }

    /// Where the data at `offset` of all extents' bytes belongs in the file, and how many bytes follow it there.
    pub(crate) fn locate(&self, extent: usize, offset: u64) -> Option<(u64, u64)> {
        let (start, length) = self.extents.get(extent)?;
        Some((start + offset, length - offset))
    }

    /// The end of the blocks of the chunk that has this byte: a chunk at the end of the file is shorter.
    pub(crate) fn chunk_end(&self, offset: u64) -> u64 {
        let end = (offset / self.chunk_size() + 1).saturating_mul(self.chunk_size());
        end.min(self.size.next_multiple_of(BLOCK as u64))
    }

    /// The map, if the chunks with data follow each other from block `first` on.
    pub(crate) fn map(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let mut next = u64::from(first);
        let mut at = 0;
        let filled = self.filled().flat_map(move |(from, to)| {
            let holes = iter::repeat_n(HOLE, usize::try_from(from - at).unwrap_or(usize::MAX));
            at = to;
            let start = next;
            next += (to - from) << self.block_bits;
            let addresses = (0..to - from).map(move |chunk| start + (chunk << self.block_bits));
            holes.chain(addresses.map(|address| u32::try_from(address).unwrap_or(HOLE)))
        });
        let rest = self.chunks() - self.filled().last().map_or(0, |(_, to)| to);
        filled.chain(iter::repeat_n(HOLE, usize::try_from(rest).unwrap_or(usize::MAX)))
    }

    /// Bytes of all chunks with data, and of the map.
    fn cost(&self) -> u64 {
        let filled: u64 = self.filled().map(|(from, to)| to - from).sum();
        filled.saturating_mul(self.chunk_size()).saturating_add(self.chunks().saturating_mul(4))
    }

    /// Ranges of chunks with data, each chunk once.
    fn filled(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut end = 0;
        self.extents.iter().filter_map(move |(offset, length)| {
            let from = (offset / self.chunk_size()).max(end);
            let to = (offset + length - 1) / self.chunk_size() + 1;
            end = to.max(end);
            (from < to).then_some((from, to))
        })
    }
}

/// Returns the bytes of all extents of a sparse file, if they are in order, apart, and inside the file.
pub fn sparse_content(size: u64, extents: &[(u64, u64)]) -> Option<u64> {
    let (mut end, mut sum) = (0, 0u64);
    for (offset, length) in extents {
        if *offset < end {
            return None;
        }
        end = offset.checked_add(*length)?;
        sum += length;
    }
    (end <= size && i64::try_from(size).is_ok()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: u64, extents: &[(u64, u64)]) -> ChunkLayout {
        ChunkLayout::choose(size, extents).unwrap().unwrap()
    }

    #[test]
    fn a_map_must_be_in_order_and_fit() {
        for (extents, size, content) in [
            (&[(0, 10), (20, 5)][..], 30, Some(15)),
            (&[(0, 10), (10, 5)], 15, Some(15)),
            (&[], 1000, Some(0)),
            (&[(0, 10), (9, 5)], 30, None),
            (&[(0, 10)], 9, None),
            (&[(u64::MAX, 1)], u64::MAX, None),
        ] {
            assert_eq!(sparse_content(size, extents), content, "{extents:?} {size}");
        }
    }

    #[test]
    fn the_map_has_an_address_for_each_chunk_with_data() {
        let file = layout(10 * 4096 + 5, &[(4096 + 7, 10), (4096 + 30, 4096), (9 * 4096, 1), (10 * 4096, 5)]);
        assert_eq!(file.block_bits, 0);
        let map: Vec<u32> = file.map(100).collect();
        assert_eq!(map, [HOLE, 100, 101, HOLE, HOLE, HOLE, HOLE, HOLE, HOLE, 102, 103]);
        assert_eq!(file.data_size(), 10 + 4096 + 1 + 5);
    }

    #[test]
    fn a_huge_hole_costs_little() {
        let empty = layout(i64::MAX as u64, &[]);
        assert!(empty.cost() <= 4 << 20, "{}", empty.cost());
        let last_login = layout(292 * 0x7fff_ffff, &[(0, 292), (292_000, 292), (292 * 0x7fff_fffe, 292)]);
        assert!(last_login.cost() < 8 << 20, "{}", last_login.cost());
    }

    #[test]
    fn invalid_and_wasteful_maps_are_rejected() {
        for (size, extents) in [(10, &[(5, 6)][..]), (30, &[(10, 5), (9, 1)]), (9, &[(0, u64::MAX)])] {
            assert_eq!(ChunkLayout::choose(size, extents).unwrap_err(), EntryProblem::SparseMap);
        }
        assert!(ChunkLayout::choose(15, &[(0, 10), (10, 5)]).unwrap().is_none());
        let far_apart: Vec<(u64, u64)> = (0..10_000).map(|at| (at << 49, 1)).collect();
        let problem = ChunkLayout::choose(i64::MAX as u64, &far_apart).unwrap_err();
        assert_eq!(problem, EntryProblem::SparseOverhead);
    }
}
