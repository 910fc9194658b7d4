//! Passes uncompressed bytes from the decompressor to the archive parser: in recycled buffers, hashed and counted.

use std::io::Read;
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use larder::reference::{Digest, DigestHasher};

use super::decompress::LayerDecoder;
use super::options::LayerByteCounts;
use super::source::check_digest;
use super::{LayerEncoding, UnpackError, UnpackOptions};
use crate::disk::DiskSpace;

/// Size of a buffer between two threads, and how many there are. What is hashed is written a moment later: with larger
/// ones it has left the core's cache by then, and a pull takes a fifth longer.
const SHARED_BUFFER: usize = 128 << 10;
const SHARED_BUFFERS: usize = 8;

/// Size of the buffer on one thread: it fits into the core's cache.
const OWN_BUFFER: usize = 128 << 10;

/// Where buffers of plain bytes come from.
pub(crate) trait BufferSource {
    /// Replaces the used-up buffer by the next one; an empty one is the end.
    fn refill(&mut self, buffer: &mut Buffer) -> Result<(), UnpackError>;
}

impl<S: BufferSource + ?Sized> BufferSource for &mut S {
    fn refill(&mut self, buffer: &mut Buffer) -> Result<(), UnpackError> {
        (**self).refill(buffer)
    }
}

/// Bytes `start..end` are unread.
#[derive(Default)]
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Inflates on the caller's thread.
pub(super) fn inline<R: Read>(decoder: &mut LayerDecoder<R>) -> impl BufferSource {
    OwnBuffers(|buffer: &mut [u8]| decoder.fill(buffer).map_err(|_| UnpackError::Hangup))
}

/// Reads plain bytes on the caller's thread.
pub(crate) fn from_reader<R: Read>(mut reader: R) -> impl BufferSource + use<R> {
    OwnBuffers(move |buffer: &mut [u8]| {
        loop {
            match reader.read(buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => break read.map_err(UnpackError::Read),
            }
        }
    })
}

/// Fills one buffer again and again.
struct OwnBuffers<F>(F);

impl<F: FnMut(&mut [u8]) -> Result<usize, UnpackError>> BufferSource for OwnBuffers<F> {
    fn refill(&mut self, buffer: &mut Buffer) -> Result<(), UnpackError> {
        if buffer.bytes.is_empty() {
            buffer.bytes = vec![0; OWN_BUFFER].into_boxed_slice();
        }
        buffer.start = 0;
        buffer.end = (self.0)(&mut buffer.bytes)?;
        Ok(())
    }
}

/// Two ends for two threads: the pump fills buffers, the feed hands them out and gives them back.
pub(super) fn channel() -> (BufferProducer, BufferConsumer) {
    let (full_sender, full) = sync_channel(SHARED_BUFFERS);
    let (empty, empty_receiver) = sync_channel(SHARED_BUFFERS);
    (BufferProducer { full: full_sender, empty: empty_receiver, made: 0 }, BufferConsumer { full, empty })
}

/// The inflating thread's end.
pub(super) struct BufferProducer {
    full: SyncSender<Buffer>,
    empty: Receiver<Buffer>,
    made: usize,
}

impl BufferProducer {
    /// Runs until the stream ends or fails, or the other end goes away. The end is sent as an empty buffer, so that a
    /// failure, which closes the channel, is never taken for it.
    pub(super) fn run<R: Read>(mut self, decoder: &mut LayerDecoder<R>) {
        loop {
            let Some(mut buffer) = self.empty_buffer() else { return };
            let Ok(filled) = decoder.fill(&mut buffer.bytes) else { return };
            (buffer.start, buffer.end) = (0, filled);
            if self.full.send(buffer).is_err() || filled == 0 {
                return;
            }
        }
    }

