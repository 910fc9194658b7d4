//! Hard links, also to files that come later in the archive, or that only a lower layer has.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, linkat, statat};
use rustix::io::Errno;

use super::super::archive::LayerEntry;
use super::super::beneath::{clean, split};
use super::super::layer_manifest::{RecordKind, path_of};
use super::super::tree::{DirId, PathWalk, PathWalkResult};
use super::super::{EntryRefusal, PendingLowerWork, UnpackError};
use super::{DirEntryName, LayerWriter};

/// Links to links to links, at most, when each comes before its target.
const MAX_CHAIN: u32 = 40;

impl LayerWriter<'_> {
    pub(super) fn hard_link(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
    ) -> Result<(), UnpackError> {
        self.drain()?; // its target may be under way
        if self.link(place, entry)? {
            return Ok(());
        }
        // It may come later. Until then nothing has this name.
        let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        if statat(&*here, path_of(place.name), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            self.clear(place, entry)?;
        }
        self.charge(entry.path.len() + entry.link.len() + place.name.len())?;
        let entry = LayerEntry { xattrs: Vec::new(), ..entry.clone() };
        self.forward.add(place.dir, place.name, entry);
        Ok(())
    }

    /// Makes the links whose target has come. What is left needs a lower layer, and is recorded.
    pub(super) fn finish_links(&mut self) -> Result<PendingLowerWork, UnpackError> {
        let mut left = self.forward.take();
        for round in 0.. {
            let before = left.len();
            let mut still = Vec::new();
            for (dir, name, entry) in left {
                if !self.link(DirEntryName { dir, name: &name }, &entry)? {
                    still.push((dir, name, entry));
                }
            }
            left = still;
            if left.is_empty() || left.len() == before {
                break;
            }
            if round > MAX_CHAIN {
                return Err(UnpackError::refused(&left[0].2.path, EntryRefusal::LinkChain));
            }
        }
        let cross_layer_links = left.len() as u64;
        for (dir, name, entry) in left {
            let target = clean(&entry.link);
            self.record(DirEntryName { dir, name: &name }, &entry, RecordKind::PendingLink { target }, None)?;
        }
        Ok(PendingLowerWork { implicit_dirs: 0, cross_layer_links })
    }

    /// Links to a file that is there. `false` when it is not.
    fn link(&mut self, place: DirEntryName<'_>, entry: &LayerEntry) -> Result<bool, UnpackError> {
        let target = clean(&entry.link);
        let (parent, name) = split(&target);
        if name.is_empty() {
            return Err(UnpackError::refused(&entry.path, EntryRefusal::LinkToDirectory));
        }
        let Some(dir) = self.existing(parent, entry)? else { return Ok(false) };
        if (dir, name) == (place.dir, place.name) {
            return Err(UnpackError::refused(&entry.path, EntryRefusal::LinkToItself));
        }
        if self.tree.child(dir, name).is_some() {
            return Err(UnpackError::refused(&entry.path, EntryRefusal::LinkToDirectory));
        }
        let there = self.tree.open(dir).map_err(|stuck| stuck.at(&entry.path))?;
        match statat(&*there, path_of(name), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            Err(errno) => {
                return Err(UnpackError::file("inspect the target of", path_of(&entry.path), errno));
            }
            // A whiteout is no file.
            Ok(stat)
                if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                    && stat.st_rdev == 0 =>
            {
                return Ok(false);
            }
            Ok(_) => {}
        }
        if self.is_under_removal(place, dir) {
            return Err(UnpackError::refused(&entry.path, EntryRefusal::LinkTarget));
        }
        self.in_place(place, entry, "create the hard link", |here, to| {
            linkat(there.as_fd(), path_of(name), here, path_of(to), AtFlags::empty())
        })?;
        let target = self.real_path(DirEntryName { dir, name });
        self.record(place, entry, RecordKind::HardLink { target }, None)?;
        Ok(true)
    }

    /// Whether making room for the link would remove its target: a link `a` to `a/b`.
    fn is_under_removal(&self, place: DirEntryName<'_>, target: DirId) -> bool {
        let Some(replaced) = self.tree.child(place.dir, place.name) else { return false };
        let mut at = target;
        loop {
            if at == replaced {
                return true;
            }
            let (parent, _) = self.tree.parent_and_name(at);
            if parent == at {
                return false;
            }
            at = parent;
        }
    }

    /// The directory that a path leads to, if this layer has it.
    fn existing(&mut self, path: &[u8], entry: &LayerEntry) -> Result<Option<DirId>, UnpackError> {
        if let Some(dir) = self.tree.known(path) {
            return Ok(Some(dir));
        }
        let mut walk = PathWalk::new(path);
        match self.tree.advance(&mut walk).map_err(|stuck| stuck.at(&entry.path))? {
            PathWalkResult::There => Ok(Some(walk.at)),
            PathWalkResult::Missing(_) | PathWalkResult::Blocked(_) => Ok(None),
        }
    }
}
