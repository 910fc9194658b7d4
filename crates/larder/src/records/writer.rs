//! The one thread of a process that changes pull records. It batches the changes that arrive while it waits for the
//! disk.
//!
//! Promises: a change that returned success survives a power failure; a record is durable before the intent that it
//! closes is removed; a failed change does not change memory.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::RecordsError;
use super::document::{ImagePullCredentials, ImagePullIntent, ImagePulledRecord};
use super::indexed_record::IndexedRecord;
use super::memory::RecordCache;
use super::merge::merge;
use super::names::has_name;
use super::pull_locks::PullLock;
use super::record_dir::{RecordDir, RecordDirKind};
use super::rfc3339::Rfc3339Time;
use super::running_pulls::RunningPulls;
use crate::backend::Image;
use crate::reference::{ImageId, ImageName};
use crate::threads::spawn_owner;

/// Maximum number of changes in a batch.
const BATCH: usize = 1000;

/// A change of the pull records.
#[derive(Debug, Clone)]
pub(super) enum RecordChange {
    /// A pull is about to start.
    Intent { image: ImageName },
    /// A pull ended without an image: removes the intent, unless another pull of the image began since. Unless the
    /// image is known to be absent, an intent of another process remains as well, because its pull may have succeeded.
    Failed { image: ImageName, absent: bool },
    /// A pull succeeded.
    Pulled { image: ImageName, image_ref: ImageId, access: Option<ImagePullCredentials>, now: Rfc3339Time },
    /// A pod authenticated for an image.
    AddCredentials { name: String, image_ref: ImageId, access: ImagePullCredentials, now: Rfc3339Time },
    /// Removes records of images that are not among these, unless they changed since `before`.
    Prune { kept: Arc<HashSet<ImageId>>, before: Rfc3339Time },
    /// Resolves intents of dead processes; these images are present, and some of them were preloaded.
    Recover { images: Arc<Vec<Image>>, preloaded: Arc<HashSet<ImageId>>, now: Rfc3339Time },
    /// Rewrites documents of older versions.
    Migrate,
    /// No change: answered when all earlier changes are done.
    Barrier,
}

type ChangeReply = oneshot::Sender<Result<(), RecordsError>>;
type ChangeRequest = (RecordChange, Option<ChangeReply>);

/// The intents of this process, by image: on disk, durably.
type ProcessIntents = HashMap<ImageName, ProcessIntent>;

struct ProcessIntent {
    _hold: PullLock,
    /// True if the intent existed before: another process pulls the image, or was interrupted.
    found: bool,
}

/// The state that changes operate on.
pub(super) struct WriterContext {
    pub(super) dir: Arc<RecordDir>,
    pub(super) memory: Arc<RecordCache>,
    pub(super) in_flight: Arc<RunningPulls>,
}

/// The handle of the writer thread. Dropping it waits until all changes are written.
pub(super) struct PullRecordWriter {
    orders: Mutex<Option<Sender<ChangeRequest>>>,
    thread: Option<JoinHandle<()>>,
}

impl PullRecordWriter {
    pub(super) fn start(context: WriterContext) -> io::Result<PullRecordWriter> {
        let (orders, ordered) = mpsc::channel();
        let thread = spawn_owner("records", move || work(&context, &ordered))?;
        Ok(PullRecordWriter { orders: Mutex::new(Some(orders)), thread: Some(thread) })
    }

    /// Submits a change without waiting; errors are logged.
    pub(super) fn submit(&self, change: RecordChange) {
        self.send(change, None);
    }

    /// Submits a change at once; the future returns when it is durable or has failed.
    pub(super) fn submit_and_wait(
        &self,
        change: RecordChange,
    ) -> impl Future<Output = Result<(), RecordsError>> + Send + use<> {
        let (answer, answered) = oneshot::channel();
        self.send(change, Some(answer));
        async { answered.await.unwrap_or(Err(RecordsError::Closed)) }
    }

    fn send(&self, change: RecordChange, answer: Option<ChangeReply>) {
        let orders = self.orders.lock();
        if let Some(orders) = orders.as_ref() {
            // Without a thread the answer is dropped, which the caller sees as an error.
            let _ = orders.send((change, answer));
        }
    }
}

