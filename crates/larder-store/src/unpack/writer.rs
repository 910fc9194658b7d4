//! Writes each entry of the archive to disk.
//!
//! Entries come in any order and the last one of a name wins, as if they were applied one after the other on top of the
//! lower layers. What this order hides from the layers below is preserved: a directory that replaces a file, a link or a
//! whiteout is opaque.
//!
//! A file is created with its permissions and only differing attributes are set afterwards, in the one order that works:
//! owner, extended attributes (a change of owner drops capabilities), mode (a change of owner drops set-id bits), times.
//! Directories are finished at the end, since every file created in them changes their time. A typical file takes five
//! system calls, and other threads may create the small ones (`small.rs`).

mod close;
mod create;
pub(super) mod file_threads;
mod forward;
mod links;
mod make;
mod small;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, fchmod, openat, statat, unlinkat};

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::beneath::{DIRECTORY, clean, parts, split};
use super::layer_manifest::{self, ManifestRecord, RecordKind, UnpackMode, path_of};
use super::stream::BufferSource;
use super::tree::{DirId, DirTree, PathError, PathWalk, PathWalkResult, ROOT};
use super::{AllocatedSpace, EntryRefusal, UnpackError, UnpackOptions, UnpackTarget};
use create::allocated;
use file_threads::FileThreads;
use forward::ForwardHardLinks;

/// Writes one layer.
pub(super) struct LayerWriter<'a> {
    target: UnpackTarget<'a>,
    options: &'a UnpackOptions,
    tree: DirTree,
    manifest: layer_manifest::LayerManifestWriter,
    /// Hard links to files that have not come yet.
    forward: ForwardHardLinks,
    /// Real paths that were replaced, and the number of the manifest's records that this makes void.
    void: HashMap<Vec<u8>, u64>,
    /// Memory taken by `forward` and `void`.
    bookkeeping: usize,
    /// Default ACLs of directories, which take effect on what is made in them.
    default_acls: Vec<(DirId, Vec<u8>)>,
    usage: AllocatedSpace,
    skipped_devices: u64,
    skipped_xattrs: u64,
    hides_lowers: bool,
    /// The parent of the last entry, as written: most entries have the same as the one before.
    last_parent: (Vec<u8>, DirId),
    last_parent_path: (DirId, Vec<u8>),
    /// Threads that make small files; without, they are made like all others.
    crew: Option<FileThreads>,
}

/// The destination of an entry: a name in a directory.
#[derive(Clone, Copy)]
struct DirEntryName<'a> {
    dir: DirId,
    name: &'a [u8],
}

