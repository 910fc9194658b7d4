//! Applies entries in the order in which they come.
//!
//! An entry keeps hiding the name that it replaces from lower layers: a directory in the place of a file, a link or a
//! whiteout is opaque. A whiteout hides what lower layers have under a name; what this layer itself has there stays.

mod data;
mod directories;
mod finish;
mod links;
mod lower_files;
mod name_sorter;
mod walk;

use crate::chunked::ChunkedVec;
use crate::entry::{ErofsEntry, ErofsEntryKind, ErofsTime};
use crate::entry_rules::{check_entry, check_name};
use crate::error::{EntryProblem, ErofsError};
use crate::format::{BLOCK, DataLayout, INODE, Inode, device_number, file_type};
use crate::metadata_blocks::MetadataBlocks;
use crate::output::{Appender, ErofsOutput};
use crate::paths::{clean, parts, split};
use crate::tree::{DirId, NameTree, NodeKind, ROOT};
use crate::xattr::encode_xattrs;

use data::OpenFile;
pub use links::LowerLink;
use links::PendingLink;
pub use lower_files::OverlayView;

/// How a layer is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErofsOptions {
    /// Bytes of memory for names and links, at most; more are moved to a temporary file. All else takes 18 bytes for an
    /// entry and 32 more for a directory, unless the layer is [parked](ErofsWriter::park); [`ErofsWriter::finish`]
    /// needs no more than what is freed before. Default 32 MiB, enough for a million names of 32 bytes.
    pub max_name_bytes: usize,
    /// The UUID of the filesystem. Overlay mounts log a warning when two of their layers have the same one. Default
    /// zero.
    pub uuid: [u8; 16],
    /// Names with the prefix `.wh.` and devices 0:0 hide names of lower layers. False for a filesystem that stands
    /// alone, in which they are files like others. Default true.
    pub whiteouts: bool,
    /// Longest tail of a file, in bytes, that is stored with its inode. Longer ones take a block of data: metadata must
    /// be on a node before a layer can be mounted, data may come later. Default 1024; decision 18 has the measurement.
    pub max_inline_tail: u64,
}

impl Default for ErofsOptions {
    fn default() -> Self {
        ErofsOptions { max_name_bytes: 32 << 20, uuid: [0; 16], whiteouts: true, max_inline_tail: 1024 }
    }
}

/// Result of writing a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErofsSummary {
    /// Bytes of the layer: full blocks.
    pub size: u64,
    /// Where metadata begins, in bytes: all from there on is metadata, and so is the first block.
    pub metadata_start: u64,
    /// Inodes that have a name.
    pub inodes: u64,
    /// True if the layer hides names of lower layers: it has a whiteout, or an opaque directory.
    pub hides_lowers: bool,
    /// Extended attributes that were left out.
    pub skipped_xattrs: u64,
    /// Hard links to files that the layer does not have; they are not in it.
    pub lower_links: u64,
}

/// Writes one layer.
pub struct ErofsWriter<O: ErofsOutput> {
    to: Appender<O>,
    options: ErofsOptions,
    tree: NameTree,
    blocks: MetadataBlocks,
    /// The file that expects data.
    file: Option<OpenFile>,
    /// Hard links to files that have not come, in the order in which they came.
    links: ChunkedVec<PendingLink>,
    /// Slot of the inode of all whiteouts.
    whiteout: Option<u32>,
    has_chunks: bool,
    hides_lowers: bool,
    skipped_xattrs: u64,
    /// The parent of the last entry, as written: most entries have the same as the one before.
    last_parent: (Vec<u8>, DirId),
}

/// A name in a directory, and the entry that takes it.
#[derive(Clone, Copy)]
struct EntryPlace<'a> {
    dir: DirId,
    name: &'a [u8],
    /// For errors.
    path: &'a [u8],
}

