//! Checkpoints of a layer's compressed bytes: places from which a part can be decompressed without what comes before.
//!
//! They are taken while the layer is unpacked: at the beginning of a zstd frame or gzip member, and anywhere in bytes
//! that are not compressed. Inside a gzip member a checkpoint is the border of two blocks, and needs the 32 KiB of
//! plain bytes before it. The inflater does not say at which bit the border is; with the CRC-32 of the plain bytes that
//! follow, a reader finds which of eight it is.

use std::io::{self, Read};
use std::ops::Range;

use super::compression::DetectedCompression;
use super::gzip::GzipReader;

/// Plain bytes between two checkpoints, at least. A window that cannot be compressed takes less than one percent of it.
pub(super) const SPACING: u64 = 4 << 20;
/// Bytes of all windows of a layer; beyond this, every second checkpoint is dropped.
const MAX_BYTES: usize = 8 << 20;
/// Plain bytes before a checkpoint that a gzip member refers to.
pub(super) const WINDOW: usize = 32 << 10;
/// Plain bytes that a checkpoint has the CRC of.
const CHECKED: u64 = 256;
/// Compresses windows: higher levels cost a pull more, and save a tenth.
const LEVEL: i32 = 1;

/// A place in a layer's compressed bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// Compressed bytes before it; of the last of them, up to seven bits may follow it.
    pub(crate) compressed: u64,
    /// Plain bytes before it.
    pub(crate) plain: u64,
    /// CRC-32 of the [`CHECKED`] plain bytes that follow it, or of all, if they are fewer.
    pub(crate) crc: u32,
    /// Plain bytes before it as a zstd frame; empty where nothing before it is needed.
    pub(crate) window: Vec<u8>,
}

/// Takes checkpoints while a layer is decompressed.
pub(super) struct CheckpointRecorder {
    taken: Vec<Checkpoint>,
    bytes: usize,
    spacing: u64,
    /// Plain bytes so far, and those at which the next checkpoint is due.
    plain: u64,
    due: u64,
    /// Plain bytes before the current one, once a checkpoint is nearly due.
    window: Vec<u8>,
    compressor: Option<zstd::bulk::Compressor<'static>>,
    /// A checkpoint without its CRC: it counts once plain bytes follow.
    pending: Option<(Checkpoint, crc32fast::Hasher, u64)>,
}

impl CheckpointRecorder {
    /// A recorder that takes a checkpoint after so many plain bytes, or somewhat more.
    pub(super) fn new(spacing: u64) -> CheckpointRecorder {
        CheckpointRecorder {
            taken: Vec::new(),
            bytes: 0,
            spacing,
            plain: 0,
            due: 0,
            window: Vec::new(),
            compressor: None,
            pending: None,
        }
    }

    /// Whether the next place is to be taken.
    pub(super) fn is_due(&self) -> bool {
        self.plain >= self.due
    }

    /// Notes plain bytes.
    pub(super) fn pass(&mut self, plain: &[u8]) {
        if plain.is_empty() {
            return;
        }
        self.check(plain);
        self.plain += plain.len() as u64;
        if self.plain + WINDOW as u64 >= self.due {
            let needed = &plain[plain.len().saturating_sub(WINDOW)..];
            let excess = (self.window.len() + needed.len()).saturating_sub(2 * WINDOW);
            if excess > 0 {
                let kept = WINDOW.saturating_sub(needed.len()).min(self.window.len());
                self.window.drain(..self.window.len() - kept);
            }
            self.window.extend_from_slice(needed);
        }
    }

    fn check(&mut self, plain: &[u8]) {
        let Some((mut checkpoint, mut crc, left)) = self.pending.take() else { return };
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(plain.len());
        crc.update(&plain[..count]);
        match left - count as u64 {
            0 => {
                checkpoint.crc = crc.finalize();
                self.add(checkpoint);
            }
            left => self.pending = Some((checkpoint, crc, left)),
        }
    }

    /// Takes the border of two blocks of a gzip member, after so many compressed bytes.
    pub(super) fn take_border(&mut self, compressed: u64) {
        let window = &self.window[self.window.len().saturating_sub(WINDOW)..];
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        let compressed_window = self.compressor.as_mut().and_then(|zstd| zstd.compress(window).ok());
        if let Some(window) = compressed_window {
            self.take(compressed, window);
        }
    }

    /// Takes the beginning of a member or frame, or of bytes that are not compressed.
    pub(super) fn take_start(&mut self, compressed: u64) {
        self.take(compressed, Vec::new());
    }

