//! Hard links that come before their target.

use std::collections::HashMap;

use super::super::archive::LayerEntry;
use super::super::tree::DirId;

/// Links whose target was not there when they came, by directory and name.
#[derive(Default)]
pub(super) struct ForwardHardLinks {
    links: HashMap<DirId, HashMap<Vec<u8>, (u64, LayerEntry)>>,
    count: u64,
}

impl ForwardHardLinks {
    pub(super) fn add(&mut self, dir: DirId, name: &[u8], entry: LayerEntry) {
        self.count += 1;
        self.links.entry(dir).or_default().insert(name.to_vec(), (self.count, entry));
    }

    /// Another entry takes the link's name.
    pub(super) fn supersede(&mut self, dir: DirId, name: &[u8]) {
        if let Some(links) = self.links.get_mut(&dir) {
            links.remove(name);
        }
    }

    pub(super) fn contains(&self, dir: DirId, name: &[u8]) -> bool {
        self.links.get(&dir).is_some_and(|links| links.contains_key(name))
    }

    /// A directory is gone, and its links with it.
    pub(super) fn forget_directory(&mut self, dir: DirId) {
        self.links.remove(&dir);
    }

    /// All of them, in the order of the archive.
    pub(super) fn take(&mut self) -> Vec<(DirId, Vec<u8>, LayerEntry)> {
        let in_dir = |(dir, links): (DirId, HashMap<Vec<u8>, (u64, LayerEntry)>)| {
            links.into_iter().map(move |(name, (number, entry))| (number, (dir, name, entry)))
        };
        let mut links: Vec<_> = self.links.drain().flat_map(in_dir).collect();
        links.sort_unstable_by_key(|(number, _)| *number);
        links.into_iter().map(|(_, link)| link).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::archive::LayerEntryKind;
    use super::super::super::layer_manifest::FileTime;
    use super::*;

    #[test]
    fn a_removed_directory_costs_its_own_links_only() {
        // As many as the default limits allow. Ten thousand million steps, if each removal looked at all links.
        const DIRECTORIES: DirId = 100_000;
        let link = LayerEntry {
            path: b"link".to_vec(),
            kind: LayerEntryKind::HardLink,
            link: b"target".to_vec(),
            size: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            mtime: FileTime::default(),
            device: (0, 0),
            xattrs: Vec::new(),
        };
        let mut links = ForwardHardLinks::default();
        for dir in 0..DIRECTORIES {
            links.add(dir, b"link", link.clone());
        }
        links.add(7, b"other", link);
        links.supersede(8, b"link");
        for dir in 10..DIRECTORIES {
            links.forget_directory(dir);
            assert!(!links.contains(dir, b"link"));
        }
        let left: Vec<_> = links.take().into_iter().map(|(dir, name, _)| (dir, name)).collect();
        let expected = [0, 1, 2, 3, 4, 5, 6, 7, 9].map(|dir| (dir, b"link".to_vec()));
        assert_eq!(left, [&expected[..], &[(7, b"other".to_vec())]].concat());
    }
}
