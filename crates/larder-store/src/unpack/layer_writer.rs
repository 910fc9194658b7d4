//! Writes a layer as one EROFS file.
//!
//! The file takes all data as it comes. Its directories are written at the end, when the layers below are known: an
//! overlay shows the nearest layer's owner and mode of a directory, so those that the archive only implied get what the
//! layer has that really contains them. Until then, the layer is a [`PendingLayer`].

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder::reference::Digest;
use larder_erofs::{
    EntryProblem, ErofsEntry, ErofsEntryKind, ErofsError, ErofsInode, ErofsOptions, ErofsSummary, ErofsTime,
    ErofsWriter, LowerLink, OverlayView,
};

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::archive_record::{ArchiveRecordWriter, append_record, remove_record};
use super::beneath::{path_of, split};
use super::implied_directories::{MAX_IMPLIED_PATHS, append_implied, directory_of};
use super::layer::{PendingLowerWork, UnpackedLayer};
use super::layer_memory::LayerMemoryShare;
use super::layer_output::{LayerOutput, difference, is_cancellation};
use super::merged_layers::{MergedEntry, MergedLayers};
use super::metadata::Xattrs;
use super::stream::{BufferSource, TarStream};
use super::{
    DetectedCompression, EntryRefusal, ExpectedLayer, LayerDownload, UnpackError, UnpackOptions,
    UnpackProgress,
};
use crate::erofs::ErofsFile;
use crate::erofs::digest::bytes_of;

/// Permissions of a directory that the archive only implied, unless a lower layer has it.
const IMPLIED_MODE: u32 = 0o755;
/// Bytes of memory for a file that hard links of the layer keep although the layer hides it.
const HIDDEN_FILE_BYTES: usize = 48;

/// A layer with all its data, whose directories are not written yet.
pub struct PendingLayer {
    writer: ErofsWriter<LayerOutput>,
    path: PathBuf,
    /// To be moved to its end.
    archive_record: Option<PathBuf>,
    max_directories: u32,
    memory: LayerMemoryShare,
    /// Bytes of memory that it needs again, if it waits in files.
    parked: Option<usize>,
    /// See [`PendingLayer::needs_nearest_only`].
    needs_nearest_only: bool,
    download: Option<LayerDownload>,
    progress: Arc<UnpackProgress>,
    hidden_files: HiddenFiles,
}

/// Files of lower layers that this layer hides and links to, by layer and inode, with the number of the first link.
type HiddenFiles = HashMap<(usize, u64), u32>;

/// A complete layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FinishedLayer {
    /// Size and digest of its file, which is not synced.
    pub file: ErofsFile,
    /// The layer fits these lowers only: an owner, a mode or attributes came from them.
    pub depends_on_lowers: bool,
}

/// How a layer is written whose data comes later: none of it is in the metadata, which comes first.
pub(super) fn without_data(diff_id: &Digest) -> ErofsOptions {
    ErofsOptions { uuid: bytes_of(diff_id), max_inline_tail: 0, ..ErofsOptions::default() }
}

/// Writes the layer's data. The half of an unpacking that takes plain bytes.
pub(super) fn write(
    mut feed: &mut dyn BufferSource,
    expected: &ExpectedLayer<'_>,
    path: &Path,
    options: &UnpackOptions,
) -> Result<(UnpackedLayer, PendingLayer), UnpackError> {
    // Entries take no inodes, and their bytes count as they are written.
    let of_entries = &UnpackOptions { reserve: None, ..options.clone() };
    let mut record = ArchiveRecordWriter::create(options)?;
    let mut archive =
        LayerArchive::new(TarStream::new(&mut feed, expected.plain_digest(), of_entries), of_entries);
    if let Some(record) = &mut record {
        archive = archive.with_frame(record);
    }
    let form = match &options.into {
        Some(layer) if !layer.has_inline_tails() => without_data(expected.diff_id),
        _ => ErofsOptions { uuid: bytes_of(expected.diff_id), ..ErofsOptions::default() },
    };
    let (mut layer, entries) = PendingLayer::read(&mut archive, path, form, options)?;
    let plain_bytes = archive.finish()?;
    record.map_or(Ok(()), ArchiveRecordWriter::finish)?;
    let lower_work = layer.pause()?;
    let unpacked = UnpackedLayer {
        compression: DetectedCompression::None,
        compressed_bytes: 0,
        plain_bytes,
        entries,
        lower_work,
        skipped_xattrs: layer.skipped_xattrs(),
        hides_lowers: layer.hides_lowers(),
        checkpoints: Vec::new(),
    };
    Ok((unpacked, layer))
}

