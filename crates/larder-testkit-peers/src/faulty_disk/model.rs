//! A directory tree in memory, by inodes: what a disk would still have.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{File, FileTimes, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Open files by inode.
pub(super) type OpenFilesByInode = HashMap<u64, File>;

/// A tree.
#[derive(Debug, Clone)]
pub(super) struct DiskModel {
    root: u64,
    nodes: HashMap<u64, DiskNode>,
}

#[derive(Debug, Clone)]
struct DiskNode {
    attributes: FileAttributes,
    kind: DiskNodeKind,
}

#[derive(Debug, Clone)]
enum DiskNodeKind {
    Directory(BTreeMap<OsString, u64>),
    File(Arc<Vec<u8>>),
    Link(PathBuf),
}

/// Mode, owner and time of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileAttributes {
    mode: u32,
    uid: u32,
    gid: u32,
    modified: SystemTime,
}

impl FileAttributes {
    pub(super) fn of(metadata: &Metadata) -> FileAttributes {
        FileAttributes {
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            modified: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        }
    }
}

/// Something done to a file.
#[derive(Debug, Clone)]
pub(super) enum UnsyncedWrite {
    Write { offset: u64, bytes: Vec<u8> },
    SetLen(u64),
}

impl UnsyncedWrite {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            UnsyncedWrite::Write { offset, bytes } => {
                let start = usize::try_from(*offset).expect("a small file");
                let end = start + bytes.len();
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[start..end].copy_from_slice(bytes);
            }
            UnsyncedWrite::SetLen(len) => content.resize(usize::try_from(*len).expect("a small file"), 0),
        }
    }
}

/// Lists the blocks that differ between two contents, in their order.
pub(super) fn changes(before: &[u8], after: &[u8]) -> Vec<UnsyncedWrite> {
    const BLOCK: usize = 4096;
    let mut changes = Vec::new();
    if after.len() < before.len() {
        changes.push(UnsyncedWrite::SetLen(after.len() as u64));
    }
    for (number, block) in after.chunks(BLOCK).enumerate() {
        let offset = number * BLOCK;
        if before.get(offset..offset + block.len()) != Some(block) {
            changes.push(UnsyncedWrite::Write { offset: offset as u64, bytes: block.to_vec() });
        }
    }
    changes
}

/// Chooses, always in the same way for the same seed.
#[derive(Debug, Clone)]
pub(super) struct SeededChoice(u64);

impl SeededChoice {
    pub(super) fn new(seed: u64) -> SeededChoice {
        SeededChoice(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// Splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn coin(&mut self) -> bool {
        self.next() & 1 == 0
    }
}

impl DiskModel {
    /// The tree below a directory, as it is now. Everything in it is kept open in `pins`, so that its number stays its
    /// own.
    pub(super) fn of(root: &Path, pins: &mut OpenFilesByInode) -> io::Result<DiskModel> {
        let mut model = DiskModel { root: fs_err::metadata(root)?.ino(), nodes: HashMap::new() };
        let mut waiting = vec![root.to_owned()];
        while let Some(path) = waiting.pop() {
            let inode = fs_err::symlink_metadata(&path)?.ino();
            let Some(mut node) = node_of(&path, pins)? else { continue };
            if let DiskNodeKind::Directory(entries) = &mut node.kind {
                *entries = entries_of(&path)?;
                waiting.extend(entries.keys().map(|name| path.join(name)));
            }
            model.nodes.insert(inode, node);
        }
        Ok(model)
    }

    /// Records the entries of a directory. New entries are empty.
    pub(super) fn sync_dir(&mut self, path: &Path, pins: &mut OpenFilesByInode) -> io::Result<()> {
        let entries = entries_of(path)?;
        for (name, inode) in &entries {
            if !self.nodes.contains_key(inode)
                && let Some(mut node) = node_of(&path.join(name), pins)?
            {
                if let DiskNodeKind::File(content) = &mut node.kind {
                    *content = Arc::default();
                }
                self.nodes.insert(*inode, node);
            }
        }
        let metadata = fs_err::metadata(path)?;
        let node =
            DiskNode { attributes: FileAttributes::of(&metadata), kind: DiskNodeKind::Directory(entries) };
        self.nodes.insert(metadata.ino(), node);
        Ok(())
    }

    /// Whether a directory is known to have this file.
    pub(super) fn has_entry(&self, dir: &Path, inode: u64) -> io::Result<bool> {
        Ok(match self.nodes.get(&fs_err::metadata(dir)?.ino()) {
            Some(DiskNode { kind: DiskNodeKind::Directory(entries), .. }) => {
                entries.values().any(|entry| *entry == inode)
            }
            _ => false,
        })
    }

    /// Notes what was done to a file.
    pub(super) fn sync_file(&mut self, inode: u64, attributes: FileAttributes, changes: &[UnsyncedWrite]) {
        let node = self
            .nodes
            .entry(inode)
            .or_insert(DiskNode { attributes, kind: DiskNodeKind::File(Arc::default()) });
        node.attributes = attributes;
        if let DiskNodeKind::File(content) = &mut node.kind {
            let content = Arc::make_mut(content);
            for change in changes {
                change.apply(content);
            }
        }
    }

