//! Usage of the disk, by kind.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use larder_store::store::{LeaseRecord, LeaseResources};

use crate::help::*;

fn du(path: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "-B1"]).arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn inodes(path: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "--inodes"]).arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn the_sum_agrees_with_du() {
    let scratch = TempStore::new();
    for number in 0..5 {
        let content = |file: usize| "x".repeat(file * 1000 + number);
        let files: Vec<(String, String)> =
            (0..40).map(|file| (format!("d{}/f{file}", file % 7), content(file))).collect();
        let files: Vec<(&str, String)> =
            files.iter().map(|(path, content)| (path.as_str(), content.clone())).collect();
        let name = format!("layer{number}");
        let layer = layer_of(&scratch.store, &key(&name), facts(&name), &files);
        let image = image(&[&format!("app:{number}")], &[layer]);
        scratch.store.commit(&image, noon()).unwrap();
    }
    scratch.store.remove("app:3", &larder_store::store::RemoveOptions::default()).unwrap();
    let file = scratch.store.ingest(&blob_of("blob", 1 << 20)).unwrap();
    file.write_at(&vec![3; 300_000], 100_000).unwrap();
    let fresh = layer(&scratch.store, "fresh");

    let total = scratch.store.usage().unwrap().total();
    let (bytes, inodes) = (du(&scratch.root()), inodes(&scratch.root()));
    assert!(bytes.abs_diff(total.bytes) * 100 <= bytes, "du says {bytes}, the store {}", total.bytes);
    assert_eq!(inodes, total.inodes);
    drop(fresh);
}

/// Most bytes by which the size in a list differs from the measured disk usage, on a filesystem with other blocks: the
/// list takes those of the record's copy as 4096 bytes.
const SIZE_SLACK: u64 = 4096;

#[test]
fn shared_and_unique_add_up() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["base", "app"]);
    commit(&scratch.store, "web", &["base", "web"]);
    commit(&scratch.store, "alone", &["alone"]);
    for usage in scratch.store.image_usages().unwrap() {
        assert_eq!(usage.total, usage.shared + usage.unique);
        let alone = usage.tags[0].contains("alone");
        assert_eq!(usage.shared.bytes == 0, alone, "{usage:?}");
        assert!(usage.unique.bytes > 0);
        let image = scratch.store.image(usage.id.as_str()).unwrap().unwrap();
        assert_eq!(usage.compressed_bytes, 1000 * image.layers.len() as u64);
        let size = scratch.store.to_image(&image).size;
        assert!(usage.total.bytes.abs_diff(size) <= SIZE_SLACK, "{usage:?}, listed with {size}");
    }
}

/// As GC counts it: removing the image frees no layer that something else needs.
#[test]
fn a_layer_that_a_lease_names_is_unique_to_no_image() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["base", "app"]);
    let unique = || scratch.store.image_usages().unwrap()[0].unique.bytes;
    let all = unique();
    let leased = LeaseResources { layers: vec![key("app")], ..LeaseResources::default() };
    let lease = LeaseRecord::granted("l", leased, Duration::MAX, &noon().into());
    scratch.store.lease(&lease).unwrap();
    assert!(unique() < all, "{} of {all}", unique());
    let usage = &scratch.store.image_usages().unwrap()[0];
    assert_eq!(usage.total, usage.shared + usage.unique);
    scratch.store.end_lease("l").unwrap();
    assert_eq!(unique(), all);
}

#[test]
fn a_layer_that_several_images_have_counts_once() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["base", "app"]);
    assert_eq!(scratch.store.usage().unwrap().shared_layers.bytes, 0);
    commit(&scratch.store, "web", &["base", "web"]);
    commit(&scratch.store, "api", &["base", "api"]);
    let usage = scratch.store.usage().unwrap();
    let images = scratch.store.image_usages().unwrap();
    assert_eq!(usage.shared_layers, images[0].shared, "the base, once");
    let own: larder_store::disk::DiskSpace = images.iter().map(|image| image.unique).sum();
    assert!(usage.layers.bytes < own.bytes + usage.shared_layers.bytes + usage.blobs.bytes);
    assert!(usage.layers.bytes > usage.shared_layers.bytes);
}

#[test]
fn the_ratio_is_learned_from_commits_and_kept() {
    let scratch = TempStore::new();
    let before = scratch.store.ratio().unwrap();
    commit(&scratch.store, "app", &["a"]);
    let after = scratch.store.ratio().unwrap();
    assert!(after.bytes > before.bytes, "{before:?} {after:?}");
    assert_eq!(scratch.reopen().store.ratio().unwrap(), after);
}

#[test]
fn free_space_is_that_of_the_filesystem() {
    let scratch = TempStore::new();
    let free = scratch.store.free().unwrap();
    assert!(free.bytes > 0 && free.inodes > 0);
}
