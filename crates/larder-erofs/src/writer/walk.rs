//! Finds directories by path, through symbolic links of the layer, as if its root were `/`.

use crate::entry::ErofsTime;
use crate::error::{EntryProblem, ErofsError};
use crate::output::ErofsOutput;
use crate::paths::{join, parts, split};
use crate::tree::{DirId, NodeKind, ROOT};

use super::ErofsWriter;

/// As many links as the kernel follows in one path.
const MAX_LINKS: u32 = 40;

/// A walk under way.
struct PathWalk {
    at: DirId,
    /// Parts still to go, the next one last.
    todo: Vec<Vec<u8>>,
    links: u32,
}

/// Where a walk stands.
enum WalkStep {
    /// At its end.
    Done,
    /// This part does not exist.
    Missing(Vec<u8>),
    /// This part is neither a directory nor a link.
    Blocked(Vec<u8>, NodeKind),
}

impl PathWalk {
    fn new(path: &[u8]) -> PathWalk {
        let mut walk = PathWalk { at: ROOT, todo: Vec::new(), links: 0 };
        walk.push(path);
        walk
    }

    fn push(&mut self, path: &[u8]) {
        let before = self.todo.len();
        self.todo.extend(parts(path).map(<[u8]>::to_vec));
        self.todo[before..].reverse();
    }

    fn follow(&mut self, target: &[u8]) -> Result<(), EntryProblem> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(EntryProblem::TooManyLinks);
        }
        if target.starts_with(b"/") {
            self.at = ROOT;
        }
        self.push(target);
        Ok(())
    }
}

impl<O: ErofsOutput> ErofsWriter<O> {
    /// The directory that a path leads to; made with all its parents where entries have left them out.
    pub(super) fn parent(&mut self, path: &[u8], mtime: ErofsTime) -> Result<DirId, EntryProblem> {
        if self.last_parent.0 == path {
            return Ok(self.last_parent.1);
        }
        if let Some(dir) = self.known(path) {
            self.last_parent.0.clear();
            self.last_parent.0.extend_from_slice(path);
            self.last_parent.1 = dir;
            return Ok(dir);
        }
        // Not remembered: it may lead through a link, which a later entry may replace.
        self.make_parents(path, mtime)
    }

    /// The directory that a path leads to, if the layer has it.
    pub(super) fn existing(&self, path: &[u8]) -> Result<Option<DirId>, EntryProblem> {
        if let Some(dir) = self.known(path) {
            return Ok(Some(dir));
        }
        let mut walk = PathWalk::new(path);
        match self.advance(&mut walk)? {
            WalkStep::Done => Ok(Some(walk.at)),
            WalkStep::Missing(_) | WalkStep::Blocked(..) => Ok(None),
        }
    }

    /// The path that the links of this layer make of a path, as far as this layer has it: its last component is not
    /// followed.
    pub fn resolve_path(&self, path: &[u8]) -> Result<Vec<u8>, ErofsError> {
        let (parent, name) = split(path);
        let mut walk = PathWalk::new(parent);
        let step = self.advance(&mut walk).map_err(|problem| ErofsError::rejected(path, problem))?;
        let mut rest = match step {
            WalkStep::Done => Vec::new(),
            WalkStep::Missing(part) | WalkStep::Blocked(part, _) => vec![part],
        };
        rest.extend(walk.todo.into_iter().rev());
        rest.push(name.to_vec());
        Ok(rest.iter().fold(self.tree.path(walk.at), |path, part| join(path, part)))
    }

    /// The directory of a path that leads through directories only: the common case.
    fn known(&self, path: &[u8]) -> Option<DirId> {
        parts(path).try_fold(ROOT, |at, part| {
            let node = self.tree.node(self.tree.find(at, part)?);
            (node.kind() == NodeKind::Directory).then_some(node.target)
        })
    }

    fn make_parents(&mut self, path: &[u8], mtime: ErofsTime) -> Result<DirId, EntryProblem> {
        let mut walk = PathWalk::new(path);
        loop {
            let (name, hides) = match self.advance(&mut walk)? {
                WalkStep::Done => return Ok(walk.at),
                WalkStep::Missing(name) => (name, false),
                // A whiteout hides what is below; a file in the same layer is a contradiction.
                WalkStep::Blocked(name, NodeKind::Whiteout) => (name, true),
                WalkStep::Blocked(..) => return Err(EntryProblem::ParentNotDirectory),
            };
            walk.at = self.tree.make_directory(walk.at, &name, mtime)?;
            if hides {
                self.mark_opaque(walk.at);
            }
        }
    }

    /// Walks on, never above the root, to the end or to a part that is no directory. The caller may make that one, and
    /// go on from it.
    fn advance(&self, walk: &mut PathWalk) -> Result<WalkStep, EntryProblem> {
        while let Some(part) = walk.todo.pop() {
            if part == b".." {
                walk.at = self.tree.parent(walk.at);
                continue;
            }
            let Some(node) = self.tree.find(walk.at, &part) else { return Ok(WalkStep::Missing(part)) };
            let node = self.tree.node(node);
            match node.kind() {
                NodeKind::Directory => walk.at = node.target,
                NodeKind::Symlink => walk.follow(&self.tree.symlink_target(node))?,
                NodeKind::PendingLink => return Ok(WalkStep::Missing(part)),
                kind => return Ok(WalkStep::Blocked(part, kind)),
            }
        }
        Ok(WalkStep::Done)
    }
}
