//! Hard links, also to files that come later, or that only a lower layer has.

use crate::chunked::{FileRecord, u32_at};
use crate::error::{EntryProblem, ErofsError};
use crate::output::ErofsOutput;
use crate::paths::{clean, join, split};
use crate::tree::{DirId, NodeId, NodeKind};

use super::{EntryPlace, ErofsWriter};

/// Links to links to links, at most, when each comes before its target.
const MAX_CHAIN: u32 = 40;

/// A hard link whose target was not there when it came.
#[derive(Clone, Copy)]
pub(super) struct PendingLink {
    node: NodeId,
    /// Place of its path: clean, without a `/` at its beginning.
    target: u32,
}

impl FileRecord for PendingLink {
    const SIZE: usize = 8;

    fn encode(self, to: &mut Vec<u8>) {
        for field in [self.node, self.target] {
            to.extend(field.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> PendingLink {
        PendingLink { node: u32_at(bytes, 0), target: u32_at(bytes, 1) }
    }
}

/// A hard link to a file that the layer does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowerLink {
    /// The link, relative to the root, without links in it.
    pub path: Vec<u8>,
    /// The file as the archive names it, relative to the root.
    pub target: Vec<u8>,
}

impl<O: ErofsOutput> ErofsWriter<O> {
    pub(super) fn hard_link(&mut self, place: EntryPlace<'_>, target: &[u8]) -> Result<(), ErofsError> {
        let target = clean(target);
        if self.link(place, &target)? {
            return Ok(());
        }
        // It may come later. Until then the name means nothing.
        let number = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        let node = self.put(place, NodeKind::PendingLink, number, b"");
        let target = self.tree.add_text(&target);
        self.links.push(PendingLink { node, target });
        Ok(())
    }

    /// Makes the hard links whose target came after them. Call it after the last entry; what is left then is in
    /// [`lower_links`](ErofsWriter::lower_links). A caller that copies them
    /// from lower layers ([`copy_file`](ErofsWriter::copy_file)) calls it once more, or leaves that to
    /// [`finish`](ErofsWriter::finish). Fails with [`ErofsError::Canceled`] soon after `is_canceled` returns true.
    pub fn resolve_links(&mut self, is_canceled: &dyn Fn() -> bool) -> Result<(), ErofsError> {
        for _ in 0..=MAX_CHAIN {
            let mut progress = false;
            let live = self.tree.live_directories();
            for number in self.link_numbers() {
                if is_canceled() {
                    return Err(ErofsError::Canceled);
                }
                let pending = self.pending(number).filter(|(dir, ..)| live[*dir as usize]);
                let Some((dir, name, target)) = pending else { continue };
                let path = join(self.tree.path(dir), &name);
                progress |= self.link(EntryPlace { dir, name: &name, path: &path }, &target)?;
            }
            if !progress {
                return Ok(());
            }
        }
        let first = self.lower_links().next().map_or_else(Vec::new, |link| link.path);
        if first.is_empty() { Ok(()) } else { Err(ErofsError::rejected(&first, EntryProblem::LinkChain)) }
    }

    /// Hard links to files that have not been added, in the order in which they came.
    pub fn lower_links(&self) -> impl Iterator<Item = LowerLink> + '_ {
        self.link_numbers().filter_map(|number| self.lower_link(number))
    }

    /// Numbers of the hard links that came before their targets, in the order in which they came.
    pub fn link_numbers(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.links.len()).unwrap_or(u32::MAX)
    }

    /// The link of this number; `None` if the layer has its file, or replaced it.
    pub fn lower_link(&self, number: u32) -> Option<LowerLink> {
        let (dir, name, target) = self.pending(number)?;
        self.tree.is_live(dir).then(|| LowerLink { path: join(self.tree.path(dir), &name), target })
    }

    /// Path of the link of this number, also if it has its file.
    pub fn link_path(&self, number: u32) -> Vec<u8> {
        let node = self.tree.node(self.links.get(number).node);
        join(self.tree.path(node.dir()), &self.tree.name(node))
    }

    /// Paths of the directories that no entry has described, relative to the root: their owner, mode and time are those
    /// of the lower layers. An entry for one of them describes it. The root is the empty path.
    pub fn implicit_directories(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        let live = self.tree.live_directories();
        let implicit = self.tree.directories().filter(|(_, directory)| directory.is_implicit());
        implicit.filter(move |(dir, _)| live[*dir as usize]).map(|(dir, _)| self.tree.path(dir))
    }

    /// Directory, name and target of a link, unless it was made or replaced.
    fn pending(&self, number: u32) -> Option<(DirId, Vec<u8>, Vec<u8>)> {
        let link = self.links.get(number);
        let node = self.tree.node(link.node);
        let is_pending = node.kind() == NodeKind::PendingLink && node.target == number;
        is_pending.then(|| {
            (node.dir(), self.tree.name(node).into_owned(), self.tree.text(link.target).into_owned())
        })
    }

    /// Links to a file that is there. `false` when it is not.
    fn link(&mut self, place: EntryPlace<'_>, target: &[u8]) -> Result<bool, ErofsError> {
        let rejected = |problem| ErofsError::rejected(place.path, problem);
        let (parent, name) = split(target);
        if name.is_empty() {
            return Err(rejected(EntryProblem::LinkToDirectory));
        }
        let parent = self.existing(parent).map_err(rejected)?;
        let Some(dir) = parent else { return Ok(false) };
        if (dir, name) == (place.dir, place.name) {
            return Err(rejected(EntryProblem::LinkToItself));
        }
        let Some(found) = self.tree.find(dir, name) else { return Ok(false) };
        let node = self.tree.node(found);
        match node.kind() {
            NodeKind::Directory => return Err(rejected(EntryProblem::LinkToDirectory)),
            // A whiteout is no file.
            NodeKind::Whiteout | NodeKind::PendingLink => return Ok(false),
            _ => {}
        }
        if self.is_under_removal(place, dir) {
            return Err(rejected(EntryProblem::LinkTarget));
        }
        self.tree.mark_linked(found);
        let text = self.tree.symlink_target(node).into_owned();
        let link = self.put(place, node.kind(), node.target, &text);
        self.tree.mark_linked(link);
        Ok(true)
    }

    /// Whether making room for the link would remove its target: a link `a` to `a/b`.
    fn is_under_removal(&self, place: EntryPlace<'_>, target: DirId) -> bool {
        let replaced = self.tree.find(place.dir, place.name).map(|node| self.tree.node(node));
        let Some(replaced) = replaced.filter(|node| node.kind() == NodeKind::Directory) else { return false };
        let mut at = target;
        loop {
            if at == replaced.target {
                return true;
            }
            let parent = self.tree.parent(at);
            if parent == at {
                return false;
            }
            at = parent;
        }
    }
}
