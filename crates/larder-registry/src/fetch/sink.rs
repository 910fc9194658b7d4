//! Where a blob's bytes are written, usually a file. Writes run on blocking threads, in batches.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use larder::threads::in_place;
use parking_lot::RwLock;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Bytes collected before a write: large enough that the change of threads costs nothing.
const BATCH: usize = 256 * 1024;

/// How long bytes are collected at most: those of a slow connection count as progress, and are kept when it ends.
const BATCH_TIME: Duration = Duration::from_secs(1);

/// Receives the bytes of one blob, in any order.
pub trait BlobSink: Send + Sync + 'static {
    /// Writes all of `data` at `offset` of the blob. Called on blocking threads, concurrently, never for overlapping
    /// ranges. Bytes of a successful write are not fetched again. Never called after the fetch has ended, successfully
    /// or not.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;
}

/// A handle to the sink that can be closed: a write on a blocking thread outlives the future that requested it.
pub(super) struct ClosableSink {
    sink: Arc<dyn BlobSink>,
    open: RwLock<bool>,
}

impl ClosableSink {
    pub(super) fn new(sink: Arc<dyn BlobSink>) -> ClosableSink {
        ClosableSink { sink, open: RwLock::new(true) }
    }

    /// Waits for writes in progress, each a part of a batch; nothing is written after it.
    pub(super) fn close(&self) {
        // A write may sync the disk, and the fetch is dropped on a thread that runs other tasks.
        in_place(|| *self.open.write() = false);
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let open = self.open.read();
        if *open { self.sink.write_at(offset, data) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

/// Collects the bytes of one connection and writes one batch while it collects the next.
pub(super) struct RangeWriter {
    sink: Arc<ClosableSink>,
    batch: Vec<(u64, Bytes)>,
    collected: usize,
    /// Time of the last write.
    written: Instant,
    under_way: Option<JoinHandle<io::Result<Vec<Range<u64>>>>>,
}

impl RangeWriter {
    pub(super) fn new(sink: Arc<ClosableSink>) -> RangeWriter {
        RangeWriter { sink, batch: Vec::new(), collected: 0, written: Instant::now(), under_way: None }
    }

    /// Adds bytes to write; returns the ranges written since the last call.
    pub(super) async fn write(&mut self, offset: u64, data: Bytes) -> io::Result<Vec<Range<u64>>> {
        self.collected += data.len();
        self.batch.push((offset, data));
        let is_due = self.collected >= BATCH || self.written.elapsed() >= BATCH_TIME;
        if is_due { self.submit().await } else { Ok(Vec::new()) }
    }

    /// Writes the rest; returns the ranges written.
    pub(super) async fn flush(&mut self) -> io::Result<Vec<Range<u64>>> {
        let mut written = self.submit().await?;
        written.extend(self.await_write().await?);
        Ok(written)
    }

    /// Starts the write of the batch, after the previous one.
    async fn submit(&mut self) -> io::Result<Vec<Range<u64>>> {
        let written = self.await_write().await?;
        let batch = std::mem::take(&mut self.batch);
        self.collected = 0;
        self.written = Instant::now();
        let sink = self.sink.clone();
        self.under_way = Some(tokio::task::spawn_blocking(move || {
            let mut written: Vec<Range<u64>> = Vec::new();
            for (offset, data) in batch {
                sink.write_at(offset, &data)?;
                let range = offset..offset + data.len() as u64;
                match written.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => written.push(range),
                }
            }
            Ok(written)
        }));
        Ok(written)
    }

    async fn await_write(&mut self) -> io::Result<Vec<Range<u64>>> {
        match self.under_way.take() {
            None => Ok(Vec::new()),
            Some(writing) => writing.await.map_err(io::Error::other)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use larder_testkit::one_worker::OneWorker;
    use parking_lot::Mutex;

    use super::*;

    /// Reports each write, and ends it when it is told to.
    struct SlowSink(Sender<()>, Mutex<Receiver<()>>);

    impl BlobSink for SlowSink {
        fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
            let _ = self.0.send(());
            let _ = self.1.lock().recv();
            Ok(())
        }
    }

    #[test]
    fn a_dropped_fetch_that_waits_for_a_write_stops_no_other_task() {
        let ((begun, writing), (go_on, ends)) = (channel(), channel());
        let sink = Arc::new(ClosableSink::new(Arc::new(SlowSink(begun, Mutex::new(ends)))));
        let writer = Arc::clone(&sink);
        let written = std::thread::spawn(move || writer.write_at(0, b"bytes"));
        writing.recv().unwrap();
        let worker = OneWorker::new();
        let closing = Arc::clone(&sink);
        let closed = worker.spawn(async move { closing.close() });
        let runs_others = worker.runs_tasks();
        drop(go_on);
        written.join().unwrap().unwrap();
        worker.join(closed);
        assert!(runs_others);
        assert!(sink.write_at(0, b"more").is_err());
    }
}
