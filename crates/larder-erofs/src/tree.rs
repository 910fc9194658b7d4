//! Maps names to nodes in little memory: 12 bytes for an entry, its name, and about 6 bytes to find it; 32 more for a
//! directory. Names, links and attributes of directories can be moved to a temporary file, and while the tree waits,
//! everything else to another one.
//!
//! Nodes are never removed. A node of a name that is used again changes what it is. A directory that something replaced
//! is no longer referenced by its node, and everything in it is dead with it: [`NameTree::live_directories`].
//!
//! A directory's parent has a smaller number than the directory.

mod index;
mod names;

use std::borrow::Cow;
use std::io;

use crate::chunked::{ChunkedVec, FileRecord, u32_at};
use crate::entry::ErofsTime;
use crate::entry_rules::check_name;
use crate::error::EntryProblem;
use crate::output::ErofsScratch;

use index::NodeIndex;
use names::NameArena;

/// Number of a directory.
pub(crate) type DirId = u32;
/// Number of a node.
pub(crate) type NodeId = u32;

pub(crate) const ROOT: DirId = 0;
const NONE: u32 = u32::MAX;

/// Bytes of the path of a directory.
const MAX_PATH: usize = 4096;
/// Numbers that do not fit beside the other fields. Far more than fit into memory.
const MAX_DIRECTORIES: usize = 1 << 28;

/// Node that a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeKind {
    File,
    Directory,
    Symlink,
    CharDevice,
    BlockDevice,
    Fifo,
    Whiteout,
    /// A hard link whose target has not come.
    PendingLink,
}

const KINDS: [NodeKind; 8] = [
    NodeKind::File,
    NodeKind::Directory,
    NodeKind::Symlink,
    NodeKind::CharDevice,
    NodeKind::BlockDevice,
    NodeKind::Fifo,
    NodeKind::Whiteout,
    NodeKind::PendingLink,
];

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TreeNode {
    name: u32,
    /// Directory, one bit for [`TreeNode::is_linked`], three for the kind.
    packed: u32,
    /// Slot of the inode; number of the directory; of a pending link, its number.
    pub(crate) target: u32,
}

impl TreeNode {
    fn new(dir: DirId, name: u32, kind: NodeKind, target: u32) -> TreeNode {
        TreeNode { name, packed: dir << 4 | kind as u32, target }
    }

    /// The directory that has the name.
    pub(crate) fn dir(self) -> DirId {
        self.packed >> 4
    }

    pub(crate) fn kind(self) -> NodeKind {
        KINDS[(self.packed & 7) as usize]
    }

    /// Whether its inode may have other names.
    pub(crate) fn is_linked(self) -> bool {
        self.packed & 8 != 0
    }
}

impl FileRecord for TreeNode {
    const SIZE: usize = 12;

