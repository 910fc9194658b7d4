//! Names in directories.

use std::cmp::Ordering;

use crate::error::{ErofsReadError, LayerDamage};
use crate::format::{BLOCK, DIRENT};
use crate::input::ErofsInput;

use super::{ErofsInode, ErofsReader, InodeKind};

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErofsDirectoryEntry {
    /// Without `/` and zero bytes, not empty, at most 255 bytes.
    pub name: Vec<u8>,
    /// Number of its inode.
    pub nid: u64,
    /// Kind of the inode; [`ErofsReader::inode`] does not check it.
    pub kind: InodeKind,
}

impl<I: ErofsInput> ErofsReader<I> {
    /// Names in a directory in bytewise order, without `.` and `..`.
    pub fn entries(&self, dir: &ErofsInode) -> Result<ErofsDirectory<'_, I>, ErofsReadError> {
        require_directory(dir)?;
        Ok(ErofsDirectory {
            layer: self,
            dir: *dir,
            block: 0,
            entries: Vec::new().into_iter(),
            last: Vec::new(),
        })
    }

    /// Finds a name in a directory. `None` also for `.` and `..`.
    pub fn lookup(
        &self,
        dir: &ErofsInode,
        name: &[u8],
    ) -> Result<Option<ErofsDirectoryEntry>, ErofsReadError> {
        require_directory(dir)?;
        if matches!(name, b"." | b"..") {
            return Ok(None);
        }
        let (mut low, mut high) = (0, dir.size.div_ceil(BLOCK as u64));
        while low < high {
            let middle = low + (high - low) / 2;
            let entries = self.directory_block(dir, middle)?;
            let [Some(first), Some(last)] = [entries.first(), entries.last()] else { return Ok(None) };
            match (name.cmp(&first.name), name.cmp(&last.name)) {
                (Ordering::Less, _) => high = middle,
                (_, Ordering::Greater) => low = middle + 1,
                _ => return Ok(entries.into_iter().find(|entry| entry.name == name)),
            }
        }
        Ok(None)
    }

    /// Finds the inode at a path, whose components are names: links in it are not followed, and `.` and `..` not found.
    pub fn find(&self, path: &[u8]) -> Result<Option<ErofsInode>, ErofsReadError> {
        let mut at = self.root()?;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            if !at.is_directory() {
                return Ok(None);
            }
            let Some(entry) = self.lookup(&at, name)? else { return Ok(None) };
            at = self.inode_of(&entry)?;
        }
        Ok(Some(at))
    }

    /// The inode of a directory entry, which must be of the entry's kind.
    pub fn inode_of(&self, entry: &ErofsDirectoryEntry) -> Result<ErofsInode, ErofsReadError> {
        let inode = self.inode(entry.nid)?;
        if inode.kind == entry.kind { Ok(inode) } else { Err(inode.damaged(LayerDamage::Kind)) }
    }

    /// All names of one block, `.` and `..` among them.
    fn directory_block(
        &self,
        dir: &ErofsInode,
        number: u64,
    ) -> Result<Vec<ErofsDirectoryEntry>, ErofsReadError> {
        let mut block = [0; BLOCK];
        let length = self.read_at(dir, &mut block, number * BLOCK as u64)?;
        parse_block(&block[..length]).ok_or_else(|| dir.damaged(LayerDamage::Directory))
    }
}

fn require_directory(dir: &ErofsInode) -> Result<(), ErofsReadError> {
    if dir.is_directory() { Ok(()) } else { Err(dir.damaged(LayerDamage::Kind)) }
}

/// `None` if the block is damaged: an offset is wrong, or a name is invalid or out of order.
fn parse_block(block: &[u8]) -> Option<Vec<ErofsDirectoryEntry>> {
    let name_offset = |at: usize| {
        let bytes = block.get(at * DIRENT + 8..at * DIRENT + 10)?;
        Some(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))
    };
    let first = name_offset(0)?;
    if first == 0 || first % DIRENT != 0 {
        return None;
    }
    let count = first / DIRENT;
    let mut entries: Vec<ErofsDirectoryEntry> = Vec::with_capacity(count.min(BLOCK / DIRENT));
    for at in 0..count {
        let begin = name_offset(at)?;
        let name = if at + 1 < count {
            block.get(begin..name_offset(at + 1)?)?
        } else {
            // The last name ends with the block, or with the zeros that fill it.
            block.get(begin..)?.split(|byte| *byte == 0).next()?
        };
        let is_valid =
            begin >= first && (1..=255).contains(&name.len()) && !name.contains(&0) && !name.contains(&b'/');
        if !is_valid || entries.last().is_some_and(|last| last.name.as_slice() >= name) {
            return None;
        }
        let entry = block.get(at * DIRENT..(at + 1) * DIRENT)?;
        let nid = u64::from_le_bytes(entry.first_chunk().copied()?);
        entries.push(ErofsDirectoryEntry { name: name.to_vec(), nid, kind: kind_of(entry[10])? });
    }
    Some(entries)
}

fn kind_of(dirent_type: u8) -> Option<InodeKind> {
    Some(match dirent_type {
        1 => InodeKind::File,
        2 => InodeKind::Directory,
        3 => InodeKind::CharDevice,
        4 => InodeKind::BlockDevice,
        5 => InodeKind::Fifo,
        7 => InodeKind::Symlink,
        _ => return None,
    })
}

/// Names of a directory, a block at a time. It ends after an error.
#[derive(Debug)]
pub struct ErofsDirectory<'a, I> {
    layer: &'a ErofsReader<I>,
    dir: ErofsInode,
    /// The block to read next.
    block: u64,
    entries: std::vec::IntoIter<ErofsDirectoryEntry>,
    /// The last name of the blocks before.
    last: Vec<u8>,
}

impl<I: ErofsInput> ErofsDirectory<'_, I> {
    fn read_block(&mut self) -> Result<bool, ErofsReadError> {
        if self.block >= self.dir.size.div_ceil(BLOCK as u64) {
            return Ok(false);
        }
        let entries = self.layer.directory_block(&self.dir, self.block)?;
        if entries.first().is_some_and(|first| first.name <= self.last) {
            return Err(self.dir.damaged(LayerDamage::Directory));
        }
        self.last = entries.last().map(|last| last.name.clone()).unwrap_or_default();
        self.block += 1;
        self.entries = entries.into_iter();
        Ok(true)
    }
}

impl<I: ErofsInput> Iterator for ErofsDirectory<'_, I> {
    type Item = Result<ErofsDirectoryEntry, ErofsReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.entries.find(|entry| !matches!(entry.name.as_slice(), b"." | b"..")) {
                return Some(Ok(entry));
            }
            match self.read_block() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.block = u64::MAX;
                    return Some(Err(error));
                }
            }
        }
    }
}
