//! A layer whose data is filled in: by reads that wait for it, and by the unpacking of its whole blob.
//!
//! Of a complete layer whose reads are verified (`verified_layer.rs`), a piece counts as filled once it was verified.
//!
//! Reads go on only where chunks are filled. For reads, a chunk is verified, written, and then noted as filled. The
//! unpacking writes what comes at once, in large pieces; a chunk of them is noted as filled after its end was written
//! and its digest, or that of the span of the blob that it lies in, was right. Until then reads of it wait, and what a
//! process has left of it is hashed before it counts.
//!
//! All else in the filesystem is there from the start, and is compared with what the archive really has: so a table of
//! contents that lies is found.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fmt, io};

use larder::backend::RateWindow;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Advice, SeekFrom, fadvise};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::fill_activity::ReadEnd;
use super::read_demand::{DemandedRead, ReadDemand};
use super::skeleton::PlacedChunk;
use super::start_reads::{ChunkName, StartRecorder};
use super::toc::{ChunkContent, ChunkDigest, GzipSpan, SpanReader};
use crate::erofs::digest::FIRST_BLOCK;
use crate::unpack::{ContentDiffers, UnfilledLayer, is_zero};

/// Bytes that are compared at once.
const BUFFER: usize = 128 << 10;
/// How long a reader whose read has failed does not wait again for the same data: EROFS reads page by page what it
/// could not read at once.
const FAILED_FOR: Duration = Duration::from_secs(1);
/// Bytes that memory has of a file, or not: the largest page of a machine.
const PAGE: u64 = 64 << 10;
/// Times until a chunk that did not come is requested again, while reads wait for it: the first, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(4));
/// Time over which the rate of a fill is measured.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// A read that waits. It fails when it is dropped.
pub(crate) trait WaitingReader: Send + fmt::Debug {
    /// Lets it go on.
    fn allow(self: Box<Self>);

    /// The process that reads.
    fn process(&self) -> i32;
}

/// A layer in its place, some of whose data is missing.
#[derive(Debug)]
pub(crate) struct PartialLayer {
    /// Opened before reads of the file were guarded: its own accesses ask for nothing.
    file: File,
    /// Bytes of its filesystem.
    filesystem_bytes: u64,
    /// Chunks that are not there from the start, by offset.
    chunks: Vec<PlacedChunk>,
    demand: mpsc::UnboundedSender<usize>,
    /// The reads that wait, of all layers of the store.
    reads: Arc<ReadDemand>,
    state: Mutex<PartialState>,
    /// Locked while data is written, or what was written is verified.
    unpacked: Mutex<UnpackedPart>,
    /// Whether the metadata has short ends of files.
    has_inline_tails: bool,
    /// Spans of the blob, if no digests of chunks are known.
    spans: Arc<[Arc<GzipSpan>]>,
    /// Whether the blob that is being unpacked had the digests of these so far.
    has_right_spans: Arc<AtomicBool>,
    /// `Some(true)` once it is complete, `Some(false)` once it is no longer filled.
    end: watch::Sender<Option<bool>>,
}

#[derive(Debug, Default)]
struct PartialState {
    filled: Vec<bool>,
    filled_bytes: u64,
    rate: FillRate,
    requested: Vec<bool>,
    /// Times until chunks that did not come are requested again, after their next failures.
    retries: HashMap<usize, Duration>,
    waiting: Vec<WaitingRead>,
    /// Reads that have failed lately: process, chunks, and when.
    failed: Vec<(i32, Range<usize>, Instant)>,
    start: StartRecorder,
    /// No data comes any more: it was removed, or is no longer what the image needs.
    ended: bool,
}

/// How far the unpacking has come.
#[derive(Debug, Default)]
struct UnpackedPart {
    /// Offset in the layer's file.
    end: u64,
    /// Digest of the chunk that it is in.
    chunk: Sha256,
}

