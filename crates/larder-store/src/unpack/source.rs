//! The compressed bytes of a layer: counted, hashed and compared with the declared digest and size.

use std::io::{self, BufRead, Read};
use std::sync::Arc;

use larder::reference::{Digest, DigestHasher};

use super::{ExpectedLayer, LayerDownload, LayerEncoding, UnpackError, UnpackOptions, UnpackProgress};

/// Bytes read at once. Larger buffers inflate no faster, and push what is inflated out of the core's cache.
const BUFFER: usize = 64 << 10;

/// Compares the digest of what went through a hasher with the expected one, which the hasher was made for.
pub(super) fn check_digest(
    hasher: DigestHasher,
    stage: LayerEncoding,
    expected: &Digest,
) -> Result<(), UnpackError> {
    let found = hasher.finish();
    if found == *expected {
        return Ok(());
    }
    Err(UnpackError::Digest { stage, expected: expected.clone(), found })
}

/// Reads the compressed bytes once, in order. What goes wrong here is kept in `fault`: the decompressors that read
/// from it only know [`io::Error`].
pub(super) struct CompressedReader<R> {
    inner: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    read: u64,
    size: Option<u64>,
    digest: Option<(DigestHasher, Digest)>,
    progress: Arc<UnpackProgress>,
    download: Option<LayerDownload>,
    fault: Option<UnpackError>,
}

impl<R: Read> CompressedReader<R> {
    pub(super) fn new(
        inner: R,
        expected: &ExpectedLayer<'_>,
        options: &UnpackOptions,
    ) -> CompressedReader<R> {
        CompressedReader {
            inner,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            read: 0,
            size: expected.size,
            digest: expected.digest.map(|digest| (DigestHasher::like(digest), digest.clone())),
            progress: options.progress.clone(),
            download: options.download.clone(),
            fault: None,
        }
    }

    /// The next `count` bytes without taking them; fewer only at the end.
    pub(super) fn peek(&mut self, count: usize) -> io::Result<&[u8]> {
        while self.end - self.start < count {
            if self.end == self.buffer.len() {
                self.buffer.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            if self.read_more()? == 0 {
                break;
            }
        }
        Ok(&self.buffer[self.start..self.end])
    }

    /// Compressed bytes read so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Compressed bytes taken so far.
    pub(super) fn position(&self) -> u64 {
        self.read - (self.end - self.start) as u64
    }

    /// Waits until all bytes are local.
    pub(super) fn wait_for_download(&mut self) -> io::Result<()> {
        let Some(Err(error)) = self.download.as_ref().map(LayerDownload::wait) else { return Ok(()) };
        self.fault = Some(UnpackError::Read(error));
        Err(io::ErrorKind::Other.into())
    }

    /// True while the layer may exceed the memory that all layers share.
    pub(super) fn exceeds_memory(&self) -> bool {
        self.progress.exceeds_memory()
    }

    pub(super) fn is_canceled(&self) -> bool {
        self.progress.is_canceled()
    }

    /// Ends the reading of a canceled layer.
    pub(super) fn cancel(&mut self) -> io::Error {
        self.fault = Some(UnpackError::Canceled);
        io::ErrorKind::Other.into()
    }

    pub(super) fn take_fault(&mut self) -> Option<UnpackError> {
        self.fault.take()
    }

    /// Reads to the end and compares size and digest with what was declared. Returns the size.
    pub(super) fn finish(mut self) -> Result<u64, UnpackError> {
        loop {
            (self.start, self.end) = (0, 0);
            match self.read_more() {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => return Err(self.take_fault().unwrap_or(UnpackError::Read(error))),
            }
        }
        if let Some(expected) = self.size.filter(|size| *size != self.read) {
            return Err(UnpackError::Size { expected, found: self.read, more: false });
        }
        match self.digest {
            Some((hasher, digest)) => {
                check_digest(hasher, LayerEncoding::Compressed, &digest).map(|()| self.read)
            }
            None => Ok(self.read),
        }
    }

    /// Reads once, behind what is buffered.
    fn read_more(&mut self) -> io::Result<usize> {
        if self.fault.is_some() {
            return Err(io::ErrorKind::Other.into());
        }
        let read = loop {
            if self.is_canceled() {
                return Err(self.cancel());
            }
            match self.inner.read(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.fault = Some(UnpackError::Read(error));
                    return Err(io::ErrorKind::Other.into());
                }
                Ok(read) => break read,
            }
        };
        if let Some((hasher, _)) = &mut self.digest {
            hasher.update(&self.buffer[self.end..self.end + read]);
        }
        self.end += read;
        self.read += read as u64;
        self.progress.set_compressed(self.read);
        if let Some(expected) = self.size.filter(|size| *size < self.read) {
            self.fault = Some(UnpackError::Size { expected, found: self.read, more: true });
            return Err(io::ErrorKind::Other.into());
        }
        Ok(read)
    }
}

impl<R: Read> Read for CompressedReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let from = self.fill_buf()?;
        let count = from.len().min(into.len());
        into[..count].copy_from_slice(&from[..count]);
        self.consume(count);
        Ok(count)
    }
}

impl<R: Read> BufRead for CompressedReader<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.read_more()?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
    }
}
