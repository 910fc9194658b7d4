//! gzip, zstd or nothing, by the first bytes: media types are not reliable, and the runtimes do not rely on them.
//!
//! A gzip stream may have several members and a zstd stream several frames; whatever follows them must be another
//! one. Bytes that are not are an error, as they are to the Go reader that wrote nearly all of the world's layers.

use std::io::{self, Read};

use super::compression::Compression;
use super::gzip::Gunzip;
use super::source::Source;
use super::{Limits, UnpackError};

/// Reads plain bytes from a [`Source`].
pub(super) struct Decoder<R: Read> {
    form: Form<R>,
    failed: Option<UnpackError>,
}

enum Form<R: Read> {
    Gzip(Box<Gunzip<Source<R>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, Source<R>>>),
    Plain(Box<Source<R>>),
}

impl<R: Read> Decoder<R> {
    pub(super) fn new(mut source: Source<R>, limits: &Limits) -> Result<Decoder<R>, UnpackError> {
        let compression = match source.peek(6) {
            Ok(start) => Compression::detect(start),
            Err(error) => return Err(source.take_fault().unwrap_or(UnpackError::Read(error))),
        };
        let compression = match compression {
            Ok(compression) => compression,
            // Wrong bytes are the better news: another try may bring the right ones.
            Err(foreign) => return Err(source.finish().err().unwrap_or(foreign)),
        };
        let form = match compression {
            Compression::Gzip => Form::Gzip(Box::new(Gunzip::new(source))),
            Compression::Zstd => {
                Form::Zstd(Box::new(zstd_decoder(source, limits).map_err(UnpackError::Read)?))
            }
            Compression::None => Form::Plain(Box::new(source)),
        };
        Ok(Decoder { form, failed: None })
    }

    pub(super) fn compression(&self) -> Compression {
        match self.form {
            Form::Gzip(_) => Compression::Gzip,
            Form::Zstd(_) => Compression::Zstd,
            Form::Plain(_) => Compression::None,
        }
    }

    /// Fills the buffer, or less at the end. An error is kept for [`Decoder::finish`].
    pub(super) fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, Failed> {
        let mut filled = 0;
        while filled < buffer.len() && self.failed.is_none() {
            let read = match &mut self.form {
                Form::Gzip(decoder) => decoder.read(&mut buffer[filled..]),
                Form::Zstd(decoder) => decoder.read(&mut buffer[filled..]),
                Form::Plain(source) => source.read(&mut buffer[filled..]),
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
        if self.failed.is_some() { Err(Failed) } else { Ok(filled) }
    }

    /// Ends the reading: returns the compressed size once size and digest are as declared.
    ///
    /// After an error in the bytes it reads the rest, without inflating it: a wrong digest explains the error.
    /// `skip_rest` says that nobody wants to know any more.
    pub(super) fn finish(self, skip_rest: bool) -> Result<u64, UnpackError> {
        let Decoder { form, failed } = self;
        let source = match form {
            Form::Gzip(decoder) => decoder.into_inner(),
            Form::Zstd(decoder) => decoder.finish(),
            Form::Plain(source) => *source,
        };
        match failed {
            None if skip_rest => Ok(source.bytes_read()),
            None => source.finish(),
            Some(error @ UnpackError::Decompress { .. }) if !skip_rest => {
                Err(source.finish().err().unwrap_or(error))
            }
            Some(error) => Err(error),
        }
    }

    fn source(&mut self) -> &mut Source<R> {
        match &mut self.form {
            Form::Gzip(decoder) => decoder.get_mut(),
            Form::Zstd(decoder) => decoder.get_mut(),
            Form::Plain(source) => source,
        }
    }
}

/// The decoder has failed and keeps the reason.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failed;

fn zstd_decoder<R: Read>(
    source: Source<R>,
    limits: &Limits,
) -> io::Result<zstd::stream::read::Decoder<'static, Source<R>>> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(source)?;
    decoder.window_log_max(limits.max_zstd_window_log)?;
    Ok(decoder)
}