    /// This, with some of what was written since.
    pub(super) fn mixed(
        &self,
        written: &DiskModel,
        unsynced: &HashMap<u64, Vec<UnsyncedWrite>>,
        mut mix: SeededChoice,
    ) -> DiskModel {
        let mut mixed = self.clone();
        let mut inodes: Vec<u64> = written.nodes.keys().copied().collect();
        inodes.sort_unstable();
        for inode in inodes {
            let now = &written.nodes[&inode];
            let Some(before) = mixed.nodes.get_mut(&inode) else {
                // A new file has some of its writes, a new directory is as it is now.
                let mut node = now.clone();
                if let (DiskNodeKind::File(content), Some(changes)) = (&mut node.kind, unsynced.get(&inode)) {
                    *content = Arc::new(some_of(&[], changes, &mut mix));
                }
                mixed.nodes.insert(inode, node);
                continue;
            };
            match (&mut before.kind, &now.kind) {
                (DiskNodeKind::File(content), DiskNodeKind::File(_)) => {
                    if let Some(changes) = unsynced.get(&inode) {
                        *content = Arc::new(some_of(content, changes, &mut mix));
                    }
                }
                (before, now) => {
                    if mix.coin() {
                        *before = now.clone();
                    }
                }
            }
        }
        mixed
    }

    /// Writes the tree into an empty directory.
    pub(super) fn write_to(&self, dir: &Path) -> io::Result<()> {
        let mut written: HashMap<u64, PathBuf> = HashMap::new();
        self.write_node(self.root, dir, &mut written)
    }

    fn write_node(&self, inode: u64, path: &Path, written: &mut HashMap<u64, PathBuf>) -> io::Result<()> {
        let Some(node) = self.nodes.get(&inode) else { return Ok(()) };
        let first = written.insert(inode, path.to_owned());
        match &node.kind {
            DiskNodeKind::Directory(entries) => {
                if first.is_some() {
                    // A mix of a rename's old and new directory has it in both. A disk repairs that in some way.
                    return Ok(());
                }
                fs_err::create_dir_all(path)?;
                for (name, inode) in entries {
                    self.write_node(*inode, &path.join(name), written)?;
                }
            }
            DiskNodeKind::File(content) => match first {
                Some(other) => return fs_err::hard_link(other, path),
                None => fs_err::write(path, content.as_slice())?,
            },
            DiskNodeKind::Link(target) => return symlink(target, path),
        }
        let FileAttributes { mode, uid, gid, modified } = node.attributes;
        let metadata = fs_err::metadata(path)?;
        if (metadata.uid(), metadata.gid()) != (uid, gid) {
            chown(path, Some(uid), Some(gid))?;
        }
        fs_err::File::open(path)?.into_file().set_times(FileTimes::new().set_modified(modified))?;
        fs_err::set_permissions(path, Permissions::from_mode(mode))
    }
}

/// The file at a path with its content, or the directory without its entries; `None` for what is neither, nor a link.
fn node_of(path: &Path, pins: &mut OpenFilesByInode) -> io::Result<Option<DiskNode>> {
    let metadata = fs_err::symlink_metadata(path)?;
    let kind = if metadata.is_symlink() {
        DiskNodeKind::Link(fs_err::read_link(path)?)
    } else if metadata.is_dir() {
        pin(path, &metadata, pins)?;
        DiskNodeKind::Directory(BTreeMap::new())
    } else if metadata.is_file() {
        pin(path, &metadata, pins)?;
        DiskNodeKind::File(Arc::new(fs_err::read(path)?))
    } else {
        return Ok(None);
    };
    Ok(Some(DiskNode { attributes: FileAttributes::of(&metadata), kind }))
}

fn pin(path: &Path, metadata: &Metadata, pins: &mut OpenFilesByInode) -> io::Result<()> {
    if let Entry::Vacant(free) = pins.entry(metadata.ino()) {
        free.insert(fs_err::File::open(path)?.into_file());
    }
    Ok(())
}

fn entries_of(path: &Path) -> io::Result<BTreeMap<OsString, u64>> {
    let mut entries = BTreeMap::new();
    for entry in fs_err::read_dir(path)? {
        let entry = entry?;
        entries.insert(entry.file_name(), fs_err::symlink_metadata(entry.path())?.ino());
    }
    Ok(entries)
}

/// Some of the changes, in their order; a write may be cut short.
fn some_of(before: &[u8], changes: &[UnsyncedWrite], mix: &mut SeededChoice) -> Vec<u8> {
    let mut content = before.to_vec();
    for change in changes {
        match (mix.next() % 4, change) {
            (0, _) => {}
            (1, UnsyncedWrite::Write { offset, bytes }) => {
                let torn = bytes[..bytes.len() / 2].to_vec();
                UnsyncedWrite::Write { offset: *offset, bytes: torn }.apply(&mut content);
            }
            _ => change.apply(&mut content),
        }
    }
    content
}
