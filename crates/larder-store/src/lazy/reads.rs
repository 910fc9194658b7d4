//! Reads of incomplete layers: the kernel asks for each, and the answer waits for the data.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::gettid;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::{self, Instant};

use super::group::{Answer, GroupState, PreContentEvent, PreContentGroup};
use super::journal::FileId;
use super::keeper::GroupKeeper;
use super::partial_layer::{PartialLayer, WaitingReader};
use crate::unpack::UnfilledLayer as _;

/// How often reads are looked at that may have waited for too long, and what keeps the group.
const CHECK: Duration = Duration::from_secs(1);
/// How much less the thread that answers reads gives way than others: unpacking keeps processors busy.
const AHEAD: i32 = 10;

/// A file whose reads are guarded, or were: some may be under way.
#[derive(Debug)]
enum GuardedFile {
    Filling(Arc<PartialLayer>),
    Complete,
    /// It is not filled any more.
    Ended,
}

/// The layers whose reads are guarded.
#[derive(Debug)]
pub(crate) struct GuardedReads {
    group: PreContentGroup,
    /// Keeps the group open when this process ends.
    keeper: Arc<dyn GroupKeeper>,
    /// How the group came to be.
    state: GroupState,
    /// By the layers' files.
    files: Mutex<HashMap<FileId, GuardedFile>>,
    /// How long a read waits for data.
    longest_wait: Duration,
    /// Has the thread that answers begin.
    begin: Sender<Weak<GuardedReads>>,
}

impl GuardedReads {
    /// Opens the group of events, or takes over that of an earlier process. Nothing is answered yet, but all that is
    /// needed for that is there: reads that wait must not depend on a thread that cannot be made.
    pub(crate) fn open(
        keeper: Arc<dyn GroupKeeper>,
        marker: &Path,
        longest_wait: Duration,
    ) -> io::Result<Arc<GuardedReads>> {
        let (begin, started) = channel::<Weak<GuardedReads>>();
        let answer = move || started.recv().map_or((), |reads| serve(&reads));
        thread::Builder::new().name("layer-reads".into()).spawn(answer)?;
        let (group, state) = PreContentGroup::open(&*keeper, marker)?;
        let files = Mutex::default();
        Ok(Arc::new(GuardedReads { group, keeper, state, files, longest_wait, begin }))
    }

    /// Begins to answer, for as long as this lives, within the runtime. All layers that an earlier process has guarded
    /// must be guarded again: a read of another file fails.
    pub(crate) fn start(reads: &Arc<GuardedReads>) {
        // The thread waits for it.
        let _ = reads.begin.send(Arc::downgrade(reads));
        Handle::current().spawn(expire(Arc::downgrade(reads)));
    }

    /// How the group came to be.
    pub(crate) fn state(&self) -> GroupState {
        self.state
    }

    /// Notes that images which may have been read wrongly are dealt with.
    pub(crate) fn acknowledge_loss(&self) -> io::Result<()> {
        self.group.acknowledge_loss()
    }

    /// Ends the guard: no layer is incomplete.
    pub(crate) fn end(&self) -> io::Result<()> {
        self.group.release(&*self.keeper)
    }

    /// Answers no more reads: they wait for the next process.
    pub(crate) fn stop(&self) -> io::Result<()> {
        self.group.stop()
    }

    /// Has the group kept open, should what keeps it have ended.
    fn renew(&self) -> io::Result<()> {
        self.group.renew(&*self.keeper)
    }

    /// Guards the file of a layer. Whatever opens it from now on waits for the data that it reads.
    pub(crate) fn guard(&self, layer: &Arc<PartialLayer>) -> io::Result<()> {
        self.renew()?;
        let file = FileId::of(layer.file().as_fd())?;
        self.files.lock().insert(file, GuardedFile::Filling(Arc::clone(layer)));
        self.group.mark(layer.file().as_fd()).inspect_err(|_| {
            self.files.lock().remove(&file);
        })
    }

    /// Files that are marked.
    pub(crate) fn marked(&self) -> io::Result<HashSet<u64>> {
        self.group.marked()
    }

    /// Ends the guard of a complete layer.
    pub(crate) fn release(&self, layer: &PartialLayer) -> io::Result<()> {
        let file = FileId::of(layer.file().as_fd())?;
        self.files.lock().insert(file, GuardedFile::Complete);
        self.group.unmark(layer.file().as_fd())
    }

