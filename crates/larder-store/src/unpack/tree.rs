//! The directories of the layer: which exist, which are open, and their final metadata.
//!
//! Every operation works in a directory of this tree, and each of them was created here, by `mkdirat` below another one. A
//! path of the archive is resolved component by component against the tree; a symbolic link of the layer is resolved in
//! the same way, as if the layer's directory were `/`. No other process reaches the layer while it is unpacked, so this
//! does not need the kernel's `RESOLVE_IN_ROOT`, works on every kernel, and needs no system call for known directories.
//! Directories are opened with `O_NOFOLLOW` nevertheless.
//!
//! A node's parent has a smaller number than the node: reverse order visits the deepest first.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, mkdirat, openat, readlinkat};
use rustix::io::Errno;

use super::beneath::{DIRECTORY, parts};
use super::layer_manifest::{FileTime, path_of};
use super::{EntryRefusal, UnpackError, UnpackLimits};

/// Number of a directory.
pub(super) type DirId = u32;

pub(super) const ROOT: DirId = 0;

const NONE: u32 = u32::MAX;

/// As many links as the kernel follows in one path.
const MAX_LINKS: u32 = 40;

/// A directory's owner, mode and time; they are applied once everything is in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct DirMeta {
    pub(super) mode: u16,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: FileTime,
}

/// One directory.
pub(super) struct DirNode {
    /// [`NONE`] once it was removed.
    parent: DirId,
    name: Box<[u8]>,
    /// Next one with the same hash.
    next: DirId,
    path_len: u32,
    pub(super) meta: DirMeta,
    /// No entry of its own: only the parent of others.
    pub(super) implicit: bool,
    pub(super) opaque: bool,
    /// Hides something with a whiteout in the form of an attribute.
    pub(super) xattr_whiteouts: bool,
    pub(super) xattrs: Option<u32>,
}

struct OpenDir {
    dir: DirId,
    fd: Arc<OwnedFd>,
    used: u64,
}

/// All directories of the layer.
pub(super) struct DirTree {
    nodes: Vec<DirNode>,
    /// First node with this hash of parent and name.
    index: HashMap<u64, DirId>,
    hasher: RandomState,
    root: Arc<OwnedFd>,
    /// Directories kept open.
    slots: Vec<OpenDir>,
    most_open: usize,
    clock: u64,
    max_directories: u32,
    max_path: u32,
}

/// A problem on the way to a directory.
#[derive(Debug)]
pub(super) enum PathError {
    Refused(EntryRefusal),
    Limit(u64),
    System(&'static str, Errno),
}

impl PathError {
    /// As an error that names the entry.
    pub(super) fn at(self, path: &[u8]) -> UnpackError {
        match self {
            PathError::Refused(reason) => UnpackError::refused(path, reason),
            PathError::Limit(limit) => UnpackError::Limit { what: "directories", limit },
            PathError::System(doing, errno) => UnpackError::file(doing, path_of(path), errno),
        }
    }
}

impl DirTree {
    /// A tree of nothing but the root, which is implicit until an entry names it.
    pub(super) fn new(root: OwnedFd, limits: &UnpackLimits, most_open: usize) -> DirTree {
        let mut tree = DirTree {
            nodes: Vec::new(),
            index: HashMap::new(),
            hasher: RandomState::new(),
            root: Arc::new(root),
            slots: Vec::with_capacity(most_open),
            most_open,
            clock: 0,
            max_directories: limits.max_directories,
            max_path: limits.max_path,
        };
        tree.nodes.push(node(ROOT, b"", 0));
        tree
    }

    pub(super) fn node(&self, dir: DirId) -> &DirNode {
        &self.nodes[dir as usize]
    }

    pub(super) fn node_mut(&mut self, dir: DirId) -> &mut DirNode {
        &mut self.nodes[dir as usize]
    }

    pub(super) fn is_live(&self, dir: DirId) -> bool {
        self.node(dir).parent != NONE
    }

