//! Small files, made by threads of their own.
//!
//! Making a file costs far more than its few bytes do: four or five system calls, nearly all of the time in the kernel. An
//! image of many small files would keep one core busy and the others idle. So the thread that reads the archive
//! hands small files out, in batches, and goes on with the next entry.
//!
//! What entries do to each other stays as if they were applied one after the other. Handed out is only a file whose
//! name no directory of the layer has. An entry for a name that is under way, and everything that looks at names (links,
//! whiteouts, parents behind links, making room), waits for all that is under way first: [`Writer::drain`]. Where
//! the name turns out to be taken, the file comes back and is made here. Records keep the archive's order.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope};
use std::{io, mem};

use rustix::io::Errno;

use super::super::archive::{Archive, Entry};
use super::super::files::{self, Record, RecordKind, path_of};
use super::super::stream::Feed;
use super::super::tree::DirId;
use super::super::{Options, UnpackError};
use super::make::{Described, create, describe_file};
use super::{Place, Writer};

/// Most memory that a file which is handed out takes, in bytes: content, names and attributes.
const SMALL: u64 = 64 << 10;

/// Most files in a batch, the memory from which on it is full, and batches that wait.
const BATCH_FILES: usize = 16;
const BATCH_BYTES: usize = 128 << 10;
const BATCHES: usize = 2;

/// Memory of the records kept back until a file before them is made, from which on that is waited for.
const KEPT_BYTES: usize = 1 << 20;

/// A file to be made.
pub(super) struct Job {
    /// Which record is its.
    number: u64,
    /// `None` once the file is made.
    dir: Option<Arc<OwnedFd>>,
    place: (DirId, Vec<u8>),
    entry: Entry,
    bytes: Vec<u8>,
}

enum Outcome {
    Made(Described, u32),
    /// The name is taken.
    Exists,
    Failed(UnpackError),
}

/// The threads, and what they are at.
pub(in super::super) struct Crew {
    jobs: SyncSender<Vec<Job>>,
    done: Receiver<Vec<(Job, Outcome)>>,
    batch: Vec<Job>,
    batch_bytes: usize,
    /// Directories that the batch keeps open, and how many it may.
    batch_dirs: usize,
    most_dirs: usize,
    under_way: HashSet<(DirId, Vec<u8>)>,
    records: Records,
}

impl Crew {
    /// Starts `threads` threads. They end when the crew is dropped.
    pub(in super::super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        threads: usize,
        options: &'scope Options,
    ) -> io::Result<Crew> {
        let (jobs, receiver) = sync_channel(BATCHES);
        let (sender, done) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..threads {
            let (jobs, done) = (receiver.clone(), sender.clone());
            let maker = move || make_all(&jobs, &done, options);
            thread::Builder::new().name("layer-files".into()).spawn_scoped(scope, maker)?;
        }
        let (batch, under_way, records) = (Vec::new(), HashSet::new(), Records::default());
        // The batches that wait, one at each thread, and the one that is filled.
        let most_dirs = (options.open_under_way() / (BATCHES + threads + 1)).max(1);
        Ok(Crew { jobs, done, batch, batch_bytes: 0, batch_dirs: 0, most_dirs, under_way, records })
    }

    fn send(&mut self) -> Result<(), UnpackError> {
        (self.batch_bytes, self.batch_dirs) = (0, 0);
        match mem::take(&mut self.batch) {
            batch if batch.is_empty() => Ok(()),
            batch => self.jobs.send(batch).map_err(|_| UnpackError::Hangup),
        }
    }
}

/// Records that wait for a file before them, in the order of the archive.
#[derive(Default)]
pub(super) struct Records {
    kept: VecDeque<(Record, bool)>,
    first: u64,
    /// Memory that they take.
    bytes: usize,
}

impl Records {
    /// Adds one, ready or not, and says its number.
    fn push(&mut self, record: Record, ready: bool) -> u64 {
        self.bytes += memory_of(&record);
        self.kept.push_back((record, ready));
        self.first + self.kept.len() as u64 - 1
    }

    /// The file of this record is made.
    fn ready(&mut self, number: u64, found: u32, hash: Option<u32>) {
        let at = usize::try_from(number - self.first).unwrap_or(usize::MAX);
        if let Some((record, ready)) = self.kept.get_mut(at) {
            record.xattrs = hash;
            if let RecordKind::File { checksum, .. } = &mut record.kind {
                *checksum = found;
            }
            *ready = true;
        }
    }

