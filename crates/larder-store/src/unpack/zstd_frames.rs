//! zstd, with a bound on the memory of all decoders together.
//!
//! The header of a frame has the size of its window, which is memory of the decoder. Small windows, as all usual levels
//! have them, are free. Larger ones share [`LARGE_WINDOWS`]: a frame that does not fit waits until others have ended. A
//! decoder gives up what it has before it waits, so two of them never wait for each other. It takes memory only once
//! its layer is downloaded, so how long others wait does not depend on a registry. A layer that has the right to exceed
//! the memory of all layers does not wait: the others may hold windows while they wait for that right.

use std::io::{self, BufRead as _, Read};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation as _, OutBuffer};

use super::UnpackLimits;
use super::checkpoints::CheckpointRecorder;
use super::source::CompressedReader;

/// Bytes of a window that takes nothing of the shared memory: that of `zstd -19`.
const SMALL_WINDOW: u64 = 8 << 20;

/// Most bytes of a frame's header.
const HEADER: usize = 18;

/// How often a wait for memory looks whether the layer is still wanted.
const CANCEL_CHECK: Duration = Duration::from_millis(50);

/// Memory of all larger windows of this process: as much as the largest that zstd allows by default.
static LARGE_WINDOWS: WindowMemory = WindowMemory::new(128 << 20);

/// An amount of memory, and what is free of it.
struct WindowMemory {
    total: u64,
    taken: Mutex<u64>,
    freed: Condvar,
}

/// A part of the memory, given back when dropped.
struct WindowShare {
    memory: &'static WindowMemory,
    bytes: u64,
}

impl WindowMemory {
    const fn new(total: u64) -> WindowMemory {
        WindowMemory { total, taken: Mutex::new(0), freed: Condvar::new() }
    }

    fn taken(&self) -> MutexGuard<'_, u64> {
        self.taken.lock()
    }

    /// Waits for the memory of a window; all of it for one that is larger. Waits no longer than until `has_priority`
    /// returns true. `None` once `is_canceled` returns true.
    fn acquire(
        &'static self,
        window: u64,
        has_priority: impl Fn() -> bool,
        is_canceled: impl Fn() -> bool,
    ) -> Option<WindowShare> {
        let bytes = window.min(self.total);
        let mut taken = self.taken();
        while *taken + bytes > self.total && !has_priority() {
            if is_canceled() {
                return None;
            }
            self.freed.wait_for(&mut taken, CANCEL_CHECK);
        }
        *taken += bytes;
        Some(WindowShare { memory: self, bytes })
    }
}

impl Drop for WindowShare {
    fn drop(&mut self) {
        *self.memory.taken() -= self.bytes;
        self.memory.freed.notify_all();
    }
}

/// Reads the plain bytes of one or more zstd frames.
pub(super) struct ZstdReader<R> {
    source: CompressedReader<R>,
    /// `None` between frames, when the next one needs another one.
    decoder: Option<Decoder<'static>>,
    /// Of the decoder's window, if that is a large one. Dropped after the decoder.
    share: Option<WindowShare>,
    max_window_log: u32,
    at: FramePosition,
    recorder: CheckpointRecorder,
}

/// Part of a zstd frame that the next compressed byte belongs to.
#[derive(PartialEq, Eq)]
enum FramePosition {
    /// The first of a frame, which must be there.
    Start,
    Body,
    /// The first of another frame, or the end.
    Between,
}

impl<R: Read> ZstdReader<R> {
    pub(super) fn new(
        source: CompressedReader<R>,
        recorder: CheckpointRecorder,
        limits: &UnpackLimits,
    ) -> ZstdReader<R> {
        let (max_window_log, at) = (limits.max_zstd_window_log, FramePosition::Start);
        ZstdReader { source, decoder: None, share: None, max_window_log, at, recorder }
    }

    pub(super) fn get_mut(&mut self) -> &mut CompressedReader<R> {
        &mut self.source
    }

    pub(super) fn into_parts(self) -> (CompressedReader<R>, Option<CheckpointRecorder>) {
        (self.source, Some(self.recorder))
    }

