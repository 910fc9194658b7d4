//! Creates small files on separate threads.
//!
//! Creating a file costs far more than writing its few bytes: four or five system calls, nearly all of the time in the
//! kernel. An image of many small files would keep one core busy and the others idle. So the thread that reads the
//! archive passes small files to other threads, in batches, and continues with the next entry.
//!
//! The result is the same as if entries were applied one after the other. Only a file whose name no directory of the layer
//! has is passed on. An entry for a name in flight, and every operation that reads names (links, whiteouts, parents behind
//! links, replacing), first waits for all files in flight: [`LayerWriter::drain`]. If the name turns out to exist, the
//! file is returned and created by the reading thread. Records keep the archive's order.

use std::os::fd::AsFd;

use super::super::archive::{LayerArchive, LayerEntry};
use super::super::error::UnpackError;
use super::super::layer_manifest::{ManifestRecord, RecordKind};
use super::super::stream::BufferSource;
use super::create::{CreatedFile, create, write_and_describe};
use super::file_threads::{FileJob, FileJobResult, FileThreads, KEPT_BYTES, SMALL, weight};
use super::{DirEntryName, LayerWriter};

impl LayerWriter<'_> {
    /// Whether a file at this place may be handed out.
    pub(super) fn is_small(&self, place: DirEntryName<'_>, entry: &LayerEntry) -> bool {
        self.crew.is_some() && weight(entry) <= SMALL && self.tree.child(place.dir, place.name).is_none()
    }

    /// Hands out a file.
    pub(super) fn hand_out(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        archive: &mut LayerArchive<'_, impl BufferSource>,
    ) -> Result<(), UnpackError> {
        let bytes = read_all(entry, archive)?;
        let dir = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let kind = RecordKind::File { size: entry.size, checksum: 0, extents: None };
        let record = self.record_of(place, entry, kind, None);
        let Some(crew) = &mut self.crew else { return Err(UnpackError::Hangup) };
        crew.add(dir, (place.dir, place.name.to_vec()), (entry.clone(), bytes), record)?;
        while let Some(done) = self.crew.as_ref().and_then(FileThreads::try_receive) {
            self.accept(done)?;
        }
        self.limit_records()
    }

    /// Waits for files whose records hold back too many others.
    fn limit_records(&mut self) -> Result<(), UnpackError> {
        while let Some(crew) = self.crew.as_mut().filter(|crew| crew.records.bytes > KEPT_BYTES) {
            let done = crew.receive()?;
            self.accept(done)?;
        }
        Ok(())
    }

    /// Waits until all that was handed out is made, if anything at this place is under way.
    pub(super) fn await_place(&mut self, place: DirEntryName<'_>) -> Result<(), UnpackError> {
        let Some(crew) = &self.crew else { return Ok(()) };
        if crew.under_way.is_empty() || !crew.under_way.contains(&(place.dir, place.name.to_vec())) {
            return Ok(());
        }
        self.drain()
    }

    /// Waits until all that was handed out is made.
    pub(super) fn drain(&mut self) -> Result<(), UnpackError> {
        while let Some(crew) = self.crew.as_mut().filter(|crew| !crew.under_way.is_empty()) {
            let done = crew.receive()?;
            self.accept(done)?;
        }
        Ok(())
    }

    fn accept(&mut self, done: Vec<(FileJob, FileJobResult)>) -> Result<(), UnpackError> {
        let mut taken = self.note_made(done)?;
        if taken.is_empty() {
            return Ok(());
        }
        // To make room one must know all that is there.
        while let Some(crew) = self.crew.as_mut().filter(|crew| crew.under_way.len() > taken.len()) {
            let done = crew.receive()?;
            taken.extend(self.note_made(done)?);
        }
        if let Some(crew) = &mut self.crew {
            crew.under_way.clear();
        }
        taken.sort_unstable_by_key(|job| job.number);
        for FileJob { number, place: (dir, name), entry, bytes, .. } in taken {
            let place = DirEntryName { dir, name: &name };
            let file =
                self.in_place(place, &entry, "create", |dir, name| create(dir, name, &entry, self.options))?;
            let made = write_and_describe(file.as_fd(), &entry, &bytes, self.options);
            self.note_file(number, made?)?;
        }
        Ok(())
    }

    /// Notes what was made; returns what was not, because its name is taken.
    fn note_made(&mut self, done: Vec<(FileJob, FileJobResult)>) -> Result<Vec<FileJob>, UnpackError> {
        let mut taken = Vec::new();
        for (job, outcome) in done {
            match outcome {
                FileJobResult::Made(described, checksum) => {
                    if let Some(crew) = &mut self.crew {
                        crew.under_way.remove(&job.place);
                    }
                    self.note_file(job.number, (described, checksum))?;
                }
                FileJobResult::Exists => taken.push(job),
                FileJobResult::Failed(error) => return Err(error),
            }
        }
        Ok(taken)
    }

    fn note_file(&mut self, number: u64, (made, checksum): (CreatedFile, u32)) -> Result<(), UnpackError> {
        self.count_file(&made);
        let Some(crew) = &mut self.crew else { return Ok(()) };
        crew.records.ready(number, checksum, made.xattrs);
        crew.records.write(&mut self.manifest).map_err(|error| self.manifest_error(error))
    }

    /// Adds a record behind those that wait.
    pub(super) fn put(&mut self, record: ManifestRecord) -> Result<(), UnpackError> {
        let added = match &mut self.crew {
            Some(crew) if !crew.records.is_empty() => {
                crew.records.push(record, true);
                return self.limit_records();
            }
            _ => self.manifest.add(&record),
        };
        added.map_err(|error| self.manifest_error(error))
    }
}

fn read_all(
    entry: &LayerEntry,
    archive: &mut LayerArchive<'_, impl BufferSource>,
) -> Result<Vec<u8>, UnpackError> {
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
