//! Damaged layers that are repaired with parts of their blobs.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use larder::backend::ProgressReporter;
use larder::reference::{Digest, Reference};
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::fsck::{FsckOptions, FsckReport};
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault, digest};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SHA256: usize = 32;

/// Numbers that look random, and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Bytes that a compressor makes half as long.
    fn content(&mut self, length: u64) -> Vec<u8> {
        (0..length).map(|_| b'a' + u8::try_from(self.below(16)).unwrap()).collect()
    }
}

/// An archive of files large and small, 30 MiB in total.
fn archive() -> Vec<u8> {
    let mut numbers = Numbers(38);
    let mut archive = TarBuilder::new().with(TarBuilderEntry::dir("lib"));
    for number in 0..12 {
        let length = [40, 5_000, 700_000, 6 * MIB][number % 4] + numbers.below(4096);
        let content = numbers.content(length);
        archive = archive.with(TarBuilderEntry::file(format!("lib/{number}"), content));
    }
    archive.with(TarBuilderEntry::hard_link("lib/again", "lib/3")).finish()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(4));
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn frames(plain: &[u8]) -> Vec<u8> {
    plain.chunks(3 << 20).flat_map(|part| zstd::encode_all(part, 1).unwrap()).collect()
}

/// A store with one image of one layer.
struct RepairNode {
    dir: TempDir,
    registry: FaultRegistry,
    puller: StorePuller,
    name: Reference,
    blob: String,
    image: ImageRecord,
    /// The layer's file, and how many bytes of it are verified.
    file: PathBuf,
    verified: u64,
    whole: Vec<u8>,
}

impl RepairNode {
    async fn with(blob: Vec<u8>) -> RepairNode {
        RepairNode::of(blob, &archive()).await
    }

    /// A layer of this archive.
    async fn of(blob: Vec<u8>, plain: &[u8]) -> RepairNode {
        let (dir, registry) = (tempfile::tempdir().unwrap(), FaultRegistry::start());
        let media = "application/vnd.oci.image.layer.v1.tar+gzip";
        let put = registry.put_image("repair/app", "1", media, &[blob], &[digest(plain)]);
        let name = Reference::parse(&registry.image("repair/app:1")).unwrap();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
        let puller = StorePuller::new(
            store,
            RegistryClient::new(RegistryConfig::default()),
            StorePullConfig::default(),
        );
        let image = puller.pull(&name, None, &ProgressReporter::unwatched()).await.unwrap();
        let layer = puller.store().layer(&image.layers[0].key).unwrap().unwrap();
        let (file, verified) = (layer.path().to_owned(), layer.record().erofs.bytes);
        let whole = fs_err::read(&file).unwrap()[..usize::try_from(verified).unwrap()].to_vec();
        registry.forget_requests();
        let [blob] = &put.layers[..] else { panic!("one layer") };
        RepairNode { blob: blob.clone(), dir, registry, puller, name, image, file, verified, whole }
    }

    /// Changes bytes of the layer's file.
    fn damage(&self, offset: u64, length: usize) {
        let file = fs_err::OpenOptions::new().read(true).write(true).open(&self.file).unwrap();
        let mut bytes = vec![0; length];
        file.file().read_exact_at(&mut bytes, offset).unwrap();
        for byte in &mut bytes {
            *byte ^= 0x41;
        }
        file.file().write_all_at(&bytes, offset).unwrap();
    }

    fn fsck(&self) -> FsckReport {
        let options = FsckOptions { repair: true, ..FsckOptions::default() };
        self.puller.store().fsck(&options).unwrap()
    }

    /// Finds the damage and pulls. Returns how many bytes of the blob were fetched, once the layer is as it was.
    async fn repair(&self) -> u64 {
        assert_eq!(self.fsck().refetch.len(), 1, "the damage is found");
        self.registry.forget_requests();
        let pulled = self.puller.pull(&self.name, None, &ProgressReporter::unwatched()).await;
        let pulled = pulled.unwrap_or_else(|error| panic!("{}", larder::error_chain(&error)));
        assert_eq!(pulled.id, self.image.id);
        let repaired = fs_err::read(&self.file).unwrap();
        assert!(repaired[..self.whole.len()] == self.whole, "the layer is another one");
        assert!(self.fsck().is_sound(), "{:?}", self.fsck());
        self.registry.bytes_sent(&self.blob)
    }

    fn blob_size(&self) -> u64 {
        self.registry.blob(&self.blob).len() as u64
    }

    fn index(&self) -> PathBuf {
        self.dir.path().join("store/indexes").join(self.image.layers[0].key.as_str())
    }
}

#[tokio::test]
async fn damage_of_a_mib_is_repaired_with_the_parts_of_the_blob_that_it_needs() {
    for (form, blob) in [("gzip", gzip(&archive())), ("zstd", frames(&archive())), ("plain", archive())] {
        let node = RepairNode::with(blob).await;
        let index = fs_err::metadata(node.index()).unwrap().len();
        assert!(index * 100 < node.verified, "{form}: an index of {index} bytes");
        // At the beginning, in the middle of a file, and where two pieces meet.
        for (offset, length) in [(5000, 1), (node.verified / 2, 4096), (9 * MIB - 3, 6)] {
            node.damage(offset, length);
            let fetched = node.repair().await;
            // A checkpoint is at most 4 MiB and a block before, and after.
            let most = node.blob_size() * 12 * MIB / node.verified;
            assert!(
                (1..most).contains(&fetched),
                "{form}, {offset}: {fetched} bytes of {}",
                node.blob_size()
            );
        }
    }
}

