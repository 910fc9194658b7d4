//! Computes layers and the images that use them from blobs and snapshots. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};

use larder::backend::Image;
use larder::gc::{DiskSpace, LayerUsageIndex, MeasuredLayer};
use larder::reference::LayerId;

use crate::proto::content::Info as Blob;
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::{Info as Snapshot, Kind};

/// Prefix of the labels of a blob that name the blobs it references.
pub(crate) const NEEDS_BLOB: &str = "containerd.io/gc.ref.content";

/// Prefix of the label of a config that names the top snapshot of its image; the snapshotter's name follows.
pub(crate) const NEEDS_SNAPSHOT: &str = "containerd.io/gc.ref.snapshot.";

/// Blobs are files, and use whole blocks of this size on the filesystems of nodes.
const BLOCK: u64 = 4096;

/// Disk usage of an overlayfs snapshot besides its files: its directory, and the kernel's work directory.
const OVERLAY_DIRS: DiskSpace = DiskSpace { bytes: 2 * BLOCK, inodes: 2 };

/// containerd's own snapshotters whose snapshots share no blocks. `native` copies files, with shared blocks where the
/// filesystem can; `btrfs` and `zfs` compress. Others may share snapshots between namespaces, or fetch their content
/// later.
const EXACT_SNAPSHOTTERS: [&str; 4] = ["overlayfs", "devmapper", "blockfile", "erofs"];

/// The blobs and their references.
pub(crate) struct ContentGraph {
    blobs: HashMap<String, Blob>,
    /// By digest, the blobs that reference it.
    above: HashMap<String, Vec<String>>,
    /// By digest, what retains it beside the images that CRI lists.
    held: HashMap<String, String>,
}

impl ContentGraph {
    pub(crate) fn of(blobs: Vec<Blob>) -> ContentGraph {
        let mut above: HashMap<String, Vec<String>> = HashMap::new();
        for blob in &blobs {
            for child in children(blob) {
                above.entry(child.to_owned()).or_default().push(blob.digest.clone());
            }
        }
        let blobs = blobs.into_iter().map(|blob| (blob.digest.clone(), blob)).collect();
        ContentGraph { blobs, above, held: HashMap::new() }
    }

    /// Marks a blob as retained.
    pub(crate) fn hold(&mut self, digest: String, by: &str) {
        self.held.entry(digest).or_insert_with(|| by.to_owned());
    }

    /// A blob and all that it references.
    pub(crate) fn below<'a>(&'a self, digest: &'a str) -> Vec<&'a str> {
        let (mut found, mut seen) = (vec![digest], HashSet::from([digest]));
        let mut next = 0;
        while let Some(blob) = found.get(next) {
            let blobs = self.blobs.get(*blob).into_iter().flat_map(children);
            let new: Vec<&str> = blobs.filter(|digest| seen.insert(digest)).collect();
            found.extend(new);
            next += 1;
        }
        found
    }

    /// The snapshots that a blob references, by snapshotter and name.
    pub(crate) fn top_snapshots(&self, digest: &str) -> impl Iterator<Item = (String, String)> {
        let tops = self.blobs.get(digest).into_iter().flat_map(tops);
        tops.map(|(snapshotter, name)| (snapshotter.to_owned(), name.to_owned()))
    }

    /// Whether an image needs blobs that are missing: layers of an image that this snapshotter has unpacked or got by
    /// reference. Manifests of other platforms, which were never fetched, do not count.
    pub(crate) fn lacks_layers(&self, target: &str, snapshotter: &str) -> bool {
        let below = self.below(target);
        let configs =
            below.iter().filter(|digest| self.top_snapshots(digest).any(|(of, _)| of == snapshotter));
        configs.flat_map(|config| self.archives(config)).any(|archive| !self.blobs.contains_key(archive))
    }

    /// The blobs with this label.
    pub(crate) fn labelled(&self, label: &str) -> impl Iterator<Item = &str> {
        self.blobs.values().filter(move |blob| blob.labels.contains_key(label)).map(|blob| &*blob.digest)
    }