    fn encode(self, to: &mut Vec<u8>) {
        for field in [self.name, self.packed, self.target] {
            to.extend(field.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> TreeNode {
        TreeNode { name: u32_at(bytes, 0), packed: u32_at(bytes, 1), target: u32_at(bytes, 2) }
    }
}

/// Attributes of a directory's inode.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TreeDirectory {
    mtime: i64,
    nanos: u32,
    /// Its node; [`NONE`] for the root.
    node: NodeId,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Place of its encoded attributes, or [`NONE`].
    xattrs: u32,
    mode_and_flags: u16,
}

const OPAQUE: u16 = 1 << 15;
const IMPLICIT: u16 = 1 << 14;

impl TreeDirectory {
    fn implicit(node: NodeId, mtime: ErofsTime) -> TreeDirectory {
        let ErofsTime { seconds, nanos } = mtime;
        TreeDirectory {
            mtime: seconds,
            nanos,
            node,
            uid: 0,
            gid: 0,
            xattrs: NONE,
            mode_and_flags: IMPLICIT | 0o755,
        }
    }

    pub(crate) fn mtime(&self) -> ErofsTime {
        ErofsTime { seconds: self.mtime, nanos: self.nanos }
    }

    pub(crate) fn mode(&self) -> u16 {
        self.mode_and_flags & 0o7777
    }

    /// Returns true if the directory hides the entries of lower layers in it.
    pub(crate) fn is_opaque(&self) -> bool {
        self.mode_and_flags & OPAQUE != 0
    }

    /// Whether no entry describes it.
    pub(crate) fn is_implicit(&self) -> bool {
        self.mode_and_flags & IMPLICIT != 0
    }
}

impl FileRecord for TreeDirectory {
    const SIZE: usize = 32;

    fn encode(self, to: &mut Vec<u8>) {
        to.extend(self.mtime.to_le_bytes());
        let fields = [self.nanos, self.node, self.uid, self.gid, self.xattrs, self.mode_and_flags.into()];
        for field in fields {
            to.extend(field.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> TreeDirectory {
        let mtime = u64::from(u32_at(bytes, 0)) | u64::from(u32_at(bytes, 1)) << 32;
        let [nanos, node, uid, gid, xattrs, mode] = [2, 3, 4, 5, 6, 7].map(|at| u32_at(bytes, at));
        TreeDirectory {
            mtime: mtime.cast_signed(),
            nanos,
            node,
            uid,
            gid,
            xattrs,
            mode_and_flags: u16::try_from(mode).unwrap_or(0),
        }
    }
}

/// All names.
pub(crate) struct NameTree {
    nodes: ChunkedVec<TreeNode>,
    directories: ChunkedVec<TreeDirectory>,
    names: NameArena,
    index: NodeIndex,
    /// The last attributes of a directory, and their place.
    last_xattrs: (Vec<u8>, u32),
    /// Where the tree waits, and how many nodes, directories and other values are there.
    parking: Box<dyn ErofsScratch>,
    parked: Option<[usize; 3]>,
}

impl NameTree {
    /// A tree of nothing but the root, with a temporary file for names and one for the rest.
    pub(crate) fn new(names: Box<dyn ErofsScratch>, parking: Box<dyn ErofsScratch>) -> NameTree {
        let mut directories = ChunkedVec::new();
        directories.push(TreeDirectory::implicit(NONE, ErofsTime::default()));
        NameTree {
            nodes: ChunkedVec::new(),
            directories,
            names: NameArena::new(names),
            index: NodeIndex::new(),
            last_xattrs: (Vec::new(), NONE),
            parking,
            parked: None,
        }
    }

    /// Whether there is no room for one more entry.
    pub(crate) fn is_full(&self) -> bool {
        self.nodes.len() >= index::MAX_NODES - MAX_PATH || self.names.is_full()
    }

    /// Bytes of memory.
    pub(crate) fn memory(&self) -> usize {
        self.nodes.memory() + self.directories.memory() + self.names.memory() + self.index.memory()
    }

    /// Bytes of memory for names.
    pub(crate) fn name_memory(&self) -> usize {
        self.names.text_memory()
    }

    /// Moves names to the temporary file.
    pub(crate) fn spill_names(&mut self) -> io::Result<()> {
        self.names.spill()
    }

    /// Moves the tree, and the values that belong to it, to temporary files. Until [`NameTree::unpark`], it is empty.
    pub(crate) fn park<T: FileRecord>(&mut self, values: &mut ChunkedVec<T>) -> io::Result<()> {
        let end = self.nodes.write(&mut *self.parking, 0)?;
        let end = self.directories.write(&mut *self.parking, end)?;
        values.write(&mut *self.parking, end)?;
        self.names.park()?;
        self.parked = Some([self.nodes.len(), self.directories.len(), values.len()]);
        (self.nodes, self.directories, self.index) = (ChunkedVec::new(), ChunkedVec::new(), NodeIndex::new());
        self.last_xattrs = (Vec::new(), NONE);
        *values = ChunkedVec::new();
        self.close();
        Ok(())
    }

    /// Reads back what was parked.
    pub(crate) fn unpark<T: FileRecord>(&mut self, values: &mut ChunkedVec<T>) -> io::Result<()> {
        let Some([nodes, directories, others]) = self.parked.take() else { return Ok(()) };
        self.names.unpark()?;
        let end;
        (self.nodes, end) = ChunkedVec::read(&mut *self.parking, 0, nodes)?;
        let (directories, end) = ChunkedVec::read(&mut *self.parking, end, directories)?;
        self.directories = directories;
        (*values, _) = ChunkedVec::read(&mut *self.parking, end, others)?;
        self.parking.close();
        self.index = NodeIndex::with_capacity(nodes);
        let (names, nodes) = (&self.names, &self.nodes);
        let hash_of = |node: TreeNode| names.hash(node.dir(), &names.name(node.name));
        for (id, node) in (0..).zip(nodes.iter()) {
            self.index.insert(hash_of(node), id, |other| hash_of(nodes.get(other)));
        }
        self.check()
    }

    /// Releases descriptors until the next name is read.
    pub(crate) fn close(&mut self) {
        self.names.close();
        self.parking.close();
    }

    /// The first error of the temporary file since the last call: until then a name that cannot be read is empty.
    pub(crate) fn check(&self) -> io::Result<()> {
        self.names.check()
    }

    pub(crate) fn node(&self, node: NodeId) -> TreeNode {
        self.nodes.get(node)
    }

    /// All nodes by their numbers.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (NodeId, TreeNode)> + '_ {
        (0..).zip(self.nodes.iter())
    }

    pub(crate) fn name(&self, node: TreeNode) -> Cow<'_, [u8]> {
        self.names.name(node.name)
    }

    /// The text of a symbolic link; empty for all others.
    pub(crate) fn symlink_target(&self, node: TreeNode) -> Cow<'_, [u8]> {
        if node.kind() == NodeKind::Symlink { self.names.link(node.name) } else { Cow::Borrowed(b"") }
    }

    /// Keeps a text that is not a name.
    pub(crate) fn add_text(&mut self, text: &[u8]) -> u32 {
        self.names.add_text(text)
    }

    /// A text that was kept.
    pub(crate) fn text(&self, at: u32) -> Cow<'_, [u8]> {
        self.names.text(at)
    }

    pub(crate) fn directory(&self, dir: DirId) -> TreeDirectory {
        self.directories.get(dir)
    }

    /// Number of all directories, dead ones included.
    pub(crate) fn directory_count(&self) -> usize {
        self.directories.len()
    }

    /// All directories by their numbers, dead ones included.
    pub(crate) fn directories(&self) -> impl Iterator<Item = (DirId, TreeDirectory)> + '_ {
        (0..).zip(self.directories.iter())
    }

