//! Computes layers and the images that use them from blobs and snapshots. Pure.

use std::collections::{BTreeSet, HashMap};

use larder::backend::Image;
use larder::gc::{DiskSpace, LayerUsageIndex, MeasuredLayer};
use larder::reference::LayerId;

use super::positive;
use crate::containerd_proto::content::Info as Blob;
use crate::containerd_proto::snapshots::{Info as Snapshot, Kind};

/// Prefix of the labels of a blob that name the blobs it references.
const NEEDS_BLOB: &str = "containerd.io/gc.ref.content";

/// Prefix of the label of a config that names the top snapshot of its image; the snapshotter's name follows.
const NEEDS_SNAPSHOT: &str = "containerd.io/gc.ref.snapshot.";

/// Blobs are files, and use whole blocks of this size on the filesystems of nodes.
const BLOCK: u64 = 4096;

/// Disk usage of an overlayfs snapshot besides its files: its directory, and the kernel's work directory.
const OVERLAY_DIRS: DiskSpace = DiskSpace { bytes: 2 * BLOCK, inodes: 2 };

/// The blobs and their references.
pub(super) struct ContentGraph {
    blobs: HashMap<String, Blob>,
    /// By digest, the blobs that reference it.
    above: HashMap<String, Vec<String>>,
}

impl ContentGraph {
    pub(super) fn of(blobs: Vec<Blob>) -> ContentGraph {
        let mut above: HashMap<String, Vec<String>> = HashMap::new();
        for blob in &blobs {
            for child in children(blob) {
                above.entry(child.to_owned()).or_default().push(blob.digest.clone());
            }
        }
        ContentGraph { blobs: blobs.into_iter().map(|blob| (blob.digest.clone(), blob)).collect(), above }
    }

    /// The snapshotters that images are unpacked with.
    pub(super) fn snapshotters(&self) -> BTreeSet<&str> {
        self.blobs.values().flat_map(tops).map(|(snapshotter, _)| snapshotter).collect()
    }

    /// Disk usage of a blob; zero if it is missing, for example because archives are discarded after unpacking.
    fn amount(&self, digest: &str) -> DiskSpace {
        self.blobs.get(digest).map_or(DiskSpace::ZERO, |blob| {
            let bytes = positive(blob.size).next_multiple_of(BLOCK);
            DiskSpace { bytes, inodes: 1 }
        })
    }

    /// The manifests and indexes that lead to a config.
    fn leading_to(&self, config: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut waiting = vec![config];
        while let Some(digest) = waiting.pop() {
            for above in self.above.get(digest).into_iter().flatten() {
                if found.insert(above.as_str()) {
                    waiting.push(above);
                }
            }
        }
        found
    }

    /// The archives of the layers of the image with this config.
    fn archives(&self, config: &str) -> BTreeSet<&str> {
        let manifests = self.above.get(config).into_iter().flatten();
        let blobs = manifests.filter_map(|manifest| self.blobs.get(manifest)).flat_map(children);
        blobs.filter(|blob| *blob != config).collect()
    }
}

/// The digests that a blob references.
fn children(blob: &Blob) -> impl Iterator<Item = &str> {
    let needs = blob.labels.iter().filter(|(label, _)| label.starts_with(NEEDS_BLOB));
    needs.map(|(_, digest)| digest.as_str())
}

/// By snapshotter, the top snapshot of a config.
fn tops(config: &Blob) -> impl Iterator<Item = (&str, &str)> {
    let labels = config.labels.iter();
    labels.filter_map(|(label, top)| Some((label.strip_prefix(NEEDS_SNAPSHOT)?, top.as_str())))
}

/// The snapshots of one snapshotter.
pub(super) struct SnapshotChains {
    snapshotter: String,
    parents: HashMap<String, String>,
    /// By name, a snapshot on top of it that belongs to no image, such as a container's.
    held: HashMap<String, String>,
    usages: HashMap<String, DiskSpace>,
}