impl PendingLayer {
    /// Begins a layer without entries in a file.
    pub(super) fn new(
        file: io::Result<LayerOutput>,
        path: &Path,
        form: ErofsOptions,
        options: &UnpackOptions,
    ) -> Result<PendingLayer, UnpackError> {
        let file = file.map_err(|error| UnpackError::file("create", path, error))?;
        Ok(PendingLayer {
            writer: ErofsWriter::new(file, form).map_err(|error| writer_error(path, error))?,
            path: path.to_owned(),
            archive_record: options.archive_record.clone(),
            max_directories: options.limits.max_directories,
            memory: options.layer_memory.share(),
            parked: None,
            needs_nearest_only: false,
            download: options.download.clone(),
            progress: options.progress.clone(),
            hidden_files: HiddenFiles::new(),
        })
    }

    /// Begins a layer in a new file, whose data comes later.
    pub(crate) fn without_data(
        diff_id: &Digest,
        path: &Path,
        options: &UnpackOptions,
    ) -> Result<PendingLayer, UnpackError> {
        let options = &UnpackOptions { archive_record: None, ..options.clone() };
        let file = LayerOutput::create(path, options);
        PendingLayer::new(file, path, without_data(diff_id), options)
    }

    /// Writes the data of all entries to a new file. Returns the number of entries, too.
    pub(super) fn read(
        archive: &mut LayerArchive<'_, impl BufferSource>,
        path: &Path,
        form: ErofsOptions,
        options: &UnpackOptions,
    ) -> Result<(PendingLayer, u64), UnpackError> {
        let file = LayerOutput::create(path, options);
        let mut layer = PendingLayer::new(file, path, form, options)?;
        while let Some(entry) = archive.next()? {
            layer.add(&entry, archive)?;
        }
        Ok((layer, archive.entries()))
    }

    fn add(
        &mut self,
        entry: &LayerEntry,
        archive: &mut LayerArchive<'_, impl BufferSource>,
    ) -> Result<(), UnpackError> {
        self.begin(entry)?;
        if !matches!(entry.kind, LayerEntryKind::File | LayerEntryKind::Sparse(_)) {
            return Ok(());
        }
        loop {
            let piece = archive.content()?;
            let length = piece.len();
            if length == 0 {
                return Ok(());
            }
            self.write(piece)?;
            archive.consume(length);
        }
    }

    /// Adds an entry without its data. Returns where that belongs in the layer, offset and length, if there is any.
    pub(crate) fn add_without_data(&mut self, entry: &LayerEntry) -> Result<Option<(u64, u64)>, UnpackError> {
        self.begin(entry)?;
        self.writer.leave_data().map_err(|error| writer_error(&self.path, error))
    }