    pub(crate) fn parent(&self, dir: DirId) -> DirId {
        let node = self.directory(dir).node;
        if node == NONE { ROOT } else { self.node(node).dir() }
    }

    pub(crate) fn find(&self, dir: DirId, name: &[u8]) -> Option<NodeId> {
        let hash = self.names.hash(dir, name);
        self.index.find(hash, |node| {
            let node = self.node(node);
            node.dir() == dir && *self.name(node) == *name
        })
    }

    /// Gives a name in a directory a meaning; the one that it has is lost. `link` is the text of a symbolic link.
    pub(crate) fn put(
        &mut self,
        dir: DirId,
        name: &[u8],
        kind: NodeKind,
        target: u32,
        link: &[u8],
    ) -> NodeId {
        let found = self.find(dir, name);
        let name_id = match found {
            Some(node) if kind != NodeKind::Symlink => self.node(node).name,
            _ if kind == NodeKind::Symlink => self.names.add_symlink(name, link),
            _ => self.names.add(name),
        };
        let new = TreeNode::new(dir, name_id, kind, target);
        if let Some(node) = found {
            *self.nodes.get_mut(node) = new;
            return node;
        }
        let node = u32::try_from(self.nodes.len()).unwrap_or(NONE);
        self.nodes.push(new);
        let (names, nodes) = (&self.names, &self.nodes);
        let hash_of = |node| {
            let node = nodes.get(node);
            names.hash(node.dir(), &names.name(node.name))
        };
        self.index.insert(names.hash(dir, name), node, hash_of);
        node
    }