/// Rate at which data comes.
#[derive(Debug)]
struct FillRate(RateWindow);

impl Default for FillRate {
    fn default() -> FillRate {
        FillRate(RateWindow::new(RATE_WINDOW))
    }
}

impl PartialState {
    /// Whether this process has just failed to read some of these chunks.
    fn has_failed(&self, process: i32, chunks: &Range<usize>, now: Instant) -> bool {
        self.failed.iter().any(|(failed, of, at)| {
            // Without a number it may be any process.
            let is_same =
                *failed == process && process != 0 && of.start < chunks.end && chunks.start < of.end;
            is_same && now.duration_since(*at) < FAILED_FOR
        })
    }
}

/// A read that waits for chunks.
#[derive(Debug)]
struct WaitingRead {
    reader: Box<dyn WaitingReader>,
    chunks: Range<usize>,
    since: Instant,
    /// The background gives way to it.
    _demanded: DemandedRead,
}

/// How much is there of a layer that is being filled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FillProgress {
    /// Bytes of file data that are there.
    pub filled_bytes: u64,
    /// Bytes of file data, in chunks that come from the blob.
    pub total_bytes: u64,
    /// Reads that wait.
    pub waiting: usize,
    /// Bytes of file data that came per second lately; `None` before that is known.
    pub bytes_per_second: Option<u64>,
}

/// The error of an archive that is not what the table of contents says.
fn differs(offset: u64) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, ContentDiffers { offset })
}

impl PartialLayer {
    /// A layer of which nothing is filled. `demand` receives the numbers of chunks that reads wait for.
    pub(crate) fn new(
        file: File,
        filesystem_bytes: u64,
        chunks: Vec<PlacedChunk>,
        demand: mpsc::UnboundedSender<usize>,
        reads: Arc<ReadDemand>,
    ) -> PartialLayer {
        let state = PartialState {
            filled: vec![false; chunks.len()],
            requested: vec![false; chunks.len()],
            ..PartialState::default()
        };
        PartialLayer {
            file,
            filesystem_bytes,
            chunks,
            demand,
            reads,
            state: Mutex::new(state),
            unpacked: Mutex::default(),
            has_inline_tails: false,
            spans: Arc::default(),
            has_right_spans: Arc::default(),
            end: watch::Sender::new(None),
        }
    }

    /// The layer whose chunks are verified by the spans that they lie in.
    pub(crate) fn with_spans(self, spans: Arc<[Arc<GzipSpan>]>) -> PartialLayer {
        PartialLayer { spans, ..self }
    }

    /// The layer whose metadata may have short ends of files.
    pub(crate) fn with_inline_tails(self, has_inline_tails: bool) -> PartialLayer {
        PartialLayer { has_inline_tails, ..self }
    }

    /// Whether the layer can be filled from a blob: spans are verified by the compressed bytes of their own.
    pub(crate) fn takes_blob(&self, is_same: bool) -> bool {
        is_same || self.spans.is_empty()
    }

