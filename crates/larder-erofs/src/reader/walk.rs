//! All paths of a layer.

use std::collections::BTreeSet;

use crate::error::{ErofsReadError, LayerDamage};
use crate::input::ErofsInput;

use super::{ErofsDirectory, ErofsInode, ErofsReader};

/// Bytes of a path, at most: the writer accepts no longer ones.
const MAX_PATH: usize = 4096 + 256;

/// A path and its inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErofsWalkEntry {
    /// Relative to the root, which is the empty path.
    pub path: Vec<u8>,
    /// The inode.
    pub inode: ErofsInode,
}

impl<I: ErofsInput> ErofsReader<I> {
    /// All paths: each directory before what is in it, names of a directory in bytewise order. Directories with several
    /// names, which only a damaged layer has, are an error. Takes 8 bytes of memory for a directory, and 8 KiB for each
    /// level.
    pub fn walk(&self) -> Result<ErofsWalk<'_, I>, ErofsReadError> {
        let root = self.root()?;
        Ok(ErofsWalk { layer: self, root: Some(root), levels: Vec::new(), entered: BTreeSet::new() })
    }
}

/// A walk of all paths. It ends after an error.
#[derive(Debug)]
pub struct ErofsWalk<'a, I> {
    layer: &'a ErofsReader<I>,
    root: Option<ErofsInode>,
    /// Directories that have been entered and not left, and the paths of them.
    levels: Vec<(Vec<u8>, ErofsDirectory<'a, I>)>,
    entered: BTreeSet<u64>,
}

impl<I: ErofsInput> ErofsWalk<'_, I> {
    fn step(&mut self) -> Result<Option<ErofsWalkEntry>, ErofsReadError> {
        if let Some(root) = self.root.take() {
            return self.visit(Vec::new(), root).map(Some);
        }
        while let Some((path, directory)) = self.levels.last_mut() {
            let Some(entry) = directory.next().transpose()? else {
                self.levels.pop();
                continue;
            };
            let mut path = path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&entry.name);
            let inode = self.layer.inode_of(&entry)?;
            return self.visit(path, inode).map(Some);
        }
        Ok(None)
    }

    fn visit(&mut self, path: Vec<u8>, inode: ErofsInode) -> Result<ErofsWalkEntry, ErofsReadError> {
        if inode.is_directory() {
            if !self.entered.insert(inode.nid) || path.len() > MAX_PATH {
                return Err(inode.damaged(LayerDamage::DirectoryLoop));
            }
            self.levels.push((path.clone(), self.layer.entries(&inode)?));
        }
        Ok(ErofsWalkEntry { path, inode })
    }
}

impl<I: ErofsInput> Iterator for ErofsWalk<'_, I> {
    type Item = Result<ErofsWalkEntry, ErofsReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.step();
        if entry.is_err() {
            self.levels.clear();
        }
        entry.transpose()
    }
}