    /// Notes that the node's inode has another name.
    pub(crate) fn mark_linked(&mut self, node: NodeId) {
        self.nodes.get_mut(node).packed |= 8;
    }

    /// Makes a directory that no entry describes yet.
    pub(crate) fn make_directory(
        &mut self,
        parent: DirId,
        name: &[u8],
        mtime: ErofsTime,
    ) -> Result<DirId, EntryProblem> {
        check_name(name)?;
        if self.path_len(parent) + name.len() + 1 > MAX_PATH || self.directories.len() >= MAX_DIRECTORIES {
            return Err(EntryProblem::PathTooLong);
        }
        let dir = u32::try_from(self.directories.len()).unwrap_or(NONE);
        let node = self.put(parent, name, NodeKind::Directory, dir, b"");
        self.directories.push(TreeDirectory::implicit(node, mtime));
        Ok(dir)
    }

    pub(crate) fn mark_opaque(&mut self, dir: DirId) {
        self.directories.get_mut(dir).mode_and_flags |= OPAQUE;
    }

    /// Notes what an entry says about its directory.
    pub(crate) fn describe_directory(
        &mut self,
        dir: DirId,
        mode: u16,
        owner: (u32, u32),
        mtime: ErofsTime,
        xattrs: Vec<u8>,
    ) {
        let xattrs = self.keep_xattrs(xattrs);
        let described = self.directories.get_mut(dir);
        described.mode_and_flags = described.mode_and_flags & OPAQUE | mode & 0o7777;
        (described.uid, described.gid) = owner;
        (described.mtime, described.nanos) = (mtime.seconds, mtime.nanos);
        described.xattrs = xattrs;
    }

    /// A directory's encoded attributes, without the mark of an opaque one.
    pub(crate) fn directory_xattrs(&self, dir: &TreeDirectory) -> Cow<'_, [u8]> {
        if dir.xattrs == NONE { Cow::Borrowed(b"") } else { self.names.text(dir.xattrs) }
    }

    /// The path from the root.
    pub(crate) fn path(&self, dir: DirId) -> Vec<u8> {
        let mut names = Vec::new();
        let mut at = dir;
        while at != ROOT {
            let node = self.node(self.directory(at).node);
            names.push(self.name(node));
            at = node.dir();
        }
        names.reverse();
        names.join(&b'/')
    }

    /// Whether a directory is still there.
    pub(crate) fn is_live(&self, dir: DirId) -> bool {
        let mut at = dir;
        while at != ROOT {
            let node = self.node(self.directory(at).node);
            if node.kind() != NodeKind::Directory || node.target != at {
                return false;
            }
            at = node.dir();
        }
        true
    }

    /// Of each directory, whether it is still there.
    pub(crate) fn live_directories(&self) -> Vec<bool> {
        let mut live: Vec<bool> = Vec::with_capacity(self.directories.len());
        for (dir, directory) in self.directories() {
            live.push(
                dir == ROOT || {
                    let node = self.node(directory.node);
                    node.kind() == NodeKind::Directory && node.target == dir && live[node.dir() as usize]
                },
            );
        }
        live
    }

    /// Frees what only changes need. Nothing is found by its name any more.
    pub(crate) fn seal(&mut self) {
        self.index = NodeIndex::new();
    }

    fn path_len(&self, dir: DirId) -> usize {
        let (mut at, mut length) = (dir, 0);
        while at != ROOT {
            let node = self.node(self.directory(at).node);
            length += self.name(node).len() + 1;
            at = node.dir();
        }
        length
    }

    /// Directories with attributes often have the same ones as the one before.
    fn keep_xattrs(&mut self, xattrs: Vec<u8>) -> u32 {
        if xattrs.is_empty() {
            return NONE;
        }
        if self.last_xattrs.0 != xattrs {
            let place = self.names.add_text(&xattrs);
            self.last_xattrs = (xattrs, place);
        }
        self.last_xattrs.1
    }
}