    /// Gets a decoder for a frame, with the memory that its window needs. The decoder refuses a larger one than is
    /// allowed.
    fn prepare(&mut self, window: u64) -> io::Result<()> {
        let is_large = window > SMALL_WINDOW && window >> self.max_window_log.min(63) <= 1;
        let needed = if is_large { window.min(LARGE_WINDOWS.total) } else { 0 };
        if self.decoder.is_some() && self.share.as_ref().map_or(0, |share| share.bytes) == needed {
            return Ok(());
        }
        (self.decoder, self.share) = (None, None);
        if needed > 0 {
            // A slow registry must not hold what other layers wait for.
            self.source.wait_for_download()?;
            let share =
                LARGE_WINDOWS.acquire(needed, || self.source.exceeds_memory(), || self.source.is_canceled());
            self.share = Some(share.ok_or_else(|| self.source.cancel())?);
        }
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(self.max_window_log))?;
        self.decoder = Some(decoder);
        Ok(())
    }

    /// One step of decoding: how many bytes came out. Zero is not yet the end.
    fn body(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(decoder) = &mut self.decoder else { return Err(io::ErrorKind::InvalidInput.into()) };
        let input = self.source.fill_buf()?;
        let is_end = input.is_empty();
        let (mut compressed, mut plain) = (InBuffer::around(input), OutBuffer::around(into));
        let left = decoder.run(&mut compressed, &mut plain)?;
        let (taken, made) = (compressed.pos(), plain.pos());
        if left != 0 && made == 0 && is_end {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "incomplete frame"));
        }
        self.source.consume(taken);
        self.recorder.pass(&into[..made]);
        if left == 0 {
            self.at = FramePosition::Between;
        }
        Ok(made)
    }
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            if self.at == FramePosition::Body {
                match self.body(into)? {
                    0 => continue,
                    made => return Ok(made),
                }
            }
            let header = self.source.peek(HEADER)?;
            if header.is_empty() && self.at == FramePosition::Between {
                return Ok(0);
            }
            // What is no frame is the decoder's to refuse.
            let window = window_of(header).unwrap_or(0);
            if self.recorder.is_due() {
                self.recorder.take_start(self.source.position());
            }
            self.prepare(window)?;
            self.at = FramePosition::Body;
        }
    }
}

/// Size of the window that a frame needs (RFC 8878, 3.1.1.1). `None` if this is no such header.
fn window_of(header: &[u8]) -> Option<u64> {
    let [0x28, 0xb5, 0x2f, 0xfd, descriptor, fields @ ..] = header else { return None };
    if descriptor & 0x20 == 0 {
        let window = fields.first()?;
        let base = 1_u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    // A single segment: the window is the content.
    let id = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size = [1, 2, 4, 8][usize::from(descriptor >> 6)];
    let mut content = [0; 8];
    content[..size].copy_from_slice(fields.get(id..id + size)?);
    Some(u64::from_le_bytes(content) + if size == 2 { 256 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_the_windows_that_were_asked_for() {
        for log in [10, 20, 23, 27] {
            let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
            encoder.window_log(log).unwrap();
            encoder.include_contentsize(false).unwrap();
            io::Write::write_all(&mut encoder, &[0; 2000]).unwrap();
            let frame = encoder.finish().unwrap();
            assert_eq!(window_of(&frame), Some(1 << log), "{:x?}", &frame[..8]);
        }
        for size in [1, 200, 300, 70_000] {
            let frame = zstd::bulk::compress(&vec![7; size], 3).unwrap();
            assert_eq!(window_of(&frame), Some(size as u64), "{:x?}", &frame[..8]);
        }
        for other in [&b""[..], b"\x28\xb5\x2f", b"\x28\xb5\x2f\xfd\x00", b"\x50\x2a\x4d\x18\0\0\0\0"] {
            assert_eq!(window_of(other), None);
        }
    }

    #[test]
    fn windows_wait_until_they_fit_and_a_canceled_layer_does_not() {
        static MEMORY: WindowMemory = WindowMemory::new(100);
        let first = MEMORY.acquire(60, || false, || false).unwrap();
        let second = MEMORY.acquire(40, || false, || false).unwrap();
        assert!(MEMORY.acquire(1, || false, || true).is_none());
        assert_eq!(
            MEMORY.acquire(50, || true, || false).unwrap().bytes,
            50,
            "others may wait for this layer"
        );
        drop(first);
        let large = std::thread::spawn(|| MEMORY.acquire(1000, || false, || false).unwrap().bytes);
        drop(second);
        assert_eq!(large.join().unwrap(), 100);
        assert_eq!(*MEMORY.taken(), 0);
    }
}
