//! Finds the files of a layer that the entries of its archive became.
//!
//! An archive has the names of a directory next to each other, and a directory must be read from its beginning. So the
//! last ones are kept.

use std::io;

use larder_erofs::{ErofsInode, InodeKind};

use super::beneath::{clean, split};
use super::merged_layers::MergedLayers;

/// Directories that are kept.
const KEPT: usize = 16;
/// Names in kept directories, at most, unless one has more.
const MAX_NAMES: usize = 200_000;

/// Finds files of the first of some layers.
pub(super) struct FileFinder<'a> {
    layers: &'a MergedLayers,
    /// The last one first.
    directories: Vec<KeptDirectory>,
}

struct KeptDirectory {
    path: Vec<u8>,
    /// Name and inode, in bytewise order of names.
    entries: Vec<(Vec<u8>, u64)>,
}

impl<'a> FileFinder<'a> {
    pub(super) fn new(layers: &'a MergedLayers) -> FileFinder<'a> {
        FileFinder { layers, directories: Vec::new() }
    }

    /// The file that an entry became: links in its path lead to where it is.
    pub(super) fn find(&mut self, path: &[u8]) -> io::Result<ErofsInode> {
        let is_file = |inode: &ErofsInode| inode.kind == InodeKind::File;
        if let Some(file) = self.inode(&clean(path))?.filter(is_file) {
            return Ok(file);
        }
        let found = self.layers.find(path, false)?.map(|found| found.inode);
        found.filter(is_file).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The inode at a path without links.
    fn inode(&mut self, path: &[u8]) -> io::Result<Option<ErofsInode>> {
        let layer = self.layers.layer(0);
        if path.is_empty() {
            return Ok(Some(layer.root()?));
        }
        let (parent, name) = split(path);
        if !self.open(parent)? {
            return Ok(None);
        }
        let entries = &self.directories[0].entries;
        let Ok(at) = entries.binary_search_by(|(found, _)| found.as_slice().cmp(name)) else {
            return Ok(None);
        };
        Ok(Some(layer.inode(entries[at].1)?))
    }

    /// Makes a directory the first of those that are kept. False if it is none.
    fn open(&mut self, path: &[u8]) -> io::Result<bool> {
        if let Some(at) = self.directories.iter().position(|kept| kept.path == path) {
            self.directories[..=at].rotate_right(1);
            return Ok(true);
        }
        let Some(directory) = self.inode(path)?.filter(ErofsInode::is_directory) else { return Ok(false) };
        let entries = self.layers.layer(0).entries(&directory)?;
        let entries = entries.map(|entry| entry.map(|entry| (entry.name, entry.nid)));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        self.directories.insert(0, KeptDirectory { path: path.to_owned(), entries });
        let mut names = 0;
        self.directories.truncate(KEPT);
        self.directories.retain(|kept| {
            let is_first = names == 0;
            names += kept.entries.len().max(1);
            is_first || names <= MAX_NAMES
        });
        Ok(true)
    }
}