impl<O: ErofsOutput> ErofsWriter<O> {
    /// A layer of nothing but an empty root directory. Appends one block.
    pub fn new(output: O, options: ErofsOptions) -> Result<ErofsWriter<O>, ErofsError> {
        let mut to = Appender::new(output);
        to.append_zeros(BLOCK as u64)?;
        let (inodes, names, parking) = (to.output.scratch()?, to.output.scratch()?, to.output.scratch()?);
        Ok(ErofsWriter {
            to,
            options,
            tree: NameTree::new(names, parking),
            blocks: MetadataBlocks::new(inodes),
            file: None,
            links: ChunkedVec::new(),
            whiteout: None,
            has_chunks: false,
            hides_lowers: false,
            skipped_xattrs: 0,
            last_parent: (Vec::new(), ROOT),
        })
    }

    /// Returns true if the layer hides names of lower layers so far; [`ErofsSummary::hides_lowers`] has the final
    /// answer.
    pub fn hides_lowers(&self) -> bool {
        self.hides_lowers
    }

    /// Longest tail of a file that is stored with its inode.
    pub fn max_inline_tail(&self) -> u64 {
        self.options.max_inline_tail
    }

    /// Extended attributes that were left out so far.
    pub fn skipped_xattrs(&self) -> u64 {
        self.skipped_xattrs
    }

    /// Directories that were added or implied so far, replaced ones included.
    pub fn directory_count(&self) -> usize {
        self.tree.directory_count()
    }

    /// Bytes of memory, but for some kilobytes.
    pub fn memory(&self) -> usize {
        self.tree.memory() + self.links.memory() + self.blocks.memory()
    }

    /// Moves names to a temporary file, to free their memory.
    pub fn spill_names(&mut self) -> Result<(), ErofsError> {
        Ok(self.tree.spill_names()?)
    }

    /// Moves all but some kilobytes to temporary files while the layer waits. Until [`unpark`](ErofsWriter::unpark),
    /// nothing else may be called.
    pub fn park(&mut self) -> Result<(), ErofsError> {
        self.tree.park(&mut self.links)?;
        self.blocks.park()
    }

    /// Reads back what was parked. The layer becomes what it would have become without.
    pub fn unpark(&mut self) -> Result<(), ErofsError> {
        self.tree.unpark(&mut self.links)?;
        self.blocks.unpark()
    }

    /// Where the layer is written.
    pub fn output_mut(&mut self) -> &mut O {
        &mut self.to.output
    }

    /// Closes temporary files until they are needed again.
    pub fn close_scratch(&mut self) {
        self.blocks.close();
        self.tree.close();
    }

    /// Applies one entry. If it is a file with data, [`write_data`](ErofsWriter::write_data) comes next.
    pub fn add(&mut self, entry: &ErofsEntry<'_>) -> Result<(), ErofsError> {
        if let Some(file) = &self.file {
            return Err(file.incomplete());
        }
        check_entry(entry).map_err(|problem| ErofsError::rejected(entry.path, problem))?;
        if self.tree.is_full() {
            return Err(ErofsError::TooManyNames { path: crate::error::path_of(entry.path) });
        }
        if self.tree.name_memory() > self.options.max_name_bytes {
            self.tree.spill_names()?;
        }
        // Before any other error: what a file of names cannot return looks as if it were not there.
        let added = self.apply(entry);
        self.tree.check()?;
        added
    }

    fn apply(&mut self, entry: &ErofsEntry<'_>) -> Result<(), ErofsError> {
        let rejected = |problem| ErofsError::rejected(entry.path, problem);
        let path = clean(entry.path);
        if path.is_empty() {
            if !matches!(entry.kind, ErofsEntryKind::Directory) {
                return Err(rejected(EntryProblem::RootNotDirectory));
            }
            self.describe_directory(ROOT, entry);
            return Ok(());
        }
        // What an old union filesystem kept for itself.
        if self.options.whiteouts
            && parts(&path).any(|part| part.starts_with(b".wh..wh.") && part != b".wh..wh..opq")
        {
            self.file = OpenFile::ignored(entry);
            return Ok(());
        }
        let (parent, name) = split(&path);
        let dir = self.parent(parent, entry.mtime).map_err(rejected)?;
        let place = EntryPlace { dir, name, path: entry.path };
        match name.strip_prefix(b".wh.").filter(|_| self.options.whiteouts) {
            Some(b".wh..opq") => self.mark_opaque(dir),
            Some(b"" | b"." | b"..") => return Err(rejected(EntryProblem::Whiteout)),
            Some(hidden) => self.whiteout(EntryPlace { name: hidden, ..place })?,
            None => return self.make(place, entry),
        }
        self.file = OpenFile::ignored(entry);
        Ok(())
    }