#[tokio::test]
async fn damaged_pieces_that_share_a_part_of_the_blob_take_one_request() {
    let node = RepairNode::with(gzip(&archive())).await;
    for (places, requests) in [(&[8, 9, 10][..], 1), (&[2, 15], 2)] {
        for place in places {
            node.damage(place * MIB + 500_000, 9);
        }
        let fetched = node.repair().await;
        assert_eq!(node.registry.requests_for(&node.blob).len(), requests, "{places:?}: {fetched} bytes");
    }
    for piece in 0..18 {
        node.damage(piece * MIB + 500_000, 9);
    }
    assert_eq!(node.repair().await, node.blob_size(), "most of it is damaged");
}

#[tokio::test]
async fn data_that_the_archive_replaces_stays_in_a_piece_that_is_repaired() {
    let mut numbers = Numbers(5);
    let replacing = TarBuilder::new()
        .with(TarBuilderEntry::file("large", numbers.content(12 * MIB)))
        .with(TarBuilderEntry::file("replaced", numbers.content(300_000)))
        .with(TarBuilderEntry::file("beside", numbers.content(300_000)))
        .with(TarBuilderEntry::file("replaced", numbers.content(9000)))
        .finish();
    let node = RepairNode::of(gzip(&replacing), &replacing).await;
    node.damage(12 * MIB + 400_000, 64);
    let fetched = node.repair().await;
    assert!(fetched < node.blob_size(), "{fetched} bytes of {}", node.blob_size());
}

#[tokio::test]
async fn bytes_that_were_changed_anywhere_are_repaired() {
    let node = RepairNode::with(gzip(&archive())).await;
    let mut numbers = Numbers(7);
    for _ in 0..12 {
        for _ in 0..=numbers.below(2) {
            node.damage(numbers.below(node.verified - 64), usize::try_from(numbers.below(63)).unwrap() + 1);
        }
        node.repair().await;
    }
}

#[tokio::test]
async fn damaged_metadata_has_the_layer_fetched_as_a_whole() {
    let node = RepairNode::with(gzip(&archive())).await;
    for offset in [1024, node.verified - 100] {
        node.damage(offset, 64);
        assert_eq!(node.repair().await, node.blob_size());
    }
    let last = node.verified - 100;
    node.damage(last - 10 * MIB, 64);
    node.damage(last, 64);
    assert_eq!(node.repair().await, node.blob_size(), "part of it cannot be repaired");
}

#[tokio::test]
async fn an_index_that_is_damaged_or_wrong_is_no_index() {
    let node = RepairNode::with(gzip(&archive())).await;
    let index = fs_err::read(node.index()).unwrap();
    let (content, _) = index.split_at(index.len() - SHA256);
    let mut numbers = Numbers(3);
    let mut wrong: Vec<(&str, Vec<u8>)> = vec![
        ("empty", Vec::new()),
        ("cut", index[..index.len() / 2].to_vec()),
        ("another digest", [content, &[7; SHA256]].concat()),
    ];
    for _ in 0..12 {
        // Anything but its own digest is wrong, as if a bad program had written it.
        let mut changed = content.to_vec();
        let at = usize::try_from(numbers.below(content.len() as u64)).unwrap();
        changed[at] ^= 1 << numbers.below(8);
        let sha256 = Digest::sha256(&changed);
        let sha256 = (0..SHA256).map(|at| u8::from_str_radix(&sha256.hex()[2 * at..2 * at + 2], 16).unwrap());
        changed.extend(sha256.collect::<Vec<u8>>());
        wrong.push(("a changed bit", changed));
    }
    for (damage, bytes) in wrong {
        fs_err::write(node.index(), bytes).unwrap();
        node.damage(node.verified / 2, 64);
        let fetched = node.repair().await;
        assert!(fetched == node.blob_size() || damage == "a changed bit", "{damage}: {fetched} bytes");
    }
    // The last pull has written a good one, or that bit was of no use.
    fs_err::write(node.index(), index).unwrap();
    node.damage(node.verified / 2, 64);
    assert!(node.repair().await < node.blob_size());
}

#[tokio::test]
async fn a_registry_without_ranges_or_with_other_bytes_has_the_layer_fetched_as_a_whole() {
    let node = RepairNode::with(gzip(&archive())).await;
    let first = FaultTrigger::path("/blobs/").ranged().once();
    for fault in [ResponseFault::IgnoreRange, ResponseFault::Corrupt] {
        node.damage(node.verified / 2, 64);
        node.registry.fault(first.clone(), fault);
        assert!(node.repair().await >= node.blob_size());
        node.registry.clear_faults();
    }
}

#[tokio::test]
async fn an_index_is_removed_with_its_layer_and_counted_until_then() {
    let node = RepairNode::with(gzip(&archive())).await;
    let (store, indexes) = (node.puller.store().clone(), node.dir.path().join("store/indexes"));
    let count = || fs_err::read_dir(&indexes).unwrap().count();
    assert_eq!(count(), 1);
    let total = store.usage().unwrap().total();
    assert_eq!(total, larder_store::disk::measure(&node.dir.path().join("store")).unwrap());
    fs_err::write(indexes.join("junk"), "").unwrap();
    assert_eq!(node.fsck().problems.len(), 1, "a file that is no index is removed");
    store.remove(node.image.id.as_str(), &larder_store::store::RemoveOptions::default()).unwrap();
    assert_eq!(count(), 0);
}