    /// Fails the reads of a layer that is not filled any more.
    pub(crate) fn fail(&self, layer: &PartialLayer) -> io::Result<()> {
        let file = FileId::of(layer.file().as_fd())?;
        self.files.lock().insert(file, GuardedFile::Ended);
        Ok(())
    }

    fn begin(&self, event: PreContentEvent) {
        let Some(file) = event.file else { return self.begin_somewhere(event) };
        let files = self.files.lock();
        match files.get(&file) {
            Some(GuardedFile::Filling(layer)) => {
                let (layer, range) = (Arc::clone(layer), event.range.clone());
                drop(files);
                layer.read(Box::new(event), &range, Instant::now());
            }
            Some(GuardedFile::Complete) => Box::new(event).allow(),
            // Denied.
            Some(GuardedFile::Ended) | None => drop(event),
        }
    }

    /// A read that an earlier process has not recorded: it goes on when each layer has its range.
    fn begin_somewhere(&self, event: PreContentEvent) {
        let (range, layers) = (event.range.clone(), self.layers());
        let shared = Arc::new(SharedRead { event, is_failed: AtomicBool::new(false) });
        for layer in layers {
            let part = PartOfRead(Some(Arc::clone(&shared)));
            layer.read(Box::new(part), &range, Instant::now());
        }
        PartOfRead(Some(shared)).go_on();
    }

    fn layers(&self) -> Vec<Arc<PartialLayer>> {
        let files = self.files.lock();
        let layers = files.values().filter_map(|file| match file {
            GuardedFile::Filling(layer) => Some(Arc::clone(layer)),
            GuardedFile::Complete | GuardedFile::Ended => None,
        });
        layers.collect()
    }
}

impl WaitingReader for PreContentEvent {
    fn allow(self: Box<Self>) {
        if let Err(error) = self.answer(Answer::Allow) {
            tracing::warn!(%error, "cannot let a read of an incomplete layer go on");
        }
    }

    fn process(&self) -> i32 {
        self.pid
    }
}

/// A read that waits for several layers.
#[derive(Debug)]
struct SharedRead {
    event: PreContentEvent,
    is_failed: AtomicBool,
}

/// The wait of a read for one of several layers.
#[derive(Debug)]
struct PartOfRead(Option<Arc<SharedRead>>);

impl PartOfRead {
    /// Ends this wait; the last one lets the read go on, unless another has failed.
    fn go_on(mut self) {
        if let Some(SharedRead { event, is_failed }) = self.0.take().and_then(Arc::into_inner)
            && !is_failed.into_inner()
        {
            Box::new(event).allow();
        }
    }
}

impl WaitingReader for PartOfRead {
    fn allow(self: Box<Self>) {
        self.go_on();
    }

    fn process(&self) -> i32 {
        self.0.as_ref().map_or(0, |shared| shared.event.pid)
    }
}

impl Drop for PartOfRead {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            shared.is_failed.store(true, Ordering::Release);
        }
    }
}

fn serve(reads: &Weak<GuardedReads>) {
    // Containers wait for each answer. Without the right to it, it is a thread like any other.
    let priority = getpriority_process(None).map(|priority| priority - AHEAD);
    let _ = priority.and_then(|priority| setpriority_process(Some(gettid()), priority));
    while let Some(reads) = reads.upgrade() {
        match reads.group.next_event() {
            Some(Ok(event)) => reads.begin(event),
            Some(Err(error)) => {
                return tracing::error!(%error, "reads of incomplete layers are answered no more: they wait for the next start");
            }
            None => return,
        }
    }
}

async fn expire(reads: Weak<GuardedReads>) {
    while let Some(reads) = reads.upgrade() {
        let (now, longest) = (Instant::now(), reads.longest_wait);
        let expired: Vec<i32> = reads.layers().iter().flat_map(|layer| layer.expire(now, longest)).collect();
        if !expired.is_empty() {
            let processes = expired;
            tracing::warn!(
                ?processes,
                "reads of layers have failed: data that is missing or damaged did not come in time"
            );
        }
        if !reads.layers().is_empty()
            && let Ok(Err(error)) = spawn_blocking(move || reads.renew()).await
        {
            tracing::error!(%error, "incomplete layers have no guard if larder is killed now");
        }
        time::sleep(CHECK).await;
    }
}
