//! Random trees come back as they were, and random sequences of entries give what applying them one by one gives.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use larder_store::unpack::{UnpackOptions, UnpackThreads};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use proptest::prelude::*;

use crate::support::{UnpackDir, gzip, is_root};
use larder_testkit_peers::tree_listing::walk;

#[derive(Debug, Clone, PartialEq, Eq)]
enum ModelFile {
    File(Vec<u8>),
    Link(Vec<u8>),
    Pipe,
    Dir { opaque: bool },
    Whiteout,
}

/// Expected entry at a path; `None` for the looks of a whiteout, or of a directory that no entry describes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ModelEntry {
    thing: ModelFile,
    looks: Option<(u32, u32, u32, i64)>,
    xattr: Option<Vec<u8>>,
    /// Paths with the same one are hard links of each other.
    inode: u64,
}

/// A directory that no entry describes.
fn implied(opaque: bool) -> ModelEntry {
    ModelEntry { thing: ModelFile::Dir { opaque }, looks: None, xattr: None, inode: 0 }
}

impl ModelEntry {
    fn is_dir(&self) -> bool {
        matches!(self.thing, ModelFile::Dir { .. })
    }
}

type ModelTree = BTreeMap<String, ModelEntry>;

#[derive(Debug, Clone)]
struct TreeStep {
    path: Vec<u8>,
    thing: u8,
    size: u32,
    mode: u32,
    owner: u32,
    mtime: u32,
    xattr: Option<Vec<u8>>,
    /// The file that a hard link is to.
    target: Vec<u8>,
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    // Mostly short, so that many entries meet at the same path.
    prop_oneof![
        4 => prop::collection::vec(0..3u8, 1..3),
        1 => prop::collection::vec(0..4u8, 3..5),
    ]
}

fn text(path: &[u8]) -> String {
    let names = ["a", "b", "c", "long-name-over-and-over-again"];
    path.iter().map(|name| names[usize::from(*name)]).collect::<Vec<_>>().join("/")
}

/// Operation of a step.
enum TreeOperation {
    Make(ModelFile),
    HardLink,
    /// Hides the path in lower layers.
    Hide,
    /// Hides all that lower layers have in the path's directory.
    HideAll,
}

fn steps() -> impl Strategy<Value = Vec<TreeStep>> {
    let step = (
        path(),
        0..13u8,
        // Around the sizes of blocks and buffers.
        prop_oneof![8 => 0..3u32, 8 => 500..520u32, 4 => 65_000..66_000u32, 1 => 1_000_000..1_100_000u32],
        prop_oneof![Just(0o755u32), Just(0o644), Just(0o4711), Just(0o1777), Just(0), Just(0o2070)],
        0..3u32,
        any::<u32>(),
        prop::option::weighted(0.4, prop::collection::vec(any::<u8>(), 1..9)),
        path(),
    );
    let step = step.prop_map(|(path, thing, size, mode, owner, mtime, xattr, target)| TreeStep {
        path,
        thing,
        size,
        mode,
        owner,
        mtime,
        xattr,
        target,
    });
    prop::collection::vec(step, 1..60)
}

impl TreeStep {
    fn path(&self) -> String {
        text(&self.path)
    }

    fn operation(&self) -> TreeOperation {
        TreeOperation::Make(match self.thing {
            0..4 => ModelFile::File(
                (0..self.size).map(|at| (at.wrapping_mul(self.mtime | 1) >> 7).to_le_bytes()[0]).collect(),
            ),
            4 => ModelFile::Link(format!("to-{}", self.mtime).into_bytes()),
            5 => ModelFile::Pipe,
            6 | 7 => ModelFile::Dir { opaque: false },
            8..11 => return TreeOperation::HardLink,
            11 => return TreeOperation::Hide,
            _ => return TreeOperation::HideAll,
        })
    }