    /// A used one if there is one, a new one while there are few.
    fn empty_buffer(&mut self) -> Option<Buffer> {
        if let Ok(buffer) = self.empty.try_recv() {
            return Some(buffer);
        }
        if self.made < SHARED_BUFFERS {
            self.made += 1;
            return Some(Buffer { bytes: vec![0; SHARED_BUFFER].into_boxed_slice(), start: 0, end: 0 });
        }
        self.empty.recv().ok()
    }
}

/// The writing thread's end.
pub(super) struct BufferConsumer {
    full: Receiver<Buffer>,
    empty: SyncSender<Buffer>,
}

impl BufferSource for BufferConsumer {
    fn refill(&mut self, buffer: &mut Buffer) -> Result<(), UnpackError> {
        let used = mem::take(buffer);
        if !used.bytes.is_empty() {
            // The pump may be done already.
            let _ = self.empty.send(used);
        }
        *buffer = self.full.recv().map_err(|_| UnpackError::Hangup)?;
        Ok(())
    }
}

/// Fails if a write of this amount would use up the reserve.
pub(super) fn admit(options: &UnpackOptions, amount: DiskSpace) -> Result<(), UnpackError> {
    let Some(reserve) = &options.reserve else { return Ok(()) };
    reserve.admit(amount).map_err(|full| UnpackError::file("write to", reserve.root(), full))
}

/// The archive's bytes, in order, each hashed once.
pub(crate) struct TarStream<'a, F> {
    feed: &'a mut F,
    buffer: Buffer,
    ended: bool,
    total: u64,
    /// Digest of all bytes, and the expected one.
    digest: Option<(DigestHasher, Digest)>,
    counts: LayerByteCounts,
    options: &'a UnpackOptions,
}

impl<'a, F: BufferSource> TarStream<'a, F> {
    /// With a digest, [`TarStream::finish`] fails if it is not that of all bytes.
    pub(crate) fn new(
        feed: &'a mut F,
        digest: Option<&Digest>,
        options: &'a UnpackOptions,
    ) -> TarStream<'a, F> {
        TarStream {
            feed,
            buffer: Buffer::default(),
            ended: false,
            total: 0,
            digest: digest.map(|digest| (DigestHasher::like(digest), digest.clone())),
            counts: LayerByteCounts::new(Arc::clone(&options.image)),
            options,
        }
    }

    /// The next unread bytes; empty at the end only.
    pub(super) fn fill(&mut self) -> Result<&[u8], UnpackError> {
        if self.buffer.start == self.buffer.end && !self.ended {
            self.refill()?;
        }
        Ok(&self.buffer.bytes[self.buffer.start..self.buffer.end])
    }

    /// Marks the first `count` bytes of the last [`TarStream::fill`] as read.
    pub(super) fn consume(&mut self, count: usize) {
        self.buffer.start = (self.buffer.start + count).min(self.buffer.end);
    }

    fn refill(&mut self) -> Result<(), UnpackError> {
        if self.options.progress.is_canceled() {
            return Err(UnpackError::Canceled);
        }
        self.feed.refill(&mut self.buffer)?;
        let bytes = &self.buffer.bytes[self.buffer.start..self.buffer.end];
        self.ended = bytes.is_empty();
        self.total += bytes.len() as u64;
        self.counts.add(bytes, self.options.progress.compressed_bytes(), &self.options.limits)?;
        admit(self.options, DiskSpace { bytes: bytes.len() as u64, inodes: 0 })?;
        if let Some((hasher, _)) = &mut self.digest {
            hasher.update(bytes);
        }
        self.options.progress.set_plain(self.total);
        Ok(())
    }

    /// Reads what follows the archive, and compares the digest of everything. Returns the number of bytes.
    pub(super) fn finish(mut self) -> Result<u64, UnpackError> {
        while !self.ended {
            self.refill()?;
        }
        if let Some((hasher, expected)) = self.digest {
            check_digest(hasher, LayerEncoding::Plain, &expected)?;
        }
        self.counts.keep();
        Ok(self.total)
    }
}