    fn state(&self) -> MutexGuard<'_, PartialState> {
        self.state.lock()
    }

    /// Chunk of this number.
    pub(crate) fn chunk(&self, number: usize) -> &PlacedChunk {
        &self.chunks[number]
    }

    /// Number of chunks.
    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Whether a chunk is there.
    pub(crate) fn is_filled(&self, number: usize) -> bool {
        self.state().filled[number]
    }

    /// The layer whose containers have started before.
    pub(crate) fn started(self) -> PartialLayer {
        self.state().start.end();
        self
    }

    /// Name of a chunk in records of starts; `None` if it is not fetched.
    pub(crate) fn chunk_name(&self, number: usize) -> Option<ChunkName> {
        let content = &self.chunk(number).chunk.content;
        match (content.digest(), content) {
            (Some(digest), _) => Some(ChunkName::from(digest.sha256)),
            (None, ChunkContent::Span(chunk)) => Some(ChunkName::from(&chunk.mark())),
            (None, _) => None,
        }
    }

    /// Whether containers have started, and what they read now is no part of that.
    pub(crate) fn has_started(&self, now: Instant) -> bool {
        self.state().start.is_over(now)
    }

    /// Takes the names of the chunks that were read at a start, in the order of the reads.
    pub(crate) fn take_start_reads(&self) -> Vec<ChunkName> {
        let read = self.state().start.take();
        read.into_iter().filter_map(|chunk| self.chunk_name(chunk)).collect()
    }

    /// Numbers of the chunks in this range of the file.
    fn chunks_in(&self, range: &Range<u64>) -> Range<usize> {
        let start = self.chunks.partition_point(|chunk| chunk.end() <= range.start);
        let end = self.chunks.partition_point(|chunk| chunk.offset < range.end);
        start..end.max(start)
    }

    /// A read of this range begins: it goes on at once if the range is there, and waits for its chunks otherwise.
    pub(crate) fn read(&self, reader: Box<dyn WaitingReader>, range: &Range<u64>, now: Instant) {
        let chunks = self.chunks_in(range);
        let mut state = self.state();
        let is_of_start = state.start.note(chunks.clone(), now);
        if state.filled[chunks.clone()].iter().all(|filled| *filled) {
            drop(state);
            if is_of_start {
                // The next one is near.
                drop(self.reads.begin());
            }
            return reader.allow();
        }
        if state.ended || state.has_failed(reader.process(), &chunks, now) {
            return;
        }
        for chunk in chunks.clone() {
            if !state.filled[chunk] && !state.requested[chunk] {
                state.requested[chunk] = true;
                // Without a receiver, the unpacking brings it, or the read fails in time.
                let _ = self.demand.send(chunk);
            }
        }
        state.waiting.push(WaitingRead { reader, chunks, since: now, _demanded: self.reads.begin() });
    }

    /// Takes a missing chunk to fetch it ahead of any read, unless it is fetched already.
    pub(crate) fn claim(&self, number: usize) -> bool {
        let mut state = self.state();
        let is_free = !state.filled[number] && !state.requested[number];
        state.requested[number] |= is_free;
        is_free
    }

    /// Whether a chunk is the next one of reads in order, and nothing fetches it: it counts as requested from now on.
    pub(crate) fn claim_next(&self, number: usize) -> bool {
        let mut state = self.state();
        let is_next = number.checked_sub(1).is_some_and(|before| state.filled.get(before) == Some(&true));
        let is_missing = state.filled.get(number) == Some(&false) && !state.requested[number];
        if is_next && is_missing {
            state.requested[number] = true;
        }
        is_next && is_missing
    }

    /// Notes that these chunks did not come. Returns the time until they are to be requested again: it doubles with
    /// each failure of one of them.
    pub(crate) fn note_failure(&self, chunks: Range<usize>) -> Duration {
        let mut state = self.state();
        let wait = chunks.clone().filter_map(|chunk| state.retries.get(&chunk)).max().copied();
        let wait = wait.unwrap_or(RETRY.0);
        state.retries.extend(chunks.map(|chunk| (chunk, RETRY.1.min(wait * 2))));
        wait
    }

    /// Requests a chunk again that did not come, if reads wait for it; else the next read requests it.
    pub(crate) fn retry(&self, number: usize) {
        let mut state = self.state();
        let wanted = !state.filled[number] && state.waiting.iter().any(|read| read.chunks.contains(&number));
        state.requested[number] = wanted;
        if wanted {
            let _ = self.demand.send(number);
        } else {
            state.retries.remove(&number);
        }
    }

    /// Notes that the layer is complete, and all of it verified.
    pub(crate) fn set_complete(&self) {
        self.end.send_replace(Some(true));
    }

    /// Waits until the layer is complete, or is no longer filled; returns which.
    pub(crate) async fn ended(&self) -> bool {
        let mut end = self.end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        ended.is_ok_and(|end| *end == Some(true))
    }

    /// Whether the layer is no longer filled.
    pub(crate) fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Fails reads that have waited for `longest`. Returns the processes that read.
    pub(crate) fn expire(&self, now: Instant, longest: Duration) -> Vec<i32> {
        let expired = self.take_waiting(|read| now.duration_since(read.since) >= longest);
        let failed = expired.iter().map(|read| (read.reader.process(), read.chunks.clone(), now));
        let mut state = self.state();
        state.failed.retain(|(.., at)| now.duration_since(*at) < FAILED_FOR);
        state.failed.extend(failed);
        drop(state);
        expired.iter().map(|read| read.reader.process()).collect()
    }

    /// Ends the layer: nothing is filled any more, and waiting reads fail.
    pub(crate) fn end(&self) {
        self.state().ended = true;
        self.end.send_if_modified(|end| end.replace(false).is_none());
        drop(self.take_waiting(|_| true));
    }

    /// Takes reads that fail.
    fn take_waiting(&self, of: impl Fn(&WaitingRead) -> bool) -> Vec<WaitingRead> {
        let taken: Vec<_> = self.state().waiting.extract_if(.., |read| of(read)).collect();
        for read in &taken {
            self.reads.note_wait(read.since.elapsed(), ReadEnd::Error);
        }
        taken
    }

    /// Writes a chunk, whose bytes were verified, unless it is there.
    pub(crate) fn write_chunk(&self, number: usize, bytes: &[u8]) -> io::Result<()> {
        let unpacked = self.unpacked.lock();
        if self.is_filled(number) {
            return Ok(());
        }
        self.check_alive()?;
        let PlacedChunk { offset, chunk, .. } = &self.chunks[number];
        if let ChunkContent::Span(_) = chunk.content {
            // The right compressed bytes, but the table says from where they are inflated.
            let begun = usize::try_from(unpacked.end.saturating_sub(*offset)).unwrap_or(usize::MAX);
            self.compare(*offset, &bytes[..begun.min(bytes.len())])?;
        }
        self.file.write_all_at(bytes, *offset)?;
        self.set_filled(number);
        Ok(())
    }

    /// Notes those of successive chunks as filled that an earlier process has written, up to one that is missing.
    /// Returns how many there are.
    pub(crate) fn find_filled(&self, chunks: Range<usize>) -> io::Result<usize> {
        for number in chunks.clone() {
            let _unpacked = self.unpacked.lock();
            if self.is_filled(number) {
                continue;
            }
            if !self.is_written(number)? {
                return Ok(number - chunks.start);
            }
            self.set_filled(number);
        }
        Ok(chunks.len())
    }

    /// Notes that the disk may have lost what was written: each chunk is read from it, or written again.
    pub(crate) fn forget_filled(&self) {
        *self.unpacked.lock() = UnpackedPart::default();
        let mut state = self.state();
        let PartialState { filled, requested, filled_bytes, waiting, .. } = &mut *state;
        filled.fill(false);
        requested.fill(false);
        *filled_bytes = 0;
        // A read may wait for another chunk, and need those again that were there.
        for chunk in waiting.iter().flat_map(|read| read.chunks.clone()) {
            if !std::mem::replace(&mut requested[chunk], true) {
                let _ = self.demand.send(chunk);
            }
        }
    }

    /// Whether the file has the bytes of a chunk, by their digest.
    fn is_written(&self, number: usize) -> io::Result<bool> {
        let PlacedChunk { offset, chunk, .. } = self.chunk(number);
        let Some(digest) = chunk.content.digest() else {
            // Its compressed bytes show that.
            return Ok(!matches!(chunk.content, ChunkContent::Span(_)));
        };
        // Memory may have what the disk has lost.
        let pages = offset - offset % PAGE..self.chunk(number).end().next_multiple_of(PAGE);
        fadvise(&self.file, pages.start, NonZeroU64::new(pages.end - pages.start), Advice::DontNeed)?;
        if self.is_hole(&(*offset..offset + chunk.size))? {
            return Ok(false);
        }
        let mut bytes = vec![0; usize::try_from(chunk.size).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut bytes, *offset)?;
        Ok(digest.is_of(&bytes))
    }

    /// Whether nothing was written to a range.
    fn is_hole(&self, range: &Range<u64>) -> io::Result<bool> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(range.start)) {
            Ok(data) => Ok(data >= range.end),
            Err(Errno::NXIO) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Notes that a chunk is there, as it was verified, and lets the reads go on that need no other.
    pub(crate) fn set_filled(&self, number: usize) {
        let (mut state, now) = (self.state(), Instant::now());
        if !std::mem::replace(&mut state.filled[number], true) {
            state.retries.remove(&number);
            state.filled_bytes += self.chunks[number].chunk.size;
            let filled_bytes = state.filled_bytes;
            state.rate.0.observe(now, filled_bytes);
        }
        let PartialState { filled, waiting, .. } = &mut *state;
        let is_done = |read: &mut WaitingRead| {
            read.chunks.contains(&number) && filled[read.chunks.clone()].iter().all(|filled| *filled)
        };
        let done: Vec<WaitingRead> = waiting.extract_if(.., is_done).collect();
        drop(state);
        for read in done {
            self.reads.note_wait(now.duration_since(read.since), ReadEnd::Data);
            read.reader.allow();
        }
    }

    /// Fails the reads that wait for a chunk, which cannot be had now. A later read requests it again.
    pub(crate) fn fail(&self, number: usize) {
        self.state().requested[number] = false;
        drop(self.take_waiting(|read| read.chunks.contains(&number)));
    }

    fn check_alive(&self) -> io::Result<()> {
        if self.state().ended { Err(io::Error::other("the layer was removed")) } else { Ok(()) }
    }

    /// Whether all chunks are there.
    pub(crate) fn is_filled_up(&self) -> bool {
        self.state().filled.iter().all(|filled| *filled)
    }

    /// How much is there.
    pub(crate) fn progress(&self) -> FillProgress {
        let mut state = self.state();
        let filled_bytes = state.filled_bytes;
        FillProgress {
            bytes_per_second: state.rate.0.observe(Instant::now(), filled_bytes),
            filled_bytes,
            total_bytes: self.chunks.iter().map(|chunk| chunk.chunk.size).sum(),
            waiting: state.waiting.len(),
        }
    }

    /// Takes bytes of a chunk from the unpacking. Returns false if they are there.
    fn add(&self, unpacked: &mut UnpackedPart, number: usize, at: u64, bytes: &[u8]) -> io::Result<bool> {
        let placed = &self.chunks[number];
        let is_right = match (placed.chunk.content.digest(), &placed.chunk.content) {
            (Some(ChunkDigest { before, behind, sha256 }), _) => {
                if at == placed.offset {
                    unpacked.chunk.reset();
                    unpacked.chunk.update(before);
                }
                unpacked.chunk.update(bytes);
                let is_whole = at + bytes.len() as u64 == placed.end();
                !is_whole || {
                    unpacked.chunk.update(behind);
                    unpacked.chunk.finalize_reset()[..] == *sha256
                }
            }
            (None, ChunkContent::Span(_)) => self.has_right_spans.load(Ordering::Acquire),
            (None, _) => return Ok(false),
        };
        if !is_right {
            return Err(differs(placed.offset));
        }
        let is_filled = self.is_filled(number);
        if is_filled && matches!(placed.chunk.content, ChunkContent::Span(_)) {
            self.compare(at, bytes)?;
        }
        Ok(!is_filled)
    }

    /// Compares bytes outside of all chunks with those that are there from the start.
    fn compare_between(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        // The first block comes at the end.
        let skip = usize::try_from(FIRST_BLOCK.saturating_sub(at)).unwrap_or(0).min(bytes.len());
        self.compare(at + skip as u64, &bytes[skip..])
    }
}