    /// All directories that are left, the deepest first, the root last.
    pub(super) fn upwards(&self) -> impl Iterator<Item = DirId> + use<> {
        (0..u32::try_from(self.nodes.len()).unwrap_or(NONE)).rev()
    }

    /// The directory above, and the name in it.
    pub(super) fn parent_and_name(&self, dir: DirId) -> (DirId, &[u8]) {
        (self.node(dir).parent, &self.node(dir).name)
    }

    /// The path from the root, without links.
    pub(super) fn path(&self, dir: DirId) -> Vec<u8> {
        let mut names = Vec::new();
        let mut at = dir;
        while at != ROOT {
            names.push(&*self.node(at).name);
            at = self.node(at).parent;
        }
        names.reverse();
        names.join(&b'/')
    }

    /// The directory of this name, if it is one.
    pub(super) fn child(&self, parent: DirId, name: &[u8]) -> Option<DirId> {
        let mut at = self.index.get(&self.hash(parent, name)).copied().unwrap_or(NONE);
        while at != NONE {
            let node = self.node(at);
            if node.parent == parent && *node.name == *name {
                return Some(at);
            }
            at = node.next;
        }
        None
    }

    /// Notes a directory that was just made.
    pub(super) fn insert(&mut self, parent: DirId, name: &[u8]) -> Result<DirId, PathError> {
        let id = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        if id > self.max_directories {
            return Err(PathError::Limit(self.max_directories.into()));
        }
        let path_len = self.path_len(parent, name)?;
        let hash = self.hash(parent, name);
        let mut node = node(parent, name, path_len);
        node.next = self.index.insert(hash, id).unwrap_or(NONE);
        self.nodes.push(node);
        Ok(id)
    }

    /// Forgets a directory that was removed from disk.
    pub(super) fn remove(&mut self, dir: DirId) {
        self.slots.retain(|slot| slot.dir != dir);
        let (parent, next) = (self.node(dir).parent, self.node(dir).next);
        let hash = self.hash(parent, &self.node(dir).name);
        let first = self.index.get(&hash).copied().unwrap_or(NONE);
        if first == dir {
            if next == NONE {
                self.index.remove(&hash);
            } else {
                self.index.insert(hash, next);
            }
        } else {
            let mut at = first;
            while at != NONE {
                if self.node(at).next == dir {
                    self.node_mut(at).next = next;
                    break;
                }
                at = self.node(at).next;
            }
        }
        let node = self.node_mut(dir);
        node.parent = NONE;
        node.name = Box::default();
    }

    /// The directory, open.
    pub(super) fn open(&mut self, dir: DirId) -> Result<Arc<OwnedFd>, PathError> {
        if dir == ROOT {
            return Ok(self.root.clone());
        }
        self.clock += 1;
        // Down from the nearest one that is open.
        let mut closed = Vec::new();
        let mut at = dir;
        let mut fd = loop {
            if at == ROOT {
                break self.root.clone();
            }
            if let Some(slot) = self.slots.iter_mut().find(|slot| slot.dir == at) {
                slot.used = self.clock;
                break slot.fd.clone();
            }
            closed.push(at);
            at = self.node(at).parent;
        };
        for dir in closed.into_iter().rev() {
            let opened = openat(fd.as_fd(), path_of(&self.node(dir).name), DIRECTORY, Mode::empty())
                .map_err(|errno| PathError::System("open the parent directory of", errno))?;
            fd = Arc::new(opened);
            self.keep(dir, fd.clone());
        }
        Ok(fd)
    }

    fn keep(&mut self, dir: DirId, fd: Arc<OwnedFd>) {
        let slot = OpenDir { dir, fd, used: self.clock };
        if self.slots.len() < self.most_open {
            self.slots.push(slot);
        } else if let Some(oldest) = self.slots.iter_mut().min_by_key(|slot| slot.used) {
            *oldest = slot;
        }
    }

