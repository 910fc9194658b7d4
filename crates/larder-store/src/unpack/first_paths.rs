//! The first path of each file with several names, so that its other names become hard links to that one.

use std::collections::HashMap;

use larder_erofs::ErofsInode;

use super::merged_layers::MergedEntry;

/// Bytes of memory for the paths: two million of usual length.
pub(super) const MAX_BYTES: usize = 256 << 20;

/// Bytes that a path takes beside its text.
const PATH_OVERHEAD: usize = 64;

/// First paths of files with several names, by layer and inode.
#[derive(Debug, Default)]
pub(super) struct FirstPaths {
    paths: HashMap<(usize, u64), Vec<u8>>,
    bytes: usize,
}

/// The paths take more than [`MAX_BYTES`].
#[derive(Debug)]
pub(super) struct TooManyPaths;

impl FirstPaths {
    /// Returns the path under which the file was found before. If this is its first one, keeps it. Directories,
    /// whiteouts, and files with one name have none.
    pub(super) fn of(&mut self, found: &MergedEntry) -> Result<Option<&[u8]>, TooManyPaths> {
        let MergedEntry { layer, path, inode } = found;
        if !may_have_several_names(inode) {
            return Ok(None);
        }
        let key = (*layer, inode.nid);
        // Two lookups: the borrow checker does not yet see that the first one ends here.
        if self.paths.contains_key(&key) {
            return Ok(self.paths.get(&key).map(Vec::as_slice));
        }
        self.bytes += path.len() + PATH_OVERHEAD;
        if self.bytes > MAX_BYTES {
            return Err(TooManyPaths);
        }
        self.paths.insert(key, path.clone());
        Ok(None)
    }
}

fn may_have_several_names(inode: &ErofsInode) -> bool {
    !inode.is_directory() && !inode.is_whiteout() && inode.nlink > 1
}
