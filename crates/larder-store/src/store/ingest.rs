//! Blobs being fetched: a sparse file each, and a record of the extents on disk, so that a fetch resumes.
//!
//! Writers put bytes at any offset; one reader follows from the start, up to where the bytes are contiguous. Only the
//! extents are in memory.
//!
//! The record may lag behind the file, but never the other way round: after a crash of the process the recorded extents
//! are in the file, and after a power loss those recorded as durable are. The reader verifies digests.
//!
//! It is in two files. One is replaced and synced with the data; the other is written over for each MiB, since a file
//! that replaces another is written to the disk at once (ext4), and all fetches would wait for that.
//!
//! A blob begins behind the first block of its file, where an EROFS filesystem has the data of its first file: a blob
//! that is one file becomes a layer [where it is](IngestFile::become_layer).

use larder::reference::Digest;
use larder::threads::in_place;
use larder_registry::ByteRanges;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::time::Instant;

use super::blob_source::{BlobSource, IngestId};
use super::error::{StoreError, StoreErrorContext as _};
use super::extents::{self, SavedExtents};
use super::handle::{OpenStore, Store};
use super::references::{ItemReference, ReferencedItem};
use crate::disk::{Disk, DiskFile, FileOpenMode, ensure_dir, replace};
use crate::erofs::digest::FIRST_BLOCK;

/// How many new bytes go unnoted: what a killed process fetches again at most, beside what it had in memory.
const NOTE_EVERY: u64 = 1 << 20;

/// How many new bytes of a blob that becomes a layer are synced at a time: most are on the disk when the last one
/// comes.
const SYNC_EVERY: u64 = 64 << 20;

/// Largest note that is read, in bytes.
const MAX_NOTE: u64 = 64 << 10;

const DATA: &str = "data";
/// The record as it is synced with the data.
const EXTENTS: &str = "extents";
/// The latest record: a power loss may tear it.
const LATEST: &str = "extents.latest";

/// A blob being fetched. Clones share it; one process fetches the blob of one repository once at a time.
#[derive(Debug, Clone)]
pub struct IngestFile(Arc<IngestInner>);

#[derive(Debug)]
struct IngestInner {
    store: Arc<OpenStore>,
    /// Digest of the blob, for errors: the file is named after the download.
    digest: Digest,
    size: u64,
    dir: PathBuf,
    /// `None` while it is closed. Like `state` never locked while the disk is waited for: tasks lock both.
    data: Mutex<Option<Arc<dyn DiskFile>>>,
    boot: String,
    state: Mutex<IngestExtents>,
    /// Held while the note is written, or the directory removed. Locked before `state`.
    noting: Mutex<()>,
    /// Bytes were written, or the fetch was stopped.
    changed: Condvar,
    _hold: ItemReference,
}

#[derive(Debug)]
struct IngestExtents {
    present: ByteRanges,
    durable: ByteRanges,
    /// Bytes that came since the note was written.
    unnoted: u64,
    /// Bytes that came since the last sync.
    unsynced: u64,
    /// The file becomes that of a layer.
    becomes_layer: bool,
    synced: Instant,
    /// How often all bytes were forgotten.
    round: u64,
    /// Why no more bytes will come.
    stopped: Option<(io::ErrorKind, String)>,
    discarded: bool,
}

impl Store {
    /// Starts or resumes the [ingest](BlobSource::ingest_id) of a blob. `Busy` while another pull of this process has
    /// it.
    pub fn ingest(&self, blob: &BlobSource) -> Result<IngestFile, StoreError> {
        let doing = "create a file for a blob";
        let (inner, id, size) = (&self.0, blob.ingest_id(), blob.size);
        let dir = inner.layout.ingest(&id);
        let hold = inner
            .references
            .add_exclusive(ReferencedItem::Ingest(id))
            .ok_or_else(|| StoreError::Busy { digest: blob.digest.clone() })?;
        let boot = inner.disk.boot_id();
        let (mut durable, mut present) = inner.ingested(&dir, size, &boot).context(doing)?;
        ensure_dir(&*inner.disk, &dir).context(doing)?;
        let (data, kept) = open_data(&*inner.disk, &dir, size).context(doing)?;
        if !kept {
            (durable, present) = (ByteRanges::default(), ByteRanges::default());
        }
        let state = IngestExtents {
            durable,
            present,
            unnoted: 0,
            unsynced: 0,
            becomes_layer: false,
            synced: Instant::now(),
            round: 0,
            stopped: None,
            discarded: false,
        };
        let inside = IngestInner {
            store: inner.clone(),
            digest: blob.digest.clone(),
            size,
            dir,
            data: Mutex::new(Some(data)),
            boot,
            state: Mutex::new(state),
            noting: Mutex::default(),
            changed: Condvar::new(),
            _hold: hold,
        };
        inside.note(false).context(doing)?;
        Ok(IngestFile(Arc::new(inside)))
    }
}

