//! Final steps of a layer: links to later files, then owner, mode and time of every directory, deepest first.

use std::collections::HashMap;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Mode, Stat, chmodat, chownat, statat, utimensat};
use rustix::io::Errno;

use super::super::archive::{LayerEntry, LayerEntryKind};
use super::super::layer_manifest::{self, ManifestRecord, RecordKind, path_of};
use super::super::metadata::{XattrTarget, hash_of, read_xattrs, set_xattr, timestamps};
use super::super::tree::{DirId, DirMeta, ROOT};
use super::super::{DetectedCompression, UnpackError, UnpackedLayer};
use super::create::allocated;
use super::{DirEntryName, LayerWriter};

impl LayerWriter<'_> {
    /// Completes the tree and its manifest. Nothing is synced.
    pub(crate) fn finish(mut self) -> Result<UnpackedLayer, UnpackError> {
        self.drain()?;
        let mut pending = self.finish_links()?;
        self.finish_default_acls()?;
        let marked =
            self.tree.upwards().any(|dir| self.tree.is_live(dir) && self.tree.node(dir).xattr_whiteouts);
        self.tree.node_mut(ROOT).xattr_whiteouts |= marked;
        for dir in self.tree.upwards() {
            if self.tree.is_live(dir) {
                pending.implicit_dirs += u64::from(self.tree.node(dir).implicit);
                self.finish_directory(dir)?;
            }
        }
        let LayerWriter { target, manifest, void, usage, .. } = self;
        let manifest_error = |error| UnpackError::file("write the layer manifest", target.files, error);
        manifest.finish().map_err(manifest_error)?;
        if !void.is_empty() {
            let mut survivors =
                RecordFilter { void: &void, orphans: HashMap::new(), stood_for: HashMap::new() };
            layer_manifest::rewrite(target.files, |number, record| survivors.keep(number, record), &[])
                .map_err(|cause| UnpackError::Manifest { path: target.files.to_owned(), cause })?;
        }
        Ok(UnpackedLayer {
            compression: DetectedCompression::None,
            compressed_bytes: 0,
            plain_bytes: 0,
            entries: 0,
            usage,
            pending,
            skipped_devices: self.skipped_devices,
            skipped_xattrs: self.skipped_xattrs,
            hides_lowers: self.hides_lowers,
        })
    }

    fn finish_default_acls(&mut self) -> Result<(), UnpackError> {
        for (dir, acl) in std::mem::take(&mut self.default_acls) {
            if !self.tree.is_live(dir) {
                continue;
            }
            let path = self.tree.path(dir);
            let fail = |errno: Errno| UnpackError::file("set attributes of", path_of(&path), errno);
            let here = self.tree.open(dir).map_err(|stuck| stuck.at(&path))?;
            let on = XattrTarget::Open(here.as_fd());
            set_xattr(on, b"system.posix_acl_default", &acl).map_err(fail)?;
            self.tree.node_mut(dir).xattrs = hash_of(&read_xattrs(on).map_err(fail)?);
        }
        Ok(())
    }

    fn finish_directory(&mut self, dir: DirId) -> Result<(), UnpackError> {
        let path = self.tree.path(dir);
        let fail = |doing, errno: Errno| UnpackError::file(doing, path_of(&path), errno);
        self.mark_directory(dir, &path)?;
        let (parent, name) = self.tree.parent_and_name(dir);
        let name = if dir == ROOT { b".".to_vec() } else { name.to_vec() };
        let here = self.tree.open(parent).map_err(|stuck| stuck.at(&path))?;
        let node = self.tree.node(dir);
        let meta = node.meta;
        let (implicit, opaque, xattrs) = (node.implicit, node.opaque, node.xattrs);
        let name = path_of(&name);
        let stat: Stat =
            statat(&*here, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| fail("inspect", errno))?;
        let mode = u32::from(meta.mode);
        if let Some((uid, gid)) = self.options.owner_to_set((meta.uid, meta.gid), &stat) {
            chownat(&*here, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|errno| fail("set the owner of", errno))?;
        }
        let disk_mode = self.options.disk_mode(mode, 0o700);
        if stat.st_mode & 0o7777 != disk_mode {
            chmodat(&*here, name, Mode::from_raw_mode(disk_mode), AtFlags::empty())
                .map_err(|errno| fail("set the mode of", errno))?;
        }
        utimensat(&*here, name, &timestamps(meta.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| fail("set the time of", errno))?;
        self.usage.inodes += 1;
        self.usage.allocated_bytes += allocated(&stat);
        let record = ManifestRecord {
            kind: RecordKind::Directory { implicit, opaque },
            mode,
            uid: meta.uid,
            gid: meta.gid,
            mtime: meta.mtime,
            xattrs,
            path,
        };
        self.manifest.add(&record).map_err(|error| self.manifest_error(error))
    }

    /// In an opaque directory whiteouts hide nothing more, and the kernel would show those that are marked files.
    fn remove_whiteouts(&mut self, dir: DirId, path: &[u8]) -> Result<(), UnpackError> {
        let here = self.tree.open(dir).map_err(|stuck| stuck.at(path))?;
        let fail = |errno| UnpackError::file("list the directory", path_of(path), errno);
        let entry = directory_entry(path, self.tree.node(dir).meta);
        for found in rustix::fs::Dir::read_from(&*here).map_err(fail)? {
            let found = found.map_err(fail)?;
            let place = DirEntryName { dir, name: found.file_name().to_bytes() };
            let is_name = !matches!(place.name, b"." | b"..");
            if is_name && self.tree.child(dir, place.name).is_none() && self.is_whiteout(place, &entry)? {
                self.clear(place, &entry)?;
            }
        }
        Ok(())
    }

    /// Says to the overlay that a directory hides those below it, or that it has whiteouts in the form of attributes.
    fn mark_directory(&mut self, dir: DirId, path: &[u8]) -> Result<(), UnpackError> {
        let value: &[u8] = match self.tree.node(dir) {
            node if node.opaque => b"y",
            node if node.xattr_whiteouts => b"x",
            _ => return Ok(()),
        };
        if self.tree.node(dir).opaque && self.tree.node(dir).xattr_whiteouts {
            self.remove_whiteouts(dir, path)?;
        }
        let here = self.tree.open(dir).map_err(|stuck| stuck.at(path))?;
        let name = self.options.overlay.xattr("opaque");
        let fail = |errno: Errno| UnpackError::file("mark the opaque directory", path_of(path), errno);
        match set_xattr(XattrTarget::Open(here.as_fd()), name.as_bytes(), value) {
            Ok(true) => Ok(()),
            Ok(false) => Err(fail(Errno::PERM)),
            Err(errno) => Err(fail(errno)),
        }
    }
}

