//! Files that are extracted into a directory.

use larder_store::unpack::{
    ExtractOptions, HoleEncoding, MergedLayers, UnpackOptions, extract_files, open_layer, write_erofs_disk,
    write_merged_files,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};

use crate::hostile::hostile_archives;
use crate::support::{UnpackDir, digest, walk};

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
