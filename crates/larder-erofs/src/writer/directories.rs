//! The content of directories: which names they have in which order, and how these are encoded.
//!
//! A directory's data is blocks; each begins with entries of 12 bytes, and their names follow. Names are in order, `.`
//! and `..` among them, inside of a block and from block to block.

use std::borrow::Cow;

use crate::error::ErofsError;
use crate::format::{BLOCK, DIRENT, DataLayout, INODE, Inode, dirent_type, file_type};
use crate::tree::{DirId, NameTree, NodeId, NodeKind, TreeDirectory};
use crate::xattr::{mark_opaque, mark_whiteouts};

use super::name_sorter::NameSorter;
use super::type_of;

/// In the place of a node: the directory itself, and its parent.
const DOT: NodeId = NodeId::MAX;
const DOT_DOT: NodeId = NodeId::MAX - 1;

/// The live names of all directories, sorted.
pub(super) struct DirectoryListing<'a> {
    pub(super) tree: &'a NameTree,
    pub(super) live: Vec<bool>,
    /// Nodes by directory, then by name.
    order: Vec<NodeId>,
    /// Of each directory, where its nodes end in `order`; they begin where those of the one before end.
    ends: Vec<u32>,
    /// Of each directory, the number of its directories.
    subdirectories: Vec<u32>,
}

/// How a directory is stored.
pub(super) struct DirectoryLayout {
    pub(super) inode: Inode,
    pub(super) xattrs: Vec<u8>,
    /// Blocks of data that do not follow the inode, the last one possibly not full.
    pub(super) blocks: u32,
    /// Bytes of data that follow the inode.
    pub(super) tail: usize,
}

/// Numbers of the inodes of a layer.
pub(super) struct InodeNumbers {
    /// Of each directory.
    pub(super) directories: Vec<u32>,
    /// Of the first slot behind all directories: slots of other inodes count from there.
    pub(super) first_slot: u64,
}

impl InodeNumbers {
    pub(super) fn of_directory(&self, dir: DirId) -> u64 {
        self.directories[dir as usize].into()
    }
}

impl<'a> DirectoryListing<'a> {
    pub(super) fn new(tree: &'a NameTree) -> DirectoryListing<'a> {
        let live = tree.live_directories();
        let is_listed = |dir: DirId, kind| live[dir as usize] && kind != NodeKind::PendingLink;
        let mut ends = vec![0u32; live.len()];
        let mut subdirectories = vec![0u32; live.len()];
        for (_, node) in tree.nodes().filter(|(_, node)| is_listed(node.dir(), node.kind())) {
            ends[node.dir() as usize] += 1;
            subdirectories[node.dir() as usize] += u32::from(node.kind() == NodeKind::Directory);
        }
        let mut total = 0;
        for end in &mut ends {
            // First the begin; each node moves it on.
            (total, *end) = (total + *end, total);
        }
        let mut order = vec![0; total as usize];
        for (id, node) in tree.nodes().filter(|(_, node)| is_listed(node.dir(), node.kind())) {
            let end = &mut ends[node.dir() as usize];
            order[*end as usize] = id;
            *end += 1;
        }
        let mut listing = DirectoryListing { tree, live, order, ends, subdirectories };
        let mut sorter = NameSorter::new(tree);
        for dir in 0..listing.ends.len() {
            let range = listing.range(dir);
            sorter.sort(&mut listing.order[range]);
        }
        listing
    }

    /// All directories that are there, the root first.
    pub(super) fn directories(&self) -> impl Iterator<Item = (DirId, TreeDirectory)> + '_ {
        self.tree.directories().filter(|(dir, _)| self.live[*dir as usize])
    }