    fn entry(&self) -> TarBuilderEntry {
        let path = if self.owner == 1 { format!("./{}", self.path()) } else { self.path() };
        let beside = |name: &str| match path.rsplit_once('/') {
            Some((parent, _)) => format!("{parent}/{name}"),
            None => name.to_owned(),
        };
        let entry = match self.operation() {
            TreeOperation::Make(ModelFile::File(content)) => TarBuilderEntry::file(path, content),
            TreeOperation::Make(ModelFile::Link(target)) => TarBuilderEntry::symlink(path, target),
            TreeOperation::Make(ModelFile::Pipe) => TarBuilderEntry::fifo(path),
            TreeOperation::Make(ModelFile::Dir { .. } | ModelFile::Whiteout) => TarBuilderEntry::dir(path),
            TreeOperation::HardLink => TarBuilderEntry::hard_link(path, text(&self.target)),
            TreeOperation::Hide => {
                let name = path.rsplit('/').next().unwrap_or_default();
                TarBuilderEntry::file(beside(&format!(".wh.{name}")), "")
            }
            TreeOperation::HideAll => TarBuilderEntry::file(beside(".wh..wh..opq"), ""),
        };
        let entry =
            entry.mode(self.mode).owner(self.owner.into(), self.owner.into()).mtime(self.mtime.into());
        match &self.xattr {
            Some(value) => entry.xattr(XATTR, value.clone()),
            None => entry,
        }
    }
}

const XATTR: &str = "trusted.larder-test";

/// Applies a step to a model. `false` for one that is left out: a parent is no directory, or a link has no file.
fn apply(tree: &mut ModelTree, step: &TreeStep, inode: u64) -> bool {
    let path = step.path();
    let (below, target) = (format!("{path}/"), text(&step.target));
    let parents: Vec<&str> = path.match_indices('/').map(|(at, _)| &path[..at]).collect();
    let is_way = |node: &ModelEntry| node.is_dir() || node.thing == ModelFile::Whiteout;
    if parents.iter().any(|parent| tree.get(*parent).is_some_and(|node| !is_way(node))) {
        return false;
    }
    let linked = tree.get(&target).filter(|node| !is_way(node)).cloned();
    let operation = step.operation();
    if matches!(operation, TreeOperation::HardLink)
        && (linked.is_none() || target == path || target.starts_with(&below))
    {
        return false;
    }
    for parent in &parents {
        let node = tree.entry((*parent).to_owned()).or_insert(implied(false));
        if !node.is_dir() {
            *node = implied(true);
        }
    }
    let was = tree.get(&path).map(|node| node.thing.clone());
    let made = match operation {
        TreeOperation::Make(ModelFile::Dir { .. }) => {
            let opaque = was.as_ref().is_some_and(|was| *was != ModelFile::Dir { opaque: false });
            ModelEntry { thing: ModelFile::Dir { opaque }, ..described(step, inode) }
        }
        TreeOperation::Make(thing) => ModelEntry { thing, ..described(step, inode) },
        TreeOperation::HardLink => linked.unwrap(),
        TreeOperation::Hide => {
            match tree.get_mut(&path) {
                Some(ModelEntry { thing: ModelFile::Dir { opaque }, .. }) => *opaque = true,
                Some(_) => {}
                None => {
                    let whiteout = ModelEntry { thing: ModelFile::Whiteout, ..implied(false) };
                    tree.insert(path, whiteout);
                }
            }
            return true;
        }
        TreeOperation::HideAll => {
            if let Some(ModelEntry { thing: ModelFile::Dir { opaque }, .. }) =
                parents.last().and_then(|parent| tree.get_mut(*parent))
            {
                *opaque = true;
            }
            return true;
        }
    };
    if !made.is_dir() {
        tree.retain(|other, _| !other.starts_with(&below));
    }
    tree.insert(path, made);
    true
}

fn described(step: &TreeStep, inode: u64) -> ModelEntry {
    let looks = Some((step.mode, step.owner, step.owner, i64::from(step.mtime)));
    ModelEntry { looks, xattr: step.xattr.clone(), inode, ..implied(false) }
}

fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = [0; 64];
    let length = rustix::fs::lgetxattr(path, name, &mut value).ok()?;
    Some(value[..length].to_vec())
}

/// Returns the tree with each inode named for the first path that has it; directories have none.
fn by_first_path(mut tree: ModelTree) -> ModelTree {
    let mut first = BTreeMap::new();
    for (number, node) in (1..).zip(tree.values_mut()) {
        let linkable = !node.is_dir() && node.thing != ModelFile::Whiteout;
        node.inode = if linkable { *first.entry(node.inode).or_insert(number) } else { 0 };
    }
    tree
}

