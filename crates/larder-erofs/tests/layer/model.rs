//! Model of a layer: a map of paths, from which replaced ones are really removed.

use std::collections::{BTreeMap, BTreeSet};

use larder_erofs::ErofsTime;

use crate::reader::ReadTree;
use crate::script::{ScriptEntry, ScriptKind};

type Path = Vec<Vec<u8>>;

#[derive(Debug, Clone)]
enum ModelNode {
    Directory {
        entry: Option<ScriptEntry>,
        mtime: ErofsTime,
        opaque: bool,
    },
    /// Number of a file, link or device.
    Leaf(usize),
    Whiteout,
    /// A hard link, and how many there were before.
    Pending(Path, usize),
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    nodes: BTreeMap<Path, ModelNode>,
    leaves: Vec<ScriptEntry>,
    links: usize,
}

/// Final state of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelView {
    kind: &'static str,
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, u32),
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path of the same inode.
    same_as: Vec<u8>,
}

impl Model {
    pub(crate) fn new() -> Model {
        let root = ModelNode::Directory { entry: None, mtime: ErofsTime::default(), opaque: false };
        Model { nodes: BTreeMap::from([(Path::new(), root)]), leaves: Vec::new(), links: 0 }
    }

    /// Applies an entry. `None` if it must be rejected; the model is useless then.
    pub(crate) fn apply(&mut self, entry: &ScriptEntry) -> Option<()> {
        let mut path = clean(&entry.path);
        let Some(mut name) = path.pop() else {
            self.describe(&path, entry);
            return (entry.kind == ScriptKind::Directory).then_some(());
        };
        let hidden = name.strip_prefix(b".wh.").map(<[u8]>::to_vec);
        let parent = self.resolve(&path, Some(entry.mtime)).ok()??;
        if hidden.as_deref() == Some(b".wh..opq") {
            self.set_opaque(&parent);
            return Some(());
        }
        let whiteout = hidden.is_some() || entry.kind == ScriptKind::CharDevice(0, 0);
        name = hidden.unwrap_or(name);
        let place: Path = [parent, vec![name]].concat();
        if whiteout {
            match self.nodes.get(&place) {
                Some(ModelNode::Directory { .. }) => self.set_opaque(&place),
                Some(_) => {}
                None => drop(self.nodes.insert(place, ModelNode::Whiteout)),
            }
            return Some(());
        }
        match &entry.kind {
            ScriptKind::Directory => {
                match self.nodes.get(&place) {
                    Some(ModelNode::Directory { .. }) => {}
                    None | Some(ModelNode::Pending(..)) => self.make(&place, entry.mtime, false),
                    Some(_) => self.make(&place, entry.mtime, true),
                }
                self.describe(&place, entry);
            }
            ScriptKind::HardLink(target) => {
                let target = clean(target);
                if !self.link(&place, &target)? {
                    self.remove(&place);
                    self.nodes.insert(place, ModelNode::Pending(target, self.links));
                    self.links += 1;
                }
            }
            _ => {
                self.remove(&place);
                self.leaves.push(entry.clone());
                self.nodes.insert(place, ModelNode::Leaf(self.leaves.len() - 1));
            }
        }
        Some(())
    }