    /// All nodes with an inode of their own or a share in one, by number.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.order.iter().copied()
    }

    /// How a directory is stored.
    pub(super) fn layout(
        &self,
        dir: DirId,
        directory: &TreeDirectory,
    ) -> Result<DirectoryLayout, ErofsError> {
        let mut xattrs = self.tree.directory_xattrs(directory).into_owned();
        if directory.is_opaque() {
            mark_opaque(&mut xattrs);
        }
        if self.has_whiteouts(dir) {
            mark_whiteouts(&mut xattrs);
        }
        let (full, rest) = self
            .blocks(dir)
            .fold((0u64, 0), |(full, last), block| (full + u64::from(last > 0), self.block_size(&block)));
        // The last block counts only up to its last name, and the others as a whole.
        let (blocks, rest) = if rest == BLOCK { (full + 1, 0) } else { (full, rest) };
        let size = blocks * BLOCK as u64 + rest as u64;
        let inline = rest > 0 && INODE + xattrs.len() + rest <= BLOCK;
        let blocks = blocks + u64::from(rest > 0 && !inline);
        let mtime = directory.mtime();
        let inode = Inode {
            layout: if inline { DataLayout::Inline } else { DataLayout::Plain },
            mode: file_type::DIRECTORY | directory.mode(),
            size,
            place: 0,
            uid: directory.uid,
            gid: directory.gid,
            seconds: mtime.seconds,
            nanos: mtime.nanos,
            links: 2 + self.subdirectories[dir as usize],
        };
        let blocks = u32::try_from(blocks).map_err(|_| ErofsError::LayerTooLarge)?;
        Ok(DirectoryLayout { inode, xattrs, blocks, tail: if inline { rest } else { 0 } })
    }

    /// The encoded blocks of a directory, none padded.
    pub(super) fn encode<'b>(
        &'b self,
        dir: DirId,
        numbers: &'b InodeNumbers,
    ) -> impl Iterator<Item = Vec<u8>> + 'b {
        self.blocks(dir).map(move |nodes| {
            let (mut entries, mut names) = (Vec::with_capacity(BLOCK), Vec::new());
            let mut name_offset = nodes.len() * DIRENT;
            for node in &nodes {
                let name = self.name(*node);
                let (number, kind) = self.inode(dir, *node, numbers);
                entries.extend(number.to_le_bytes());
                entries.extend(u16::try_from(name_offset).unwrap_or(0).to_le_bytes());
                entries.extend([dirent_type(type_of(kind)), 0]);
                names.extend_from_slice(&name);
                name_offset += name.len();
            }
            entries.extend(names);
            entries
        })
    }

    fn has_whiteouts(&self, dir: DirId) -> bool {
        let names = &self.order[self.range(dir as usize)];
        names.iter().any(|node| self.tree.node(*node).kind() == NodeKind::Whiteout)
    }

    fn range(&self, dir: usize) -> std::ops::Range<usize> {
        let begin = dir.checked_sub(1).map_or(0, |before| self.ends[before]);
        begin as usize..self.ends[dir] as usize
    }

    /// Names of a directory, as many together as a block holds.
    fn blocks(&self, dir: DirId) -> impl Iterator<Item = Vec<NodeId>> + '_ {
        let nodes = &self.order[self.range(dir as usize)];
        let [dot, dot_dot] =
            [&b"."[..], b".."].map(|name| nodes.partition_point(|node| *self.name(*node) < *name));
        let all = [&nodes[..dot], &[DOT], &nodes[dot..dot_dot], &[DOT_DOT], &nodes[dot_dot..]];
        let mut nodes = all.into_iter().flatten().copied().peekable();
        std::iter::from_fn(move || {
            let mut block = Vec::new();
            let mut size = 0;
            while let Some(node) = nodes.next_if(|node| size + DIRENT + self.name(*node).len() <= BLOCK) {
                size += DIRENT + self.name(node).len();
                block.push(node);
            }
            (!block.is_empty()).then_some(block)
        })
    }

    fn block_size(&self, block: &[NodeId]) -> usize {
        block.iter().map(|node| DIRENT + self.name(*node).len()).sum()
    }

    fn name(&self, node: NodeId) -> Cow<'_, [u8]> {
        match node {
            DOT => Cow::Borrowed(b"."),
            DOT_DOT => Cow::Borrowed(b".."),
            node => self.tree.name(self.tree.node(node)),
        }
    }

    fn inode(&self, dir: DirId, node: NodeId, numbers: &InodeNumbers) -> (u64, NodeKind) {
        match node {
            DOT => (numbers.of_directory(dir), NodeKind::Directory),
            DOT_DOT => (numbers.of_directory(self.tree.parent(dir)), NodeKind::Directory),
            node => {
                let node = self.tree.node(node);
                let number = match node.kind() {
                    NodeKind::Directory => numbers.of_directory(node.target),
                    _ => numbers.first_slot + u64::from(node.target),
                };
                (number, node.kind())
            }
        }
    }
}