    /// Writes what nothing holds back any more.
    fn write(&mut self, manifest: &mut files::Writer) -> io::Result<()> {
        while let Some((record, true)) = self.kept.front() {
            manifest.add(record)?;
            self.bytes -= memory_of(record);
            self.kept.pop_front();
            self.first += 1;
        }
        Ok(())
    }
}

impl Writer<'_> {
    /// Whether a file at this place may be handed out.
    pub(super) fn is_small(&self, place: Place<'_>, entry: &Entry) -> bool {
        self.crew.is_some() && weight(entry) <= SMALL && self.tree.child(place.dir, place.name).is_none()
    }

    /// Hands out a file.
    pub(super) fn hand_out(
        &mut self,
        place: Place<'_>,
        entry: &Entry,
        archive: &mut Archive<'_, impl Feed>,
    ) -> Result<(), UnpackError> {
        let bytes = read_all(entry, archive)?;
        let dir = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let kind = RecordKind::File { size: entry.size, checksum: 0, extents: None };
        let record = self.record_of(place, entry, kind, None);
        let Some(crew) = &mut self.crew else { return Err(UnpackError::Hangup) };
        let number = crew.records.push(record, false);
        let place = (place.dir, place.name.to_vec());
        // Files of one directory come one after the other: who comes back to one is counted again, and open but once.
        let dirs = usize::from(crew.batch.last().is_none_or(|last| last.place.0 != place.0));
        if crew.batch_dirs + dirs > crew.most_dirs {
            crew.send()?;
        }
        crew.batch_dirs += dirs;
        crew.under_way.insert(place.clone());
        crew.batch_bytes += usize::try_from(weight(entry)).unwrap_or(usize::MAX);
        crew.batch.push(Job { number, dir: Some(dir), place, entry: entry.clone(), bytes });
        if crew.batch.len() >= BATCH_FILES || crew.batch_bytes >= BATCH_BYTES {
            crew.send()?;
        }
        while let Some(Ok(done)) = self.crew.as_ref().map(|crew| crew.done.try_recv()) {
            self.accept(done)?;
        }
        self.limit_records()
    }

    /// Waits for files whose records hold back too many others.
    fn limit_records(&mut self) -> Result<(), UnpackError> {
        while let Some(crew) = self.crew.as_mut().filter(|crew| crew.records.bytes > KEPT_BYTES) {
            crew.send()?;
            let done = crew.done.recv().map_err(|_| UnpackError::Hangup)?;
            self.accept(done)?;
        }
        Ok(())
    }

    /// Waits until all that was handed out is made, if anything at this place is under way.
    pub(super) fn await_place(&mut self, place: Place<'_>) -> Result<(), UnpackError> {
        let Some(crew) = &self.crew else { return Ok(()) };
        if crew.under_way.is_empty() || !crew.under_way.contains(&(place.dir, place.name.to_vec())) {
            return Ok(());
        }
        self.drain()
    }

    /// Waits until all that was handed out is made.
    pub(super) fn drain(&mut self) -> Result<(), UnpackError> {
        while let Some(crew) = self.crew.as_mut().filter(|crew| !crew.under_way.is_empty()) {
            crew.send()?;
            let done = crew.done.recv().map_err(|_| UnpackError::Hangup)?;
            self.accept(done)?;
        }
        Ok(())
    }

    fn accept(&mut self, done: Vec<(Job, Outcome)>) -> Result<(), UnpackError> {
        let mut taken = self.note_made(done)?;
        if taken.is_empty() {
            return Ok(());
        }
        // To make room one must know all that is there.
        while let Some(crew) = self.crew.as_mut().filter(|crew| crew.under_way.len() > taken.len()) {
            crew.send()?;
            let done = crew.done.recv().map_err(|_| UnpackError::Hangup)?;
            taken.extend(self.note_made(done)?);
        }
        if let Some(crew) = &mut self.crew {
            crew.under_way.clear();
        }
        taken.sort_unstable_by_key(|job| job.number);
        for Job { number, place: (dir, name), entry, bytes, .. } in taken {
            let place = Place { dir, name: &name };
            let file =
                self.in_place(place, &entry, "create", |dir, name| create(dir, name, &entry, self.options))?;
            let made = write_and_describe(file.as_fd(), &entry, &bytes, self.options);
            self.note_file(number, made?)?;
        }
        Ok(())
    }

    /// Notes what was made; returns what was not, because its name is taken.
    fn note_made(&mut self, done: Vec<(Job, Outcome)>) -> Result<Vec<Job>, UnpackError> {
        let mut taken = Vec::new();
        for (job, outcome) in done {
            match outcome {
                Outcome::Made(described, checksum) => {
                    if let Some(crew) = &mut self.crew {
                        crew.under_way.remove(&job.place);
                    }
                    self.note_file(job.number, (described, checksum))?;
                }
                Outcome::Exists => taken.push(job),
                Outcome::Failed(error) => return Err(error),
            }
        }
        Ok(taken)
    }

    fn note_file(&mut self, number: u64, (made, checksum): (Described, u32)) -> Result<(), UnpackError> {
        self.count_file(&made);
        let Some(crew) = &mut self.crew else { return Ok(()) };
        crew.records.ready(number, checksum, made.xattrs);
        crew.records.write(&mut self.manifest).map_err(|error| self.manifest_error(error))
    }

    /// Adds a record behind those that wait.
    pub(super) fn put(&mut self, record: Record) -> Result<(), UnpackError> {
        let added = match &mut self.crew {
            Some(crew) if !crew.records.kept.is_empty() => {
                crew.records.push(record, true);
                return self.limit_records();
            }
            _ => self.manifest.add(&record),
        };
        added.map_err(|error| self.manifest_error(error))
    }
}

