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
use super::document::{Access, PullIntent, PulledRecord};
use super::folder::{Folder, Shelf};
use super::holds::Hold;
use super::in_flight::InFlight;
use super::known::Known;
use super::memory::Memory;
use super::merge::merge;
use super::names::has_name;
use super::utc::Utc;
use crate::backend::Image;
use crate::reference::{ImageId, ImageName};

/// At most so many changes are made at once.
const BATCH: usize = 1000;

/// One change of the records.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// A pull is about to start.
    Intent { image: ImageName },
    /// A pull ended without an image: the intent goes, unless another pull of the image began since. Unless the image is
    /// known to be absent, an intent that was there before stays as well: another pull may have brought it.
    Failed { image: ImageName, absent: bool },
    /// A pull brought an image.
    Pulled { image: ImageName, image_ref: ImageId, access: Option<Access>, now: Utc },
    /// A pod showed that it may use an image.
    Learn { name: String, image_ref: ImageId, access: Access, now: Utc },
    /// Records of images that are not among these go, unless they changed since.
    Prune { kept: Arc<HashSet<ImageId>>, before: Utc },
    /// Intents of pulls that died, of which these images are left.
    Recover { images: Arc<Vec<Image>>, now: Utc },
    /// Documents of an older version are written anew.
    Renew,
    /// Nothing: answered when all before it is done.
    Nothing,
}

type Answer = oneshot::Sender<Result<(), RecordsError>>;
type Order = (Change, Option<Answer>);

/// The intents of this process, by image: on disk, durably.
type Held = HashMap<ImageName, Own>;

struct Own {
    _hold: Hold,
    /// Whether it was there already: another process pulls the image, or was cut off.
    found: bool,
}

/// What a change works on.
pub(super) struct Desk {
    pub(super) folder: Arc<Folder>,
    pub(super) memory: Arc<Memory>,
    pub(super) in_flight: Arc<InFlight>,
}

/// Dropping it waits until all is written.
pub(super) struct Writer {
    orders: Mutex<Option<Sender<Order>>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start(desk: Desk) -> io::Result<Writer> {
        let (orders, ordered) = mpsc::channel();
        let thread = Builder::new().name("records".into()).spawn(move || work(&desk, &ordered))?;
        Ok(Writer { orders: Mutex::new(Some(orders)), thread: Some(thread) })
    }

    /// Done some time later; trouble is logged.
    pub(super) fn order(&self, change: Change) {
        self.send(change, None);
    }

    /// Ordered at once; the answer comes when it is done, durably, or not.
    pub(super) fn ordered(
        &self,
        change: Change,
    ) -> impl Future<Output = Result<(), RecordsError>> + Send + use<> {
        let (answer, answered) = oneshot::channel();
        self.send(change, Some(answer));
        async { answered.await.unwrap_or(Err(RecordsError::Closed)) }
    }

