//! The one thread of a process that changes the records. What comes while it waits for the disk is written together.
//!
//! Promises: who is answered with success finds it on disk after a power cut; a record is there before the intent that
//! it closes goes; a change that fails changes nothing in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

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

/// At most so many changes are made at once.
const BATCH: usize = 1000;

/// One change of the records.
#[derive(Debug, Clone)]
pub(super) enum RecordChange {
    /// A pull is about to start.
    Intent { image: ImageName },
    /// A pull ended without an image: the intent goes, unless another pull of the image began since. Unless the image is
    /// known to be absent, an intent that was there before stays as well: another pull may have brought it.
    Failed { image: ImageName, absent: bool },
    /// A pull brought an image.
    Pulled { image: ImageName, image_ref: ImageId, access: Option<ImagePullCredentials>, now: Rfc3339Time },
    /// A pod showed that it may use an image.
    AddCredentials { name: String, image_ref: ImageId, access: ImagePullCredentials, now: Rfc3339Time },
    /// Records of images that are not among these go, unless they changed since.
    Prune { kept: Arc<HashSet<ImageId>>, before: Rfc3339Time },
    /// Intents of pulls that died, of which these images are left.
    Recover { images: Arc<Vec<Image>>, now: Rfc3339Time },
    /// Documents of an older version are written anew.
    Migrate,
    /// Nothing: answered when all before it is done.
    Barrier,
}

type ChangeReply = oneshot::Sender<Result<(), RecordsError>>;
type ChangeRequest = (RecordChange, Option<ChangeReply>);

/// The intents of this process, by image: on disk, durably.
type ProcessIntents = HashMap<ImageName, ProcessIntent>;

struct ProcessIntent {
    _hold: PullLock,
    /// Whether it was there already: another process pulls the image, or was cut off.
    found: bool,
}

/// What a change works on.
pub(super) struct WriterContext {
    pub(super) folder: Arc<RecordDir>,
    pub(super) memory: Arc<RecordCache>,
    pub(super) in_flight: Arc<RunningPulls>,
}

/// Dropping it waits until all is written.
pub(super) struct PullRecordWriter {
    orders: Mutex<Option<Sender<ChangeRequest>>>,
    thread: Option<JoinHandle<()>>,
}

impl PullRecordWriter {
    pub(super) fn start(desk: WriterContext) -> io::Result<PullRecordWriter> {
        let (orders, ordered) = mpsc::channel();
        let thread = Builder::new().name("records".into()).spawn(move || work(&desk, &ordered))?;
        Ok(PullRecordWriter { orders: Mutex::new(Some(orders)), thread: Some(thread) })
    }

    /// Done some time later; trouble is logged.
    pub(super) fn submit(&self, change: RecordChange) {
        self.send(change, None);
    }

    /// Ordered at once; the answer comes when it is done, durably, or not.
    pub(super) fn submit_and_wait(
        &self,
        change: RecordChange,
    ) -> impl Future<Output = Result<(), RecordsError>> + Send + use<> {
        let (answer, answered) = oneshot::channel();
        self.send(change, Some(answer));
        async { answered.await.unwrap_or(Err(RecordsError::Closed)) }
    }

    fn send(&self, change: RecordChange, answer: Option<ChangeReply>) {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(orders) = orders.as_ref() {
            // Without a thread the answer is dropped, and so is an error for who waits.
            let _ = orders.send((change, answer));
        }
    }
}