/// A directory's own description as an entry, for errors and for what replaces entries.
fn directory_entry(path: &[u8], meta: DirMeta) -> LayerEntry {
    LayerEntry {
        path: path.to_vec(),
        kind: LayerEntryKind::Directory,
        link: Vec::new(),
        size: 0,
        mode: meta.mode.into(),
        uid: meta.uid,
        gid: meta.gid,
        mtime: meta.mtime,
        device: (0, 0),
        xattrs: Vec::new(),
    }
}

/// Drops the records of what was replaced, and gives a file that lost its first name the record of the next one.
struct RecordFilter<'a> {
    /// Replaced paths, and the number of the first record that this leaves alone.
    void: &'a HashMap<Vec<u8>, u64>,
    /// Files whose record went, by its number: other names of theirs may be left, the first of which takes its place.
    orphans: HashMap<u64, (ManifestRecord, Option<Vec<u8>>)>,
    /// What names that went, of files and of hard links, stood for when they did.
    stood_for: HashMap<Vec<u8>, HardLinkRecord>,
}

/// The record that hard links lead to.
#[derive(Clone)]
enum HardLinkRecord {
    /// It is kept, under this path.
    Stays(Vec<u8>),
    /// It was removed.
    Orphan(u64),
}

impl RecordFilter<'_> {
    fn keep(&mut self, number: u64, record: ManifestRecord) -> Option<ManifestRecord> {
        let gone = self.is_void(&record.path, number);
        match &record.kind {
            // Directories are recorded last, when all that was replaced is gone.
            RecordKind::Directory { .. } => Some(record),
            RecordKind::HardLink { target } => {
                let root = if self.is_void(target, number) {
                    self.stood_for.get(target)?.clone()
                } else {
                    HardLinkRecord::Stays(target.clone())
                };
                if gone {
                    self.stood_for.insert(record.path, root);
                    return None;
                }
                let number = match root {
                    HardLinkRecord::Stays(target) => {
                        return Some(ManifestRecord { kind: RecordKind::HardLink { target }, ..record });
                    }
                    HardLinkRecord::Orphan(number) => number,
                };
                let (file, name) = self.orphans.get_mut(&number)?;
                if let Some(name) = name {
                    return Some(ManifestRecord {
                        kind: RecordKind::HardLink { target: name.clone() },
                        ..record
                    });
                }
                *name = Some(record.path.clone());
                Some(ManifestRecord { path: record.path, ..file.clone() })
            }
            _ if gone => {
                self.stood_for.insert(record.path.clone(), HardLinkRecord::Orphan(number));
                self.orphans.insert(number, (record, None));
                None
            }
            _ => Some(record),
        }
    }

    /// Whether this path, or a directory above it, was replaced after the record.
    fn is_void(&self, path: &[u8], number: u64) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        ends.chain([path.len()]).any(|end| self.void.get(&path[..end]).is_some_and(|first| number < *first))
    }
}
