//! Syncs large files while the rest of the layer is still unpacked.
//!
//! An image becomes visible after one sync of the filesystem. Without write-behind, that sync finds every byte still in
//! memory, and a pull first uses the cores and then the disk. A thread syncs large files as they are completed, so most
//! bytes are on disk by then. This is an optimization only: durability is guaranteed by the final sync.
//!
//! One thread serves all pulls, which bounds the number of queued files. It exits when there is no work. An open file
//! occupies space even after it is removed, so a pull that ends also drops its queued files here.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use larder::threads::spawn_owner;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// Smallest file worth a sync of its own, in bytes. Smaller ones are written faster all at once.
const LARGE: u64 = 1 << 20;

/// Syncs files of all pulls, one after the other. Clones share the thread.
#[derive(Debug, Clone)]
pub struct BackgroundSyncer(Arc<SyncQueue>);

#[derive(Debug)]
struct SyncQueue {
    /// Files that wait, at most. More are left to the sync at the end: the disk is the slower part then anyhow.
    room: usize,
    sync: fn(&File) -> io::Result<()>,
    state: Mutex<SyncQueueState>,
    /// A file was let go of.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SyncQueueState {
    waiting: VecDeque<(Arc<PullSyncResult>, OwnedFd)>,
    /// Whose file is being synced.
    at: Option<Arc<PullSyncResult>>,
    working: bool,
}

/// One pull's part of the work.
#[derive(Debug, Default)]
struct PullSyncResult(Mutex<SyncOutcome>);

#[derive(Debug, Default)]
struct SyncOutcome {
    ended: bool,
    /// The first error that the disk gave.
    error: Option<io::Error>,
}

/// Takes the large files of one pull. Clones are one.
#[derive(Debug, Clone)]
pub struct WriteBehind {
    queue: Arc<SyncQueue>,
    part: Arc<PullSyncResult>,
}

impl BackgroundSyncer {
    /// Keeps up to `room` files open that wait for their turn.
    pub fn new(room: usize) -> BackgroundSyncer {
        BackgroundSyncer::with(room, File::sync_data)
    }

    fn with(room: usize, sync: fn(&File) -> io::Result<()>) -> BackgroundSyncer {
        BackgroundSyncer(Arc::new(SyncQueue { room, sync, state: Mutex::default(), changed: Condvar::new() }))
    }

    /// A pull's part.
    pub fn begin(&self) -> WriteBehind {
        WriteBehind { queue: self.0.clone(), part: Arc::default() }
    }
}

impl WriteBehind {
    /// How much of a file is written between two syncs of it, in bytes.
    pub(super) const PIECE: usize = 16 << 20;

    /// Takes a file that is complete, or has grown by a piece, if it is large and there is room.
    pub(super) fn add(&self, file: OwnedFd, size: u64) {
        if size < LARGE {
            return;
        }
        let mut state = self.queue.state();
        if state.waiting.len() >= self.queue.room || self.part.outcome().ended {
            return;
        }
        state.waiting.push_back((self.part.clone(), file));
        if !state.working {
            let queue = self.queue.clone();
            let started = spawn_owner("write-behind", move || queue.work());
            state.working = started.is_ok();
            if !state.working {
                state.waiting.clear(); // they are left to the sync at the end
            }
        }
    }

    /// Lets go of the files that wait, and takes no more. Does not wait for the one that is being synced.
    pub fn cancel(&self) {
        let mut state = self.queue.state();
        self.part.outcome().ended = true;
        state.waiting.retain(|(part, _)| !Arc::ptr_eq(part, &self.part));
    }

    /// Whether one of its files is being synced.
    pub fn is_syncing(&self) -> bool {
        self.queue.state().at.as_ref().is_some_and(|part| Arc::ptr_eq(part, &self.part))
    }

    /// Ends this pull's part: none of its files is open here any more. Blocks until the file that is being synced is
    /// done, if it is one of them. Returns the first error that the disk gave.
    pub fn finish(&self) -> io::Result<()> {
        self.cancel();
        let mut state = self.queue.state();
        while state.at.as_ref().is_some_and(|part| Arc::ptr_eq(part, &self.part)) {
            self.queue.changed.wait(&mut state);
        }
        self.part.outcome().error.take().map_or(Ok(()), Err)
    }
}