impl Drop for PullRecordWriter {
    fn drop(&mut self) {
        drop(self.orders.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(desk: &WriterContext, ordered: &Receiver<ChangeRequest>) {
    let mut held = ProcessIntents::new();
    while let Ok(first) = ordered.recv() {
        let batch: Vec<_> = std::iter::once(first).chain(ordered.try_iter().take(BATCH - 1)).collect();
        let changes: Vec<_> = batch.iter().map(|(change, _)| change).collect();
        let together = desk.make(&changes, &mut held);
        let alone = together.is_err() && batch.len() > 1;
        for (change, answer) in batch {
            // One that cannot be made must not take the others with it.
            let made = if alone { desk.make(&[&change], &mut held) } else { together.clone() };
            if let (Err(error), None) = (&made, &answer) {
                tracing::warn!("pull records: {error}");
            }
            let _ = answer.map(|answer| answer.send(made));
        }
    }
}

impl WriterContext {
    /// Makes these changes, all or none.
    fn make(&self, changes: &[&RecordChange], held: &mut ProcessIntents) -> Result<(), RecordsError> {
        let mut draft = ChangeBatch::new(self);
        let made = self.folder.lock().and_then(|_turn| {
            for change in changes {
                draft.take(change, held)?;
            }
            draft.write(held)
        });
        made.map_err(RecordsError::from)
    }

    fn remove(&self, files: impl Iterator<Item = (RecordDirKind, String)>) {
        for (shelf, key) in files {
            // What stays asks for credentials once more, and grants nothing.
            if let Err(error) = self.folder.remove(shelf, &key) {
                tracing::warn!("cannot remove a pull record: {error}");
            }
        }
    }
}

/// What several changes come to.
struct ChangeBatch<'a> {
    desk: &'a WriterContext,
    intents: BTreeSet<ImageName>,
    records: BTreeMap<ImageId, ImagePulledRecord>,
    /// Intents and records that go.
    closed: BTreeSet<ImageName>,
    gone: BTreeSet<ImageId>,
    /// Intents of dead processes that are written anew.
    renewed: Vec<ImagePullIntent>,
    /// Images of pulls that ended well.
    ended: Vec<ImageName>,
    /// Intents that are not ours alone.
    released_locks: Vec<ImageName>,
}

impl<'a> ChangeBatch<'a> {
    fn new(desk: &'a WriterContext) -> Self {
        ChangeBatch {
            desk,
            intents: BTreeSet::new(),
            records: BTreeMap::new(),
            closed: BTreeSet::new(),
            gone: BTreeSet::new(),
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
                    self.intent_goes(image);
                } else if self.desk.in_flight.count(image) == 0 {
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
            RecordChange::Recover { images, now } => self.recover(images, *now, held)?,
            RecordChange::Migrate => self.renew_documents()?,
        }
        Ok(())
    }

    fn prune(&mut self, kept: &HashSet<ImageId>, before: Rfc3339Time) -> io::Result<()> {
        for record in self.desk.folder.records()? {
            let ImagePulledRecord { image_ref, last_updated, .. } = record.document;
            let updated = self.records.get(&image_ref).map_or(last_updated, |new| new.last_updated);
            if !kept.contains(&image_ref) && updated < Some(before) {
                self.records.remove(&image_ref);
                self.gone.insert(image_ref);
            }
        }
        Ok(())
    }

    /// Writes anew what has an older version.
    fn renew_documents(&mut self) -> io::Result<()> {
        let intents = self.desk.folder.intents()?.into_iter().filter(|of| !of.current_version);
        self.renewed.extend(intents.map(|of| of.document));
        let records = self.desk.folder.records()?.into_iter().filter(|of| !of.current_version);
        for record in records.map(|of| of.document) {
            self.records.entry(record.image_ref.clone()).or_insert(record);
        }
        Ok(())
    }

    /// Whether an intent was there before ours.
    fn is_found(&self, image: &ImageName, held: &ProcessIntents) -> bool {
        match held.get(image) {
            Some(own) => own.found,
            None => self.desk.folder.has_intent(image).unwrap_or(true),
        }
    }

    fn intent_goes(&mut self, image: &ImageName) {
        if self.desk.in_flight.count(image) == 0 {
            self.intents.remove(image);
            self.closed.insert(image.clone());
        }
    }

    /// The record as it is by now. One that cannot be read counts as none: it served nobody.
    fn record(&self, image_ref: &ImageId) -> Option<ImagePulledRecord> {
        if let Some(record) = self.records.get(image_ref) {
            return Some(record.clone());
        }
        if self.gone.contains(image_ref) {
            return None;
        }
        self.desk.folder.record(image_ref).unwrap_or_else(|error| {
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
            self.gone.remove(image_ref);
            self.records.insert(image_ref.clone(), record);
        }
    }

    /// A round of collection that began before the image came again must not take its record, whichever process holds it.
    fn renew(&mut self, image_ref: &ImageId, now: Rfc3339Time) {
        if let Some(mut record) = self.record(image_ref).filter(|record| record.last_updated < Some(now)) {
            record.last_updated = Some(now);
            self.records.insert(image_ref.clone(), record);
        }
    }

    /// An image that a pull of ours brought before it could be recorded is nobody's until somebody shows credentials.
    fn recover(&mut self, images: &[Image], now: Rfc3339Time, held: &ProcessIntents) -> io::Result<()> {
        for intent in self.desk.folder.intents()? {
            let ImagePullIntent { image } = intent.document;
            let Some(present) = images.iter().find(|present| has_name(present, &image)) else { continue };
            if held.contains_key(&image) || self.desk.folder.is_pulled_by_other_process(&image) {
                continue;
            }
            let id = present.id.clone();
            self.merge(&id, "", None, now);
            self.intent_goes(&image);
        }
        Ok(())
    }

    fn write(self, held: &mut ProcessIntents) -> io::Result<()> {
        let ChangeBatch { desk, intents, records, closed, gone, renewed, ended, released_locks: let_go } =
            self;
        let intent =
            |intent: ImagePullIntent| (RecordDirKind::Pulling, intent.image.to_string(), intent.encode());
        let record = |(image_ref, record): (&ImageId, &ImagePulledRecord)| {
            (RecordDirKind::Pulled, image_ref.to_string(), record.encode())
        };
        // A file that is there stays: another process may hold it.
        let (there, missing): (Vec<_>, Vec<_>) =
            intents.iter().partition(|image| desk.folder.has_intent(image).unwrap_or(false));
        let missing = missing.into_iter().map(|image| ImagePullIntent { image: image.clone() });
        let files: Vec<_> = missing.chain(renewed).map(intent).chain(records.iter().map(record)).collect();
        desk.folder.write(&files)?;
        for image in &there {
            desk.folder.settle_intent(image)?;
            desk.in_flight.mark_ambiguous(image);
        }
        for image in &intents {
            let own = ProcessIntent { _hold: desk.folder.hold(image)?, found: there.contains(&image) };
            held.insert(image.clone(), own);
        }
        for image in let_go {
            held.remove(&image);
        }
        for (image_ref, record) in &records {
            desk.memory.put(image_ref, Arc::new(IndexedRecord::new(record)));
        }
        let ended: Vec<_> = ended.into_iter().filter(|image| desk.in_flight.end(image)).collect();
        let closed = closed.into_iter().chain(ended).filter(|image| {
            held.remove(image);
            !desk.folder.is_pulled_by_other_process(image)
        });
        let closed: Vec<_> = closed.map(|image| (RecordDirKind::Pulling, String::from(image))).collect();
        let gone = gone.into_iter().map(|image_ref| {
            desk.memory.forget(&image_ref);
            (RecordDirKind::Pulled, String::from(image_ref))
        });
        desk.remove(closed.into_iter().chain(gone));
        Ok(())
    }
}