    /// Makes the links that were early. What is left is returned, in order: path and target.
    pub(crate) fn finish(&mut self) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
        loop {
            let mut progress = false;
            for (place, target, _) in self.pending() {
                progress |= self.link(&place, &target)?;
            }
            if !progress {
                let left = self.pending().into_iter();
                return Some(
                    left.map(|(place, target, _)| (place.join(&b'/'), target.join(&b'/'))).collect(),
                );
            }
        }
    }

    pub(crate) fn implicit_directories(&self) -> Vec<Vec<u8>> {
        let is_implicit = |node: &ModelNode| matches!(node, ModelNode::Directory { entry: None, .. });
        self.nodes.iter().filter(|(_, node)| is_implicit(node)).map(|(path, _)| path.join(&b'/')).collect()
    }

    pub(crate) fn view(&self) -> BTreeMap<Vec<u8>, ModelView> {
        let mut first = BTreeMap::new();
        let mut views = BTreeMap::new();
        let mut with_whiteouts = BTreeSet::new();
        let mut nodes: Vec<_> = self.nodes.iter().map(|(path, node)| (path.join(&b'/'), node)).collect();
        nodes.sort_by(|one, other| one.0.cmp(&other.0));
        for (path, node) in nodes {
            let mut view = match node {
                ModelNode::Pending(..) => continue,
                ModelNode::Whiteout => view_of_whiteout(),
                ModelNode::Leaf(leaf) => view_of_leaf(&self.leaves[*leaf]),
                ModelNode::Directory { entry, mtime, opaque } => view_of_dir(entry.as_ref(), *mtime, *opaque),
            };
            view.same_as = match node {
                ModelNode::Leaf(leaf) => first.entry(*leaf).or_insert_with(|| path.clone()).clone(),
                _ => path.clone(),
            };
            if matches!(node, ModelNode::Whiteout) {
                let parent = path.iter().rposition(|byte| *byte == b'/').map_or(&b""[..], |end| &path[..end]);
                with_whiteouts.insert(parent.to_vec());
            }
            views.insert(path, view);
        }
        for path in with_whiteouts {
            let dir: Option<&mut ModelView> = views.get_mut(&path);
            dir.unwrap().xattrs.insert(b"trusted.overlay.origin".to_vec(), Vec::new());
        }
        views
    }

    fn pending(&self) -> Vec<(Path, Path, usize)> {
        let mut pending: Vec<_> = self
            .nodes
            .iter()
            .filter_map(|(place, node)| match node {
                ModelNode::Pending(target, number) => Some((place.clone(), target.clone(), *number)),
                _ => None,
            })
            .collect();
        pending.sort_by_key(|(_, _, number)| *number);
        pending
    }

    /// The real path of a directory. An error when it cannot be, `None` when it is not there and is not to be made.
    fn resolve(&mut self, path: &[Vec<u8>], make: Option<ErofsTime>) -> Result<Option<Path>, ()> {
        let (mut at, mut links) = (Path::new(), 0);
        let mut todo: Vec<Vec<u8>> = path.iter().rev().cloned().collect();
        while let Some(part) = todo.pop() {
            if part == b".." {
                at.pop();
                continue;
            }
            let place: Path = [at.clone(), vec![part]].concat();
            match (self.nodes.get(&place), make) {
                (Some(ModelNode::Directory { .. }), _) => {}
                (Some(ModelNode::Leaf(leaf)), _) => {
                    let ScriptKind::Symlink(target) = &self.leaves[*leaf].kind else {
                        return if make.is_some() { Err(()) } else { Ok(None) };
                    };
                    links += 1;
                    if links > 40 {
                        return Err(());
                    }
                    if target.starts_with(b"/") {
                        at.clear();
                    }
                    let parts = target.split(|byte| *byte == b'/');
                    let parts: Vec<_> = parts.filter(|part| !matches!(*part, b"" | b".")).collect();
                    todo.extend(parts.into_iter().rev().map(<[u8]>::to_vec));
                    continue;
                }
                (_, None) => return Ok(None),
                (Some(ModelNode::Whiteout), Some(mtime)) => self.make(&place, mtime, true),
                (None | Some(ModelNode::Pending(..)), Some(mtime)) => self.make(&place, mtime, false),
            }
            at = place;
        }
        Ok(Some(at))
    }

    /// Links to a leaf. `None` if that must be rejected.
    fn link(&mut self, place: &Path, target: &[Vec<u8>]) -> Option<bool> {
        let (name, parent) = target.split_last()?;
        let Some(parent) = self.resolve(parent, None).ok()? else { return Some(false) };
        let target: Path = [parent, vec![name.clone()]].concat();
        if target == *place {
            return None;
        }
        match self.nodes.get(&target) {
            Some(ModelNode::Directory { .. }) => None,
            Some(ModelNode::Leaf(leaf)) => {
                let leaf = *leaf;
                if target.starts_with(place) {
                    return None;
                }
                self.remove(place);
                self.nodes.insert(place.clone(), ModelNode::Leaf(leaf));
                Some(true)
            }
            _ => Some(false),
        }
    }

    fn remove(&mut self, place: &Path) {
        self.nodes.retain(|path, _| !path.starts_with(place));
    }

    fn make(&mut self, place: &Path, mtime: ErofsTime, opaque: bool) {
        self.nodes.insert(place.clone(), ModelNode::Directory { entry: None, mtime, opaque });
    }

    fn set_opaque(&mut self, place: &Path) {
        if let Some(ModelNode::Directory { opaque, .. }) = self.nodes.get_mut(place) {
            *opaque = true;
        }
    }

    fn describe(&mut self, place: &Path, described: &ScriptEntry) {
        if let Some(ModelNode::Directory { entry, .. }) = self.nodes.get_mut(place) {
            *entry = Some(described.clone());
        }
    }
}

