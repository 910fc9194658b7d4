//! Images that were ensured not long ago: garbage collection spares them until their container runs, also when it is
//! another process that collects.
//!
//! While this process lives, the gate of its manager protects them. This is the record for those after it: written
//! by one thread, each image at most once in [`RENEW`], all that is pending in one write. An ensure answers after the
//! write, so that the record exists even if the process is killed right after the answer.

use std::collections::HashMap;
use std::mem;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use larder::error_chain;
use larder::reference::{Digest, ImageId};
use larder_store::backend::StoreBackend;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::ensured_file::EnsureLeaseFile;
use crate::Error;

/// How long an image that was recorded is not recorded again.
const RENEW: Duration = Duration::from_secs(30);

/// Where ensures are recorded.
enum EnsureJournal {
    /// As leases of larder's own store.
    Store(StoreBackend),
    /// In a file of the state directory.
    File(EnsureLeaseFile),
}

/// Records ensures of one backend. The last one dropped waits until all of them are on disk.
pub(crate) struct RecentEnsures {
    pending: Arc<Mutex<PendingEnsures>>,
    wake: Option<Sender<JournalCommand>>,
    thread: Option<JoinHandle<()>>,
    /// Whether a pull itself leases its image.
    pulls_lease: bool,
}

#[derive(Default)]
struct PendingEnsures {
    ids: Vec<ImageId>,
    /// When each image was recorded last.
    recorded: HashMap<ImageId, Instant>,
}

enum JournalCommand {
    Write,
    /// Answered once everything before it was written.
    Flush(oneshot::Sender<()>),
    /// Ends the leases of these images, after everything before it was written.
    End(Vec<ImageId>, oneshot::Sender<Result<(), Error>>),
}

impl RecentEnsures {
    /// Records in larder's own store.
    pub(crate) fn in_store(store: StoreBackend) -> RecentEnsures {
        RecentEnsures::new(EnsureJournal::Store(store))
    }

    /// Records in a file of the state directory.
    pub(crate) fn in_file(file: EnsureLeaseFile) -> RecentEnsures {
        RecentEnsures::new(EnsureJournal::File(file))
    }

    fn new(journal: EnsureJournal) -> RecentEnsures {
        let (wake, woken) = mpsc::channel::<JournalCommand>();
        let pending = Arc::new(Mutex::new(PendingEnsures::default()));
        let pulls_lease = matches!(journal, EnsureJournal::Store(_));
        let shared = Arc::clone(&pending);
        let thread = thread::Builder::new().name("ensures".into()).spawn(move || {
            while let Ok(wake) = woken.recv() {
                let ids = mem::take(&mut lock(&shared).ids);
                journal.record(&ids, &shared);
                // A caller that is gone needs no answer.
                match wake {
                    JournalCommand::Write => {}
                    JournalCommand::Flush(done) => _ = done.send(()),
                    JournalCommand::End(ids, done) => {
                        let ended = journal.end(&ids);
                        // Those ensured since the call, whose leases it has ended, too.
                        let again: Vec<_> = {
                            let pending = lock(&shared);
                            ids.into_iter().filter(|id| pending.recorded.contains_key(id)).collect()
                        };
                        journal.record(&again, &shared);
                        let _ = done.send(ended);
                    }
                }
            }
        });
        if let Err(error) = &thread {
            tracing::warn!("cannot record ensured images: {error}");
        }
        RecentEnsures { pending, wake: Some(wake), thread: thread.ok(), pulls_lease }
    }

    /// Records that an image was ensured now. Returns at once: whether it had not been recorded for a while.
    pub(crate) fn note(&self, id: &ImageId) -> bool {
        let now = Instant::now();
        let mut pending = lock(&self.pending);
        pending.recorded.retain(|_, recorded| now.duration_since(*recorded) < RENEW);
        if pending.recorded.contains_key(id) {
            return false;
        }
        pending.recorded.insert(id.clone(), now);
        pending.ids.push(id.clone());
        drop(pending);
        self.wake(JournalCommand::Write);
        true
    }

    /// Records that an image was just pulled: whether the pull has leased it, and nothing needs to be written.
    pub(crate) fn note_pulled(&self, id: &ImageId) -> bool {
        if self.pulls_lease {
            lock(&self.pending).recorded.insert(id.clone(), Instant::now());
        } else {
            self.note(id);
        }
        self.pulls_lease
    }

    /// Waits until all that was recorded is on disk.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        self.wake(JournalCommand::Flush(done));
        let _ = written.await; // closed where there is no thread
    }

    /// Ends the leases of these images; durable when it returns. An ensure since the call, or after it, leases its image
    /// again.
    pub(crate) async fn end(&self, ids: &[ImageId]) -> Result<(), Error> {
        {
            let mut pending = lock(&self.pending);
            pending.recorded.retain(|id, _| !ids.contains(id));
        }
        let (done, ended) = oneshot::channel();
        self.wake(JournalCommand::End(ids.to_vec(), done));
        ended.await.unwrap_or_else(|_| Err(Error::failed("cannot record ensured images")))
    }

    fn wake(&self, wake: JournalCommand) {
        if let Some(sender) = &self.wake {
            let _ = sender.send(wake); // closed where there is no thread
        }
    }
}