impl SnapshotChains {
    pub(super) fn of(
        snapshotter: &str,
        all: &[Snapshot],
        usages: HashMap<String, DiskSpace>,
    ) -> SnapshotChains {
        let parents = all.iter().map(|snapshot| (snapshot.name.clone(), snapshot.parent.clone())).collect();
        let mut stacks =
            SnapshotChains { snapshotter: snapshotter.to_owned(), parents, held: HashMap::new(), usages };
        for user in all.iter().filter(|snapshot| snapshot.kind() != Kind::Committed) {
            let below: Vec<String> = stacks.down_from(&user.parent).map(str::to_owned).collect();
            stacks.held.extend(below.into_iter().map(|name| (name, user.name.clone())));
        }
        stacks
    }

    /// A committed snapshot and its parents.
    fn down_from<'a>(&'a self, top: &'a str) -> impl Iterator<Item = &'a str> {
        let present = |name: &&str| self.usages.contains_key(*name);
        let below = move |name: &&str| self.parents.get(*name).map(String::as_str).filter(present);
        // Bounds the loop, whatever the response contains.
        std::iter::successors(Some(top).filter(present), below).take(self.usages.len())
    }

    fn id(&self, name: &str) -> LayerId {
        format!("{} {name}", self.snapshotter).into()
    }

    fn layers(&self) -> impl Iterator<Item = MeasuredLayer> {
        let beside = if self.snapshotter == "overlayfs" { OVERLAY_DIRS } else { DiskSpace::ZERO };
        self.usages.iter().map(move |(name, usage)| MeasuredLayer {
            id: self.id(name),
            amount: *usage + beside,
            estimated: false,
            referenced_by: self.held.get(name).map(|user| format!("snapshot {user}")),
        })
    }
}