impl Drop for PullRecordWriter {
    fn drop(&mut self) {
        drop(self.orders.lock().take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(context: &WriterContext, ordered: &Receiver<ChangeRequest>) {
    let mut held = ProcessIntents::new();
    while let Ok(first) = ordered.recv() {
        let batch: Vec<_> = std::iter::once(first).chain(ordered.try_iter().take(BATCH - 1)).collect();
        let changes: Vec<_> = batch.iter().map(|(change, _)| change).collect();
        let together = context.make(&changes, &mut held);
        let alone = together.is_err() && batch.len() > 1;
        for (change, answer) in batch {
            // One failing change must not fail the others.
            let made = if alone { context.make(&[&change], &mut held) } else { together.clone() };
            if let (Err(error), None) = (&made, &answer) {
                tracing::warn!("pull records: {error}");
            }
            let _ = answer.map(|answer| answer.send(made));
        }
    }
}

impl WriterContext {
    /// Applies these changes, all or none.
    fn make(&self, changes: &[&RecordChange], held: &mut ProcessIntents) -> Result<(), RecordsError> {
        let mut batch = ChangeBatch::new(self);
        let made = self.dir.lock().and_then(|_turn| {
            for change in changes {
                batch.take(change, held)?;
            }
            batch.write(held)
        });
        made.map_err(RecordsError::from)
    }

    fn remove(&self, files: impl Iterator<Item = (RecordDirKind, String)>) {
        for (kind, key) in files {
            // A leftover file requires authentication once more, and grants no access.
            if let Err(error) = self.dir.remove(kind, &key) {
                tracing::warn!("cannot remove a pull record: {error}");
            }
        }
    }
}

/// The combined effect of several changes.
struct ChangeBatch<'a> {
    context: &'a WriterContext,
    intents: BTreeSet<ImageName>,
    records: BTreeMap<ImageId, ImagePulledRecord>,
    /// Intents to remove.
    closed: BTreeSet<ImageName>,
    removed: BTreeSet<ImageId>,
    /// Intents of dead processes to rewrite.
    renewed: Vec<ImagePullIntent>,
    /// Images of successful pulls.
    ended: Vec<ImageName>,
    /// Intents shared with another process.
    released_locks: Vec<ImageName>,
}

impl<'a> ChangeBatch<'a> {
    fn new(context: &'a WriterContext) -> Self {
        ChangeBatch {
            context,
            intents: BTreeSet::new(),
            records: BTreeMap::new(),
            closed: BTreeSet::new(),
            removed: BTreeSet::new(),
            renewed: Vec::new(),
            ended: Vec::new(),
            released_locks: Vec::new(),
        }
    }

    fn take(&mut self, change: &RecordChange, held: &ProcessIntents) -> io::Result<()> {
        match change {
            RecordChange::Barrier => {}
            RecordChange::Intent { image } => {
                self.closed.remove(image);
                if !held.contains_key(image) {
                    self.intents.insert(image.clone());
                }
            }
            RecordChange::Failed { image, absent } => {
                if *absent || !self.is_found(image, held) {
                    self.intent_is_removed(image);
                } else if self.context.in_flight.count(image) == 0 {
                    self.intents.remove(image);
                    self.released_locks.push(image.clone());
                }
            }
            RecordChange::Pulled { image, image_ref, access, now } => {
                let name = image.trimmed().map_err(io::Error::other)?;
                self.merge(image_ref, name, access.as_ref(), *now);
                self.renew(image_ref, *now);
                self.ended.push(image.clone());
            }
            RecordChange::AddCredentials { name, image_ref, access, now } => {
                self.merge(image_ref, name, Some(access), *now);
            }
            RecordChange::Prune { kept, before } => self.prune(kept, *before)?,
            RecordChange::Recover { images, preloaded, now } => {
                self.recover(images, preloaded, *now, held)?;
            }
            RecordChange::Migrate => self.renew_documents()?,
        }
        Ok(())
    }

    fn prune(&mut self, kept: &HashSet<ImageId>, before: Rfc3339Time) -> io::Result<()> {
        for record in self.context.dir.records()? {
            let ImagePulledRecord { image_ref, last_updated, .. } = record.document;
            let updated = self.records.get(&image_ref).map_or(last_updated, |new| new.last_updated);
            if !kept.contains(&image_ref) && updated < Some(before) {
                self.records.remove(&image_ref);
                self.removed.insert(image_ref);
            }
        }
        Ok(())
    }

    /// Rewrites documents of older versions.
    fn renew_documents(&mut self) -> io::Result<()> {
        let intents = self.context.dir.intents()?.into_iter().filter(|of| !of.current_version);
        self.renewed.extend(intents.map(|of| of.document));
        let records = self.context.dir.records()?.into_iter().filter(|of| !of.current_version);
        for record in records.map(|of| of.document) {
            self.records.entry(record.image_ref.clone()).or_insert(record);
        }
        Ok(())
    }

    /// Whether the intent existed before this process's pull.
    fn is_found(&self, image: &ImageName, held: &ProcessIntents) -> bool {
        match held.get(image) {
            Some(own) => own.found,
            None => self.context.dir.has_intent(image).unwrap_or(true),
        }
    }

    fn intent_is_removed(&mut self, image: &ImageName) {
        if self.context.in_flight.count(image) == 0 {
            self.intents.remove(image);
            self.closed.insert(image.clone());
        }
    }

    /// The current record. An unreadable record counts as none, because it gave no access.
    fn record(&self, image_ref: &ImageId) -> Option<ImagePulledRecord> {
        if let Some(record) = self.records.get(image_ref) {
            return Some(record.clone());
        }
        if self.removed.contains(image_ref) {
            return None;
        }
        self.context.dir.record(image_ref).unwrap_or_else(|error| {
            tracing::warn!("replacing an unreadable pull record: {error}");
            None
        })
    }

    fn merge(
        &mut self,
        image_ref: &ImageId,
        name: &str,
        access: Option<&ImagePullCredentials>,
        now: Rfc3339Time,
    ) {
        let before = self.record(image_ref);
        let is_new = before.is_none();
        let mut record = before.unwrap_or_default();
        if merge(&mut record, name, access) || is_new {
            record.last_updated = Some(now);
            record.image_ref = image_ref.clone();
            self.removed.remove(image_ref);
            self.records.insert(image_ref.clone(), record);
        }
    }

    /// A garbage collection round that began before the image was pulled again must not remove its record, in whichever
    /// process the round runs.
    fn renew(&mut self, image_ref: &ImageId, now: Rfc3339Time) {
        if let Some(mut record) = self.record(image_ref).filter(|record| record.last_updated < Some(now)) {
            record.last_updated = Some(now);
            self.records.insert(image_ref.clone(), record);
        }
    }

    /// An image that was pulled but not recorded is accessible to no pod before it authenticates. A preloaded one was
    /// present before the pull.
    fn recover(
        &mut self,
        images: &[Image],
        preloaded: &HashSet<ImageId>,
        now: Rfc3339Time,
        held: &ProcessIntents,
    ) -> io::Result<()> {
        for intent in self.context.dir.intents()? {
            let ImagePullIntent { image } = intent.document;
            let Some(present) = images.iter().find(|present| has_name(present, &image)) else { continue };
            if held.contains_key(&image) || self.context.dir.is_pulled_by_other_process(&image) {
                continue;
            }
            if !preloaded.contains(&present.id) {
                self.merge(&present.id, "", None, now);
            }
            self.intent_is_removed(&image);
        }
        Ok(())
    }

    fn write(self, held: &mut ProcessIntents) -> io::Result<()> {
        let ChangeBatch {
            context,
            intents,
            records,
            closed,
            removed,
            renewed,
            ended,
            released_locks: let_go,
        } = self;
        let intent =
            |intent: ImagePullIntent| (RecordDirKind::Pulling, intent.image.to_string(), intent.encode());
        let record = |(image_ref, record): (&ImageId, &ImagePulledRecord)| {
            (RecordDirKind::Pulled, image_ref.to_string(), record.encode())
        };
        let there: BTreeSet<&ImageName> =
            intents.iter().filter(|image| context.dir.has_intent(image).unwrap_or(false)).collect();
        // Intents that exist are replaced by equal ones: the process that wrote them may not have synced them, and the
        // sync of a descriptor opened now would not report that a write failed.
        let own = intents.iter().map(|image| ImagePullIntent { image: image.clone() });
        let files: Vec<_> = own.chain(renewed).map(intent).chain(records.iter().map(record)).collect();
        context.dir.write(&files)?;
        for image in &there {
            context.in_flight.mark_ambiguous(image);
        }
        for image in &intents {
            let own = ProcessIntent { _hold: context.dir.hold(image)?, found: there.contains(image) };
            held.insert(image.clone(), own);
        }
        for image in let_go {
            held.remove(&image);
        }
        for (image_ref, record) in &records {
            context.memory.put(image_ref, Arc::new(IndexedRecord::new(record)));
        }
        let ended: Vec<_> = ended.into_iter().filter(|image| context.in_flight.end(image)).collect();
        let closed = closed.into_iter().chain(ended).filter(|image| {
            held.remove(image);
            !context.dir.is_pulled_by_other_process(image)
        });
        let closed: Vec<_> = closed.map(|image| (RecordDirKind::Pulling, String::from(image))).collect();
        let removed = removed.into_iter().map(|image_ref| {
            context.memory.forget(&image_ref);
            (RecordDirKind::Pulled, String::from(image_ref))
        });
        context.remove(closed.into_iter().chain(removed));
        Ok(())
    }
}