    fn take(&mut self, compressed: u64, window: Vec<u8>) {
        self.window.clear();
        self.due = self.plain + self.spacing;
        let checkpoint = Checkpoint { compressed, plain: self.plain, crc: 0, window };
        self.pending = Some((checkpoint, crc32fast::Hasher::new(), CHECKED));
    }

    fn add(&mut self, checkpoint: Checkpoint) {
        self.bytes += checkpoint.window.len();
        self.taken.push(checkpoint);
        if self.bytes > MAX_BYTES {
            self.spacing *= 2;
            let mut number = 0_usize;
            self.taken.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.bytes = self.taken.iter().map(|checkpoint| checkpoint.window.len()).sum();
        }
    }

    /// Forgets a checkpoint that no plain bytes have followed: a member has ended there.
    pub(super) fn end_member(&mut self) {
        if self.pending.as_ref().is_some_and(|(.., left)| *left == CHECKED) {
            self.pending = None;
            self.due = self.plain;
        }
    }

    /// Ends the layer.
    pub(super) fn finish(mut self) -> Vec<Checkpoint> {
        self.end_member();
        if let Some((mut checkpoint, crc, _)) = self.pending.take() {
            checkpoint.crc = crc.finalize();
            self.add(checkpoint);
        }
        self.taken
    }
}

/// Compressed bytes that are enough to decompress a part of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompressedPart {
    checkpoint: Checkpoint,
    /// Range of the blob.
    pub(crate) range: Range<u64>,
    /// Plain bytes that they are enough for.
    pub(crate) plain: Range<u64>,
}

/// The parts from each checkpoint to the next one. `size` is that of the blob, `plain` that of the archive.
pub(crate) fn parts_between(checkpoints: &[Checkpoint], size: u64, plain: u64) -> Vec<CompressedPart> {
    let ends = checkpoints.iter().skip(1).map(|next| (next.compressed, next.plain));
    let parts = checkpoints.iter().zip(ends.chain([(size, plain)]));
    parts.map(|(checkpoint, (end, plain_end))| CompressedPart::from(checkpoint, end, plain_end)).collect()
}

impl CompressedPart {
    /// The part from a checkpoint to the byte of the blob that is enough for the plain bytes up to `plain_end`.
    fn from(checkpoint: &Checkpoint, end: u64, plain_end: u64) -> CompressedPart {
        let start = checkpoint.compressed.saturating_sub(u64::from(checkpoint.needs_last_byte()));
        CompressedPart {
            checkpoint: checkpoint.clone(),
            range: start..end.max(start),
            plain: checkpoint.plain..plain_end.max(checkpoint.plain),
        }
    }

    /// Bytes of memory that its bytes take, compressed and plain.
    pub(crate) fn memory(&self) -> u64 {
        let length = |range: &Range<u64>| range.end.saturating_sub(range.start);
        length(&self.range).saturating_add(length(&self.plain))
    }