    fn make(&mut self, place: EntryPlace<'_>, entry: &ErofsEntry<'_>) -> Result<(), ErofsError> {
        check_name(place.name).map_err(|problem| ErofsError::rejected(place.path, problem))?;
        match entry.kind {
            ErofsEntryKind::File { size } => self.start_file(place, entry, size, None),
            ErofsEntryKind::Sparse { size, extents } => self.start_file(place, entry, size, Some(extents)),
            ErofsEntryKind::Directory => {
                let dir = self.directory(place, entry.mtime)?;
                self.describe_directory(dir, entry);
                Ok(())
            }
            ErofsEntryKind::Symlink { target } => self.symlink(place, entry, target),
            ErofsEntryKind::HardLink { target } => self.hard_link(place, target),
            ErofsEntryKind::Fifo => self.special(place, entry, NodeKind::Fifo, (0, 0)),
            ErofsEntryKind::CharDevice { major: 0, minor: 0 } if self.options.whiteouts => {
                self.whiteout(place)
            }
            ErofsEntryKind::CharDevice { major, minor } => {
                self.special(place, entry, NodeKind::CharDevice, (major, minor))
            }
            ErofsEntryKind::BlockDevice { major, minor } => {
                self.special(place, entry, NodeKind::BlockDevice, (major, minor))
            }
        }
    }

    /// Gives a place to something that is not a directory.
    fn put(&mut self, place: EntryPlace<'_>, kind: NodeKind, target: u32, link: &[u8]) -> u32 {
        let replaced = self.tree.find(place.dir, place.name);
        if replaced.is_some_and(|node| self.tree.node(node).kind() == NodeKind::Directory) {
            self.forget_last_parent();
        }
        self.tree.put(place.dir, place.name, kind, target, link)
    }

    fn forget_last_parent(&mut self) {
        self.last_parent = (Vec::new(), ROOT);
    }

    /// The directory at a place: the one that is there, or a new one. What was there instead hid what lower layers have
    /// at this path, and so does the directory.
    fn directory(&mut self, place: EntryPlace<'_>, mtime: ErofsTime) -> Result<DirId, ErofsError> {
        let found = self.tree.find(place.dir, place.name).map(|node| self.tree.node(node));
        if let Some(node) = found.filter(|node| node.kind() == NodeKind::Directory) {
            return Ok(node.target);
        }
        let made = self.tree.make_directory(place.dir, place.name, mtime);
        let dir = made.map_err(|problem| ErofsError::rejected(place.path, problem))?;
        if found.is_some_and(|node| node.kind() != NodeKind::PendingLink) {
            self.mark_opaque(dir);
        }
        Ok(dir)
    }

    fn mark_opaque(&mut self, dir: DirId) {
        self.hides_lowers = true;
        self.tree.mark_opaque(dir);
    }

    fn describe_directory(&mut self, dir: DirId, entry: &ErofsEntry<'_>) {
        let xattrs = self.xattrs(entry, file_type::DIRECTORY);
        let owner = (entry.uid, entry.gid);
        self.tree.describe_directory(dir, mode_bits(entry.mode), owner, entry.mtime, xattrs);
    }

    /// Hides a name of the lower layers.
    fn whiteout(&mut self, place: EntryPlace<'_>) -> Result<(), ErofsError> {
        check_name(place.name).map_err(|problem| ErofsError::rejected(place.path, problem))?;
        self.hides_lowers = true;
        if let Some(node) = self.tree.find(place.dir, place.name) {
            let node = self.tree.node(node);
            if node.kind() == NodeKind::Directory {
                self.tree.mark_opaque(node.target);
            }
            return Ok(());
        }
        let slot = match self.whiteout {
            Some(slot) => slot,
            None => self.place_inode(&inode_of_whiteout(), &[], &[])?,
        };
        self.whiteout = Some(slot);
        let node = self.tree.put(place.dir, place.name, NodeKind::Whiteout, slot, b"");
        self.tree.mark_linked(node);
        Ok(())
    }

