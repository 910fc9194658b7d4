//! Ordinary gzip layers whose image has a SOCI index.

use super::*;

pub(super) const FIXTURES: [&str; 2] = ["soci", "soci-members"];
const INDEX: &str = "application/vnd.amazon.soci.index.v2+json";

/// A layer, and the table of contents beside it.
pub(super) struct Indexed {
    pub(super) layer: Fixture,
    ztoc: Vec<u8>,
}

impl Indexed {
    pub(super) fn load(name: &'static str) -> Indexed {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/toc");
        let blob = fs_err::read(dir.join(format!("{name}.blob"))).unwrap();
        let layer = Fixture::of_blob(name, blob, serde_json::Map::new());
        Indexed { layer, ztoc: fs_err::read(dir.join(format!("{name}.ztoc"))).unwrap() }
    }

    /// Puts an image with this layer on top of others, which the index does not have.
    fn put_on(&self, registry: &FaultRegistry, below: &[&Fixture]) -> Reference {
        let index = self.put_index(registry);
        let layers: Vec<&Fixture> = below.iter().copied().chain([&self.layer]).collect();
        put_annotated(registry, "lazy/app", &layers, &json!({"com.amazon.soci.index-digest": index}))
    }

    pub(super) fn put(&self, registry: &FaultRegistry) -> Reference {
        self.put_on(registry, &[])
    }