/// Opens the file for a blob of `size` bytes. Returns true if it has the bytes of an earlier fetch, which metadata of
/// an unfinished layer may follow.
fn open_data(disk: &dyn Disk, dir: &Path, size: u64) -> io::Result<(Arc<dyn DiskFile>, bool)> {
    let data = disk.open(&dir.join(DATA), FileOpenMode::Create)?;
    let (length, full) = (data.len()?, full_length(size));
    if length < full {
        // Not a new file: ext4 takes one that is cut to nothing for one that is replaced, and writes it to the disk
        // when it is closed. These bytes live too briefly for that.
        if length > 0 {
            data.set_len(0)?;
        }
        data.set_len(full)?;
    }
    Ok((data, length >= full))
}

fn full_length(size: u64) -> u64 {
    FIRST_BLOCK.saturating_add(size)
}

impl IngestFile {
    /// Writes bytes at their offset. Calls may overlap.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), StoreError> {
        let end = offset.saturating_add(bytes.len() as u64);
        if end > self.0.size {
            return Err(StoreError::TooLong { digest: self.0.digest.clone(), size: self.0.size, end });
        }
        let doing = "write a blob";
        self.0.data().and_then(|data| data.write_all_at(bytes, full_length(offset))).context(doing)?;
        let note = {
            let mut state = self.0.state();
            extents::add(&mut state.present, offset..end);
            state.unnoted += bytes.len() as u64;
            state.unsynced += bytes.len() as u64;
            self.0.changed.notify_all();
            state.unnoted >= NOTE_EVERY
        };
        if note {
            self.0.sync_if_due().and_then(|synced| self.0.note(synced)).context(doing)?;
        }
        Ok(())
    }

    /// Notes what was written, however little: the next process has it, unless the machine crashes.
    pub(crate) fn note(&self) -> Result<(), StoreError> {
        self.0.note(false).context("write a blob")
    }

    /// The extents that were written, in order.
    pub fn present(&self) -> Vec<Range<u64>> {
        self.0.state().present.ranges().collect()
    }

    /// Number of bytes written.
    pub fn done(&self) -> u64 {
        self.0.state().present.bytes()
    }

    /// Reads bytes of the blob; `None` if some of them have not come.
    pub(crate) fn read_range(&self, range: &Range<u64>) -> Result<Option<Vec<u8>>, StoreError> {
        if !self.0.state().present.missing(range.clone()).is_empty() {
            return Ok(None);
        }
        let doing = "read a blob";
        let data = self.0.data().context(doing)?;
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
        let mut done = 0;
        while done < bytes.len() {
            let offset = full_length(range.start + done as u64);
            let read = data.read_at(&mut bytes[done..], offset).context(doing)?;
            if read == 0 {
                return Ok(None);
            }
            done += read;
        }
        Ok(Some(bytes))
    }

    /// Forgets all bytes, because they turned out to be wrong.
    pub fn forget(&self) -> Result<(), StoreError> {
        let doing = "free the space of a blob";
        // First the note, so that it never promises what is gone.
        self.0.forget().context(doing)?;
        let data = self.0.data().context(doing)?;
        data.set_len(0).and_then(|()| data.set_len(full_length(self.0.size))).context(doing)
    }

    /// Ends the fetch with an error, which waiting readers get.
    /// Its kind must not be `Interrupted`, upon which readers try again.
    pub fn stop(&self, kind: io::ErrorKind, reason: impl Into<String>) {
        self.0.state().stopped.get_or_insert_with(|| (kind, reason.into()));
        self.0.changed.notify_all();
    }

    /// Reverts [`stop`](IngestFile::stop), for another attempt.
    pub fn resume(&self) {
        self.0.state().stopped = None;
    }

    /// Closes the file until it is used again: an image may have more layers that wait than a process may have files.
    pub fn close(&self) {
        // Not closed while it is locked: that may wait for the disk.
        let data = self.0.open_file().take();
        drop(data);
    }

    /// Reads the blob from its start, and waits for bytes that are not there yet. Blocks; for threads.
    pub fn reader(&self) -> IngestReader {
        IngestReader { file: self.clone(), at: 0 }
    }

    /// Waits until all bytes are there. Blocks; for threads.
    pub(crate) fn wait_until_complete(&self) -> io::Result<()> {
        self.0.wait_for(self.0.size).map(drop)
    }

    /// The file, in which the blob begins at [`FIRST_BLOCK`].
    pub(crate) fn path(&self) -> PathBuf {
        self.0.dir.join(DATA)
    }

    /// Begins a fetch of which the file [becomes](IngestFile::become_layer) that of a layer. Bytes that an earlier
    /// process has written and not synced are read from the disk: some may not have come there.
    pub(crate) fn begin_layer(&self) -> Result<(), StoreError> {
        let unsure = {
            let mut state = self.0.state();
            state.becomes_layer = true;
            state.present != state.durable
        };
        if unsure {
            let doing = "read a blob from the disk";
            self.0.sync().and_then(|()| self.0.data()?.drop_cache()).context(doing)?;
        }
        Ok(())
    }

    /// Syncs the blob, of which all bytes have come, and closes the file. Fails if the disk did not take some of them;
    /// then all are forgotten. The file must have been open since the first write: the kernel may not tell of what
    /// failed before.
    pub(crate) fn end_layer(&self) -> Result<(), StoreError> {
        self.0.sync().context("sync a blob")?;
        self.close();
        Ok(())
    }

    /// Lets `place` move the file to its place as that of a layer. Fails if the disk did not take what was added since
    /// [`end_layer`](IngestFile::end_layer).
    pub(crate) fn become_layer<T>(
        &self,
        place: impl FnOnce(&Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.0.sync().context("turn a blob into a layer")?;
        let _noting = self.0.noting.lock();
        let placed = place(&self.path())?;
        self.0.state().discarded = true;
        drop(self.0.open_file().take());
        Ok(placed)
    }

    /// Removes the file, unless it has become a layer: the blob is of no more use.
    pub fn discard(&self) -> Result<(), StoreError> {
        let data = if self.0.state().discarded { None } else { Some(self.0.data()) };
        let noting = self.0.noting.lock();
        self.0.state().discarded = true;
        self.0.store.discard(&self.0.dir).context("remove a fetched blob")?;
        drop(noting);
        // Now, not when the trash comes to it: else the sync of a commit may write all of it to the disk.
        if let Some(Err(error)) = data.map(|data| data.and_then(|data| data.set_len(0))) {
            tracing::debug!(digest = %self.0.digest, %error, "cannot truncate a removed blob; its deletion frees the space");
        }
        self.0.store.trash.kick();
        Ok(())
    }
}

