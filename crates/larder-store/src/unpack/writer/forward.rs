//! Hard links that come before their target.

use std::collections::HashMap;

use super::super::archive::LayerEntry;
use super::super::tree::DirId;

/// Links whose target was not there when they came, by directory and name.
#[derive(Default)]
pub(super) struct ForwardHardLinks {
    links: HashMap<(DirId, Vec<u8>), (u64, LayerEntry)>,
    count: u64,
}

impl ForwardHardLinks {
    pub(super) fn add(&mut self, dir: DirId, name: &[u8], entry: LayerEntry) {
        self.count += 1;
        self.links.insert((dir, name.to_vec()), (self.count, entry));
    }

    /// Another entry takes the link's name.
    pub(super) fn supersede(&mut self, dir: DirId, name: &[u8]) {
        if !self.links.is_empty() {
            self.links.remove(&(dir, name.to_vec()));
        }
    }

    pub(super) fn contains(&self, dir: DirId, name: &[u8]) -> bool {
        !self.links.is_empty() && self.links.contains_key(&(dir, name.to_vec()))
    }

    /// A directory is gone, and its links with it.
    pub(super) fn forget_directory(&mut self, dir: DirId) {
        self.links.retain(|(parent, _), _| *parent != dir);
    }

    /// All of them, in the order of the archive.
    pub(super) fn take(&mut self) -> Vec<(DirId, Vec<u8>, LayerEntry)> {
        let mut links: Vec<_> = self.links.drain().collect();
        links.sort_unstable_by_key(|(_, (number, _))| *number);
        links.into_iter().map(|((dir, name), (_, entry))| (dir, name, entry)).collect()
    }
}
