//! Large files on their way to the disk while the rest is still unpacked.
//!
//! An image becomes visible after one sync of the file system. Without this, that sync finds every byte still in
//! memory, and a pull first keeps the cores busy and then the disk. Here a thread syncs the large files as they come, so
//! that most bytes are written already. It is only ever early: whether all is durable is for the sync at the end to say.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Smallest file worth a sync of its own, in bytes. Smaller ones are written faster all at once.
const LARGE: u64 = 1 << 20;

/// Files that wait. More than that are left to the sync at the end: the disk is the slower part then anyhow.
const QUEUE: usize = 64;

/// Takes large files and syncs them, one after the other. Clones share the thread.
#[derive(Debug, Clone)]
pub struct WriteBehind(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stop: Arc<AtomicBool>,
    queue: Mutex<Option<SyncSender<OwnedFd>>>,
    thread: Mutex<Option<JoinHandle<io::Result<()>>>>,
}

impl WriteBehind {
    /// How much of a file is written between two syncs of it, in bytes.
    pub(super) const PIECE: usize = 16 << 20;

    /// Starts the thread.
    pub fn start() -> io::Result<WriteBehind> {
        let (sender, files) = sync_channel(QUEUE);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread =
            thread::Builder::new().name("write-behind".into()).spawn(move || sync(&files, &stopped))?;
        let (queue, thread) = (Mutex::new(Some(sender)), Mutex::new(Some(thread)));
        Ok(WriteBehind(Arc::new(Shared { stop, queue, thread })))
    }

    /// Takes a file that is complete, or has grown by a piece, if it is large and there is room.
    pub(super) fn take(&self, file: OwnedFd, size: u64) {
        if size < LARGE {
            return;
        }
        let queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = &*queue {
            let _ = queue.try_send(file); // a full queue drops it, which closes it
        }
    }

    /// Ends the thread, after the file that it is at. Blocks. Returns the first error that the disk gave.
    pub fn finish(&self) -> io::Result<()> {
        self.0.end();
        let thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        thread.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl Shared {
    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.end();
    }
}

fn sync(files: &Receiver<OwnedFd>, stop: &AtomicBool) -> io::Result<()> {
    for file in files {
        if !stop.load(Ordering::Relaxed) {
            File::from(file).sync_data()?;
        }
    }
    Ok(())
}
