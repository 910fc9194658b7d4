//! Files that are extracted into a directory.

use larder_store::unpack::{
    ExtractOptions, HoleEncoding, MergedLayers, UnpackOptions, extract_files, open_layer, write_erofs_disk,
    write_merged_files,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};

use crate::hostile::hostile_archives;
use crate::support::{UnpackDir, digest};
use larder_testkit_peers::tree_listing::walk;

/// The files of layers as an archive, from the bottom up.
fn merged(layers: &[UnpackDir]) -> Vec<u8> {
    let layers = layers.iter().rev().map(|layer| open_layer(&layer.layer()).unwrap()).collect();
    let mut archive = Vec::new();
    write_merged_files(&MergedLayers::new(layers).unwrap(), HoleEncoding::Sparse, &mut archive).unwrap();
    archive
}

#[test]
fn archives_that_lead_out_of_the_directory_are_refused_or_contained() {
    let outside = UnpackDir::new().outside().display().to_string();
    let count = hostile_archives(&outside).len();
    for at in 0..count {
        let dir = UnpackDir::new();
        let (name, archive) = hostile_archives(&dir.outside().display().to_string()).swap_remove(at);
        let outcome = extract_files(&archive[..], &dir.root(), ExtractOptions { suid: true, dev: true });
        eprintln!("{name}: {outcome:?}");
        dir.assert_contained();
    }
}

#[test]
fn a_link_is_not_followed_by_the_entries_that_come_after_it() {
    let dir = UnpackDir::new();
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::symlink("out", dir.outside().display().to_string()))
        .with(TarBuilderEntry::file("out/secret", "evil"))
        .finish();
    extract_files(&archive[..], &dir.root(), ExtractOptions::default()).unwrap_err();
    dir.assert_contained();
}

/// Directories whose names begin with `.wh.` exist if the archive names only what is in them.
#[test]
fn merged_files_have_no_whiteouts() {
    let layers = [
        &["bar", "foo/own"][..],
        &[".wh.bar", ".wh.gone/in", ".wh..wh..opq/in", "foo/.wh.gone/in", "foo/.wh.own"],
    ];
    let layers = layers.map(|names| {
        let entries = names.iter().map(|name| TarBuilderEntry::file(*name, *name));
        let archive = TarBuilder::new().extend(entries).finish();
        let layer = UnpackDir::new();
        layer.unpack(&archive).unwrap();
        layer
    });
    let archive = merged(&layers);
    let dir = UnpackDir::new();
    let disk = dir.layer();
    write_erofs_disk(&archive[..], &digest(&archive), &disk).unwrap();
    let disk = open_layer(&disk).unwrap();
    let paths: Vec<_> = disk.walk().unwrap().map(|entry| entry.unwrap().path).collect();
    let expected = ["", ".wh..wh..opq", ".wh..wh..opq/in", ".wh.gone", ".wh.gone/in", "foo"];
    let expected = [&expected[..], &["foo/.wh.gone", "foo/.wh.gone/in"]].concat();
    assert_eq!(paths, expected.iter().map(|path| path.as_bytes()).collect::<Vec<_>>());
    assert!(!disk.is_opaque(&disk.root().unwrap()).unwrap());
    extract_files(&archive[..], &dir.root(), ExtractOptions::default()).unwrap();
    let names = walk(&dir.root()).into_iter().map(|(path, _)| path);
    let names: Vec<_> =
        names.map(|path| path.strip_prefix(dir.root()).unwrap().display().to_string()).collect();
    assert_eq!(names, expected);
}

#[test]
fn merged_files_are_extracted_as_they_are() {
    let layers = edge_case_layers().map(|archive| {
        let layer = UnpackDir::new();
        layer.unpack_with(&archive, &archive, &UnpackOptions::default()).unwrap();
        layer
    });
    let dir = UnpackDir::new();
    let archive = merged(&layers);
    let skipped = extract_files(&archive[..], &dir.root(), ExtractOptions { suid: true, dev: true }).unwrap();
    if rustix::process::geteuid().is_root() {
        assert_eq!((skipped.devices, skipped.suid, skipped.xattrs), (0, 0, 0));
    }
    assert!(!dir.root().join("etc/keep/a").exists(), "the upper layer hides it");
    dir.assert_contained();
}

/// The merged files of a layer with a device that has two names, and a file.
fn device_with_two_names() -> Vec<u8> {
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::char_device("dev/null", 1, 3))
        .with(TarBuilderEntry::hard_link("dev/other", "dev/null"))
        .with(TarBuilderEntry::file("file", "content"))
        .finish();
    let layer = UnpackDir::new();
    layer.unpack_with(&archive, &archive, &UnpackOptions::default()).unwrap();
    merged(&[layer])
}

#[test]
fn a_device_that_is_left_out_is_left_out_under_all_its_names() {
    let dir = UnpackDir::new();
    let archive = device_with_two_names();
    let skipped = extract_files(&archive[..], &dir.root(), ExtractOptions::default()).unwrap();
    assert_eq!(skipped.devices, 2);
    assert_eq!(fs_err::read_dir(dir.root().join("dev")).unwrap().count(), 0);
    assert_eq!(fs_err::read_to_string(dir.root().join("file")).unwrap(), "content");
}

#[test]
fn a_hard_link_to_a_missing_file_is_an_error() {
    let dir = UnpackDir::new();
    let archive = TarBuilder::new().with(TarBuilderEntry::hard_link("link", "missing")).finish();
    extract_files(&archive[..], &dir.root(), ExtractOptions { suid: true, dev: true }).unwrap_err();
}