    /// Adds an entry; the data of a file comes next.
    fn begin(&mut self, entry: &LayerEntry) -> Result<(), UnpackError> {
        let (major, minor) = entry.device;
        let kind = match &entry.kind {
            LayerEntryKind::File => ErofsEntryKind::File { size: entry.size },
            LayerEntryKind::Sparse(extents) => ErofsEntryKind::Sparse { size: entry.size, extents },
            LayerEntryKind::Directory => ErofsEntryKind::Directory,
            LayerEntryKind::Symlink if entry.link.is_empty() => {
                return Err(UnpackError::refused(&entry.path, EntryRefusal::EmptyLink));
            }
            LayerEntryKind::Symlink => ErofsEntryKind::Symlink { target: &entry.link },
            LayerEntryKind::HardLink => ErofsEntryKind::HardLink { target: &entry.link },
            LayerEntryKind::Fifo => ErofsEntryKind::Fifo,
            LayerEntryKind::CharDevice => ErofsEntryKind::CharDevice { major, minor },
            LayerEntryKind::BlockDevice => ErofsEntryKind::BlockDevice { major, minor },
        };
        self.add_entry(&ErofsEntry {
            path: &entry.path,
            kind,
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            xattrs: &entry.xattrs,
        })?;
        let limit = u64::from(self.max_directories);
        if self.writer.directory_count() as u64 > limit {
            return Err(UnpackError::over(limit, "directories"));
        }
        Ok(())
    }

    /// Extended attributes that were left out so far.
    pub(crate) fn skipped_xattrs(&self) -> u64 {
        self.writer.skipped_xattrs()
    }

    /// Whether the layer hides names of lower layers so far.
    pub(crate) fn hides_lowers(&self) -> bool {
        self.writer.hides_lowers()
    }

    /// Adds an entry; [`write`](PendingLayer::write) then takes the bytes of a file.
    pub(super) fn add_entry(&mut self, entry: &ErofsEntry<'_>) -> Result<(), UnpackError> {
        self.writer.add(entry).map_err(|error| writer_error(&self.path, error))?;
        self.bound_memory()
    }

    /// Writes the next bytes of the file that was added last.
    pub(super) fn write(&mut self, piece: &[u8]) -> Result<(), UnpackError> {
        self.writer.write_data(piece).map_err(|error| writer_error(&self.path, error))
    }

    /// Keeps the layer within the memory of all layers: moves names to a file, and waits if that is not enough.
    fn bound_memory(&mut self) -> Result<(), UnpackError> {
        if self.memory.resize(self.bytes()) {
            return Ok(());
        }
        self.writer.spill_names().map_err(|error| writer_error(&self.path, error))?;
        if self.memory.resize(self.bytes()) {
            return Ok(());
        }
        // Other layers may wait for this one: that must not depend on a registry.
        if let Some(download) = &self.download {
            download.wait().map_err(UnpackError::Read)?;
        }
        self.wait_for_memory(self.bytes())
    }

    fn bytes(&self) -> usize {
        self.writer.memory() + self.hidden_files.capacity() * HIDDEN_FILE_BYTES
    }

    fn wait_for_memory(&mut self, bytes: usize) -> Result<(), UnpackError> {
        if !self.memory.wait(bytes, || self.progress.is_canceled()) {
            return Err(UnpackError::Canceled);
        }
        self.progress.set_exceeds_memory(self.memory.may_exceed());
        Ok(())
    }

    /// Ends the data, and says what depends on the layers below.
    pub(crate) fn pause(&mut self) -> Result<PendingLowerWork, UnpackError> {
        self.resolve_links()?;
        let cross_layer_links = self.writer.lower_links().count() as u64;
        let paused = self.writer.output_mut().pause();
        paused.map_err(|error| output_error(&self.path, error))?;
        let (mut implicit_dirs, mut path_bytes, mut only_root) = (0, 0, true);
        for path in self.writer.implicit_directories() {
            implicit_dirs += 1;
            path_bytes += path.len();
            only_root &= path.is_empty();
            if path_bytes > MAX_IMPLIED_PATHS {
                let reason = format!("paths of implied directories need more than {MAX_IMPLIED_PATHS} bytes");
                return Err(UnpackError::Unsupported { reason });
            }
        }
        self.needs_nearest_only = only_root && cross_layer_links == 0;
        self.leave_memory()?;
        Ok(PendingLowerWork { implicit_dirs, cross_layer_links })
    }