/// Bytes of one piece of the unpacking that are written at once.
struct WrittenRun<'a> {
    layer: &'a PartialLayer,
    /// Offset of the piece.
    offset: u64,
    piece: &'a [u8],
    /// Range of the file.
    range: Range<u64>,
    /// Chunks whose ends are in it.
    chunks: Vec<usize>,
}

impl WrittenRun<'_> {
    /// Adds what ends at `end`, with the zeros before it.
    fn add(&mut self, start: u64, end: u64) {
        if self.range.is_empty() {
            self.range.start = start;
        }
        self.range.end = end;
    }

    fn write(&mut self) -> io::Result<()> {
        if !self.range.is_empty() {
            let at = |offset: u64| usize::try_from(offset - self.offset).unwrap_or(usize::MAX);
            let bytes = &self.piece[at(self.range.start)..at(self.range.end)];
            self.layer.file.write_all_at(bytes, self.range.start)?;
            self.range.start = self.range.end;
        }
        self.chunks.drain(..).for_each(|number| self.layer.set_filled(number));
        Ok(())
    }
}

impl UnfilledLayer for PartialLayer {
    fn fill(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut unpacked = self.unpacked.lock();
        self.check_alive()?;
        if offset != 0 && offset != unpacked.end {
            return Err(io::Error::other("the layer is unpacked from its start again"));
        }
        let piece_end = offset + bytes.len() as u64;
        let is_hole = self.is_hole(&(offset..piece_end))?;
        let mut run = WrittenRun { layer: self, offset, piece: bytes, range: 0..0, chunks: Vec::new() };
        let (mut at, mut rest) = (offset, bytes);
        let mut number = self.chunks_in(&(at..at + 1)).start;
        while !rest.is_empty() {
            let chunk = self.chunks.get(number);
            let inside = chunk.is_some_and(|chunk| chunk.offset <= at);
            let end = match chunk {
                Some(chunk) if inside => chunk.end(),
                Some(chunk) => chunk.offset,
                None if at < self.filesystem_bytes => self.filesystem_bytes,
                None => u64::MAX,
            };
            let (part, others) =
                rest.split_at(usize::try_from(end - at).unwrap_or(usize::MAX).min(rest.len()));
            let start = at;
            at += part.len() as u64;
            let is_written = if inside {
                self.add(&mut unpacked, number, start, part)?
            } else {
                start >= self.filesystem_bytes
            };
            if is_written {
                run.add(start, at);
            } else if inside || !is_hole || at - start >= FIRST_BLOCK || !is_zero(part) {
                run.write()?;
                if !inside {
                    self.compare_between(start, part)?;
                }
            }
            if inside && at == end {
                if is_written {
                    run.chunks.push(number);
                }
                number += 1;
            }
            rest = others;
        }
        run.write()?;
        unpacked.end = piece_end;
        Ok(())
    }