    /// Bytes of the path of a name in a directory, if they are not too many.
    pub(super) fn path_len(&self, dir: DirId, name: &[u8]) -> Result<u32, PathError> {
        if name.len() > 255 {
            return Err(PathError::Refused(EntryRefusal::NameTooLong));
        }
        let length = self.node(dir).path_len + u32::try_from(name.len()).unwrap_or(NONE) + 1;
        if length > self.max_path {
            return Err(PathError::Refused(EntryRefusal::PathTooLong));
        }
        Ok(length)
    }

    /// The directory of a path that goes through known directories only: the common case, without a system call.
    pub(super) fn known(&self, path: &[u8]) -> Option<DirId> {
        parts(path).try_fold(ROOT, |at, part| self.child(at, part))
    }

    /// Walks on, through links of the layer and never above the root, to the end or to a part that is no directory.
    /// Such a part is the caller's to make; it then goes on with [`PathWalk::enter`].
    pub(super) fn advance(&mut self, walk: &mut PathWalk) -> Result<PathWalkResult, PathError> {
        while let Some(part) = walk.todo.pop() {
            if part == b".." {
                walk.at = self.node(walk.at).parent;
                continue;
            }
            if let Some(child) = self.child(walk.at, &part) {
                walk.at = child;
                continue;
            }
            self.path_len(walk.at, &part)?;
            let here = self.open(walk.at)?;
            match readlinkat(here.as_fd(), path_of(&part), Vec::new()) {
                Ok(target) => walk.follow(target.as_bytes())?,
                Err(Errno::NOENT) => return Ok(PathWalkResult::Missing(part)),
                Err(Errno::INVAL) => return Ok(PathWalkResult::Blocked(part)),
                Err(errno) => return Err(PathError::System("inspect a parent directory of", errno)),
            }
        }
        Ok(PathWalkResult::There)
    }

    /// Makes a directory on disk and notes it. Its final mode comes last.
    pub(super) fn make(&mut self, parent: DirId, name: &[u8]) -> Result<DirId, PathError> {
        self.path_len(parent, name)?;
        let here = self.open(parent)?;
        mkdirat(here.as_fd(), path_of(name), Mode::RWXU)
            .map_err(|errno| PathError::System("create the parent directory of", errno))?;
        self.insert(parent, name)
    }

    fn hash(&self, parent: DirId, name: &[u8]) -> u64 {
        self.hasher.hash_one((parent, name))
    }
}

/// A walk under way.
pub(super) struct PathWalk {
    /// Where it is now.
    pub(super) at: DirId,
    /// Parts still to go, the next one last.
    todo: Vec<Vec<u8>>,
    links: u32,
}

/// Where a walk stands.
pub(super) enum PathWalkResult {
    /// At its end.
    There,
    /// This part does not exist.
    Missing(Vec<u8>),
    /// This part is neither a directory nor a link: a file, a device, a whiteout.
    Blocked(Vec<u8>),
}

impl PathWalk {
    /// A walk along `path`, from the root.
    pub(super) fn new(path: &[u8]) -> PathWalk {
        let mut walk = PathWalk { at: ROOT, todo: Vec::new(), links: 0 };
        walk.push(path);
        walk
    }

    /// Goes into the directory that the caller has made.
    pub(super) fn enter(&mut self, dir: DirId) {
        self.at = dir;
    }

    fn follow(&mut self, target: &[u8]) -> Result<(), PathError> {
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(PathError::Refused(EntryRefusal::TooManyLinks));
        }
        if target.starts_with(b"/") {
            self.at = ROOT;
        }
        self.push(target);
        Ok(())
    }

    fn push(&mut self, path: &[u8]) {
        let before = self.todo.len();
        self.todo.extend(parts(path).map(<[u8]>::to_vec));
        self.todo[before..].reverse();
    }
}

fn node(parent: DirId, name: &[u8], path_len: u32) -> DirNode {
    DirNode {
        parent,
        name: name.into(),
        next: NONE,
        path_len,
        meta: DirMeta { mode: 0o755, uid: 0, gid: 0, mtime: FileTime::default() },
        implicit: true,
        opaque: false,
        xattr_whiteouts: false,
        xattrs: None,
    }
}
