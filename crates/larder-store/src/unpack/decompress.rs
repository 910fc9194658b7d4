//! gzip, zstd or nothing, by the first bytes: media types are not reliable, and the runtimes do not rely on them.
//!
//! A gzip stream may have several members and a zstd stream several frames; whatever follows them must be another
//! one. Bytes that are not are an error, as they are to the Go reader that wrote nearly all of the world's layers.

use std::io::{self, Read};

use super::checkpoints::{Checkpoint, CheckpointRecorder, SPACING};
use super::compression::DetectedCompression;
use super::gzip::GzipReader;
use super::source::CompressedReader;
use super::zstd_frames::ZstdReader;
use super::{UnpackError, UnpackLimits};

/// Reads plain bytes from a [`CompressedReader`].
pub(super) struct LayerDecoder<R: Read> {
    form: DecoderKind<R>,
    failed: Option<UnpackError>,
}

enum DecoderKind<R: Read> {
    Gzip(Box<GzipReader<CompressedReader<R>>>),
    Zstd(Box<ZstdReader<R>>),
    Plain(Box<CompressedReader<R>>, CheckpointRecorder),
}

impl<R: Read> LayerDecoder<R> {
    pub(super) fn new(
        mut source: CompressedReader<R>,
        limits: &UnpackLimits,
    ) -> Result<LayerDecoder<R>, UnpackError> {
        let compression = match source.peek(6) {
            Ok(start) => DetectedCompression::detect(start),
            Err(error) => return Err(source.take_fault().unwrap_or(UnpackError::Read(error))),
        };
        let recorder = CheckpointRecorder::new(SPACING);
        let form = match compression {
            DetectedCompression::Gzip => DecoderKind::Gzip(Box::new(GzipReader::recording(source, recorder))),
            DetectedCompression::Zstd => {
                DecoderKind::Zstd(Box::new(ZstdReader::new(source, recorder, limits)))
            }
            DetectedCompression::None => DecoderKind::Plain(Box::new(source), recorder),
            foreign @ (DetectedCompression::Xz | DetectedCompression::Bzip2) => {
                // Wrong bytes are the better news: another try may bring the right ones.
                let foreign = UnpackError::ForeignCompression(foreign);
                return Err(source.finish().err().unwrap_or(foreign));
            }
        };
        Ok(LayerDecoder { form, failed: None })
    }

    pub(super) fn compression(&self) -> DetectedCompression {
        match self.form {
            DecoderKind::Gzip(_) => DetectedCompression::Gzip,
            DecoderKind::Zstd(_) => DetectedCompression::Zstd,
            DecoderKind::Plain(..) => DetectedCompression::None,
        }
    }

    /// Fills the buffer, or less at the end. An error is kept for [`LayerDecoder::finish`].
    pub(super) fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, DecoderFailed> {
        let mut filled = 0;
        while filled < buffer.len() && self.failed.is_none() {
            let read = match &mut self.form {
                DecoderKind::Gzip(decoder) => decoder.read(&mut buffer[filled..]),
                DecoderKind::Zstd(decoder) => decoder.read(&mut buffer[filled..]),
                DecoderKind::Plain(source, recorder) => {
                    if recorder.is_due() {
                        recorder.take_start(source.position());
                    }
                    let read = source.read(&mut buffer[filled..]);
                    read.inspect(|read| recorder.pass(&buffer[filled..filled + read]))
                }
            };
            match read {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => {
                    let compression = self.compression();
                    let source = self.source();
                    let at = source.bytes_read();
                    let fault = source.take_fault();
                    self.failed = Some(fault.unwrap_or(UnpackError::Decompress { compression, at, cause }));
                }
            }
        }
        if self.failed.is_some() { Err(DecoderFailed) } else { Ok(filled) }
    }

    /// Ends the reading: returns the compressed size once size and digest are as declared, and the checkpoints.
    ///
    /// After an error in the bytes it reads the rest, without inflating it: a wrong digest explains the error.
    /// `skip_rest` reports that no reader needs the rest.
    pub(super) fn finish(self, skip_rest: bool) -> Result<(u64, Vec<Checkpoint>), UnpackError> {
        let LayerDecoder { form, failed } = self;
        let (source, recorder) = match form {
            DecoderKind::Gzip(decoder) => decoder.into_parts(),
            DecoderKind::Zstd(decoder) => decoder.into_parts(),
            DecoderKind::Plain(source, recorder) => (*source, Some(recorder)),
        };
        let checkpoints = || recorder.map_or_else(Vec::new, CheckpointRecorder::finish);
        match failed {
            None if skip_rest => Ok((source.bytes_read(), Vec::new())),
            None => Ok((source.finish()?, checkpoints())),
            Some(error @ UnpackError::Decompress { .. }) if !skip_rest => {
                Err(source.finish().err().unwrap_or(error))
            }
            Some(error) => Err(error),
        }
    }

    fn source(&mut self) -> &mut CompressedReader<R> {
        match &mut self.form {
            DecoderKind::Gzip(decoder) => decoder.get_mut(),
            DecoderKind::Zstd(decoder) => decoder.get_mut(),
            DecoderKind::Plain(source, _) => source,
        }
    }
}

/// The decoder has failed and keeps the reason.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecoderFailed;