    fn compare(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut present = vec![0; bytes.len().min(BUFFER)];
        let mut at = offset;
        for piece in bytes.chunks(BUFFER) {
            let present = &mut present[..piece.len()];
            match self.file.read_exact_at(present, at) {
                Ok(()) if present == piece => {}
                Ok(()) => return Err(differs(at)),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(differs(at)),
                Err(error) => return Err(error),
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn end(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn file(&self) -> &File {
        &self.file
    }

    fn has_inline_tails(&self) -> bool {
        self.has_inline_tails
    }

    fn verified(&self, blob: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
        if self.spans.is_empty() {
            return blob;
        }
        self.has_right_spans.store(true, Ordering::Release);
        let is_right = Arc::clone(&self.has_right_spans);
        Box::new(SpanReader::new(blob, Arc::clone(&self.spans), is_right))
    }
}

#[cfg(test)]
mod tests {
    use larder_testkit_peers::OverbookedDisk;

    use super::*;
    use crate::lazy::toc::{ChunkCompression, CompressedChunk, TocChunk};

    const CHUNK: usize = 1_000_000;
    const BLOCK: usize = 4096;
    /// ext4 has a place for what follows within megabytes.
    const DISTANCE: usize = 20 << 20;

    fn content(number: usize) -> Vec<u8> {
        vec![b'a' + u8::try_from(number).unwrap(); CHUNK]
    }

    fn placed(number: usize, offset: u64) -> PlacedChunk {
        let sha256 = Sha256::digest(content(number)).into();
        let compression = ChunkCompression::Zstd;
        let content = ChunkContent::Compressed(CompressedChunk { compression, blob: 0..1, skip: 0, sha256 });
        let chunk = TocChunk { size: CHUNK as u64, content };
        PlacedChunk { offset, chunk, begins_file: true, is_before_landmark: false }
    }

    /// A layer of some chunks, from the first block on, each up to a block before the next one.
    fn layer(count: usize) -> PartialLayer {
        let file = tempfile::tempfile().unwrap();
        let place = |number: usize| FIRST_BLOCK + (number * CHUNK.next_multiple_of(BLOCK)) as u64;
        file.set_len(place(count)).unwrap();
        let chunks = (0..count).map(|number| placed(number, place(number)));
        let (demand, _demanded) = mpsc::unbounded_channel();
        PartialLayer::new(file, place(count), chunks.collect(), demand, Arc::default())
    }

    /// Bytes that the unpacking brings for such a layer.
    fn unpacked(count: usize) -> Vec<u8> {
        let block = vec![0; usize::try_from(FIRST_BLOCK).unwrap()];
        let padding = vec![0; CHUNK.next_multiple_of(BLOCK) - CHUNK];
        (0..count).fold(block, |bytes, number| [bytes, content(number), padding.clone()].concat())
    }

    fn read(layer: &PartialLayer, number: usize) -> Vec<u8> {
        let mut bytes = vec![0; CHUNK];
        layer.file.read_exact_at(&mut bytes, layer.chunk(number).offset).unwrap();
        bytes
    }

    fn fill(layer: &PartialLayer, bytes: &[u8]) -> io::Result<()> {
        (0..).step_by(BUFFER).zip(bytes.chunks(BUFFER)).try_for_each(|(at, piece)| layer.fill(at, piece))
    }

    #[test]
    fn a_chunk_counts_once_all_of_it_is_written_and_right() {
        let (layer, bytes) = (layer(3), unpacked(3));
        layer.write_chunk(1, &content(1)).unwrap();
        fill(&layer, &bytes[..CHUNK]).unwrap();
        assert_eq!([0, 1, 2].map(|chunk| layer.is_filled(chunk)), [false, true, false]);
        let mut wrong = bytes.clone();
        wrong[usize::try_from(layer.chunk(2).offset).unwrap() + 10] = b'x';
        fill(&layer, &wrong).unwrap_err();
        assert_eq!([0, 1, 2].map(|chunk| layer.is_filled(chunk)), [true, true, false]);
        assert_eq!(layer.find_filled(2..3).unwrap(), 0, "what was written is wrong");
        fill(&layer, &bytes).unwrap();
        assert!((0..3).all(|chunk| read(&layer, chunk) == content(chunk)));
        assert!(layer.is_filled_up());
    }

    #[test]
    fn wrong_bytes_do_not_replace_a_chunk_that_a_read_has_brought() {
        let (layer, bytes) = (layer(2), unpacked(2));
        let wrong = vec![b'x'; BUFFER];
        layer.fill(0, &[&bytes[..BLOCK], &wrong].concat()).unwrap();
        layer.write_chunk(0, &content(0)).unwrap();
        let at = BLOCK + BUFFER;
        layer.fill(at as u64, &wrong).unwrap();
        layer.fill((at + BUFFER) as u64, &bytes[at + BUFFER..]).expect_err("another digest");
        assert!(read(&layer, 0) == content(0));
    }

    #[test]
    fn what_a_table_has_left_out_is_found_between_chunks() {
        let (layer, mut bytes) = (layer(2), unpacked(2));
        bytes[BLOCK + CHUNK] = 1;
        let error = fill(&layer, &bytes).unwrap_err();
        assert!(error.get_ref().unwrap().is::<ContentDiffers>());
        assert!(!layer.is_filled(1));
    }

    #[test]
    fn a_chunk_does_not_count_whose_start_was_lost_or_came_from_another_attempt() {
        let (layer, bytes) = (layer(1), unpacked(1));
        layer.fill(0, &bytes[..BUFFER]).unwrap();
        layer.forget_filled();
        layer.fill(BUFFER as u64, &bytes[BUFFER..]).unwrap_err();
        layer.fill(0, &bytes[..BUFFER]).unwrap();
        layer.fill(2 * BUFFER as u64, &bytes[2 * BUFFER..]).unwrap_err();
        assert!(!layer.is_filled(0));
        layer.fill(BUFFER as u64, &bytes[BUFFER..]).unwrap();
        assert!(layer.is_filled(0));
    }

    /// A read that waits.
    #[derive(Debug)]
    struct Reader;

    impl WaitingReader for Reader {
        fn allow(self: Box<Self>) {}

        fn process(&self) -> i32 {
            1
        }
    }

    #[test]
    fn a_chunk_that_does_not_come_is_requested_less_and_less_often_while_a_read_waits() {
        let layer = layer(3);
        let range = layer.chunk(1).offset..layer.chunk(1).end();
        layer.read(Box::new(Reader), &range, Instant::now());
        let fail = |chunks: Range<usize>| {
            let wait = layer.note_failure(chunks.clone());
            chunks.for_each(|chunk| layer.retry(chunk));
            wait.as_millis()
        };
        let waits: Vec<_> = (0..5).map(|_| fail(1..2)).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 4000]);
        assert_eq!(fail(0..1), 500, "another chunk");
        assert_eq!(fail(0..1), 500, "no read waits for it");
        layer.write_chunk(1, &content(1)).unwrap();
        layer.forget_filled();
        assert_eq!(layer.note_failure(1..2).as_millis(), 500, "it came");
    }

    #[test]
    fn what_the_disk_has_lost_is_not_there_though_memory_has_it() {
        let Some(disk) = OverbookedDisk::new().unwrap() else { return };
        let mut options = fs_err::File::options();
        options.read(true).write(true).create_new(true);
        let file = options.open(disk.path().join("layer")).unwrap().into_parts().0;
        let chunks = (0..3).map(|number| placed(number, (number * DISTANCE) as u64));
        let (demand, _demanded) = mpsc::unbounded_channel();
        let layer = PartialLayer::new(file, 0, chunks.collect(), demand, Arc::default());
        layer.write_chunk(0, &content(0)).unwrap();
        disk.sync().unwrap();
        layer.write_chunk(1, &content(1)).unwrap();
        assert_eq!(layer.progress().filled_bytes, 2 * CHUNK as u64);
        disk.fill().unwrap();
        disk.sync().expect_err("writes have failed");
        disk.make_room().unwrap();
        layer.forget_filled();
        assert_eq!(layer.progress().filled_bytes, 0);
        assert_eq!(layer.find_filled(0..3).unwrap(), 1, "the second is lost");
        layer.write_chunk(1, &content(1)).unwrap();
        disk.sync().unwrap();
        layer.forget_filled();
        assert_eq!(layer.find_filled(0..3).unwrap(), 2);
    }
}
