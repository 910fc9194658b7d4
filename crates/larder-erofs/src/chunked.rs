//! A vector that grows without moving what is in it, so that growth needs no memory for two copies. It can wait in a
//! file.

use std::io;

use crate::output::ErofsScratch;

const BITS: usize = 13;
const MASK: usize = (1 << BITS) - 1;

/// A value that has the same number of bytes in a file, always.
pub(crate) trait FileRecord: Copy {
    const SIZE: usize;

    /// Appends its bytes.
    fn encode(self, to: &mut Vec<u8>);

    fn decode(bytes: &[u8]) -> Self;
}

/// The little-endian number of 32 bits that is the `at`th of a record.
pub(crate) fn u32_at(record: &[u8], at: usize) -> u32 {
    record.get(4 * at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

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

impl<T: FileRecord> ChunkedVec<T> {
    /// Writes all values to a file, from an offset on. Returns where they end.
    pub(crate) fn write(&self, file: &mut dyn ErofsScratch, offset: u64) -> io::Result<u64> {
        let (mut end, mut bytes) = (offset, Vec::with_capacity(T::SIZE << BITS));
        for chunk in &self.chunks {
            bytes.clear();
            for value in chunk {
                value.encode(&mut bytes);
            }
            file.write_at(end, &bytes)?;
            end += bytes.len() as u64;
        }
        Ok(end)
    }

    /// Reads as many values from an offset of a file. Returns where they end, too.
    pub(crate) fn read(
        file: &mut dyn ErofsScratch,
        offset: u64,
        count: usize,
    ) -> io::Result<(ChunkedVec<T>, u64)> {
        let (mut end, mut left, mut chunks) = (offset, count, Vec::new());
        let mut bytes = vec![0; T::SIZE << BITS];
        while left > 0 {
            let length = left.min(1 << BITS);
            let bytes = &mut bytes[..length * T::SIZE];
            file.read_exact_at(bytes, end)?;
            let mut chunk = Vec::with_capacity(1 << BITS);
            chunk.extend(bytes.chunks_exact(T::SIZE).map(T::decode));
            chunks.push(chunk);
            end += bytes.len() as u64;
            left -= length;
        }
        Ok((ChunkedVec { chunks }, end))
    }
}
