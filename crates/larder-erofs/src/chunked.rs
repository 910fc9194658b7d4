//! A vector that grows without moving what is in it, so that growth needs no memory for two copies.

const BITS: usize = 13;
const MASK: usize = (1 << BITS) - 1;

/// Values by index, in pieces of 8192.
#[derive(Debug)]
pub(crate) struct ChunkedVec<T> {
    chunks: Vec<Vec<T>>,
}

impl<T: Copy> ChunkedVec<T> {
    pub(crate) fn new() -> ChunkedVec<T> {
        ChunkedVec { chunks: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.chunks.last().map_or(0, |last| ((self.chunks.len() - 1) << BITS) + last.len())
    }

    /// Bytes of memory.
    pub(crate) fn memory(&self) -> usize {
        (self.chunks.len() << BITS) * size_of::<T>()
    }

    pub(crate) fn push(&mut self, value: T) {
        match self.chunks.last_mut() {
            Some(last) if last.len() <= MASK => last.push(value),
            _ => {
                let mut chunk = Vec::with_capacity(1 << BITS);
                chunk.push(value);
                self.chunks.push(chunk);
            }
        }
    }

    pub(crate) fn get(&self, at: u32) -> T {
        let at = at as usize;
        self.chunks[at >> BITS][at & MASK]
    }

    pub(crate) fn get_mut(&mut self, at: u32) -> &mut T {
        let at = at as usize;
        &mut self.chunks[at >> BITS][at & MASK]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.chunks.iter().flatten().copied()
    }
}