    fn send(&self, change: Change, answer: Option<Answer>) {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(orders) = orders.as_ref() {
            // Without a thread the answer is dropped, and so is an error for who waits.
            let _ = orders.send((change, answer));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.orders.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(desk: &Desk, ordered: &Receiver<Order>) {
    let mut held = Held::new();
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

impl Desk {
    /// Makes these changes, all or none.
    fn make(&self, changes: &[&Change], held: &mut Held) -> Result<(), RecordsError> {
        let mut draft = Draft::new(self);
        let made = self.folder.turn().and_then(|_turn| {
            for change in changes {
                draft.take(change, held)?;
            }
            draft.write(held)
        });
        made.map_err(RecordsError::from)
    }

    fn remove(&self, files: impl Iterator<Item = (Shelf, String)>) {
        for (shelf, key) in files {
            // What stays asks for credentials once more, and grants nothing.
            if let Err(error) = self.folder.remove(shelf, &key) {
                tracing::warn!("a pull record stays that should go: {error}");
            }
        }
    }
}

/// What several changes come to.
struct Draft<'a> {
    desk: &'a Desk,
    intents: BTreeSet<ImageName>,
    records: BTreeMap<ImageId, PulledRecord>,
    /// Intents and records that go.
    closed: BTreeSet<ImageName>,
    gone: BTreeSet<ImageId>,
    /// Intents of dead processes that are written anew.
    renewed: Vec<PullIntent>,
    /// Images of pulls that ended well.
    ended: Vec<ImageName>,
    /// Intents that are not ours alone.
    let_go: Vec<ImageName>,
}

impl<'a> Draft<'a> {
    fn new(desk: &'a Desk) -> Self {
        Draft {
            desk,
            intents: BTreeSet::new(),
            records: BTreeMap::new(),
            closed: BTreeSet::new(),
            gone: BTreeSet::new(),
            renewed: Vec::new(),
            ended: Vec::new(),
            let_go: Vec::new(),
        }
    }

    fn take(&mut self, change: &Change, held: &Held) -> io::Result<()> {
        match change {
            Change::Nothing => {}
            Change::Intent { image } => {
                self.closed.remove(image);
                if !held.contains_key(image) {
                    self.intents.insert(image.clone());
                }
            }
            Change::Failed { image, absent } => {
                if *absent || !self.is_found(image, held) {
                    self.intent_goes(image);
                } else if self.desk.in_flight.count(image) == 0 {
                    self.intents.remove(image);
                    self.let_go.push(image.clone());
                }
            }
            Change::Pulled { image, image_ref, access, now } => {
                let name = image.trimmed().map_err(io::Error::other)?;
                self.merge(image_ref, name, access.as_ref(), *now);
                self.renew(image_ref, *now);
                self.ended.push(image.clone());
            }
            Change::Learn { name, image_ref, access, now } => {
                self.merge(image_ref, name, Some(access), *now);
            }
            Change::Prune { kept, before } => self.prune(kept, *before)?,
            Change::Recover { images, now } => self.recover(images, *now, held)?,
            Change::Renew => self.renew_documents()?,
        }
        Ok(())
    }

    fn prune(&mut self, kept: &HashSet<ImageId>, before: Utc) -> io::Result<()> {
        for record in self.desk.folder.records()? {
            let PulledRecord { image_ref, last_updated, .. } = record.document;
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
    fn is_found(&self, image: &ImageName, held: &Held) -> bool {
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
    fn record(&self, image_ref: &ImageId) -> Option<PulledRecord> {
        if let Some(record) = self.records.get(image_ref) {
            return Some(record.clone());
        }
        if self.gone.contains(image_ref) {
            return None;
        }
        self.desk.folder.record(image_ref).unwrap_or_else(|error| {
            tracing::warn!("a pull record is written anew: {error}");
            None
        })
    }

    fn merge(&mut self, image_ref: &ImageId, name: &str, access: Option<&Access>, now: Utc) {
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
    fn renew(&mut self, image_ref: &ImageId, now: Utc) {
        if let Some(mut record) = self.record(image_ref).filter(|record| record.last_updated < Some(now)) {
            record.last_updated = Some(now);
            self.records.insert(image_ref.clone(), record);
        }
    }

    /// An image that a pull of ours brought before it could be recorded is nobody's until somebody shows credentials.
    fn recover(&mut self, images: &[Image], now: Utc, held: &Held) -> io::Result<()> {
        for intent in self.desk.folder.intents()? {
            let PullIntent { image } = intent.document;
            let Some(present) = images.iter().find(|present| has_name(present, &image)) else { continue };
            if held.contains_key(&image) || self.desk.folder.is_held_elsewhere(&image) {
                continue;
            }
            let id = present.id.clone();
            self.merge(&id, "", None, now);
            self.intent_goes(&image);
        }
        Ok(())
    }

    fn write(self, held: &mut Held) -> io::Result<()> {
        let Draft { desk, intents, records, closed, gone, renewed, ended, let_go } = self;
        let intent = |intent: PullIntent| (Shelf::Pulling, intent.image.to_string(), intent.encode());
        let record = |(image_ref, record): (&ImageId, &PulledRecord)| {
            (Shelf::Pulled, image_ref.to_string(), record.encode())
        };
        // A file that is there stays: another process may hold it.
        let (there, missing): (Vec<_>, Vec<_>) =
            intents.iter().partition(|image| desk.folder.has_intent(image).unwrap_or(false));
        let missing = missing.into_iter().map(|image| PullIntent { image: image.clone() });
        let files: Vec<_> = missing.chain(renewed).map(intent).chain(records.iter().map(record)).collect();
        desk.folder.write(&files)?;
        for image in &there {
            desk.folder.settle_intent(image)?;
            desk.in_flight.blur(image);
        }
        for image in &intents {
            let own = Own { _hold: desk.folder.hold(image)?, found: there.contains(&image) };
            held.insert(image.clone(), own);
        }
        for image in let_go {
            held.remove(&image);
        }
        for (image_ref, record) in &records {
            desk.memory.put(image_ref, Arc::new(Known::new(record)));
        }
        let ended: Vec<_> = ended.into_iter().filter(|image| desk.in_flight.ends(image)).collect();
        let closed = closed.into_iter().chain(ended).filter(|image| {
            held.remove(image);
            !desk.folder.is_held_elsewhere(image)
        });
        let closed: Vec<_> = closed.map(|image| (Shelf::Pulling, String::from(image))).collect();
        let gone = gone.into_iter().map(|image_ref| {
            desk.memory.forget(&image_ref);
            (Shelf::Pulled, String::from(image_ref))
        });
        desk.remove(closed.into_iter().chain(gone));
        Ok(())
    }
}