/// Bytes of memory that a file takes while it is under way.
fn weight(entry: &Entry) -> u64 {
    let xattrs = entry.xattrs.iter().map(|(name, value)| name.len() + value.len());
    entry.size.saturating_add((2 * entry.path.len() + xattrs.sum::<usize>()) as u64)
}

/// Bytes of memory that a record takes, roughly.
fn memory_of(record: &Record) -> usize {
    let more = match &record.kind {
        RecordKind::File { extents: Some(extents), .. } => extents.len() * size_of::<(u64, u64)>(),
        RecordKind::Symlink { target }
        | RecordKind::HardLink { target }
        | RecordKind::PendingLink { target } => target.len(),
        _ => 0,
    };
    size_of::<Record>() + record.path.len() + more
}

fn read_all(entry: &Entry, archive: &mut Archive<'_, impl Feed>) -> Result<Vec<u8>, UnpackError> {
    let mut bytes = Vec::with_capacity(usize::try_from(entry.size.min(SMALL)).unwrap_or(0));
    loop {
        let piece = archive.content()?;
        let length = piece.len();
        if length == 0 {
            return Ok(bytes);
        }
        bytes.extend_from_slice(piece);
        archive.consume(length);
    }
}

/// A thread's work.
fn make_all(jobs: &Mutex<Receiver<Vec<Job>>>, done: &Sender<Vec<(Job, Outcome)>>, options: &Options) {
    loop {
        let batch = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(batch) = batch else { return };
        let make = |mut job: Job| {
            let outcome = match job.dir.take() {
                Some(dir) => make(&job, &dir, options),
                None => Outcome::Exists, // cannot be; whoever handed it out makes it
            };
            (job, outcome)
        };
        if done.send(batch.into_iter().map(make).collect()).is_err() {
            return;
        }
    }
}

fn make(job: &Job, dir: &OwnedFd, options: &Options) -> Outcome {
    let entry = &job.entry;
    let file = match create(dir.as_fd(), &job.place.1, entry, options) {
        Ok(file) => file,
        Err(Errno::EXIST) => return Outcome::Exists,
        Err(errno) => return Outcome::Failed(UnpackError::file("create", path_of(&entry.path), errno)),
    };
    match write_and_describe(file.as_fd(), entry, &job.bytes, options) {
        Ok((described, checksum)) => Outcome::Made(described, checksum),
        Err(error) => Outcome::Failed(error),
    }
}

fn write_and_describe(
    file: BorrowedFd<'_>,
    entry: &Entry,
    bytes: &[u8],
    options: &Options,
) -> Result<(Described, u32), UnpackError> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(file, rest))
            .map_err(|errno| UnpackError::file("write", path_of(&entry.path), errno))?;
        rest = &rest[written..];
    }
    Ok((describe_file(file, entry, options)?, crc32fast::hash(bytes)))
}
