//! Finds the files of a layer that the entries of its archive became.
//!
//! An archive has the names of a directory next to each other. So a directory is read as a whole once as many of its
//! names in a row were looked up as it has blocks, and the last directories are kept.

use std::io;

use larder_erofs::{ErofsInode, InodeKind};

use super::beneath::{clean, parts, split};
use super::merged_layers::MergedLayers;

/// Directories that are kept.
const MAX_DIRECTORIES: usize = 16;
/// Bytes of a directory that is kept, at most.
const MAX_BYTES: u64 = 4 << 20;
/// Bytes of a block.
const BLOCK: u64 = 4096;

/// Finds files of the first of some layers.
pub(super) struct FileFinder<'a> {
    layers: &'a MergedLayers,
    /// The last one first.
    directories: Vec<ReadDirectory>,
    /// The directory of the last lookups, and how many they were in a row.
    last: (Vec<u8>, u64),
}

struct ReadDirectory {
    path: Vec<u8>,
    /// Name and inode, in bytewise order of names.
    entries: Vec<(Vec<u8>, u64)>,
}

impl ReadDirectory {
    fn inode(&self, name: &[u8]) -> Option<u64> {
        let at = self.entries.binary_search_by(|(found, _)| found.as_slice().cmp(name)).ok()?;
        Some(self.entries[at].1)
    }
}

impl<'a> FileFinder<'a> {
    pub(super) fn new(layers: &'a MergedLayers) -> FileFinder<'a> {
        FileFinder { layers, directories: Vec::new(), last: (Vec::new(), 0) }
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
        let (parent, name) = split(path);
        if let Some(at) = self.directories.iter().position(|directory| directory.path == parent) {
            self.directories[..=at].rotate_right(1);
            let found = self.directories[0].inode(name);
            return Ok(found.map(|number| layer.inode(number)).transpose()?);
        }
        let Some(directory) = self.directory(parent)? else { return Ok(None) };
        if self.last.0 != parent {
            self.last = (parent.to_owned(), 0);
        }
        self.last.1 += 1;
        if directory.size > MAX_BYTES || self.last.1 < directory.size.div_ceil(BLOCK) {
            let found = layer.lookup(&directory, name)?;
            return Ok(found.map(|entry| layer.inode_of(&entry)).transpose()?);
        }
        let entries = layer.entries(&directory)?.map(|entry| entry.map(|entry| (entry.name, entry.nid)));
        let read = ReadDirectory { path: parent.to_owned(), entries: entries.collect::<Result<_, _>>()? };
        let found = read.inode(name);
        self.directories.truncate(MAX_DIRECTORIES - 1);
        self.directories.insert(0, read);
        Ok(found.map(|number| layer.inode(number)).transpose()?)
    }

    /// The directory at a path without links.
    fn directory(&self, path: &[u8]) -> io::Result<Option<ErofsInode>> {
        let layer = self.layers.layer(0);
        let (mut found, mut rest) = (layer.root()?, path);
        let mut above = path;
        while !above.is_empty() {
            let (parent, name) = split(above);
            if let Some(read) = self.directories.iter().find(|directory| directory.path == parent) {
                let Some(number) = read.inode(name) else { return Ok(None) };
                (found, rest) = (layer.inode(number)?, &path[above.len()..]);
                break;
            }
            above = parent;
        }
        for name in parts(rest) {
            if !found.is_directory() {
                return Ok(None);
            }
            let Some(next) = layer.lookup(&found, name)? else { return Ok(None) };
            found = layer.inode_of(&next)?;
        }
        Ok(Some(found).filter(ErofsInode::is_directory))
    }
}
