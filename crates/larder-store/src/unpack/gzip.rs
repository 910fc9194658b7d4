//! gzip without its CRC-32.
//!
//! Every layer's uncompressed bytes are compared with the config's diff ID, a SHA-256. The CRC of a member adds nothing
//! to that and costs 5% of a pull, so it is skipped. The size in the trailer is compared.

use std::io::{self, BufRead, Read};

use zlib_rs::{Inflate, InflateFlush, Status};

use super::checkpoints::CheckpointRecorder;

/// Base-2 logarithm of a window.
const WINDOW_BITS: u8 = 15;

/// Reads the plain bytes of one or more gzip members (RFC 1952).
pub(crate) struct GzipReader<R> {
    source: R,
    inflate: Inflate,
    at: GzipPosition,
    /// Compressed bytes taken.
    taken: u64,
    /// Whether all of the current member comes from here.
    is_whole_member: bool,
    recorder: Option<CheckpointRecorder>,
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
        let inflate = Inflate::new(false, WINDOW_BITS);
        let at = GzipPosition::Start;
        GzipReader { source, inflate, at, taken: 0, is_whole_member: true, recorder: None }
    }

    /// Takes checkpoints, too.
    pub(super) fn recording(source: R, recorder: CheckpointRecorder) -> GzipReader<R> {
        GzipReader { recorder: Some(recorder), ..GzipReader::new(source) }
    }

    /// Reads on inside a member, at the border of two blocks: after the first byte, or at that many last bits of it.
    /// `window` has the plain bytes before.
    pub(crate) fn resume(mut source: R, window: &[u8], bits: u32) -> io::Result<GzipReader<R>> {
        let first = *source.fill_buf()?.first().ok_or(io::ErrorKind::UnexpectedEof)?;
        source.consume(1);
        let mut inflate = Inflate::new(false, WINDOW_BITS);
        inflate.set_dictionary(window).map_err(invalid)?;
        let mut before = empty_blocks(8 - bits);
        if let Some(last) = before.last_mut().filter(|_| bits > 0) {
            *last |= first & !(u8::MAX >> bits);
            inflate.decompress(&before, &mut [0], InflateFlush::NoFlush).map_err(invalid)?;
            if inflate.total_in() != before.len() as u64 || inflate.total_out() > 0 {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        let at = GzipPosition::Body;
        Ok(GzipReader { source, inflate, at, taken: 1, is_whole_member: false, recorder: None })
    }

    pub(crate) fn get_mut(&mut self) -> &mut R {
        &mut self.source
    }

    pub(super) fn into_parts(self) -> (R, Option<CheckpointRecorder>) {
        (self.source, self.recorder)
    }

    fn byte(&mut self) -> io::Result<u8> {
        let byte = *self.source.fill_buf()?.first().ok_or(io::ErrorKind::UnexpectedEof)?;
        self.source.consume(1);
        self.taken += 1;
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
    pub(crate) fn header(&mut self) -> io::Result<()> {
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
        let size_differs =
            u64::from(u32::from_le_bytes(size)) != self.inflate.total_out() & u64::from(u32::MAX);
        if size_differs && self.is_whole_member {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "wrong size in the gzip trailer"));
        }
        self.inflate.reset(false);
        self.is_whole_member = true;
        Ok(())
    }

    /// One step of inflating: how many bytes came out. Zero is not yet the end.
    fn body(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let is_due = self.recorder.as_ref().is_some_and(CheckpointRecorder::is_due);
        let mut step =
            self.inflate(into, if is_due { InflateFlush::Block } else { InflateFlush::NoFlush })?;
        if is_due && step.is_idle() {
            // At a border that the last step has met, which it could not know.
            step = self.inflate(into, InflateFlush::NoFlush)?;
        }
        if step.is_idle() {
            let cut = self.source.fill_buf()?.is_empty();
            return Err(if cut { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::InvalidData }.into());
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.pass(&into[..step.made]);
            // Nothing else ends a step early.
            if is_due && step.has_room && step.has_input && !step.is_end {
                recorder.take_border(self.taken);
            }
            if step.is_end {
                recorder.end_member();
            }
        }
        if step.is_end {
            self.trailer()?;
            self.at = GzipPosition::Between;
        }
        Ok(step.made)
    }

    fn inflate(&mut self, into: &mut [u8], flush: InflateFlush) -> io::Result<InflateStep> {
        let input = self.source.fill_buf()?;
        let (was_in, was_out) = (self.inflate.total_in(), self.inflate.total_out());
        let status = self.inflate.decompress(input, into, flush).map_err(invalid)?;
        // Both are at most the lengths of buffers.
        let count = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (taken, made) =
            (count(self.inflate.total_in() - was_in), count(self.inflate.total_out() - was_out));
        let (has_input, has_room) = (taken < input.len(), made < into.len());
        self.source.consume(taken);
        self.taken += taken as u64;
        Ok(InflateStep { taken, made, has_input, has_room, is_end: status == Status::StreamEnd })
    }
}

/// What a step of inflating has done.
struct InflateStep {
    taken: usize,
    made: usize,
    /// Whether there was more to take, and room for more.
    has_input: bool,
    has_room: bool,
    is_end: bool,
}

impl InflateStep {
    fn is_idle(&self) -> bool {
        self.taken + self.made == 0 && !self.is_end
    }
}

fn invalid(error: zlib_rs::InflateError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.as_str())
}

/// Bits of a deflate block with dynamic codes (RFC 1951, 3.2.7) and no content, the first one lowest, and their number:
/// there is a code for the end, and two for distances.
const EMPTY_BLOCK: (u128, u32) = {
    // Not the last block, dynamic codes; 257 codes of literals, 2 of distances, 18 of lengths.
    let (mut bits, mut count) = (2_u128 << 1, 3);
    bits |= 0 << count | 1 << (count + 5) | 14 << (count + 10);
    count += 14;
    // The codes of lengths, in the order of the format: the third and the last are those of 18 and of 1.
    bits |= 1 << (count + 3 * 2) | 1 << (count + 3 * 17);
    count += 3 * 18;
    // 138 and 118 codes of length 0, of which there are 11 at least.
    bits |= (1 | 127 << 1) << count | (1 | 107 << 1) << (count + 8);
    // Length 1 for the end and for both distances; then the end.
    (bits, count + 16 + 3 + 1)
};

/// Whole blocks without content that end with so many bits of their last byte, 1 to 8.
fn empty_blocks(bits: u32) -> Vec<u8> {
    // One block has 3 bits more than whole bytes, and three have 1.
    let blocks = 3 * bits % 8;
    let (block, length) = EMPTY_BLOCK;
    let mut bytes = vec![0; (blocks * length).div_ceil(8) as usize];
    for number in 0..blocks * length {
        let bit = u8::from(block >> (number % length) & 1 == 1);
        bytes[(number / 8) as usize] |= bit << (number % 8);
    }
    bytes
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
                    if let Some(recorder) = self.recorder.as_mut().filter(|recorder| recorder.is_due()) {
                        recorder.take_start(self.taken);
                    }
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