    /// The snapshotters that images are unpacked with.
    pub(crate) fn snapshotters(&self) -> BTreeSet<&str> {
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
pub(crate) struct SnapshotChains {
    snapshotter: String,
    parents: HashMap<String, String>,
    /// By name, what retains it beside the images that CRI lists, such as a container's snapshot.
    held: HashMap<String, String>,
    /// The labels of all.
    labels: HashMap<String, Vec<String>>,
    usages: HashMap<String, DiskSpace>,
}

impl SnapshotChains {
    pub(crate) fn of(
        snapshotter: &str,
        all: &[Snapshot],
        usages: HashMap<String, DiskSpace>,
    ) -> SnapshotChains {
        let parents = all.iter().map(|snapshot| (snapshot.name.clone(), snapshot.parent.clone())).collect();
        let labels =
            all.iter().map(|snapshot| (snapshot.name.clone(), snapshot.labels.keys().cloned().collect()));
        let (snapshotter, labels) = (snapshotter.to_owned(), labels.collect());
        let mut chains = SnapshotChains { snapshotter, parents, held: HashMap::new(), labels, usages };
        for user in all.iter().filter(|snapshot| snapshot.kind() != Kind::Committed) {
            chains.hold(&user.name, &format!("snapshot {}", user.name));
        }
        chains
    }

    /// Whether these are the snapshots of this snapshotter.
    pub(crate) fn is_of(&self, snapshotter: &str) -> bool {
        self.snapshotter == snapshotter
    }

    /// Marks a snapshot and its parents as retained.
    pub(crate) fn hold(&mut self, name: &str, by: &str) {
        // A snapshot that is not committed belongs to no image.
        let is_committed = self.usages.contains_key(name);
        let top = if is_committed { Some(name) } else { self.parents.get(name).map(String::as_str) };
        let below: Vec<String> =
            top.into_iter().flat_map(|top| self.down_from(top)).map(str::to_owned).collect();
        for name in below {
            self.held.entry(name).or_insert_with(|| by.to_owned());
        }
    }

    /// The committed snapshots that something retains beside the images, and what.
    pub(crate) fn into_held(self) -> HashMap<String, String> {
        self.held
    }

    /// The snapshots with this label, by snapshotter and name.
    pub(crate) fn labelled(&self, label: &str) -> impl Iterator<Item = (String, String)> {
        let found = self.labels.iter().filter(move |(_, labels)| labels.iter().any(|known| known == label));
        found.map(|(name, _)| (self.snapshotter.clone(), name.clone()))
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

    fn layers(&self, estimated: bool) -> impl Iterator<Item = MeasuredLayer> {
        let beside = if self.snapshotter == "overlayfs" { OVERLAY_DIRS } else { DiskSpace::ZERO };
        let estimated = estimated || !EXACT_SNAPSHOTTERS.contains(&&*self.snapshotter);
        self.usages.iter().map(move |(name, usage)| MeasuredLayer {
            id: self.id(name),
            amount: *usage + beside,
            estimated,
            referenced_by: self.held.get(name).cloned(),
        })
    }
}

/// Which blob has the ID of an image as its digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageIdKind {
    /// The config, as in CRI.
    Config,
    /// The target of the image's records, a manifest or an index, as in Docker Engine.
    Target,
}

/// Layers are snapshots and the archives they were unpacked from. An image without its blob is skipped. The sizes
/// are estimated unless everything that retains a layer is known, which includes the image `records`.
pub(crate) fn layers(
    images: &[Image],
    id_kind: ImageIdKind,
    content: &ContentGraph,
    stacks: &[SnapshotChains],
    records: Option<&[ImageRecord]>,
) -> LayerUsageIndex {
    let mut layers = LayerUsageIndex::unknown();
    let estimated = records.is_none();
    stacks.iter().flat_map(|chains| chains.layers(estimated)).for_each(|layer| layers.add(layer));
    let listed: Vec<ListedImage<'_>> =
        images.iter().filter_map(|image| ListedImage::of(image, id_kind, content)).collect();
    let mut leads: HashMap<&str, usize> = HashMap::new();
    for digest in listed.iter().flat_map(|image| &image.metadata) {
        *leads.entry(digest).or_default() += 1;
    }
    for listed in &listed {
        let ListedImage { image, config, metadata, archives } = listed;
        let mut ids = Vec::new();
        let targets = match id_kind {
            ImageIdKind::Config => targets_of(image, records.unwrap_or_default()),
            ImageIdKind::Target => vec![image.id.as_str()],
        };
        let platforms = listed.other_platforms(&targets, content);
        for archive in archives.union(&platforms).copied() {
            let (id, amount) = (LayerId::from(format!("archive {archive}")), content.amount(archive));
            let referenced_by = content.held.get(archive).cloned();
            layers.add(MeasuredLayer { id: id.clone(), amount, estimated, referenced_by });
            ids.push(id);
        }
        let configs = platforms.iter().filter_map(|digest| content.blobs.get(*digest)).chain([*config]);
        for (snapshotter, top) in configs.flat_map(tops) {
            let of = stacks.iter().filter(|stacks| stacks.snapshotter == snapshotter);
            ids.extend(of.flat_map(|stacks| stacks.down_from(top).map(|name| stacks.id(name))));
        }
        // What several images have belongs to none alone. What is one of the layers counts there.
        let own =
            metadata.iter().filter(|digest| leads[*digest] == 1 && !content.held.contains_key(**digest));
        let own =
            own.filter(|digest| !platforms.contains(*digest)).map(|digest| content.amount(digest)).sum();
        layers.add_image(&image.id, &ids, own);
    }
    layers
}

/// An image whose blobs are known.
struct ListedImage<'a> {
    image: &'a Image,
    /// Its config, or the blob with its ID if nothing of the image is unpacked.
    config: &'a Blob,
    /// The config, and the manifests and indexes through which the image has it.
    metadata: BTreeSet<&'a str>,
    /// The archives of the layers of the config.
    archives: BTreeSet<&'a str>,
}

impl<'a> ListedImage<'a> {
    fn of(image: &'a Image, id_kind: ImageIdKind, content: &'a ContentGraph) -> Option<ListedImage<'a>> {
        let named = content.blobs.get(image.id.as_str())?;
        let of_config =
            |config: &'a Blob| (content.leading_to(&config.digest), content.archives(&config.digest));
        let (config, (mut metadata, archives)) = match id_kind {
            ImageIdKind::Config => (named, of_config(named)),
            ImageIdKind::Target => {
                let below: BTreeSet<&str> = content.below(&named.digest).into_iter().collect();
                let mut blobs = below.iter().filter_map(|digest| content.blobs.get(*digest));
                let config = blobs.find(|blob| tops(blob).next().is_some()).unwrap_or(named);
                let (leading, archives) = of_config(config);
                (config, (&leading & &below, &archives & &below))
            }
        };
        metadata.insert(&config.digest);
        Some(ListedImage { image, config, metadata, archives })
    }