/// Converts the paths that were read to the form of the model.
pub(crate) fn view_of_layer(tree: &ReadTree) -> BTreeMap<Vec<u8>, ModelView> {
    let mut first = BTreeMap::new();
    let mut views = BTreeMap::new();
    for (path, node) in tree {
        let (kind, content) = match node.mode & 0o170_000 {
            0o040_000 => ("directory", Vec::new()),
            0o100_000 => ("file", node.content.clone()),
            0o120_000 => ("symlink", node.content.clone()),
            0o010_000 => ("fifo", Vec::new()),
            0o020_000 => ("char device", node.device.to_le_bytes().to_vec()),
            _ => ("block device", node.device.to_le_bytes().to_vec()),
        };
        let whiteout = kind == "char device" && node.device == 0;
        let same_as = first.entry(node.number).or_insert_with(|| path.clone()).clone();
        let view = ModelView {
            kind,
            mode: u32::from(node.mode & 0o7777),
            owner: (node.uid, node.gid),
            mtime: node.mtime,
            content,
            xattrs: node.xattrs.clone(),
            same_as: if whiteout { path.clone() } else { same_as },
        };
        views.insert(path.clone(), view);
    }
    views
}

/// Scripts have valid attributes of these names only.
fn kept_xattrs(entry: &ScriptEntry) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let kept = [&b"security.y"[..], b"security.x", b"trusted.long.name.of.an.attribute"];
    entry.xattrs.iter().filter(|(name, _)| kept.contains(&&name[..])).cloned().collect()
}

fn view_of_whiteout() -> ModelView {
    ModelView {
        kind: "char device",
        mode: 0,
        owner: (0, 0),
        mtime: (0, 0),
        content: vec![0; 4],
        xattrs: BTreeMap::new(),
        same_as: Vec::new(),
    }
}

fn view_of_dir(entry: Option<&ScriptEntry>, mtime: ErofsTime, opaque: bool) -> ModelView {
    let mtime = entry.map_or(mtime, |entry| entry.mtime);
    let mut xattrs = entry.map_or_else(BTreeMap::new, kept_xattrs);
    if opaque {
        xattrs.insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
    }
    ModelView {
        kind: "directory",
        mode: entry.map_or(0o755, |entry| entry.mode),
        owner: entry.map_or((0, 0), |entry| (entry.uid, entry.gid)),
        mtime: (mtime.seconds, mtime.nanos),
        content: Vec::new(),
        xattrs,
        same_as: Vec::new(),
    }
}

fn view_of_leaf(entry: &ScriptEntry) -> ModelView {
    let device =
        |major: u32, minor: u32| (minor & 0xff | major << 8 | (minor >> 8) << 20).to_le_bytes().to_vec();
    let (kind, content) = match &entry.kind {
        ScriptKind::File(data) => ("file", data.clone()),
        ScriptKind::Sparse(size, parts) => {
            let mut content = vec![0; usize::try_from(*size).unwrap()];
            for (offset, data) in parts {
                let at = usize::try_from(*offset).unwrap();
                content[at..at + data.len()].copy_from_slice(data);
            }
            ("file", content)
        }
        ScriptKind::Symlink(target) => ("symlink", target.clone()),
        ScriptKind::Fifo => ("fifo", Vec::new()),
        ScriptKind::CharDevice(major, minor) => ("char device", device(*major, *minor)),
        ScriptKind::BlockDevice(major, minor) => ("block device", device(*major, *minor)),
        ScriptKind::Directory | ScriptKind::HardLink(_) => unreachable!("no leaf"),
    };
    ModelView {
        kind,
        mode: if kind == "symlink" { 0o777 } else { entry.mode },
        owner: (entry.uid, entry.gid),
        mtime: (entry.mtime.seconds, entry.mtime.nanos),
        content,
        xattrs: kept_xattrs(entry),
        same_as: Vec::new(),
    }
}

fn clean(path: &[u8]) -> Path {
    let mut clean = Path::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(clean.pop()),
            part => clean.push(part.to_vec()),
        }
    }
    clean
}