    /// Returns what the layer has of the memory, unless it fits there: it may wait for long.
    fn leave_memory(&mut self) -> Result<(), UnpackError> {
        self.memory.release();
        self.progress.set_exceeds_memory(false);
        let bytes = self.bytes();
        if !self.memory.resize(bytes) {
            self.writer.park().map_err(|error| writer_error(&self.path, error))?;
            self.parked = Some(bytes);
        }
        self.writer.close_scratch();
        Ok(())
    }

    fn resolve_links(&mut self) -> Result<(), UnpackError> {
        let progress = &self.progress;
        let resolved = self.writer.resolve_links(&|| progress.is_canceled());
        resolved.map_err(|error| writer_error(&self.path, error))
    }

    fn check_canceled(&self) -> Result<(), UnpackError> {
        if self.progress.is_canceled() { Err(UnpackError::Canceled) } else { Ok(()) }
    }

    /// Whether the nearest layer below is all that [`finish`](PendingLayer::finish) looks at: only the root is implied,
    /// and each layer has the root's metadata.
    pub fn needs_nearest_only(&self) -> bool {
        self.needs_nearest_only
    }

    /// Completes the layer on those below. `progress` carries the wish to stop.
    pub fn finish(
        mut self,
        lowers: &MergedLayers,
        progress: &Arc<UnpackProgress>,
    ) -> Result<FinishedLayer, UnpackError> {
        (self.progress, self.download) = (Arc::clone(progress), None);
        self.writer.output_mut().set_progress(Arc::clone(progress));
        if let Some(bytes) = self.parked.take() {
            self.wait_for_memory(bytes)?;
            self.writer.unpark().map_err(|error| writer_error(&self.path, error))?;
        }
        // Before the directories: a copy may imply one.
        let mut depends_on_lowers = self.copy_lower_files(lowers)?;
        let implied: Vec<Vec<u8>> = self.writer.implicit_directories().collect();
        for path in &implied {
            self.check_canceled()?;
            let model = directory_of(lowers, path)
                .map_err(|error| UnpackError::file("inspect in the layers below", path_of(path), error))?;
            if let Some((inode, xattrs)) = &model {
                depends_on_lowers |= self.describe(path, inode, xattrs)?;
            }
        }
        let has_inline_tails = self.writer.max_inline_tail() > 0;
        let finished = self.writer.finish().map_err(|error| writer_error(&self.path, error))?;
        let (mut file, ErofsSummary { metadata_start, .. }) = finished;
        let failed = |error| output_error(&self.path, error);
        let implied_bytes = append_implied(&mut file, &implied).map_err(failed)?;
        if let Some(record) = &self.archive_record {
            append_record(&mut file, record).and_then(|()| remove_record(record)).map_err(failed)?;
        }
        let file = file.finish().map_err(failed)?;
        Ok(FinishedLayer {
            file: ErofsFile { implied_bytes, metadata_start, has_inline_tails, ..file },
            depends_on_lowers,
        })
    }

    /// Makes the hard links to files of the layers below: a file gets a copy in this layer, as an overlay makes one.
    /// Returns whether there are any.
    fn copy_lower_files(&mut self, lowers: &MergedLayers) -> Result<bool, UnpackError> {
        let mut has_links = false;
        for number in self.writer.link_numbers() {
            self.check_canceled()?;
            let Some(link) = self.writer.lower_link(number) else { continue };
            has_links = true;
            let target = self.writer.resolve_path(&link.target);
            let target = target.map_err(|error| writer_error(&self.path, error))?;
            // A target that is itself such a link is resolved with it.
            if self.writer.view(&target) != OverlayView::Own {
                self.link_to_lower_file(number, &link, &target, lowers)?;
            }
        }
        self.hidden_files = HiddenFiles::new();
        self.resolve_links()?;
        match self.writer.lower_links().next() {
            Some(link) => Err(UnpackError::refused(&link.path, EntryProblem::LinkTarget)),
            None => Ok(has_links),
        }
    }