impl IngestInner {
    fn state(&self) -> MutexGuard<'_, IngestExtents> {
        self.state.lock()
    }

    /// Waits until this many bytes from the start are there; gives how many there are.
    fn wait_for(&self, length: u64) -> io::Result<u64> {
        let mut state = self.state();
        loop {
            let frontier = state.present.contiguous_len();
            if frontier >= length {
                return Ok(frontier);
            }
            if let Some((kind, reason)) = &state.stopped {
                return Err(io::Error::new(*kind, reason.clone()));
            }
            self.changed.wait(&mut state);
        }
    }

    fn open_file(&self) -> MutexGuard<'_, Option<Arc<dyn DiskFile>>> {
        self.data.lock()
    }

    fn data(&self) -> io::Result<Arc<dyn DiskFile>> {
        if let Some(data) = &*self.open_file() {
            return Ok(data.clone());
        }
        let data = self.store.disk.open(&self.dir.join(DATA), FileOpenMode::Existing)?;
        Ok(self.open_file().get_or_insert(data).clone())
    }

    /// Syncs written bytes if the last sync is old enough; returns whether it did.
    fn sync_if_due(&self) -> io::Result<bool> {
        let due = {
            let state = self.state();
            let early = state.becomes_layer && state.unsynced >= SYNC_EVERY;
            early || state.synced.elapsed() >= self.store.config.ingest_sync
        };
        if due {
            self.sync()?;
        }
        Ok(due)
    }

    /// Syncs written bytes. After a failure none can be relied on: a further sync would not tell of those that are
    /// lost.
    fn sync(&self) -> io::Result<()> {
        let (present, round) = {
            let mut state = self.state();
            state.synced = Instant::now(); // writers during the sync continue
            state.unsynced = 0;
            (state.present.clone(), state.round)
        };
        if let Err(error) = self.data()?.sync_data() {
            if self.forget().is_err() {
                // A full disk, which has no room for a new note: no note promises nothing.
                self.remove_notes()?;
            }
            return Err(error);
        }
        let mut state = self.state();
        if state.round == round {
            state.durable = present;
        }
        Ok(())
    }

    /// Notes that no byte is there.
    fn forget(&self) -> io::Result<()> {
        {
            let mut state = self.state();
            state.present = ByteRanges::default();
            state.durable = ByteRanges::default();
            state.round += 1;
        }
        self.note(true)
    }

    fn remove_notes(&self) -> io::Result<()> {
        for name in [LATEST, EXTENTS] {
            match self.store.disk.remove_file(&self.dir.join(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Writes down what is there, durably on demand. Writers may come here together; the last one writes the most.
    fn note(&self, durably: bool) -> io::Result<()> {
        // Or an older note could replace a newer one.
        let _noting = self.noting.lock();
        let (noted, unnoted) = {
            let state = self.state();
            if state.discarded {
                return Ok(());
            }
            let noted = SavedExtents {
                boot: self.boot.clone(),
                size: self.size,
                durable: state.durable.clone(),
                present: state.present.clone(),
            };
            (noted, state.unnoted)
        };
        let (disk, mut text) = (&*self.store.disk, serde_json::to_vec(&noted)?);
        let synced = durably.then(|| text.clone());
        let latest = disk.open(&self.dir.join(LATEST), FileOpenMode::Create)?;
        // Never cut: what follows a shorter record would be a part of it if the process were killed before.
        let length = text.len().max(usize::try_from(latest.len()?).unwrap_or_default());
        text.resize(length, b' ');
        // Before the other: it counts first.
        latest.write_all_at(&text, 0)?;
        self.state().unnoted -= unnoted;
        if let Some(text) = synced {
            replace(disk, &self.dir.join("extents.new"), &self.dir.join(EXTENTS), &text)?;
            disk.open(&self.dir.join(EXTENTS), FileOpenMode::Existing)?.sync_data()?;
            disk.sync_dir(&self.dir)?;
            disk.sync_dir(&self.store.layout.ingests())?;
        }
        Ok(())
    }
}

impl Drop for IngestInner {
    fn drop(&mut self) {
        if self.state().unnoted > 0
            && let Err(error) = in_place(|| self.note(false))
        {
            tracing::debug!(digest = %self.digest, %error, "cannot save the progress of a blob; a resume fetches more bytes");
        }
    }
}

/// A record in this directory, if it is whole and about a blob of this size.
fn read_note(dir: &Path, name: &str, size: u64) -> io::Result<Option<SavedExtents>> {
    let path = dir.join(name);
    let text = match fs_err::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
        Ok(metadata) if metadata.len() > MAX_NOTE => return Ok(None),
        Ok(_) => fs_err::read(&path)?,
    };
    Ok(SavedExtents::parse(&text).filter(|noted| noted.size == size))
}

/// Reads a blob while it is being fetched. See [`IngestFile::reader`].
#[derive(Debug)]
pub struct IngestReader {
    file: IngestFile,
    at: u64,
}

impl IngestReader {
    /// Waits until there is something to read; gives how much, 0 at the end of the blob.
    fn wait(&self) -> io::Result<u64> {
        let inside = &self.file.0;
        let frontier = inside.wait_for(inside.size.min(self.at + 1))?;
        Ok(frontier.saturating_sub(self.at))
    }
}

impl io::Read for IngestReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let ready = usize::try_from(self.wait()?).unwrap_or(usize::MAX);
        let length = ready.min(buffer.len());
        let read = self.file.0.data()?.read_at(&mut buffer[..length], full_length(self.at))?;
        if read == 0 && length > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        Ok(read)
    }
}

impl OpenStore {
    /// Returns the ranges that an earlier fetch left in a directory: the durable ones, and those that can be relied
    /// on.
    fn ingested(&self, dir: &Path, size: u64, boot: &str) -> io::Result<(ByteRanges, ByteRanges)> {
        if dir.is_dir() {
            let (synced, latest) = (read_note(dir, EXTENTS, size)?, read_note(dir, LATEST, size)?);
            if synced.is_some() || latest.is_some() {
                return Ok(SavedExtents::resumable(synced, latest, boot));
            }
            self.discard(dir)?;
        }
        Ok((ByteRanges::default(), ByteRanges::default()))
    }

    /// Removes the ingests of committed layers.
    pub(super) fn discard_ingests(&self, ingests: &[IngestId]) {
        for id in ingests {
            let dir = self.layout.ingest(id);
            if self.references.has(&ReferencedItem::Ingest(id.clone())) || !dir.exists() {
                continue;
            }
            if let Err(error) = self.discard(&dir) {
                tracing::warn!(dir = %dir.display(), %error, "cannot remove a fetched blob");
            }
            self.trash.kick();
        }
    }
}