impl<'a> LayerWriter<'a> {
    pub(super) fn new(
        target: UnpackTarget<'a>,
        options: &'a UnpackOptions,
        crew: Option<FileThreads>,
    ) -> Result<LayerWriter<'a>, UnpackError> {
        let open = |error| UnpackError::file("open the layer's directory", target.root, error);
        let root: OwnedFd = openat(rustix::fs::CWD, target.root, DIRECTORY, Mode::empty()).map_err(open)?;
        // Without a set-group-id bit: what is made in it shall be this process's own.
        fchmod(&root, Mode::RWXU).map_err(open)?;
        let form = UnpackMode { owners: options.owners, overlay: options.overlay };
        let manifest = layer_manifest::LayerManifestWriter::create(target.files, form)
            .map_err(|error| UnpackError::file("write the layer manifest", target.files, error))?;
        Ok(LayerWriter {
            target,
            options,
            tree: DirTree::new(root, &options.limits, options.open_in_tree()),
            manifest,
            forward: ForwardHardLinks::default(),
            void: HashMap::new(),
            bookkeeping: 0,
            default_acls: Vec::new(),
            usage: AllocatedSpace::default(),
            skipped_devices: 0,
            skipped_xattrs: 0,
            hides_lowers: false,
            last_parent: (Vec::new(), ROOT),
            last_parent_path: (ROOT, Vec::new()),
            crew,
        })
    }

    /// Applies one entry.
    pub(super) fn add(
        &mut self,
        entry: &LayerEntry,
        archive: &mut LayerArchive<'_, impl BufferSource>,
    ) -> Result<(), UnpackError> {
        let path = clean(&entry.path);
        if path.is_empty() {
            if entry.kind != LayerEntryKind::Directory {
                return Err(UnpackError::refused(&entry.path, EntryRefusal::Root));
            }
            return self.describe_directory(ROOT, entry);
        }
        let (parent, name) = split(&path);
        // What an old union filesystem kept for itself.
        if parts(&path).any(|part| part.starts_with(b".wh..wh.") && part != b".wh..wh..opq") {
            return Ok(());
        }
        let dir = self.parent(parent, entry)?;
        let place = DirEntryName { dir, name };
        match name.strip_prefix(b".wh.") {
            Some(b".wh..opq") => {
                self.tree.node_mut(dir).opaque = true;
                self.hides_lowers = true;
                Ok(())
            }
            Some(b"" | b"." | b"..") => Err(UnpackError::refused(&entry.path, EntryRefusal::Whiteout)),
            Some(hidden) => self.whiteout(DirEntryName { dir, name: hidden }, entry),
            None => self.make(place, entry, archive),
        }
    }

    fn make(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        archive: &mut LayerArchive<'_, impl BufferSource>,
    ) -> Result<(), UnpackError> {
        self.tree.path_len(place.dir, place.name).map_err(|stuck| stuck.at(&entry.path))?;
        self.await_place(place)?;
        self.forward.supersede(place.dir, place.name);
        match &entry.kind {
            LayerEntryKind::Directory => {
                let dir = self.directory(place, entry)?;
                self.describe_directory(dir, entry)
            }
            LayerEntryKind::File if self.is_small(place, entry) => self.hand_out(place, entry, archive),
            LayerEntryKind::File => self.file(place, entry, None, archive),
            LayerEntryKind::Sparse(extents) => self.file(place, entry, Some(extents), archive),
            LayerEntryKind::HardLink => self.hard_link(place, entry),
            LayerEntryKind::Symlink => self.symlink(place, entry),
            LayerEntryKind::Fifo => self.special(place, entry, FileType::Fifo),
            LayerEntryKind::CharDevice if entry.device == (0, 0) => self.whiteout(place, entry),
            LayerEntryKind::CharDevice => self.special(place, entry, FileType::CharacterDevice),
            LayerEntryKind::BlockDevice => self.special(place, entry, FileType::BlockDevice),
        }
    }

    /// The directory that a path leads to; made with all its parents where the archive has left them out.
    fn parent(&mut self, path: &[u8], entry: &LayerEntry) -> Result<DirId, UnpackError> {
        if self.last_parent.0 == path {
            return Ok(self.last_parent.1);
        }
        if let Some(dir) = self.tree.known(path) {
            self.last_parent.0.clear();
            self.last_parent.0.extend_from_slice(path);
            self.last_parent.1 = dir;
            return Ok(dir);
        }
        // Not to be remembered: it may lead through a link, whose name a file that is under way may take.
        self.make_parents(path, entry)
    }

    fn make_parents(&mut self, path: &[u8], entry: &LayerEntry) -> Result<DirId, UnpackError> {
        let at = |stuck: PathError| stuck.at(&entry.path);
        self.drain()?;
        let mut walk = PathWalk::new(path);
        loop {
            let made = match self.tree.advance(&mut walk).map_err(at)? {
                PathWalkResult::There => return Ok(walk.at),
                PathWalkResult::Missing(name) => {
                    self.forward.supersede(walk.at, &name);
                    self.tree.make(walk.at, &name).map_err(at)?
                }
                PathWalkResult::Blocked(name) => {
                    let place = DirEntryName { dir: walk.at, name: &name };
                    // A whiteout hides what is below; a file in the same layer is a contradiction.
                    if !self.is_whiteout(place, entry)? {
                        return Err(UnpackError::refused(&entry.path, EntryRefusal::ParentNotDirectory));
                    }
                    self.directory(place, entry)?
                }
            };
            self.tree.node_mut(made).meta.mtime = entry.mtime;
            walk.enter(made);
        }
    }

    /// Removes what is at a place, to make room. The layers below stay hidden by what comes instead.
    fn clear(&mut self, place: DirEntryName<'_>, entry: &LayerEntry) -> Result<(), UnpackError> {
        self.drain()?;
        let path = self.real_path(place);
        self.charge(path.len())?;
        self.void.insert(path, self.manifest.count());
        match self.tree.child(place.dir, place.name) {
            Some(dir) => self.remove_tree(dir, entry),
            None => self.remove_file(place, entry),
        }
    }

    fn remove_file(&mut self, place: DirEntryName<'_>, entry: &LayerEntry) -> Result<(), UnpackError> {
        let fail = |errno| UnpackError::file("replace", path_of(&entry.path), errno);
        let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let stat = statat(here.as_fd(), path_of(place.name), AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        unlinkat(here.as_fd(), path_of(place.name), AtFlags::empty()).map_err(fail)?;
        if stat.st_nlink <= 1 {
            self.usage.inodes -= 1;
            self.usage.allocated_bytes -= allocated(&stat);
        }
        Ok(())
    }

    /// Removes a directory and all in it. Every directory in it is known, so that none has to be opened on trust and
    /// no depth needs more than a few of them open.
    fn remove_tree(&mut self, top: DirId, entry: &LayerEntry) -> Result<(), UnpackError> {
        self.last_parent = (Vec::new(), ROOT);
        self.last_parent_path = (ROOT, Vec::new());
        let fail = |errno| UnpackError::file("replace the directory", path_of(&entry.path), errno);
        let mut todo = vec![(top, false)];
        while let Some((dir, emptied)) = todo.pop() {
            if emptied {
                let (parent, name) = self.tree.parent_and_name(dir);
                let name = name.to_vec();
                let here = self.tree.open(parent).map_err(|stuck| stuck.at(&entry.path))?;
                unlinkat(here.as_fd(), path_of(&name), AtFlags::REMOVEDIR).map_err(fail)?;
                self.forward.forget_directory(dir);
                self.tree.remove(dir);
                continue;
            }
            todo.push((dir, true));
            let here = self.tree.open(dir).map_err(|stuck| stuck.at(&entry.path))?;
            for found in rustix::fs::Dir::read_from(here.as_fd()).map_err(fail)? {
                let found = found.map_err(fail)?;
                match found.file_name().to_bytes() {
                    b"." | b".." => {}
                    name => match self.tree.child(dir, name) {
                        Some(child) => todo.push((child, false)),
                        None => self.remove_file(DirEntryName { dir, name }, entry)?,
                    },
                }
            }
        }
        Ok(())
    }

    /// Takes memory for what one entry does to others.
    fn charge(&mut self, bytes: usize) -> Result<(), UnpackError> {
        self.bookkeeping += bytes + 64;
        if self.bookkeeping > self.options.limits.max_bookkeeping {
            let limit = self.options.limits.max_bookkeeping as u64;
            return Err(UnpackError::Limit {
                what: "bytes of paths that replace or precede other entries",
                limit,
            });
        }
        Ok(())
    }

    fn record(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        kind: RecordKind,
        xattrs: Option<u32>,
    ) -> Result<(), UnpackError> {
        let record = self.record_of(place, entry, kind, xattrs);
        self.put(record)
    }

    fn record_of(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        kind: RecordKind,
        xattrs: Option<u32>,
    ) -> ManifestRecord {
        let path = self.real_path(place);
        ManifestRecord {
            path,
            kind,
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            xattrs,
        }
    }

    fn manifest_error(&self, error: io::Error) -> UnpackError {
        UnpackError::file("write the layer manifest", self.target.files, error)
    }

    fn real_path(&mut self, place: DirEntryName<'_>) -> Vec<u8> {
        if self.last_parent_path.0 != place.dir {
            self.last_parent_path = (place.dir, self.tree.path(place.dir));
        }
        let parent = &self.last_parent_path.1;
        let mut path = Vec::with_capacity(parent.len() + 1 + place.name.len());
        path.extend_from_slice(parent);
        if !parent.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(place.name);
        path
    }
}
