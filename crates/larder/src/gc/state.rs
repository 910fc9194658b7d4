//! The state of garbage collection: usage records in memory, and the thread that writes them and the history to disk.
//!
//! Rounds and readers change and copy the records in memory under a lock that is never held across a call or a write,
//! so neither a removal nor a disk that hangs blocks them. The thread writes in request order and coalesces pending
//! saves. Dropping the state waits until everything is on disk.

use std::iter;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use parking_lot::{Mutex, MutexGuard};
use tokio::task::spawn_blocking;

use super::activity::ImageActivity;
use super::history::{RemovalHistory, RemovalHistoryEntry};
use super::policy::GcStrategy;
use super::unix_millis::UnixMillis;
use super::usage_records::{Clock, ClockReading, ImageUsageRecords, UsageRecordStore};
use crate::backend::Image;
use crate::reference::ImageId;
use crate::retention::RetentionSet;
use crate::threads::spawn_owner;

/// Ensures of an image within so many milliseconds are recorded as one use.
const ENSURES_ALIKE_MS: i64 = 30_000;

/// The owner of the usage records and the history.
pub(super) struct GcState {
    memory: Arc<Mutex<SharedUsageRecords>>,
    /// `None` if the writer thread could not be started.
    orders: Option<Sender<UsageWriteCommand>>,
    thread: Option<JoinHandle<()>>,
}

struct SharedUsageRecords {
    records: Arc<ImageUsageRecords>,
    /// Number of observations and removals that have begun.
    begun: u64,
    /// The number of the observation or removal that the records reflect.
    current: u64,
}

/// A request to the writer thread.
enum UsageWriteCommand {
    /// Save the records as they are when the thread handles this.
    Records,
    /// Append a removal to the history.
    Removal(RemovalHistoryEntry),
    /// Reply when every earlier request is written.
    Flush(Sender<()>),
}

/// When an observation began. A later observation takes precedence.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservationStart {
    number: u64,
    at: UnixMillis,
}

/// Why images are observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObservationPurpose {
    /// For a round: what is used now is recorded as used.
    Round,
    /// To answer a question: it records which images are present, and no use, so that a query does not change the
    /// order of removals.
    Query,
}

/// An observation: the images present, what retains them, and the activity since the last observation.
pub(super) struct GcObservation<'a> {
    pub(super) purpose: ObservationPurpose,
    pub(super) images: &'a [Image],
    pub(super) retained: &'a RetentionSet,
    pub(super) activity: &'a [ImageActivity],
}

impl GcState {
    /// Loads the records and starts the thread. Also returns the error of records that could not be read.
    pub(super) fn open(
        store: Arc<dyn UsageRecordStore>,
        history: Option<Arc<dyn RemovalHistory>>,
    ) -> (GcState, Option<String>) {
        let loaded = store.load();
        let memory = SharedUsageRecords { records: Arc::new(loaded.records), begun: 0, current: 0 };
        let memory = Arc::new(Mutex::new(memory));
        let (orders, requests) = mpsc::channel();
        let writer = UsageRecordWriter { memory: Arc::clone(&memory), store, history };
        let started = spawn_owner("gc-state", move || writer.run(&requests));
        if let Err(error) = &started {
            tracing::warn!("cannot start the writer thread of GC records and history: {error}");
        }
        let thread = started.ok();
        (GcState { memory, orders: thread.is_some().then_some(orders), thread }, loaded.notice)
    }

    /// The current records.
    pub(super) fn records(&self) -> Arc<ImageUsageRecords> {
        Arc::clone(&self.memory().records)
    }

    /// Must be called before the backend lists images.
    pub(super) fn begin_observation(&self, clock: &dyn Clock) -> ObservationStart {
        let mut memory = self.memory();
        memory.begun += 1;
        ObservationStart { number: memory.begun, at: clock.read().wall }
    }

    /// Applies an observation, and returns the resulting records and the time. If a later observation was applied or an
    /// image was removed since this one began, its images and uses are outdated and apply only to the returned copy.
    /// Activity is reported once, so it always applies.
    pub(super) fn observe(
        &self,
        began: ObservationStart,
        observed: &GcObservation<'_>,
        clock: &dyn Clock,
        strategy: GcStrategy,
    ) -> (Arc<ImageUsageRecords>, UnixMillis) {
        let mut memory = self.memory();
        // Under the lock, so that time does not go back from one observation to the next.
        let now = clock.read();
        let apply = |records: &mut ImageUsageRecords, uses: &RetentionSet| {
            records.observe(observed.images, uses, &now, strategy);
            records.apply_activity(observed.activity, began.at);
        };
        let before = Arc::clone(&memory.records);
        let is_latest = began.number > memory.current;
        if is_latest {
            memory.current = began.number;
            let none = RetentionSet::default();
            let uses = if observed.purpose == ObservationPurpose::Round { observed.retained } else { &none };
            apply(Arc::make_mut(&mut memory.records), uses);
        } else {
            Arc::make_mut(&mut memory.records).apply_activity(observed.activity, began.at);
        }
        let current = Arc::clone(&memory.records);
        drop(memory);
        let mut records = Arc::clone(&current);
        if !is_latest || observed.purpose == ObservationPurpose::Query {
            apply(Arc::make_mut(&mut records), observed.retained);
        }
        // A query that finds nothing new leaves the file as it is.
        if observed.purpose == ObservationPurpose::Round || !current.has_same_images(&before) {
            self.save();
        }
        (records, now.wall)
    }

    /// Drops the record of a removed image. Saved with the next [`save`](GcState::save).
    pub(super) fn forget(&self, id: &ImageId, handler: &str) {
        let mut memory = self.memory();
        memory.begun += 1;
        memory.current = memory.begun;
        Arc::make_mut(&mut memory.records).forget(id, handler);
    }

