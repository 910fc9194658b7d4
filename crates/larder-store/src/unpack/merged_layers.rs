//! Looks up paths in layers as an overlay of them would show them. Layers are read from their files: nothing is
//! mounted.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;

use larder_erofs::{ErofsInode, ErofsReader, InodeKind};
use rustix::io::Errno;

use super::beneath::parts;

/// As many links as the kernel follows in one path.
const MAX_LINKS: u32 = 40;

/// A layer that is read from its file.
pub type LayerReader = ErofsReader<File>;

/// Opens the file of a layer.
pub fn open_layer(path: &Path) -> io::Result<LayerReader> {
    Ok(ErofsReader::open(fs_err::File::open(path)?.into_parts().0)?)
}

/// Layers, the nearest first. Default none.
#[derive(Debug, Default)]
pub struct MergedLayers {
    layers: Vec<LayerReader>,
    /// How many of them are visible: an opaque root hides those that follow.
    visible: usize,
}

/// Entry at a path.
#[derive(Debug, Clone)]
pub(super) struct MergedEntry {
    /// The layer that shows it: for a directory, the nearest of those that have it.
    pub(super) layer: usize,
    /// Its path there, without links.
    pub(super) path: Vec<u8>,
    pub(super) inode: ErofsInode,
}

/// One directory on the way down.
pub(super) struct MergedDir {
    pub(super) path: Vec<u8>,
    /// The layers that it is merged from, and its inode in each.
    parts: Vec<(usize, ErofsInode)>,
}

impl MergedDir {
    /// The path of a name in it.
    pub(super) fn path_of(&self, name: &[u8]) -> Vec<u8> {
        if self.path.is_empty() { name.to_vec() } else { [&self.path, name].join(&b'/') }
    }

    /// The directory itself, as the nearest layer describes it.
    pub(super) fn entry(&self) -> Option<MergedEntry> {
        let (layer, inode) = *self.parts.first()?;
        Some(MergedEntry { layer, path: self.path.clone(), inode })
    }

    /// The directory in each of its layers.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, u64)> {
        self.parts.iter().map(|(layer, inode)| (*layer, inode.nid))
    }
}

/// A name in a directory.
pub(super) enum MergedName {
    Directory(MergedDir),
    Other(MergedEntry),
}

impl MergedLayers {
    /// These layers, the nearest first.
    pub fn new(layers: Vec<LayerReader>) -> io::Result<MergedLayers> {
        let mut visible = layers.len();
        for (at, layer) in layers.iter().enumerate() {
            if layer.is_opaque(&layer.root()?)? {
                visible = at + 1;
                break;
            }
        }
        Ok(MergedLayers { layers, visible })
    }

    pub(super) fn layer(&self, number: usize) -> &LayerReader {
        &self.layers[number]
    }

    pub(super) fn root(&self) -> io::Result<MergedDir> {
        let visible = self.layers[..self.visible].iter().enumerate();
        let parts = visible.map(|(at, layer)| Ok((at, layer.root()?))).collect::<io::Result<_>>()?;
        Ok(MergedDir { path: Vec::new(), parts })
    }

    /// Looks up `path`, following links in it, and at its end if `follow`. `None` when nothing is there.
    pub(super) fn find(&self, path: &[u8], follow: bool) -> io::Result<Option<MergedEntry>> {
        let mut levels = vec![self.root()?];
        let mut todo: Vec<Vec<u8>> = parts(path).map(<[u8]>::to_vec).collect();
        todo.reverse();
        let mut links = 0;
        while let Some(part) = todo.pop() {
            if part == b".." {
                if levels.len() > 1 {
                    levels.pop();
                }
                continue;
            }
            let Some(level) = levels.last() else { return Ok(None) };
            let found = match self.lookup(level, &part)? {
                None => return Ok(None),
                Some(MergedName::Directory(dir)) => {
                    levels.push(dir);
                    continue;
                }
                Some(MergedName::Other(found)) => found,
            };
            if found.inode.kind == InodeKind::Symlink && (follow || !todo.is_empty()) {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                let target = self.layer(found.layer).symlink_target(&found.inode)?;
                if target.starts_with(b"/") {
                    levels.truncate(1);
                }
                let before = todo.len();
                todo.extend(parts(&target).map(<[u8]>::to_vec));
                todo[before..].reverse();
            } else {
                return Ok(todo.is_empty().then_some(found));
            }
        }
        Ok(levels.last().and_then(MergedDir::entry))
    }

    /// Returns the entry that the layers of a directory show under a name in it. `None` where a whiteout hides it.
    pub(super) fn lookup(&self, dir: &MergedDir, name: &[u8]) -> io::Result<Option<MergedName>> {
        let mut parts = Vec::new();
        for (layer, inode) in &dir.parts {
            let reader = self.layer(*layer);
            let Some(found) = reader.lookup(inode, name)? else { continue };
            let inode = reader.inode_of(&found)?;
            if !inode.is_directory() {
                if parts.is_empty() && !inode.is_whiteout() {
                    let found = MergedEntry { layer: *layer, path: dir.path_of(name), inode };
                    return Ok(Some(MergedName::Other(found)));
                }
                break;
            }
            parts.push((*layer, inode));
            if reader.is_opaque(&inode)? {
                break;
            }
        }
        let merged = MergedDir { path: dir.path_of(name), parts };
        Ok((!merged.parts.is_empty()).then_some(MergedName::Directory(merged)))
    }

    /// All names that the layers have in a directory, those of whiteouts among them.
    pub(super) fn names(&self, dir: &MergedDir) -> io::Result<BTreeSet<Vec<u8>>> {
        let mut names = BTreeSet::new();
        for (layer, inode) in &dir.parts {
            for entry in self.layer(*layer).entries(inode)? {
                names.insert(entry?.name);
            }
        }
        Ok(names)
    }
}
