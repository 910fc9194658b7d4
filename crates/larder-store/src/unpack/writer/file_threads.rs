//! Threads that create small files, and the records that wait for them (see `small.rs`).

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope};
use std::{io, mem};

use rustix::io::Errno;

use super::super::archive::LayerEntry;
use super::super::error::UnpackError;
use super::super::layer_manifest::{self, ManifestRecord, RecordKind, path_of};
use super::super::options::UnpackOptions;
use super::super::tree::DirId;
use super::create::{CreatedFile, create, write_and_describe};

/// Most memory that a file which is handed out takes, in bytes: content, names and attributes.
pub(super) const SMALL: u64 = 64 << 10;

/// Most files in a batch, the memory from which on it is full, and batches that wait.
const BATCH_FILES: usize = 16;
const BATCH_BYTES: usize = 128 << 10;
const BATCHES: usize = 2;

/// Memory of the records kept back until a file before them is made, from which on that is waited for.
pub(super) const KEPT_BYTES: usize = 1 << 20;

/// A file to be made.
pub(super) struct FileJob {
    /// Which record is its.
    pub(super) number: u64,
    /// `None` once the file is made.
    dir: Option<Arc<OwnedFd>>,
    pub(super) place: (DirId, Vec<u8>),
    pub(super) entry: LayerEntry,
    pub(super) bytes: Vec<u8>,
}

pub(super) enum FileJobResult {
    Made(CreatedFile, u32),
    /// The name is taken.
    Exists,
    Failed(UnpackError),
}

/// The threads, and what they are at.
pub(crate) struct FileThreads {
    jobs: SyncSender<Vec<FileJob>>,
    done: Receiver<Vec<(FileJob, FileJobResult)>>,
    batch: Vec<FileJob>,
    batch_bytes: usize,
    /// Directories that the batch keeps open, and how many it may.
    batch_dirs: usize,
    most_dirs: usize,
    pub(super) under_way: HashSet<(DirId, Vec<u8>)>,
    pub(super) records: OrderedRecords,
}

impl FileThreads {
    /// Starts `threads` threads. They end when the crew is dropped.
    pub(crate) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        threads: usize,
        options: &'scope UnpackOptions,
    ) -> io::Result<FileThreads> {
        let (jobs, receiver) = sync_channel(BATCHES);
        let (sender, done) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..threads {
            let (jobs, done) = (receiver.clone(), sender.clone());
            let maker = move || make_all(&jobs, &done, options);
            thread::Builder::new().name("layer-files".into()).spawn_scoped(scope, maker)?;
        }
        let (batch, under_way, records) = (Vec::new(), HashSet::new(), OrderedRecords::default());
        // The batches that wait, one at each thread, and the one that is filled.
        let most_dirs = (options.open_under_way() / (BATCHES + threads + 1)).max(1);
        Ok(FileThreads { jobs, done, batch, batch_bytes: 0, batch_dirs: 0, most_dirs, under_way, records })
    }

    /// Takes a small file to make, in the directory `dir`; `record` waits for it.
    pub(super) fn add(
        &mut self,
        dir: Arc<OwnedFd>,
        place: (DirId, Vec<u8>),
        (entry, bytes): (LayerEntry, Vec<u8>),
        record: ManifestRecord,
    ) -> Result<(), UnpackError> {
        let number = self.records.push(record, false);
        // Files of one directory come one after the other: who comes back to one is counted again, and open but once.
        let dirs = usize::from(self.batch.last().is_none_or(|last| last.place.0 != place.0));
        if self.batch_dirs + dirs > self.most_dirs {
            self.send()?;
        }
        self.batch_dirs += dirs;
        self.under_way.insert(place.clone());
        self.batch_bytes += usize::try_from(weight(&entry)).unwrap_or(usize::MAX);
        self.batch.push(FileJob { number, dir: Some(dir), place, entry, bytes });
        if self.batch.len() >= BATCH_FILES || self.batch_bytes >= BATCH_BYTES {
            self.send()?;
        }
        Ok(())
    }

    /// What was made since the last call, without waiting.
    pub(super) fn try_receive(&self) -> Option<Vec<(FileJob, FileJobResult)>> {
        self.done.try_recv().ok()
    }

    /// Waits for a batch, after what is collected was sent.
    pub(super) fn receive(&mut self) -> Result<Vec<(FileJob, FileJobResult)>, UnpackError> {
        self.send()?;
        self.done.recv().map_err(|_| UnpackError::Hangup)
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
pub(super) struct OrderedRecords {
    kept: VecDeque<(ManifestRecord, bool)>,
    first: u64,
    /// Memory that they take.
    pub(super) bytes: usize,
}

impl OrderedRecords {
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Adds one, ready or not, and says its number.
    pub(super) fn push(&mut self, record: ManifestRecord, ready: bool) -> u64 {
        self.bytes += memory_of(&record);
        self.kept.push_back((record, ready));
        self.first + self.kept.len() as u64 - 1
    }

    /// The file of this record is made.
    pub(super) fn ready(&mut self, number: u64, found: u32, hash: Option<u32>) {
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
    pub(super) fn write(&mut self, manifest: &mut layer_manifest::LayerManifestWriter) -> io::Result<()> {
        while let Some((record, true)) = self.kept.front() {
            manifest.add(record)?;
            self.bytes -= memory_of(record);
            self.kept.pop_front();
            self.first += 1;
        }
        Ok(())
    }
}

/// Bytes of memory that a file takes while it is under way.
pub(super) fn weight(entry: &LayerEntry) -> u64 {
    let xattrs = entry.xattrs.iter().map(|(name, value)| name.len() + value.len());
    entry.size.saturating_add((2 * entry.path.len() + xattrs.sum::<usize>()) as u64)
}

/// Bytes of memory that a record takes, roughly.
fn memory_of(record: &ManifestRecord) -> usize {
    let more = match &record.kind {
        RecordKind::File { extents: Some(extents), .. } => extents.len() * size_of::<(u64, u64)>(),
        RecordKind::Symlink { target }
        | RecordKind::HardLink { target }
        | RecordKind::PendingLink { target } => target.len(),
        _ => 0,
    };
    size_of::<ManifestRecord>() + record.path.len() + more
}

/// A thread's work.
fn make_all(
    jobs: &Mutex<Receiver<Vec<FileJob>>>,
    done: &Sender<Vec<(FileJob, FileJobResult)>>,
    options: &UnpackOptions,
) {
    loop {
        let batch = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(batch) = batch else { return };
        let make = |mut job: FileJob| {
            let outcome = match job.dir.take() {
                Some(dir) => make(&job, &dir, options),
                None => FileJobResult::Exists, // cannot happen; the reading thread creates it
            };
            (job, outcome)
        };
        if done.send(batch.into_iter().map(make).collect()).is_err() {
            return;
        }
    }
}

fn make(job: &FileJob, dir: &OwnedFd, options: &UnpackOptions) -> FileJobResult {
    let entry = &job.entry;
    let file = match create(dir.as_fd(), &job.place.1, entry, options) {
        Ok(file) => file,
        Err(Errno::EXIST) => return FileJobResult::Exists,
        Err(errno) => return FileJobResult::Failed(UnpackError::file("create", path_of(&entry.path), errno)),
    };
    match write_and_describe(file.as_fd(), entry, &job.bytes, options) {
        Ok((described, checksum)) => FileJobResult::Made(described, checksum),
        Err(error) => FileJobResult::Failed(error),
    }
}