fn on_disk(layer: &UnpackDir) -> ModelTree {
    let root = layer.root();
    walk(&root)
        .into_iter()
        .filter(|(path, _)| *path != root)
        .map(|(path, meta)| {
            let thing = if meta.is_dir() {
                ModelFile::Dir { opaque: xattr(&path, "trusted.overlay.opaque").is_some() }
            } else if meta.file_type().is_char_device() && meta.rdev() == 0 {
                ModelFile::Whiteout
            } else if meta.is_symlink() {
                ModelFile::Link(fs_err::read_link(&path).unwrap().as_os_str().as_bytes().to_vec())
            } else if meta.is_file() {
                ModelFile::File(fs_err::read(&path).unwrap())
            } else {
                ModelFile::Pipe
            };
            let looks = Some((meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime()));
            let looks = looks.filter(|_| thing != ModelFile::Whiteout);
            let node = ModelEntry { thing, looks, xattr: xattr(&path, XATTR), inode: meta.ino() };
            (path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned(), node)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn applying_entries_gives_the_tree_that_they_describe(steps in steps(), threads in threads(), packed: bool) {
        if !is_root() {
            return Ok(());
        }
        let mut expected = ModelTree::new();
        let numbered = (1..).zip(&steps);
        let kept: Vec<&TreeStep> =
            numbered.filter(|(at, step)| apply(&mut expected, step, *at)).map(|(_, step)| step).collect();
        let expected = by_first_path(expected);
        let archive = TarBuilder::new().extend(kept.iter().map(|step| step.entry())).finish();
        let compressed = if packed { gzip(&archive) } else { archive.clone() };
        let layer = UnpackDir::new();
        let unpacked =
            layer.unpack_with(&compressed, &archive, &UnpackOptions { threads, ..UnpackOptions::default() }).unwrap();
        let mut found = by_first_path(on_disk(&layer));
        for (path, node) in &mut found {
            match expected.get(path) {
                // No entry describes its metadata.
                Some(ModelEntry { thing: ModelFile::Dir { .. }, looks: None, .. }) => {
                    prop_assert_eq!(node.looks.map(|looks| looks.0), Some(0o755));
                    node.looks = None;
                }
                Some(ModelEntry { thing: ModelFile::Link(_), looks: Some(looks), .. }) => {
                    node.looks = node.looks.map(|found| (looks.0, found.1, found.2, found.3));
                }
                _ => {}
            }
        }
        prop_assert!(found == expected, "{:?}\n{:?}", names(&found), names(&expected));
        prop_assert_eq!(unpacked.entries, kept.len() as u64);
        let alone = UnpackDir::new();
        let options = UnpackOptions { threads: UnpackThreads::One, ..UnpackOptions::default() };
        alone.unpack_with(&compressed, &archive, &options).unwrap();
        let [alone, layer] = [alone, layer].map(|layer| fs_err::read(layer.layer()).unwrap());
        prop_assert!(alone == layer, "the layer depends on the threads");
    }
}

fn threads() -> impl Strategy<Value = UnpackThreads> {
    prop_oneof![Just(UnpackThreads::One), Just(UnpackThreads::Two)]
}

fn names(tree: &ModelTree) -> Vec<String> {
    tree.iter()
        .map(|(path, node)| {
            let kind = match &node.thing {
                ModelFile::File(content) => format!("file of {}", content.len()),
                other => format!("{other:?}"),
            };
            format!("{path}: {kind} {:?} {:?} {}", node.looks, node.xattr, node.inode)
        })
        .collect()
}

/// Links to a link whose own name is replaced, as is that of the file itself: what is left keeps its content.
#[test]
fn a_link_outlives_the_link_and_the_file_that_it_was_made_from() {
    if !is_root() {
        return;
    }
    let layers: [&[TarBuilderEntry]; 3] = [
        &[TarBuilderEntry::file("c", "new"), TarBuilderEntry::file("a/c", "newer")],
        &[TarBuilderEntry::file("a", "no directory"), TarBuilderEntry::dir("c")],
        &[TarBuilderEntry::file("c", "new")],
    ];
    for replacing in layers {
        let first = [
            TarBuilderEntry::file("a/c", "old"),
            TarBuilderEntry::hard_link("c", "a/c"),
            TarBuilderEntry::hard_link("b", "c"),
        ];
        let archive = TarBuilder::new().extend(first.into_iter().chain(replacing.iter().cloned())).finish();
        let layer = UnpackDir::new();
        layer.unpack_with(&archive, &archive, &UnpackOptions::default()).unwrap();
        assert_eq!(fs_err::read(layer.root().join("b")).unwrap(), b"old");
    }
}
