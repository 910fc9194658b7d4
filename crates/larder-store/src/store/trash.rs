//! Deletion: files are renamed into `trash` at once and deleted by a separate thread soon after.
//!
//! The thread exits when there is no work, so an idle store has none. When the store is closed, the thread stops within
//! one entry and the next start continues; or it finishes first, if the configuration asks for it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use larder::threads::spawn_owner;
use parking_lot::{Mutex, MutexGuard};

use super::StoreConfig;
use super::layout::names_in;
use crate::disk::Disk;

/// Deletes what is in one directory.
#[derive(Debug)]
pub(crate) struct Trash {
    shared: Arc<TrashDir>,
    background: bool,
    finish: AtomicBool,
}

#[derive(Debug)]
struct TrashDir {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    state: Mutex<TrashWorkerState>,
    stop: AtomicBool,
    /// Something was deleted since the filesystem was last synced.
    deleted: AtomicBool,
    /// Held while the directory is being emptied.
    emptying: Mutex<()>,
}

#[derive(Debug, Default)]
struct TrashWorkerState {
    /// Something came since the thread last looked.
    more: bool,
    worker: Option<JoinHandle<()>>,
    working: bool,
}

impl Trash {
    pub(crate) fn new(disk: Arc<dyn Disk>, dir: PathBuf, config: &StoreConfig) -> Trash {
        let (state, stop, emptying) = (Mutex::default(), AtomicBool::new(false), Mutex::default());
        let shared = TrashDir { disk, dir, state, stop, deleted: AtomicBool::new(false), emptying };
        Trash {
            shared: Arc::new(shared),
            background: config.background_deletion,
            finish: AtomicBool::new(config.finish_deletion),
        }
    }

    /// Says that something is in the directory.
    pub(crate) fn kick(&self) {
        if !self.background {
            return;
        }
        let mut state = self.shared.state();
        state.more = true;
        if state.working {
            return;
        }
        if let Some(finished) = state.worker.take() {
            // It has let go of the state for the last time, so this does not wait.
            let _ = finished.join();
        }
        let shared = self.shared.clone();
        let started = spawn_owner("larder-trash", move || shared.work());
        match started {
            Ok(worker) => {
                state.working = true;
                state.worker = Some(worker);
            }
            Err(error) => tracing::warn!(%error, "cannot delete removed layers; the next removal retries"),
        }
    }

    /// Lets the closing of the store wait until everything is deleted.
    pub(crate) fn finish(&self) {
        self.finish.store(true, Ordering::Relaxed);
    }

    /// Deletes everything that is in the directory now.
    pub(crate) fn empty(&self) -> io::Result<()> {
        self.shared.empty()
    }

    /// Calls `sync` if something was deleted since it last succeeded.
    pub(crate) fn sync_deletions(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if !self.shared.deleted.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        sync().inspect_err(|_| self.shared.deleted.store(true, Ordering::Release))
    }
}

impl Drop for Trash {
    fn drop(&mut self) {
        if !self.finish.load(Ordering::Relaxed) {
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        let worker = self.shared.state().worker.take();
        if let Some(worker) = worker {
            // A thread that panicked has nothing left to do either.
            let _ = worker.join();
        }
    }
}

impl TrashDir {
    fn state(&self) -> MutexGuard<'_, TrashWorkerState> {
        self.state.lock()
    }

    /// Until nothing is left.
    fn work(&self) {
        loop {
            {
                let mut state = self.state();
                if !state.more || self.stop.load(Ordering::Relaxed) {
                    state.working = false;
                    return;
                }
                state.more = false;
            }
            if let Err(error) = self.empty()
                && error.kind() != io::ErrorKind::Interrupted
            {
                let dir = self.dir.display();
                tracing::warn!(%error, %dir, "cannot delete removed files; the next removal retries");
            }
        }
    }

    /// Every entry is tried; the first error is returned.
    fn empty(&self) -> io::Result<()> {
        // Two at once would take files from under each other.
        let _alone = self.emptying.lock();
        let go_on = || !self.stop.load(Ordering::Relaxed);
        let mut first = Ok(());
        for name in names_in(&self.dir)? {
            if !go_on() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let done = self.disk.remove_tree(&self.dir.join(name), &go_on);
            self.deleted.store(true, Ordering::Release);
            if first.is_ok() {
                first = done;
            }
        }
        first
    }
}

/// Moves something into the trash; succeeds when it is not there.
pub(crate) fn discard(disk: &dyn Disk, path: &Path, trash: &Path) -> io::Result<()> {
    match disk.rename(path, trash) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