    /// Whether any observation was ever applied.
    pub(super) fn has_observed(&self) -> bool {
        self.memory().records.watched().is_some()
    }

    /// Records an ensure of the image as a use, unless one was recorded not long ago.
    pub(super) fn ensured(&self, id: &ImageId, now: &ClockReading, strategy: GcStrategy) {
        {
            let mut memory = self.memory();
            let used = memory.records.get(id, "").and_then(|record| record.last_used);
            if used.is_some_and(|used| (0..ENSURES_ALIKE_MS).contains(&now.wall.millis_since(used))) {
                return;
            }
            Arc::make_mut(&mut memory.records).ensured([id], now, strategy);
        }
        self.save();
    }

    /// Requests that the records are saved. Does not wait.
    pub(super) fn save(&self) {
        self.write(UsageWriteCommand::Records);
    }

    /// Requests that a removal is appended to the history. Does not wait.
    pub(super) fn record_removal(&self, entry: RemovalHistoryEntry) {
        self.write(UsageWriteCommand::Removal(entry));
    }

    /// Waits until every earlier request is on disk, or has failed and was logged.
    pub(super) async fn flush(&self) {
        let (written, wait) = mpsc::channel();
        self.write(UsageWriteCommand::Flush(written));
        // Without a thread the sender is dropped, and `recv` returns at once.
        let _ = spawn_blocking(move || wait.recv()).await;
    }

    fn write(&self, write: UsageWriteCommand) {
        if let Some(orders) = &self.orders {
            // Fails only after the thread has panicked, which was reported.
            let _ = orders.send(write);
        }
    }

    fn memory(&self) -> MutexGuard<'_, SharedUsageRecords> {
        lock(&self.memory)
    }
}

impl Drop for GcState {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state of the writer thread.
struct UsageRecordWriter {
    memory: Arc<Mutex<SharedUsageRecords>>,
    store: Arc<dyn UsageRecordStore>,
    history: Option<Arc<dyn RemovalHistory>>,
}

impl UsageRecordWriter {
    fn run(&self, requests: &Receiver<UsageWriteCommand>) {
        while let Ok(first) = requests.recv() {
            let (mut save, mut waiting) = (false, Vec::new());
            for write in iter::once(first).chain(requests.try_iter()) {
                match write {
                    UsageWriteCommand::Records => save = true,
                    UsageWriteCommand::Removal(entry) => self.append(&entry),
                    UsageWriteCommand::Flush(written) => waiting.push(written),
                }
            }
            if save {
                self.save();
            }
            for written in waiting {
                // The caller may have stopped waiting.
                let _ = written.send(());
            }
        }
    }

    fn save(&self) {
        let records = Arc::clone(&lock(&self.memory).records);
        if let Err(error) = self.store.save(&records) {
            tracing::warn!("{error}");
        }
    }

    fn append(&self, entry: &RemovalHistoryEntry) {
        let Some(history) = &self.history else { return };
        if let Err(error) = history.record(entry) {
            tracing::warn!("cannot record the removal of {}: {error}", entry.id);
        }
    }
}

fn lock(memory: &Mutex<SharedUsageRecords>) -> MutexGuard<'_, SharedUsageRecords> {
    memory.lock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gc::activity::ActivityKind;
    use crate::gc::usage_records::{ClockReading, VolatileUsageRecords};

    /// Each reading is a second later.
    struct TickingClock(Mutex<i64>);

    impl Clock for TickingClock {
        fn read(&self) -> ClockReading {
            let mut seconds = self.0.lock();
            *seconds += 1;
            ClockReading::wall(UnixMillis(*seconds * 1000))
        }
    }

    fn ids(records: &ImageUsageRecords) -> Vec<&str> {
        records.iter().map(|record| record.id.as_str()).collect()
    }

    #[test]
    fn an_outdated_observation_counts_only_for_its_caller_and_an_event_for_all() {
        let (state, _) = GcState::open(Arc::new(VolatileUsageRecords::default()), None);
        let clock = TickingClock(Mutex::new(0));
        let observe = |began, present: &[&str], activity: &[ImageActivity]| {
            let image = |id: &&str| Image { id: (*id).into(), ..Image::default() };
            let images: Vec<_> = present.iter().map(image).collect();
            let uses = RetentionSet::new(Vec::new(), &images, GcStrategy::Larder);
            let purpose = ObservationPurpose::Round;
            let observed = GcObservation { purpose, images: &images, retained: &uses, activity };
            state.observe(began, &observed, &clock, GcStrategy::Larder).0
        };
        let first = state.begin_observation(&clock);
        let second = state.begin_observation(&clock);
        assert_eq!(ids(&observe(second, &["a", "b"], &[])), ["a", "b"]);
        let sighting = |what, at| ImageActivity { image: "b".into(), at: UnixMillis(at), what };
        let happened = [sighting(ActivityKind::Added, 500), sighting(ActivityKind::Used, 900)];
        assert_eq!(ids(&observe(first, &["a"], &happened)), ["a"], "b came later");
        let known = state.records();
        assert_eq!(ids(&known), ["a", "b"]);
        let b = known.get(&"b".into(), "").unwrap();
        assert_eq!((b.first_seen, b.last_used), (UnixMillis(500), Some(UnixMillis(900))));
        let before = state.begin_observation(&clock);
        state.forget(&"a".into(), "");
        assert_eq!(ids(&observe(before, &["a", "b"], &[])), ["a", "b"], "it was there when this began");
        assert_eq!(ids(&state.records()), ["b"]);
        assert_eq!(ids(&observe(state.begin_observation(&clock), &["b", "c"], &[])), ["b", "c"]);
        assert_eq!(ids(&state.records()), ["b", "c"]);
    }
}