    fn link_to_lower_file(
        &mut self,
        number: u32,
        link: &LowerLink,
        target: &[u8],
        lowers: &MergedLayers,
    ) -> Result<(), UnpackError> {
        let found = lowers.find(target, false);
        let found = found.map_err(|error| UnpackError::file("inspect", path_of(target), error))?;
        let Some(found) = found else {
            return Err(UnpackError::refused(&link.path, EntryProblem::LinkTarget));
        };
        if found.inode.is_directory() {
            return Err(UnpackError::refused(&link.path, EntryProblem::LinkToDirectory));
        }
        match self.writer.view(&found.path) {
            OverlayView::Own => self.hard_link(&link.path, &found.path),
            OverlayView::Lower => {
                self.copy_file(&found.path, &found, lowers)?;
                self.hard_link(&link.path, &found.path)
            }
            // The layer hides the file after it has linked to it: its links are the file's only names.
            OverlayView::Hidden => {
                let file = (found.layer, found.inode.nid);
                if let Some(first) = self.hidden_files.get(&file) {
                    return self.hard_link(&link.path, &self.writer.link_path(*first));
                }
                self.hidden_files.insert(file, number);
                self.copy_file(&link.path, &found, lowers)
            }
        }
    }

    fn copy_file(
        &mut self,
        path: &[u8],
        found: &MergedEntry,
        lowers: &MergedLayers,
    ) -> Result<(), UnpackError> {
        let copied = self.writer.copy_file(path, lowers.layer(found.layer), &found.inode);
        copied.map_err(|error| writer_error(&self.path, error))?;
        self.bound_memory()
    }

    fn hard_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), UnpackError> {
        let made = self.writer.add(&ErofsEntry {
            path,
            kind: ErofsEntryKind::HardLink { target },
            mode: 0,
            uid: 0,
            gid: 0,
            mtime: ErofsTime::default(),
            xattrs: &[],
        });
        made.map_err(|error| writer_error(&self.path, error))
    }

    /// Gives an implied directory the metadata of the one below. Returns whether it is not what it had; a time does not
    /// count.
    fn describe(&mut self, path: &[u8], model: &ErofsInode, xattrs: &Xattrs) -> Result<bool, UnpackError> {
        // As an entry, a name like this would be a whiteout.
        if split(path).1.starts_with(b".wh.") {
            return Ok(false);
        }
        let described = self.writer.add(&ErofsEntry {
            path: if path.is_empty() { b"/" } else { path },
            kind: ErofsEntryKind::Directory,
            mode: model.mode,
            uid: model.uid,
            gid: model.gid,
            mtime: model.mtime,
            xattrs,
        });
        described.map_err(|error| writer_error(&self.path, error))?;
        let is_default = model.mode == IMPLIED_MODE && (model.uid, model.gid) == (0, 0) && xattrs.is_empty();
        Ok(!is_default)
    }
}

impl std::fmt::Debug for PendingLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingLayer").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Converts an error of the writer, and names the entry.
pub(super) fn writer_error(layer: &Path, error: ErofsError) -> UnpackError {
    match error {
        ErofsError::Output(cause) => output_error(layer, cause),
        ErofsError::Canceled => UnpackError::Canceled,
        ErofsError::LowerLayer(cause) => UnpackError::file("copy a file of a lower layer to", layer, cause),
        ErofsError::Rejected {
            path,
            problem: problem @ (EntryProblem::Time | EntryProblem::SparseOverhead),
        } => UnpackError::Unsupported { reason: format!("{}: {problem}", path.display()) },
        ErofsError::Rejected { path, problem } => UnpackError::Refused { path, reason: problem.into() },
        other => UnpackError::Unsupported { reason: other.to_string() },
    }
}

/// Converts an error of the layer's file.
fn output_error(layer: &Path, cause: io::Error) -> UnpackError {
    match difference(&cause) {
        Some(offset) => UnpackError::Differs { offset },
        None if is_cancellation(&cause) => UnpackError::Canceled,
        None => UnpackError::file("write", layer, cause),
    }
}