impl Drop for RecentEnsures {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl EnsureJournal {
    /// Writes these; the next ensure of each tries again if that fails.
    fn record(&self, ids: &[ImageId], pending: &Mutex<PendingEnsures>) {
        if !ids.is_empty()
            && let Err(error) = self.write(ids)
        {
            tracing::warn!("GC may remove ensured images before they are used: {error}");
            lock(pending).recorded.retain(|id, _| !ids.contains(id));
        }
    }

    fn end(&self, ids: &[ImageId]) -> Result<(), Error> {
        match self {
            EnsureJournal::File(file) => file.remove(ids),
            EnsureJournal::Store(store) => {
                let ids: Vec<Digest> = ids.iter().filter_map(ImageId::digest).collect();
                let ended = store.store().end_image_leases(&ids);
                ended.map_err(|error| Error::failed(error_chain(&error)))
            }
        }
    }

    fn write(&self, ids: &[ImageId]) -> Result<(), Error> {
        match self {
            EnsureJournal::File(file) => file.add(ids),
            EnsureJournal::Store(store) => {
                let leased = store.puller().lease_ensured(ids.iter().filter_map(ImageId::digest));
                leased.map_err(|error| Error::failed(error_chain(&error)))
            }
        }
    }
}

fn lock(pending: &Mutex<PendingEnsures>) -> MutexGuard<'_, PendingEnsures> {
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use larder::gc::ClockReading;
    use larder::retention::RetentionSource as _;
    use larder_registry::{RegistryClient, RegistryConfig};
    use larder_store::pull::{StorePullConfig, StorePuller};
    use larder_store::store::{Store, StoreConfig};

    use super::*;
    use crate::state::StateDir;

    #[tokio::test(start_paused = true)]
    async fn a_use_is_on_disk_after_a_flush_and_is_renewed_later() {
        let dir = tempfile::tempdir().unwrap();
        let lease = Duration::from_secs(60);
        let file = || EnsureLeaseFile::at(&StateDir::at(dir.path().to_owned()), lease);
        let recent = RecentEnsures::in_file(file());
        for id in ["sha256:a", "sha256:b", "sha256:a"] {
            recent.note(&id.into());
        }
        recent.flush().await;
        let mut found: Vec<_> =
            file().retentions().await.unwrap().into_iter().map(|found| found.image).collect();
        found.sort_unstable();
        assert_eq!(found, ["sha256:a", "sha256:b"]);
        fs_err::remove_file(dir.path().join("ensured.json")).unwrap();
        recent.note(&"sha256:a".into());
        recent.flush().await;
        assert!(file().retentions().await.unwrap().is_empty(), "it was recorded not long ago");
        tokio::time::advance(RENEW).await;
        recent.note(&"sha256:a".into());
        drop(recent);
        assert_eq!(file().retentions().await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn an_ensure_while_its_lease_ends_has_one_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let file = || EnsureLeaseFile::at(&StateDir::at(dir.path().to_owned()), Duration::from_secs(60));
        let recent = RecentEnsures::in_file(file());
        let ids = ["a", "b"].map(ImageId::from);
        for id in &ids {
            recent.note(id);
        }
        recent.flush().await;
        // The thread waits for the lock until the ensure is noted.
        let pending = Arc::clone(&recent.pending);
        let (done, ended) = oneshot::channel();
        {
            let mut pending = lock(&pending);
            pending.recorded.clear();
            recent.wake(JournalCommand::End(ids.to_vec(), done));
            pending.recorded.insert(ids[0].clone(), Instant::now());
            pending.ids.push(ids[0].clone());
            recent.wake(JournalCommand::Write);
        }
        ended.await.unwrap().unwrap();
        recent.flush().await;
        let found: Vec<_> = file().retentions().await.unwrap().into_iter().map(|found| found.image).collect();
        assert_eq!(found, ["a"]);
    }

    #[tokio::test]
    async fn a_pull_into_the_store_has_leased_its_image_itself() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), StoreConfig::default()).unwrap();
        let puller = StorePuller::new(
            store.clone(),
            RegistryClient::new(RegistryConfig::default()),
            StorePullConfig::default(),
        );
        let recent = RecentEnsures::in_store(StoreBackend::new(puller));
        let id = ImageId::from(format!("sha256:{}", "a".repeat(64)));
        assert!(recent.note_pulled(&id));
        recent.note(&id);
        recent.flush().await;
        assert_eq!(store.leases(&ClockReading::now()).unwrap().len(), 0, "not written a second time");
        let file = EnsureLeaseFile::at(&StateDir::at(dir.path().to_owned()), Duration::from_secs(60));
        let recent = RecentEnsures::in_file(file);
        assert!(!recent.note_pulled(&id), "a runtime has no leases of larder");
    }
}
