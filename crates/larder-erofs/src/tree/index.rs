//! Finds nodes by the hash of directory and name.
//!
//! Open addressing in 64 tables: each grows on its own, so that growth never needs much memory at once. An element has
//! 8 bits of the hash, and nearly all nodes of other names are passed over without a look at them.

const SHARDS: usize = 64;
const EMPTY: u32 = u32::MAX;
const NODE_BITS: u32 = 24;
/// Nodes, at most: what fits beside the hash, but for the one that could look [`EMPTY`].
pub(super) const MAX_NODES: usize = (1 << NODE_BITS) - 1;
const FIRST_SIZE: usize = 64;

#[derive(Clone, Default)]
struct IndexShard {
    slots: Vec<u32>,
    used: usize,
}

/// Numbers of nodes by hash.
pub(super) struct NodeIndex {
    shards: Vec<IndexShard>,
}

impl NodeIndex {
    pub(super) fn new() -> NodeIndex {
        NodeIndex { shards: vec![IndexShard::default(); SHARDS] }
    }

    /// An index that has room for so many nodes.
    pub(super) fn with_capacity(nodes: usize) -> NodeIndex {
        // Hashes do not spread evenly: a tenth more than the share of a table.
        let share = nodes / SHARDS + nodes / SHARDS / 10;
        let slots = if nodes == 0 { Vec::new() } else { vec![EMPTY; share * 5 / 4 + FIRST_SIZE] };
        NodeIndex { shards: vec![IndexShard { slots, used: 0 }; SHARDS] }
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.shards.iter().map(|shard| shard.slots.len() * size_of::<u32>()).sum()
    }

    /// The node with this hash for which `is_it` holds.
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let slots = &self.shards[shard_of(hash)].slots;
        if slots.is_empty() {
            return None;
        }
        let mut at = start(hash, slots.len());
        while slots[at] != EMPTY {
            let node = slots[at] & (EMPTY >> (32 - NODE_BITS));
            if slots[at] >> NODE_BITS == tag(hash) && is_it(node) {
                return Some(node);
            }
            at = next(at, slots.len());
        }
        None
    }

    /// Adds a node that is not in it. `hash_of` gives the hash of any node in it.
    pub(super) fn insert(&mut self, hash: u64, node: u32, hash_of: impl Fn(u32) -> u64) {
        let shard = &mut self.shards[shard_of(hash)];
        if (shard.used + 1) * 5 > shard.slots.len() * 4 {
            let size = (shard.slots.len() + shard.slots.len() / 2).max(FIRST_SIZE);
            let old = std::mem::replace(&mut shard.slots, vec![EMPTY; size]);
            for element in old.into_iter().filter(|element| *element != EMPTY) {
                let node = element & (EMPTY >> (32 - NODE_BITS));
                put(&mut shard.slots, hash_of(node), node);
            }
        }
        shard.used += 1;
        put(&mut shard.slots, hash, node);
    }
}

fn put(slots: &mut [u32], hash: u64, node: u32) {
    let mut at = start(hash, slots.len());
    while slots[at] != EMPTY {
        at = next(at, slots.len());
    }
    slots[at] = tag(hash) << NODE_BITS | node;
}

fn shard_of(hash: u64) -> usize {
    usize::try_from(hash >> 58).unwrap_or(0)
}

fn tag(hash: u64) -> u32 {
    u32::from(hash.to_le_bytes()[4])
}

/// The lower half of the hash, scaled to a size that is no power of two.
fn start(hash: u64, size: usize) -> usize {
    usize::try_from(((hash & 0xFFFF_FFFF) * size as u64) >> 32).unwrap_or(0)
}

fn next(at: usize, size: usize) -> usize {
    if at + 1 == size { 0 } else { at + 1 }
}
