//! gzip without its CRC-32.
//!
//! Every layer's uncompressed bytes are compared with the config's diff ID, a SHA-256. The CRC of a member adds nothing
//! to that and costs 5% of a pull, so it is skipped. The size in the trailer is compared.

use std::io::{self, BufRead, Read};

use flate2::{Decompress, FlushDecompress, Status};

/// Reads the plain bytes of one or more gzip members (RFC 1952).
pub(crate) struct GzipReader<R> {
    source: R,
    inflate: Decompress,
    at: GzipPosition,
}

/// Part of a gzip file that the next compressed byte belongs to.
enum GzipPosition {
    /// The first of a member, which must be there.
    Start,
    Body,
    /// The first of another member, or the end.
    Between,
}

impl<R: BufRead> GzipReader<R> {
    pub(crate) fn new(source: R) -> GzipReader<R> {
        GzipReader { source, inflate: Decompress::new(false), at: GzipPosition::Start }
    }

    pub(super) fn get_mut(&mut self) -> &mut R {
        &mut self.source
    }

    pub(super) fn into_inner(self) -> R {
        self.source
    }

    fn byte(&mut self) -> io::Result<u8> {
        let byte = *self.source.fill_buf()?.first().ok_or(io::ErrorKind::UnexpectedEof)?;
        self.source.consume(1);
        Ok(byte)
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.byte()?;
        }
        Ok(bytes)
    }

    /// Reads over a member's header. Reserved flags are ignored, as Go's reader does.
    fn header(&mut self) -> io::Result<()> {
        let [magic_1, magic_2, method, flags, ..] = self.bytes::<10>()?;
        if [magic_1, magic_2, method] != [0x1f, 0x8b, 8] {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "invalid gzip header"));
        }
        let [checksum, extra, name, comment] = [1, 2, 3, 4].map(|bit| flags & (1 << bit) != 0);
        if extra {
            for _ in 0..u16::from_le_bytes(self.bytes()?) {
                self.byte()?;
            }
        }
        for present in [name, comment] {
            while present && self.byte()? != 0 {}
        }
        if checksum {
            self.bytes::<2>()?;
        }
        Ok(())
    }

    fn trailer(&mut self) -> io::Result<()> {
        let [_, _, _, _, size @ ..] = self.bytes::<8>()?;
        // The size is modulo 2^32.
        if u64::from(u32::from_le_bytes(size)) != self.inflate.total_out() & u64::from(u32::MAX) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "wrong size in the gzip trailer"));
        }
        self.inflate.reset(false);
        Ok(())
    }

    /// One step of inflating: how many bytes came out. Zero is not yet the end.
    fn body(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let input = self.source.fill_buf()?;
        let (was_in, was_out) = (self.inflate.total_in(), self.inflate.total_out());
        let status = self.inflate.decompress(input, into, FlushDecompress::None)?;
        let (taken, made) = (self.inflate.total_in() - was_in, self.inflate.total_out() - was_out);
        if taken + made == 0 && status != Status::StreamEnd {
            let cut = input.is_empty();
            return Err(if cut { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::InvalidData }.into());
        }
        // Both are at most the lengths of buffers.
        self.source.consume(usize::try_from(taken).unwrap_or(usize::MAX));
        if status == Status::StreamEnd {
            self.trailer()?;
            self.at = GzipPosition::Between;
        }
        Ok(usize::try_from(made).unwrap_or(usize::MAX))
    }
}

impl<R: BufRead> Read for GzipReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            match self.at {
                GzipPosition::Between if self.source.fill_buf()?.is_empty() => return Ok(0),
                GzipPosition::Start | GzipPosition::Between => {
                    self.header()?;
                    self.at = GzipPosition::Body;
                }
                GzipPosition::Body => match self.body(into)? {
                    0 => {}
                    made => return Ok(made),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn gunzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut plain = Vec::new();
        // A buffer of seven bytes puts a border into every part.
        GzipReader::new(io::BufReader::with_capacity(7, bytes)).read_to_end(&mut plain).map(|_| plain)
    }

    fn gzip(header: flate2::GzBuilder, plain: &[u8]) -> Vec<u8> {
        let mut encoder = header.write(Vec::new(), flate2::Compression::fast());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn members_follow_each_other_and_headers_may_be_full() {
        let plain = "larder ".repeat(10_000).into_bytes();
        let full = flate2::GzBuilder::new().filename("layer.tar").comment("made by hand").extra(*b"1234");
        let mut bytes = gzip(full, &plain);
        bytes.extend(gzip(flate2::GzBuilder::new(), b""));
        bytes.extend(gzip(flate2::GzBuilder::new(), b"the end"));
        assert_eq!(gunzip(&bytes).unwrap(), [&plain[..], b"the end"].concat());
    }

    #[test]
    fn a_header_checksum_is_read_over() {
        let mut bytes = gzip(flate2::GzBuilder::new(), b"plain");
        bytes[3] |= 2;
        bytes.splice(10..10, [0xaa, 0xbb]);
        assert_eq!(gunzip(&bytes).unwrap(), b"plain");
    }

    #[test]
    fn a_truncated_or_trailing_document_is_an_error() {
        let bytes = gzip(flate2::GzBuilder::new(), &b"larder ".repeat(100));
        for cut in 1..bytes.len() {
            assert_eq!(gunzip(&bytes[..cut]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{cut}");
        }
        let followed = [&bytes[..], &[0; 20]].concat();
        assert_eq!(gunzip(&followed).unwrap_err().to_string(), "invalid gzip header");
    }

    #[test]
    fn a_wrong_size_is_an_error_and_a_wrong_crc_is_the_digest_s_to_find() {
        let mut bytes = gzip(flate2::GzBuilder::new(), b"plain");
        let end = bytes.len();
        bytes[end - 8] ^= 1;
        assert_eq!(gunzip(&bytes).unwrap(), b"plain");
        bytes[end - 1] ^= 1;
        assert_eq!(gunzip(&bytes).unwrap_err().to_string(), "wrong size in the gzip trailer");
    }
}
