//! Where a layer is written.

use std::io;

use crate::error::ErofsError;
use crate::format::BLOCK;

/// Receives the bytes of a layer.
///
/// A layer is written from its beginning to its end by [`append`](ErofsOutput::append), and by
/// [`skip`](ErofsOutput::skip) in a layer whose data comes later. Only
/// [`ErofsWriter::finish`](crate::ErofsWriter::finish) calls [`write_at`](ErofsOutput::write_at), after the last
/// `append`: for block 0.
pub trait ErofsOutput {
    /// Adds `bytes` to the end. Pieces may be small: an implementation that makes system calls collects them.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Adds this many bytes of file data that come later, by other ways than the writer. Until then they are zero.
    fn skip(&mut self, count: u64) -> io::Result<()> {
        zeros(count).try_for_each(|piece| self.append(piece))
    }

    /// Replaces bytes that were appended.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// An empty temporary file for what the layer takes at its end, which ends with the returned value.
    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>>;
}

/// A temporary file of a layer that is being written.
pub trait ErofsScratch: Send {
    /// Writes bytes at an offset, which may be behind the end: bytes between are zero.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads bytes that were written.
    fn read_exact_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Releases descriptors until the next access.
    fn close(&mut self);
}

impl<O: ErofsOutput + ?Sized> ErofsOutput for &mut O {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        (**self).append(bytes)
    }

    fn skip(&mut self, count: u64) -> io::Result<()> {
        (**self).skip(count)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        (**self).write_at(offset, bytes)
    }

    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        (**self).scratch()
    }
}

/// Appends to a vector, which must be empty at first.
impl ErofsOutput for Vec<u8> {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.extend_from_slice(bytes);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let at = usize::try_from(offset).ok().and_then(|at| Some(at..at.checked_add(bytes.len())?));
        let place = at.and_then(|at| self.get_mut(at)).ok_or(io::ErrorKind::InvalidInput)?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        Ok(Box::new(Vec::new()))
    }
}

/// A temporary file in memory.
impl ErofsScratch for Vec<u8> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let end = start.checked_add(bytes.len()).ok_or(io::ErrorKind::FileTooLarge)?;
        self.resize(self.len().max(end), 0);
        self[start..end].copy_from_slice(bytes);
        Ok(())
    }

    fn read_exact_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        crate::ErofsInput::read_exact_at(self.as_slice(), buffer, offset)
    }

    fn close(&mut self) {}
}

static ZEROS: [u8; 16 * BLOCK] = [0; 16 * BLOCK];

/// So many zeros, in pieces.
fn zeros(count: u64) -> impl Iterator<Item = &'static [u8]> {
    let mut left = count;
    std::iter::from_fn(move || {
        let piece = usize::try_from(left).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
        left -= piece as u64;
        (piece > 0).then(|| &ZEROS[..piece])
    })
}

/// An output and the number of bytes in it.
pub(crate) struct Appender<O> {
    pub(crate) output: O,
    position: u64,
}

impl<O: ErofsOutput> Appender<O> {
    pub(crate) fn new(output: O) -> Appender<O> {
        Appender { output, position: 0 }
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), ErofsError> {
        self.output.append(bytes)?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    /// Leaves out bytes that come later.
    pub(crate) fn skip(&mut self, count: u64) -> Result<(), ErofsError> {
        self.output.skip(count)?;
        self.position += count;
        Ok(())
    }

    pub(crate) fn append_zeros(&mut self, count: u64) -> Result<(), ErofsError> {
        zeros(count).try_for_each(|piece| self.append(piece))
    }

    /// Zeros up to the next block.
    pub(crate) fn pad(&mut self) -> Result<(), ErofsError> {
        self.append_zeros(self.position.wrapping_neg() % BLOCK as u64)
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// The next block. All bytes before it are complete.
    pub(crate) fn block(&self) -> Result<u32, ErofsError> {
        block_address(self.position / BLOCK as u64)
    }
}

/// A block number that fits; the last one means "no block".
pub(crate) fn block_address(block: u64) -> Result<u32, ErofsError> {
    u32::try_from(block).ok().filter(|block| *block != u32::MAX).ok_or(ErofsError::LayerTooLarge)
}
