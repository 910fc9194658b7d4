//! Random trees come back as they were, and random sequences of entries give what applying them one by one gives.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;

use larder_store::unpack::{Options, Threads};
use larder_testkit::archive::{Archive, Entry};
use proptest::prelude::*;

use crate::support::{Layer, gzip, is_root, walk};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Thing {
    File(Vec<u8>),
    Link(Vec<u8>),
    Pipe,
    Dir,
}

/// What a path is; `None` for the looks of a directory that no entry describes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    thing: Thing,
    looks: Option<(u32, u32, u32, i64)>,
}

type Tree = BTreeMap<String, Node>;

#[derive(Debug, Clone)]
struct Step {
    path: Vec<u8>,
    thing: u8,
    size: u32,
    mode: u32,
    owner: u32,
    mtime: u32,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (
        prop::collection::vec(0..4u8, 1..5),
        0..8u8,
        // Around the sizes of blocks and buffers.
        prop_oneof![8 => 0..3u32, 8 => 500..520u32, 4 => 65_000..66_000u32, 1 => 1_000_000..1_100_000u32],
        prop_oneof![Just(0o755u32), Just(0o644), Just(0o4711), Just(0o1777), Just(0), Just(0o2070)],
        0..3u32,
        any::<u32>(),
    )
        .prop_map(|(path, thing, size, mode, owner, mtime)| Step {
            path,
            thing,
            size,
            mode,
            owner,
            mtime,
        });
    prop::collection::vec(step, 1..40)
}

impl Step {
    fn path(&self) -> String {
        self.path
            .iter()
            .map(|name| ["a", "b", "c", "long-name-over-and-over-again"][usize::from(*name)])
            .collect::<Vec<_>>()
            .join("/")
    }

    fn thing(&self) -> Thing {
        match self.thing {
            0..4 => Thing::File(
                (0..self.size).map(|at| (at.wrapping_mul(self.mtime | 1) >> 7).to_le_bytes()[0]).collect(),
            ),
            4 => Thing::Link(format!("to-{}", self.mtime).into_bytes()),
            5 => Thing::Pipe,
            _ => Thing::Dir,
        }
    }

    fn entry(&self) -> Entry {
        let path = if self.owner == 1 { format!("./{}", self.path()) } else { self.path() };
        let entry = match self.thing() {
            Thing::File(content) => Entry::file(path, content),
            Thing::Link(target) => Entry::symlink(path, target),
            Thing::Pipe => Entry::fifo(path),
            Thing::Dir => Entry::dir(path),
        };
        entry.mode(self.mode).owner(self.owner.into(), self.owner.into()).mtime(self.mtime.into())
    }
}

/// Applies a step to a model. `false` if a parent is no directory: such a step is left out.
fn apply(tree: &mut Tree, step: &Step) -> bool {
    let path = step.path();
    let parents: Vec<&str> = path.match_indices('/').map(|(at, _)| &path[..at]).collect();
    if parents.iter().any(|parent| tree.get(*parent).is_some_and(|node| node.thing != Thing::Dir)) {
        return false;
    }
    for parent in parents {
        tree.entry(parent.to_owned()).or_insert(Node { thing: Thing::Dir, looks: None });
    }
    let thing = step.thing();
    if thing != Thing::Dir {
        let below = format!("{path}/");
        tree.retain(|other, _| !other.starts_with(&below));
    }
    let looks = Some((step.mode, step.owner, step.owner, i64::from(step.mtime)));
    tree.insert(path, Node { thing, looks });
    true
}

fn on_disk(layer: &Layer) -> Tree {
    let root = layer.root();
    walk(&root)
        .into_iter()
        .filter(|(path, _)| *path != root)
        .map(|(path, meta)| {
            let thing = if meta.is_dir() {
                Thing::Dir
            } else if meta.is_symlink() {
                Thing::Link(fs_err::read_link(&path).unwrap().as_os_str().as_bytes().to_vec())
            } else if meta.is_file() {
                Thing::File(fs_err::read(&path).unwrap())
            } else {
                Thing::Pipe
            };
            let looks = Some((meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime()));
            (path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned(), Node { thing, looks })
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
        let mut expected = Tree::new();
        let kept: Vec<&Step> = steps.iter().filter(|step| apply(&mut expected, step)).collect();
        let archive = Archive::new().extend(kept.iter().map(|step| step.entry())).finish();
        let compressed = if packed { gzip(&archive) } else { archive.clone() };
        let layer = Layer::new();
        let unpacked =
            layer.unpack_with(&compressed, &archive, &Options { threads, ..Options::default() }).unwrap();
        let mut found = on_disk(&layer);
        for (path, node) in &mut found {
            match expected.get(path) {
                // Nobody said how it should look.
                Some(Node { looks: None, .. }) => {
                    prop_assert_eq!(node.looks.map(|looks| looks.0), Some(0o755));
                    node.looks = None;
                }
                Some(Node { thing: Thing::Link(_), looks: Some(looks) }) => {
                    node.looks = node.looks.map(|found| (looks.0, found.1, found.2, found.3));
                }
                _ => {}
            }
        }
        prop_assert!(found == expected, "{:?}\n{:?}", names(&found), names(&expected));
        prop_assert_eq!(unpacked.entries, kept.len() as u64);
        prop_assert_eq!(unpacked.usage, layer.usage_on_disk());
        prop_assert_eq!(layer.damage(), []);
        prop_assert_eq!(layer.records().len(), expected.len() + 1);
        let alone = Layer::new();
        let options = Options { threads: Threads::One, ..Options::default() };
        prop_assert_eq!(alone.unpack_with(&compressed, &archive, &options).unwrap().usage, unpacked.usage);
        prop_assert!(alone.records() == layer.records(), "the manifest depends on the threads");
    }
}

fn threads() -> impl Strategy<Value = Threads> {
    prop_oneof![1 => Just(Threads::One), 1 => Just(Threads::Two), 3 => Just(Threads::Many)]
}

fn names(tree: &Tree) -> Vec<String> {
    tree.iter()
        .map(|(path, node)| {
            let kind = match &node.thing {
                Thing::File(content) => format!("file of {}", content.len()),
                other => format!("{other:?}"),
            };
            format!("{path}: {kind} {:?}", node.looks)
        })
        .collect()
}