/// Layers are snapshots and the archives they were unpacked from. An image whose config is missing is skipped.
pub(super) fn layers(images: &[Image], content: &ContentGraph, stacks: &[SnapshotChains]) -> LayerUsageIndex {
    let mut layers = LayerUsageIndex::unknown();
    stacks.iter().flat_map(SnapshotChains::layers).for_each(|layer| layers.add(layer));
    let configs = || images.iter().filter_map(|image| content.blobs.get(image.id.as_str()));
    let mut leads: HashMap<&str, usize> = HashMap::new();
    for config in configs() {
        for digest in content.leading_to(&config.digest) {
            *leads.entry(digest).or_default() += 1;
        }
    }
    for config in configs() {
        let mut ids = Vec::new();
        for archive in content.archives(&config.digest) {
            let (id, amount) = (LayerId::from(format!("archive {archive}")), content.amount(archive));
            layers.add(MeasuredLayer { id: id.clone(), amount, estimated: false, referenced_by: None });
            ids.push(id);
        }
        for (snapshotter, top) in tops(config) {
            let of = stacks.iter().filter(|stacks| stacks.snapshotter == snapshotter);
            ids.extend(of.flat_map(|stacks| stacks.down_from(top).map(|name| stacks.id(name))));
        }
        // An index that leads to several images belongs to none alone.
        let leading = content.leading_to(&config.digest).into_iter().filter(|digest| leads[digest] == 1);
        let own = leading.chain([config.digest.as_str()]).map(|digest| content.amount(digest)).sum();
        layers.add_image(&config.digest, &ids, own, None);
    }
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(digest: &str, size: i64, labels: &[(&str, &str)]) -> Blob {
        let labels = labels.iter().map(|&(label, text)| (label.to_owned(), text.to_owned())).collect();
        Blob { digest: digest.into(), size, labels }
    }

    fn snapshot(name: &str, parent: &str, kind: Kind) -> Snapshot {
        Snapshot { name: name.into(), parent: parent.into(), kind: kind.into() }
    }

    fn of(bytes: u64, inodes: u64) -> DiskSpace {
        DiskSpace { bytes, inodes }
    }

    /// Two images on one base; an index leads to the first.
    fn content() -> ContentGraph {
        let image = |number: &str, top: &str| {
            let (config, archive) = (format!("config-{number}"), format!("archive-{number}"));
            let needs = [
                ("containerd.io/gc.ref.content.config", config.as_str()),
                ("containerd.io/gc.ref.content.l.0", "archive-base"),
                ("containerd.io/gc.ref.content.l.1", archive.as_str()),
            ];
            [
                blob(&format!("manifest-{number}"), 700, &needs),
                blob(&config, 900, &[("containerd.io/gc.ref.snapshot.overlayfs", top)]),
                blob(&archive, 5000, &[("containerd.io/uncompressed", "sha256:x")]),
            ]
        };
        let index = blob("index", 300, &[("containerd.io/gc.ref.content.m.0", "manifest-1")]);
        let blobs = [index, blob("archive-base", 4097, &[])];
        ContentGraph::of(blobs.into_iter().chain(image("1", "top-1")).chain(image("2", "top-2")).collect())
    }

    fn stacks(more: &[Snapshot]) -> SnapshotChains {
        let mut all = vec![
            snapshot("base", "", Kind::Committed),
            snapshot("top-1", "base", Kind::Committed),
            snapshot("top-2", "base", Kind::Committed),
        ];
        all.extend_from_slice(more);
        let usages = [("base", of(40960, 9)), ("top-1", of(8192, 2)), ("top-2", of(4096, 1))];
        SnapshotChains::of("overlayfs", &all, usages.map(|(name, usage)| (name.to_owned(), usage)).into())
    }

    fn images() -> Vec<Image> {
        ["config-1", "config-2", "unknown"].map(|id| Image { id: id.into(), ..Image::default() }).into()
    }

    /// The layers of an image, by id.
    fn layers_of(layers: &LayerUsageIndex, image: &str) -> Vec<(LayerId, DiskSpace)> {
        let known = layers.layers_of(image).unwrap().layers.iter().map(|&at| &layers.all()[at as usize]);
        let mut known: Vec<_> = known.map(|layer| (layer.id.clone(), layer.amount)).collect();
        known.sort_by(|(a, _), (b, _)| a.cmp(b));
        known
    }

    #[test]
    fn an_image_has_its_archives_and_snapshots_and_beside_them_its_documents() {
        let found = layers(&images(), &content(), &[stacks(&[])]);
        let expected = [
            ("archive archive-1", of(8192, 1)),
            ("archive archive-base", of(8192, 1)),
            ("overlayfs base", of(40960 + 8192, 11)),
            ("overlayfs top-1", of(8192 + 8192, 4)),
        ];
        assert_eq!(layers_of(&found, "config-1"), expected.map(|(id, amount)| (id.into(), amount)));
        assert_eq!(found.layers_of("config-1").unwrap().own, of(3 * 4096, 3), "config, manifest, index");
        assert_eq!(found.layers_of("config-2").unwrap().own, of(2 * 4096, 2), "config, manifest");
        assert_eq!(found.layers_of("unknown"), None);
        assert!(found.all().iter().all(|layer| !layer.estimated && layer.referenced_by.is_none()));
    }

    #[test]
    fn the_layers_below_a_container_are_retained() {
        let stacks = stacks(&[snapshot("container", "top-2", Kind::Active)]);
        let found = layers(&images(), &content(), &[stacks]);
        let held = found.all().iter().filter(|layer| layer.referenced_by.is_some());
        let mut held: Vec<&str> = held.map(|layer| layer.id.as_str()).collect();
        held.sort_unstable();
        assert_eq!(held, ["overlayfs base", "overlayfs top-2"]);
    }

    #[test]
    fn snapshots_in_a_circle_do_not_hang_it() {
        let all = [snapshot("a", "b", Kind::Committed), snapshot("b", "a", Kind::Committed)];
        let usages = ["a", "b"].map(|name| (name.to_owned(), of(1, 1))).into();
        assert_eq!(SnapshotChains::of("overlayfs", &all, usages).down_from("a").count(), 2);
    }
}