    /// Decompresses plain bytes from the bytes of the range. The caller verifies them: bytes of another blob, or of
    /// another checkpoint, are found by their CRC only if they come at once.
    pub(crate) fn decompress(
        &self,
        compression: DetectedCompression,
        bytes: &[u8],
        max_zstd_window_log: u32,
    ) -> io::Result<Vec<u8>> {
        let length = self.plain.end - self.plain.start;
        let read = |mut reader: Box<dyn Read + '_>| {
            let mut plain = Vec::new();
            reader.by_ref().take(CHECKED).read_to_end(&mut plain)?;
            if crc32fast::hash(&plain) != self.checkpoint.crc {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "other bytes follow the checkpoint"));
            }
            reader.take(length.saturating_sub(plain.len() as u64)).read_to_end(&mut plain)?;
            if (plain.len() as u64) < length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            plain.truncate(usize::try_from(length).unwrap_or(usize::MAX));
            Ok(plain)
        };
        match compression {
            DetectedCompression::Gzip if self.checkpoint.needs_last_byte() => {
                let window = zstd::bulk::decompress(&self.checkpoint.window, WINDOW)?;
                let from_bit = |bits| read(Box::new(GzipReader::resume(bytes, &window, bits)?));
                (0..8).find_map(|bits| from_bit(bits).ok()).ok_or_else(|| {
                    io::Error::new(io::ErrorKind::InvalidData, "no block begins at the checkpoint")
                })
            }
            DetectedCompression::Gzip => read(Box::new(GzipReader::new(bytes))),
            DetectedCompression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes)?;
                decoder.window_log_max(max_zstd_window_log)?;
                read(Box::new(decoder))
            }
            DetectedCompression::None => read(Box::new(bytes)),
            DetectedCompression::Xz | DetectedCompression::Bzip2 => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Checkpoint {
    /// Whether this checkpoint can come before another one.
    pub(crate) fn precedes(&self, next: &Checkpoint) -> bool {
        self.compressed <= next.compressed && self.plain < next.plain
    }

    /// Whether bits of the byte before it may follow it.
    fn needs_last_byte(&self) -> bool {
        !self.window.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const SIZE: u64 = 3 << 20;

    /// Text, what cannot be compressed, zeros, and all of it once more.
    fn content() -> Vec<u8> {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let mut content = Vec::new();
        while (content.len() as u64) < SIZE {
            let start = content.len();
            match next() % 4 {
                0 => (0..60_000).for_each(|_| content.extend_from_slice(&next().to_le_bytes())),
                1 => content.resize(start + 90_000, 0),
                2 => (0..9_000)
                    .for_each(|_| content.extend_from_slice(format!("{} ", next() % 700).as_bytes())),
                _ => content.extend_from_within(start.saturating_sub(70_000)..),
            }
        }
        content
    }

    fn gzip(plain: &[u8], level: u32) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(level));
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn checkpoints_of(blob: &[u8], spacing: u64, buffer: usize) -> Vec<Checkpoint> {
        let source = io::BufReader::with_capacity(buffer, blob);
        let mut reader = GzipReader::recording(source, CheckpointRecorder::new(spacing));
        let mut piece = vec![0; 50_000];
        while reader.read(&mut piece).unwrap() > 0 {}
        reader.into_parts().1.unwrap().finish()
    }

    /// Decompresses the part from each checkpoint.
    fn assert_resumes(checkpoints: &[Checkpoint], blob: &[u8], plain: &[u8]) {
        let parts = parts_between(checkpoints, blob.len() as u64, plain.len() as u64);
        assert_eq!(parts.len(), checkpoints.len());
        for (number, part) in parts.iter().enumerate() {
            let at = |offset: u64| usize::try_from(offset).unwrap();
            let bytes = &blob[at(part.range.start)..at(part.range.end)];
            let found = part.decompress(DetectedCompression::Gzip, bytes, 27);
            let found = found.unwrap_or_else(|error| panic!("{number}, {:?}: {error}", part.checkpoint));
            assert!(found == plain[at(part.plain.start)..at(part.plain.end)], "{number}: other bytes");
        }
    }

    #[test]
    fn a_part_is_read_from_each_checkpoint() {
        let plain = content();
        for level in [0, 1, 4, 6, 9] {
            let blob = gzip(&plain, level);
            for (spacing, buffer) in [(1, 64 << 10), (100_000, 64 << 10), (100_000, 61)] {
                let checkpoints = checkpoints_of(&blob, spacing, buffer);
                // The fastest level makes one block of nearly everything.
                assert!(level == 1 || checkpoints.len() > 5, "level {level}, spacing {spacing}");
                assert_resumes(&checkpoints, &blob, &plain);
            }
        }
    }

    #[test]
    fn members_begin_with_checkpoints_without_a_window() {
        let plain = content();
        let blob: Vec<u8> = plain.chunks(30_000).flat_map(|part| gzip(part, 6)).collect();
        let checkpoints = checkpoints_of(&blob, 20_000, 8192);
        assert!(checkpoints.iter().filter(|checkpoint| checkpoint.window.is_empty()).count() > 20);
        assert_resumes(&checkpoints, &blob, &plain);
    }

    #[test]
    fn the_windows_of_a_long_layer_are_bounded() {
        let mut recorder = CheckpointRecorder::new(1);
        let mut state = 1_u64;
        for number in 0..1000 {
            let random = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            });
            recorder.pass(&random.take(WINDOW).collect::<Vec<u8>>());
            recorder.take_border(number);
        }
        let checkpoints = recorder.finish();
        let bytes: usize = checkpoints.iter().map(|checkpoint| checkpoint.window.len()).sum();
        assert!(bytes <= MAX_BYTES && checkpoints.len() > 100, "{bytes} bytes, {}", checkpoints.len());
        assert_eq!(checkpoints[0].compressed, 0);
    }

    #[test]
    fn a_damaged_checkpoint_is_an_error_or_gives_other_bytes() {
        let plain = content();
        let blob = gzip(&plain, 6);
        let checkpoints = checkpoints_of(&blob, 200_000, 8192);
        let mut checkpoint = checkpoints[2].clone();
        checkpoint.compressed += 1;
        let part = &parts_between(&[checkpoint], blob.len() as u64, plain.len() as u64)[0];
        let bytes = &blob[usize::try_from(part.range.start).unwrap()..];
        assert!(part.decompress(DetectedCompression::Gzip, bytes, 27).is_err());
    }
}