impl SyncQueue {
    fn state(&self) -> MutexGuard<'_, SyncQueueState> {
        self.state.lock()
    }

    /// Until nothing waits.
    fn work(&self) {
        while let Some((part, file)) = self.next() {
            let file = File::from(file);
            if let Err(error) = (self.sync)(&file) {
                part.outcome().error.get_or_insert(error);
            }
        }
    }

    /// The next file, once the one before is closed.
    fn next(&self) -> Option<(Arc<PullSyncResult>, OwnedFd)> {
        let mut state = self.state();
        let next = state.waiting.pop_front();
        state.at = next.as_ref().map(|(part, _)| part.clone());
        state.working = next.is_some();
        self.changed.notify_all();
        next
    }
}

impl PullSyncResult {
    fn outcome(&self) -> MutexGuard<'_, SyncOutcome> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use std::thread;

    use super::*;

    /// The lengths of files that are synced say what happens: see [`slow`].
    const FAILS: u64 = 7;

    /// A pipe's end hangs up with the last file; reading waits for a byte that says to go on.
    fn slow(file: &File) -> io::Result<()> {
        if file.metadata()?.is_file() {
            return if file.metadata()?.size() == FAILS {
                Err(io::ErrorKind::StorageFull.into())
            } else {
                Ok(())
            };
        }
        io::Read::read(&mut &*file, &mut [0]).map(drop)
    }

    /// A file whose sync lasts until something is written to, or closes, the other end.
    fn slow_file() -> (OwnedFd, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (reader.into(), writer)
    }

    fn file(length: u64) -> OwnedFd {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        file.into()
    }

    /// Whether the other end is open.
    fn is_open(writer: &io::PipeWriter) -> bool {
        let mut fds = [rustix::event::PollFd::new(writer, rustix::event::PollFlags::empty())];
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default())).unwrap();
        !fds[0].revents().contains(rustix::event::PollFlags::ERR)
    }

    fn finishing(part: &WriteBehind) -> Receiver<io::Result<()>> {
        let (done, finished) = channel();
        let part = part.clone();
        thread::spawn(move || done.send(part.finish()));
        finished
    }

    #[test]
    fn finishing_waits_for_its_own_file_and_closes_waiting_ones() {
        let syncer = BackgroundSyncer::with(8, slow);
        let (ours, other) = (syncer.begin(), syncer.begin());
        let [(first, at), (second, waiting), (third, of_other)] = [(); 3].map(|()| slow_file());
        ours.add(first, LARGE);
        while syncer.0.state().at.is_none() {
            thread::yield_now();
        }
        ours.add(second, LARGE);
        other.add(third, LARGE);
        let finished = finishing(&ours);
        while is_open(&waiting) {
            thread::yield_now();
        }
        assert!(finished.recv_timeout(Duration::from_millis(50)).is_err(), "a file of its is still synced");
        assert!(is_open(&at) && is_open(&of_other));
        assert!(ours.is_syncing() && !other.is_syncing());
        drop(at);
        finished.recv().unwrap().unwrap();
        assert!(is_open(&of_other), "another pull's file is nothing to wait for");
        drop(of_other);
        other.finish().unwrap();
    }

    #[test]
    fn a_disk_error_is_returned_to_the_pull_of_its_file() {
        let syncer = BackgroundSyncer::with(8, slow);
        let (ours, other) = (syncer.begin(), syncer.begin());
        ours.add(file(FAILS), LARGE);
        other.add(file(1), LARGE);
        while syncer.0.state().working {
            thread::yield_now();
        }
        assert_eq!(ours.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
        other.finish().unwrap();
    }

    #[test]
    fn the_number_of_waiting_files_is_bounded() {
        let syncer = BackgroundSyncer::with(3, slow);
        let parts = [(); 4].map(|()| syncer.begin());
        let (first, at) = slow_file();
        parts[0].add(first, LARGE);
        while syncer.0.state().at.is_none() {
            thread::yield_now();
        }
        for part in parts.iter().cycle().take(20) {
            part.add(file(1), LARGE);
        }
        assert_eq!(syncer.0.state().waiting.len(), 3);
        parts[1].cancel();
        assert_eq!(syncer.0.state().waiting.len(), 2);
        parts[1].add(file(1), LARGE);
        assert_eq!(syncer.0.state().waiting.len(), 2, "it takes no more");
        drop(at);
        for part in &parts {
            part.finish().unwrap();
        }
    }
}