    /// Puts the index alone; returns its digest.
    fn put_index(&self, registry: &FaultRegistry) -> String {
        let (ztoc, config) = (registry.put_blob(self.ztoc.clone()), registry.put_blob("{}"));
        let index = json!({"schemaVersion": 2, "mediaType": MANIFEST,
            "config": {"mediaType": INDEX, "digest": config, "size": 2},
            "layers": [{"mediaType": "application/octet-stream", "digest": ztoc, "size": self.ztoc.len(),
                "annotations": {"com.amazon.soci.image-layer-digest": digest(&self.layer.blob),
                    "com.amazon.soci.image-layer-mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}}]});
        let index = index.to_string();
        let found = digest(index.as_bytes());
        registry.put_manifest("lazy/app", "index", MANIFEST, index);
        found
    }

    fn position(&self, bytes: &[u8]) -> usize {
        self.ztoc.windows(bytes.len()).position(|part| part == bytes).unwrap()
    }

    /// The ztoc with other bytes where these are.
    fn with_ztoc(mut self, bytes: &[u8], others: &[u8]) -> Indexed {
        let at = self.position(bytes);
        self.ztoc[at..at + others.len()].copy_from_slice(others);
        self
    }

    /// The ztoc whose second span begins some plain bytes before its place.
    fn with_early_span(mut self) -> Indexed {
        // Behind the size of spans and the first checkpoint, then an offset in the blob.
        let at = self.position(&250_000_u64.to_le_bytes()) + 8 + (17 + 32768) + 8;
        let place: &mut [u8; 8] = self.ztoc[at..].first_chunk_mut().unwrap();
        *place = (u64::from_le_bytes(*place) - 16).to_le_bytes();
        self
    }
}

async fn wait_until_ended(node: &LazyNode) {
    let ended = async {
        while !node.store().filling_layers().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, ended).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_an_ordinary_layer_are_read_before_it_is_complete() {
    for name in FIXTURES {
        // Both have the same archive.
        let Some(node) = LazyNode::new().await else { return };
        let (registry, indexed) = (FaultRegistry::start(), Indexed::load(name));
        let fixture = &indexed.layer;
        let image = indexed.put(&registry);
        hold_background(&registry, fixture);
        let pulled = node.pull(&image).await;
        assert!(node.is_partial(&pulled), "{name}");
        assert_eq!(registry.bytes_sent(&digest(&fixture.blob)), 0, "{name}: nothing of the layer came");
        let mounted = node.mount(&pulled, name);
        for (path, content) in fixture.files() {
            let read = mounted.read(&path).await;
            assert!(read.unwrap() == content, "{name}: {}", path.display());
        }
        assert!(node.is_partial(&pulled), "{name}: its reads did not wait for all of it");
        // Spans, each once; and attempts of the background, which get nothing.
        let size = fixture.blob.len() as u64;
        assert!(registry.bytes_sent(&digest(&fixture.blob)) <= size + 10, "{name}: a span was fetched again");
        registry.clear_faults();
        node.complete(&image).await;
        assert!(!node.is_partial(&pulled), "{name}");
        for (path, content) in fixture.files() {
            assert!(mounted.read(&path).await.unwrap() == content, "{name}: {}", path.display());
        }
        let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
        assert!(checked.problems.is_empty(), "{name}: {:?}", checked.problems);
        drop(mounted);
        let mut archive = Vec::new();
        let export = ExportRequest { image: pulled.id.as_str().into(), name: None };
        node.store().begin_export(&[export]).unwrap().write_oci(&mut archive).unwrap();
        assert!(archive.windows(fixture.plain.len()).any(|window| window == fixture.plain), "{name}");
        let reclaimed = node.store().reclaim(ReclaimTrigger::Pressure, &ClockReading::now());
        assert_eq!(reclaimed.freed.downloads.inodes, 0, "{name}: nothing of its table is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_is_fetched_only_for_lazy_pulls_and_once() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, indexed) = (FaultRegistry::start(), Indexed::load("soci"));
    let other = Fixture { annotations: serde_json::Map::new(), ..Fixture::made("below", &two_files(1)) };
    let image = indexed.put_on(&registry, &[&other]);
    let index = indexed.put_index(&registry);
    hold_background(&registry, &indexed.layer);
    let pulled = node.pull(&image).await;
    let is_partial = pulled.layers.iter().map(|layer| {
        let layer = node.store().layer(&layer.key).unwrap().unwrap();
        layer.record().partial.is_some()
    });
    assert_eq!(is_partial.collect::<Vec<_>>(), [false, true], "a layer without a ztoc is pulled in full");
    assert_eq!(registry.requests_for(&index).len(), 1);
    assert_eq!(registry.requests_for(&digest(&indexed.ztoc)).len(), 1);
    registry.clear_faults();
    node.complete(&image).await;
    assert_eq!(registry.requests_for(&index).len(), 1, "all layers are there");

    let Some(node) = LazyNode::new().await else { return };
    registry.forget_requests();
    node.complete(&image).await;
    assert_eq!(registry.requests_for(&index), [], "the pull is not lazy");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_index_or_table_a_layer_is_pulled_in_full() {
    let Some(node) = LazyNode::new().await else { return };
    for (number, damage) in ["index", "ztoc", "version"].into_iter().enumerate() {
        let (registry, mut indexed) = (FaultRegistry::start(), Indexed::load("soci"));
        if damage == "version" {
            indexed = indexed.with_ztoc(b"0.9", b"1.0");
        }
        let image = indexed.put(&registry);
        let missing = if damage == "ztoc" { digest(&indexed.ztoc) } else { indexed.put_index(&registry) };
        if damage != "version" {
            registry.fault(FaultTrigger::path(missing), ResponseFault::status(404));
        }
        let pulled = node.pull(&image).await;
        assert!(!node.is_partial(&pulled), "{damage}");
        let mounted = node.mount(&pulled, &format!("full{number}"));
        let (path, content) = indexed.layer.files().remove(0);
        assert!(mounted.read(&path).await.unwrap() == content, "{damage}");
        drop(mounted);
        node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_lies_is_found() {
    let Some(node) = LazyNode::new().await else { return };
    let lies: [fn(Indexed) -> Indexed; 3] = [
        |indexed| indexed.with_ztoc(&0o4755_u64.to_le_bytes(), &0o755_u64.to_le_bytes()),
        |indexed| indexed.with_ztoc(b"usr/bin/last", b"usr/bin/lost"),
        Indexed::with_early_span,
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let registry = FaultRegistry::start();
        let indexed = lie(Indexed::load("soci"));
        let image = indexed.put(&registry);
        hold_background(&registry, &indexed.layer);
        let pulled = node.pull(&image).await;
        assert!(node.is_partial(&pulled), "{number}");
        let mounted = node.mount(&pulled, &format!("lie{number}"));
        // As the index says: it may be other bytes than those of the archive.
        for (path, _) in indexed.layer.files() {
            let _ = mounted.read(&path).await;
        }
        drop(mounted);
        registry.clear_faults();
        wait_until_ended(&node).await;
        let layer = node.store().layer(&pulled.layers[0].key).unwrap().unwrap();
        assert!(layer.record().damaged, "{number}");
        drop(layer);
        let pulled = node.pull(&image).await;
        assert!(!node.is_partial(&pulled), "{number}: it is pulled in full");
        let mounted = node.mount(&pulled, &format!("true{number}"));
        for (path, content) in indexed.layer.files() {
            assert!(mounted.read(&path).await.unwrap() == content, "{number}: {}", path.display());
        }
        drop(mounted);
        node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_of_a_span_reach_no_reader() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, indexed) = (FaultRegistry::start(), Indexed::load("soci"));
    let (image, blob) = (indexed.put(&registry), digest(&indexed.layer.blob));
    hold_background(&registry, &indexed.layer);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    registry.fault(FaultTrigger::path(&blob).ranged().nth(1..=2), ResponseFault::Corrupt);
    let files = indexed.layer.files();
    let (path, content) = files.iter().find(|(path, _)| path.ends_with("text")).unwrap();
    assert!(mounted.read(path).await.unwrap() == *content);
    registry.clear_faults();
    node.complete(&image).await;
}

/// The blob of a layer with a changed bit, which can be inflated all the same, to as many bytes.
fn flipped(layer: &Fixture) -> Vec<u8> {
    let inflated = |blob: &[u8]| {
        let mut plain = Vec::new();
        let deflated = &blob[10..blob.len() - 8];
        flate2::read::DeflateDecoder::new(deflated).read_to_end(&mut plain).is_ok().then_some(plain)
    };
    let flip = |at: usize| {
        let mut blob = layer.blob.clone();
        blob[at] ^= 1;
        let is_other = |plain: &Vec<u8>| plain.len() == layer.plain.len() && *plain != layer.plain;
        inflated(&blob).filter(is_other).map(|_| blob)
    };
    (5000..9000).find_map(flip).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_in_the_background_reach_no_reader() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, indexed) = (FaultRegistry::start(), Indexed::load("soci"));
    let (image, blob) = (indexed.put(&registry), digest(&indexed.layer.blob));
    registry.put_blob_as(&blob, flipped(&indexed.layer));
    let pulled = node.pull(&image).await;
    let size = indexed.layer.blob.len() as u64;
    let fetched = async {
        while registry.bytes_sent(&blob) < 2 * size {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, fetched).await.unwrap();
    registry.put_blob_as(&blob, indexed.layer.blob.clone());
    let mounted = node.mount(&pulled, "app");
    for (path, content) in indexed.layer.files() {
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
    node.complete(&image).await;
    for (path, content) in indexed.layer.files() {
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
}

#[test]
fn spans_that_have_come_are_read_after_a_restart_without_the_registry() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, indexed) = (FaultRegistry::start(), Indexed::load("soci"));
    let image = indexed.put(&registry);
    hold_background(&registry, &indexed.layer);
    let Some((runtime, node)) = LazyNode::start(&keeper) else { return };
    let pulled = runtime.block_on(node.pull(&image));
    let mounted = node.mount(&pulled, "app");
    let files = indexed.layer.files();
    let (path, content) = files.iter().find(|(path, _)| path.ends_with("text")).unwrap();
    assert!(runtime.block_on(mounted.read(path)).unwrap() == *content);
    drop(mounted);
    let dir = node.stop(runtime);

    registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, before) = runtime.block_on(LazyNode::in_dir(dir, keeper, LONGEST_WAIT)).unwrap();
    assert_eq!(before, GuardedBefore { layers: 1, lost: Vec::new() });
    let reclaimed = node.store().reclaim(ReclaimTrigger::Pressure, &ClockReading::now());
    assert!(reclaimed.error.is_none(), "{reclaimed:?}");
    assert!(node.is_partial(&pulled), "its table was read again");
    let mounted = node.mount(&pulled, "again");
    assert!(runtime.block_on(mounted.read(path)).unwrap() == *content);
    registry.clear_faults();
    runtime.block_on(node.complete(&image));
    for (path, content) in files {
        assert!(runtime.block_on(mounted.read(&path)).unwrap() == content, "{}", path.display());
    }
}
