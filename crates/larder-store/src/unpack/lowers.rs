//! Looks up paths in unpacked layers as an overlay of them would show them.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, openat, readlinkat, statat};
use rustix::io::Errno;

use super::beneath::{self, DIRECTORY, parts};
use super::layer_manifest::path_of;
use super::metadata::{XattrTarget, get, has_xattr};

const MAX_LINKS: u32 = 40;

/// Unpacked layers, the nearest first.
pub(super) struct LowerLayers {
    roots: Vec<Arc<OwnedFd>>,
    /// How many of them are seen: an opaque root hides those that follow.
    visible: usize,
}

/// How many of these unpacked layers, the nearest first, are seen in their merged view. An opaque whiteout in the root of a
/// layer hides all layers below it, but the kernel does not look for its mark there.
pub fn visible_layers(layers: &[impl AsRef<Path>]) -> io::Result<usize> {
    for (at, layer) in layers.iter().enumerate() {
        let root = openat(rustix::fs::CWD, layer.as_ref(), DIRECTORY, Mode::empty())?;
        if is_opaque(&root) {
            return Ok(at + 1);
        }
    }
    Ok(layers.len())
}

fn is_opaque(dir: &OwnedFd) -> bool {
    let says_yes = |name: &[u8]| get(XattrTarget::Open(dir.as_fd()), name).is_ok_and(|value| value == b"y");
    says_yes(b"trusted.overlay.opaque") || says_yes(b"user.overlay.opaque")
}

/// What is at a path.
pub(super) struct LowerEntry {
    /// Which layer shows it: for a directory, the nearest of those that have it.
    pub(super) layer: usize,
    /// Its path there, without links.
    pub(super) path: Vec<u8>,
    pub(super) stat: Stat,
}

impl LowerEntry {
    pub(super) fn is_directory(&self) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == FileType::Directory
    }
}

/// One directory on the way down, and the layers that it is merged from.
pub(super) struct MergedDir {
    pub(super) path: Vec<u8>,
    pub(super) layers: Vec<usize>,
}

impl MergedDir {
    pub(super) fn root(layers: &LowerLayers) -> MergedDir {
        MergedDir { path: Vec::new(), layers: (0..layers.visible).collect() }
    }

    /// The path of a name in it.
    pub(super) fn path_of(&self, name: &[u8]) -> Vec<u8> {
        join(&self.path, name)
    }
}

impl LowerLayers {
    pub(super) fn new(roots: Vec<Arc<OwnedFd>>) -> LowerLayers {
        let visible = roots.iter().position(|root| is_opaque(root)).map_or(roots.len(), |at| at + 1);
        LowerLayers { roots, visible }
    }

    pub(super) fn root(&self, layer: usize) -> BorrowedFd<'_> {
        self.roots[layer].as_fd()
    }

    /// Looks up `path`, following links in it, and at its end if `follow`. `None` when nothing is there.
    pub(super) fn find(&self, path: &[u8], follow: bool) -> Result<Option<LowerEntry>, Errno> {
        let mut levels = vec![MergedDir::root(self)];
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
            let path = level.path_of(&part);
            let Some((found, layers)) = self.look(level, path)? else { return Ok(None) };
            match FileType::from_raw_mode(found.stat.st_mode) {
                FileType::Directory => levels.push(MergedDir { path: found.path, layers }),
                FileType::Symlink if follow || !todo.is_empty() => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(Errno::LOOP);
                    }
                    let target = readlinkat(self.root(found.layer), path_of(&found.path), Vec::new())?;
                    if target.as_bytes().starts_with(b"/") {
                        levels.truncate(1);
                    }
                    todo.extend(
                        parts(target.as_bytes()).map(<[u8]>::to_vec).collect::<Vec<_>>().into_iter().rev(),
                    );
                }
                _ if todo.is_empty() => return Ok(Some(found)),
                _ => return Ok(None),
            }
        }
        let Some(level) = levels.pop() else { return Ok(None) };
        let Some(layer) = level.layers.first().copied() else { return Ok(None) };
        let fd = beneath::open(self.root(layer), &level.path, DIRECTORY)?;
        Ok(Some(LowerEntry { layer, path: level.path, stat: rustix::fs::fstat(fd)? }))
    }

    /// What the layers of a directory show at a path in it; of a directory also the layers that it is merged from.
    pub(super) fn look(
        &self,
        level: &MergedDir,
        path: Vec<u8>,
    ) -> Result<Option<(LowerEntry, Vec<usize>)>, Errno> {
        let mut nearest: Option<LowerEntry> = None;
        let mut merged = Vec::new();
        for layer in level.layers.iter().copied() {
            let stat = match statat(self.root(layer), path_of(&path), AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                if nearest.is_none() && !self.is_whiteout(layer, &path, &stat)? {
                    nearest = Some(LowerEntry { layer, path, stat });
                }
                break;
            }
            merged.push(layer);
            nearest.get_or_insert_with(|| LowerEntry { layer, path: path.clone(), stat });
            if is_opaque(&beneath::open(self.root(layer), &path, DIRECTORY)?) {
                break;
            }
        }
        Ok(nearest.map(|found| (found, merged)))
    }

    /// All names that the layers have in a directory, those of whiteouts among them.
    pub(super) fn names(&self, dir: &MergedDir) -> Result<BTreeSet<Vec<u8>>, Errno> {
        let mut names = BTreeSet::new();
        for layer in dir.layers.iter().copied() {
            let open = beneath::open(self.root(layer), &dir.path, DIRECTORY)?;
            for entry in Dir::new(open)? {
                let name = entry?.file_name().to_bytes().to_vec();
                if name != b"." && name != b".." {
                    names.insert(name);
                }
            }
        }
        Ok(names)
    }

    fn is_whiteout(&self, layer: usize, path: &[u8], stat: &Stat) -> Result<bool, Errno> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => Ok(stat.st_rdev == 0),
            FileType::RegularFile if stat.st_size == 0 => {
                let file = beneath::open(self.root(layer), path, OFlags::RDONLY)?;
                let on = XattrTarget::Open(file.as_fd());
                Ok(has_xattr(on, "trusted.overlay.whiteout") || has_xattr(on, "user.overlay.whiteout"))
            }
            _ => Ok(false),
        }
    }
}

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() { name.to_vec() } else { [parent, name].join(&b'/') }
}