    fn symlink(
        &mut self,
        place: EntryPlace<'_>,
        entry: &ErofsEntry<'_>,
        target: &[u8],
    ) -> Result<(), ErofsError> {
        let xattrs = self.xattrs(entry, file_type::SYMLINK);
        let mut inode = inode_of(entry, file_type::SYMLINK | 0o777);
        inode.size = target.len() as u64;
        // Kernels before 6.12 want the text in the block where the inode ends.
        let slot = if INODE + xattrs.len() + target.len() <= BLOCK {
            inode.layout = DataLayout::Inline;
            self.place_inode(&inode, &xattrs, target)?
        } else {
            inode.place = self.to.block()?;
            self.to.append(target)?;
            self.to.pad()?;
            self.place_inode(&inode, &xattrs, &[])?
        };
        self.put(place, NodeKind::Symlink, slot, target);
        Ok(())
    }

    fn special(
        &mut self,
        place: EntryPlace<'_>,
        entry: &ErofsEntry<'_>,
        kind: NodeKind,
        (major, minor): (u32, u32),
    ) -> Result<(), ErofsError> {
        let file_type = type_of(kind);
        let xattrs = self.xattrs(entry, file_type);
        let mut inode = inode_of(entry, file_type | mode_bits(entry.mode));
        inode.place = device_number(major, minor)
            .ok_or_else(|| ErofsError::rejected(entry.path, EntryProblem::Device))?;
        let slot = self.place_inode(&inode, &xattrs, &[])?;
        self.put(place, kind, slot, b"");
        Ok(())
    }

    fn xattrs(&mut self, entry: &ErofsEntry<'_>, file_type: u16) -> Vec<u8> {
        if entry.xattrs.is_empty() {
            return Vec::new();
        }
        let (encoded, skipped) = encode_xattrs(entry.xattrs, file_type);
        self.skipped_xattrs += skipped;
        encoded
    }

    /// Stores an inode with its attributes and the tail of its data.
    fn place_inode(&mut self, inode: &Inode, xattrs: &[u8], tail: &[u8]) -> Result<u32, ErofsError> {
        let mut record = inode.encode(xattrs);
        record.extend_from_slice(tail);
        if record.len() <= BLOCK {
            return self.blocks.place(&record);
        }
        let mut long = self.blocks.start_long(record.len() as u64)?;
        self.blocks.write(&mut long, &record)?;
        Ok(long.slot)
    }
}

fn mode_bits(mode: u32) -> u16 {
    u16::try_from(mode & 0o7777).unwrap_or(0)
}

/// The type bits of a node.
fn type_of(kind: NodeKind) -> u16 {
    match kind {
        NodeKind::File | NodeKind::PendingLink => file_type::FILE,
        NodeKind::Directory => file_type::DIRECTORY,
        NodeKind::Symlink => file_type::SYMLINK,
        NodeKind::CharDevice | NodeKind::Whiteout => file_type::CHAR_DEVICE,
        NodeKind::BlockDevice => file_type::BLOCK_DEVICE,
        NodeKind::Fifo => file_type::FIFO,
    }
}

/// An empty inode with one name.
fn inode_of(entry: &ErofsEntry<'_>, mode: u16) -> Inode {
    Inode {
        layout: DataLayout::Plain,
        mode,
        size: 0,
        place: 0,
        uid: entry.uid,
        gid: entry.gid,
        seconds: entry.mtime.seconds,
        nanos: entry.mtime.nanos,
        links: 1,
    }
}

fn inode_of_whiteout() -> Inode {
    Inode {
        layout: DataLayout::Plain,
        mode: file_type::CHAR_DEVICE,
        size: 0,
        place: 0,
        uid: 0,
        gid: 0,
        seconds: 0,
        nanos: 0,
        links: 1,
    }
}