    /// The blobs that the image retains by these targets beside its own: the manifests, configs and archives of other
    /// platforms, where an index was fetched for several.
    fn other_platforms(&self, targets: &[&'a str], content: &'a ContentGraph) -> BTreeSet<&'a str> {
        let below = targets.iter().flat_map(|target| content.below(target));
        let present = below.filter(|digest| content.blobs.contains_key(*digest));
        present.filter(|digest| !self.metadata.contains(digest) && !self.archives.contains(digest)).collect()
    }
}

/// Whether what a record stands for is an image with this ID, or has it among others.
pub(crate) fn leads_to(content: &ContentGraph, record: &ImageRecord, id: &str) -> bool {
    record.target.as_ref().is_some_and(|target| content.below(&target.digest).contains(&id))
}

/// The targets of the records of an image.
fn targets_of<'a>(image: &Image, records: &'a [ImageRecord]) -> Vec<&'a str> {
    let names = || image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str);
    let own =
        records.iter().filter(|record| names().chain([image.id.as_str()]).any(|name| name == record.name));
    own.filter_map(|record| Some(record.target.as_ref()?.digest.as_str())).collect()
}

/// A size as a Go integer.
pub(crate) fn positive(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::holders::{self, Holder};
    use crate::proto::images::Descriptor;

    fn blob(digest: &str, size: i64, labels: &[(&str, &str)]) -> Blob {
        let labels = labels.iter().map(|&(label, text)| (label.to_owned(), text.to_owned())).collect();
        Blob { digest: digest.into(), size, labels }
    }

    fn snapshot(name: &str, parent: &str, kind: Kind) -> Snapshot {
        Snapshot { name: name.into(), parent: parent.into(), kind: kind.into(), ..Snapshot::default() }
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
        let found = layers(&images(), ImageIdKind::Config, &content(), &[stacks(&[])], Some(&[]));
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

    /// An index whose image records were fetched for two platforms; CRI lists the one of the node.
    #[test]
    fn an_image_has_the_content_of_all_platforms_that_its_record_leads_to() {
        let (mut content, stacks) = (content(), stacks(&[]));
        let index = blob(
            "index",
            300,
            &[
                ("containerd.io/gc.ref.content.m.0", "manifest-1"),
                ("containerd.io/gc.ref.content.m.1", "manifest-2"),
            ],
        );
        content.blobs.insert("index".into(), index);
        content.above.entry("manifest-2".into()).or_default().push("index".into());
        let target = Some(Descriptor { digest: "index".into(), ..Descriptor::default() });
        let records = [ImageRecord { name: "r.example/app:1".into(), target, ..ImageRecord::default() }];
        let image =
            Image { id: "config-1".into(), repo_tags: vec!["r.example/app:1".into()], ..Image::default() };
        let found = layers(&[image], ImageIdKind::Config, &content, &[stacks], Some(&records));
        let ids: Vec<String> =
            layers_of(&found, "config-1").into_iter().map(|(id, _)| id.to_string()).collect();
        let expected = [
            "archive archive-1",
            "archive archive-2",
            "archive archive-base",
            "archive config-2",
            "archive manifest-2",
            "overlayfs base",
            "overlayfs top-1",
            "overlayfs top-2",
        ];
        assert_eq!(ids, expected);
        assert_eq!(found.layers_of("config-1").unwrap().own, of(3 * 4096, 3), "config, manifest, index");
    }

    /// Docker Engine lists the targets of records; two of them lead to one config here.
    #[test]
    fn an_image_of_docker_has_what_is_below_its_target() {
        let images = ["index", "manifest-1", "manifest-2", "archive-2"];
        let images = images.map(|id| Image { id: id.into(), ..Image::default() });
        let found = layers(&images, ImageIdKind::Target, &content(), &[stacks(&[])], Some(&[]));
        let of_first = layers_of(&found, "manifest-1");
        let ids: Vec<&str> = of_first.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(ids, ["archive archive-1", "archive archive-base", "overlayfs base", "overlayfs top-1"]);
        assert_eq!(layers_of(&found, "index"), of_first);
        let own = |image| found.layers_of(image).unwrap().own;
        assert_eq!(own("index"), of(4096, 1), "not what manifest-1 has, too");
        assert_eq!(own("manifest-1"), of(0, 0));
        assert_eq!(own("manifest-2"), of(2 * 4096, 2));
        assert_eq!(
            (layers_of(&found, "archive-2"), own("archive-2")),
            (Vec::new(), of(8192, 1)),
            "not unpacked"
        );
    }

    #[test]
    fn the_layers_below_a_container_are_retained() {
        let stacks = stacks(&[snapshot("container", "top-2", Kind::Active)]);
        let found = layers(&images(), ImageIdKind::Config, &content(), &[stacks], Some(&[]));
        let held = found.all().iter().filter(|layer| layer.referenced_by.is_some());
        let mut held: Vec<&str> = held.map(|layer| layer.id.as_str()).collect();
        held.sort_unstable();
        assert_eq!(held, ["overlayfs base", "overlayfs top-2"]);
    }

    /// The layers that removing images does not free, and what retains them.
    fn held(holders: &[Holder]) -> Vec<(String, String)> {
        let (mut content, mut chains) = (content(), vec![stacks(&[])]);
        holders::mark(holders, &mut content, &mut chains);
        let found = layers(&images(), ImageIdKind::Config, &content, &chains, Some(&[]));
        let held =
            found.all().iter().filter_map(|layer| Some((layer.id.to_string(), layer.referenced_by.clone()?)));
        let mut held: Vec<_> = held.collect();
        held.sort();
        held
    }

    fn pairs(held: &[(&str, &str)]) -> Vec<(String, String)> {
        held.iter().map(|&(layer, by)| (layer.to_owned(), by.to_owned())).collect()
    }

    #[test]
    fn a_lease_retains_what_its_resources_reference_and_a_flat_one_only_these() {
        let lease = |flat| Holder {
            by: "lease x".into(),
            blobs: vec!["manifest-1".into(), "archive-2".into()],
            snapshots: Vec::new(),
            flat,
        };
        assert_eq!(held(&[lease(true)]), pairs(&[("archive archive-2", "lease x")]));
        let all = [
            "archive archive-1",
            "archive archive-2",
            "archive archive-base",
            "overlayfs base",
            "overlayfs top-1",
        ];
        assert_eq!(held(&[lease(false)]), pairs(&all.map(|layer| (layer, "lease x"))));
        let snapshots = vec![("overlayfs".into(), "top-2".into()), ("native".into(), "top-1".into())];
        let lease = Holder { by: "lease y".into(), blobs: Vec::new(), snapshots, flat: true };
        assert_eq!(held(&[lease]), pairs(&[("overlayfs base", "lease y"), ("overlayfs top-2", "lease y")]));
    }

    #[test]
    fn blobs_that_another_namespace_has_are_not_freed_and_snapshots_are() {
        let others = ["archive-1", "config-1", "manifest-1", "index"].map(str::to_owned).to_vec();
        let (mut content, mut chains) = (content(), vec![stacks(&[])]);
        holders::mark(&[Holder::namespace("moby", others)], &mut content, &mut chains);
        let found = layers(&images(), ImageIdKind::Config, &content, &chains, Some(&[]));
        assert_eq!(found.layers_of("config-1").unwrap().own, DiskSpace::ZERO);
        assert_eq!(found.layers_of("config-2").unwrap().own, of(2 * 4096, 2));
        let held = found.all().iter().filter(|layer| layer.referenced_by.is_some());
        assert_eq!(held.map(|layer| layer.id.as_str()).collect::<Vec<_>>(), ["archive archive-1"]);
    }

    #[test]
    fn an_image_that_cri_does_not_list_retains_its_layers() {
        let record = |name: &str, digest: &str| ImageRecord {
            name: name.into(),
            target: Some(Descriptor { digest: digest.into(), ..Descriptor::default() }),
            ..ImageRecord::default()
        };
        let records = [record("a:1", "index"), record("b:1", "manifest-2"), record("c:1", "archive-base")];
        let unlisted = |images: &[Image]| holders::unlisted(&records, images, &content());
        assert_eq!(held(&unlisted(&images())), pairs(&[("archive archive-base", "image c:1")]));
        let by: Vec<String> = unlisted(&images()[1..]).into_iter().map(|holder| holder.by).collect();
        assert_eq!(by, ["image a:1", "image c:1"]);
    }

    #[test]
    fn labelled_roots_are_retained() {
        let root = ("containerd.io/gc.root".to_owned(), "now".to_owned());
        let (mut content, mut top) = (content(), snapshot("top-3", "top-1", Kind::Committed));
        content.blobs.get_mut("archive-2").unwrap().labels.insert(root.0.clone(), root.1.clone());
        top.labels.insert(root.0, root.1);
        let mut chains = vec![stacks(&[top])];
        let roots = holders::labelled_roots(&content, &chains);
        holders::mark(&roots, &mut content, &mut chains);
        let found = layers(&images(), ImageIdKind::Config, &content, &chains, Some(&[]));
        let mut held: Vec<&str> = found
            .all()
            .iter()
            .filter(|layer| layer.referenced_by.is_some())
            .map(|layer| layer.id.as_str())
            .collect();
        held.sort_unstable();
        assert_eq!(held, ["archive archive-2", "overlayfs base", "overlayfs top-1"]);
    }

    #[test]
    fn sizes_are_estimated_while_it_is_unknown_what_else_retains_layers() {
        let found = layers(&images(), ImageIdKind::Config, &content(), &[stacks(&[])], None);
        assert!(!found.all().is_empty() && found.all().iter().all(|layer| layer.estimated));
        // One that is not containerd's own, and one whose snapshots may share blocks.
        for snapshotter in ["remote", "native"] {
            let base = snapshot("base", "", Kind::Committed);
            let other = SnapshotChains::of(snapshotter, &[base], [("base".to_owned(), of(4096, 1))].into());
            let found = layers(&images(), ImageIdKind::Config, &content(), &[stacks(&[]), other], Some(&[]));
            let estimated: Vec<&str> =
                found.all().iter().filter(|layer| layer.estimated).map(|layer| layer.id.as_str()).collect();
            assert_eq!(estimated, [format!("{snapshotter} base")]);
        }
    }

    #[test]
    fn snapshots_in_a_circle_do_not_hang_it() {
        let all = [snapshot("a", "b", Kind::Committed), snapshot("b", "a", Kind::Committed)];
        let usages = ["a", "b"].map(|name| (name.to_owned(), of(1, 1))).into();
        assert_eq!(SnapshotChains::of("overlayfs", &all, usages).down_from("a").count(), 2);
    }
}
