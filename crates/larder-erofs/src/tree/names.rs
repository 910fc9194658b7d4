//! Names, one after the other, each with its length before it. Frequent names are stored once.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

/// Bytes of one piece of memory; a name is in one piece.
const CHUNK_BITS: usize = 16;
/// As many recent names are recognised.
const RECENT: usize = 1 << 14;
const NONE: u32 = u32::MAX;

/// Names by the place where they start.
pub(super) struct NameArena {
    chunks: Vec<Vec<u8>>,
    /// A name of this hash, or [`NONE`].
    recent: Vec<u32>,
    /// Keyed at random, since archives choose the names. It decides where something is in memory, never in the layer.
    hasher: RandomState,
}

impl NameArena {
    pub(super) fn new() -> NameArena {
        NameArena { chunks: Vec::new(), recent: vec![NONE; RECENT], hasher: RandomState::new() }
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.chunks.len() << CHUNK_BITS
    }

    pub(super) fn hash(&self, dir: u32, name: &[u8]) -> u64 {
        let mut mixed = self.hasher.hash_one(name) ^ u64::from(dir).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for _ in 0..2 {
            mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        }
        mixed ^ (mixed >> 32)
    }

    /// Stores a name of at most 255 bytes.
    pub(super) fn add(&mut self, name: &[u8]) -> u32 {
        let slot = usize::try_from(self.hash(0, name) % RECENT as u64).unwrap_or(0);
        let recent = self.recent[slot];
        if recent != NONE && self.name(recent) == name {
            return recent;
        }
        let added = self.store(name, &[]);
        self.recent[slot] = added;
        added
    }

    /// Stores a name and, behind it, the text of a symbolic link.
    pub(super) fn add_symlink(&mut self, name: &[u8], link: &[u8]) -> u32 {
        let length = u16::try_from(link.len()).unwrap_or(u16::MAX).to_le_bytes();
        self.store(name, &[&length, link])
    }

    pub(super) fn name(&self, at: u32) -> &[u8] {
        let (chunk, start) = self.place(at);
        &chunk[start + 1..=start + usize::from(chunk[start])]
    }

    /// What [`NameArena::add_symlink`] stored.
    pub(super) fn link(&self, at: u32) -> &[u8] {
        let (chunk, start) = self.place(at);
        let start = start + 1 + usize::from(chunk[start]);
        let length = u16::from_le_bytes([chunk[start], chunk[start + 1]]);
        &chunk[start + 2..start + 2 + usize::from(length)]
    }

    fn place(&self, at: u32) -> (&[u8], usize) {
        let at = at as usize;
        (&self.chunks[at >> CHUNK_BITS], at & ((1 << CHUNK_BITS) - 1))
    }

    fn store(&mut self, name: &[u8], more: &[&[u8]]) -> u32 {
        let length = 1 + name.len() + more.iter().map(|part| part.len()).sum::<usize>();
        let is_full = |chunk: &Vec<u8>| chunk.len() + length > 1 << CHUNK_BITS;
        if self.chunks.last().is_none_or(is_full) {
            self.chunks.push(Vec::with_capacity(1 << CHUNK_BITS));
        }
        let number = self.chunks.len() - 1;
        let chunk = &mut self.chunks[number];
        let at = (number << CHUNK_BITS) + chunk.len();
        chunk.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        chunk.extend_from_slice(name);
        for part in more {
            chunk.extend_from_slice(part);
        }
        u32::try_from(at).unwrap_or(NONE)
    }
}
