//! Kinds of damage that only layers in directories have.

use larder_store::fsck::{FsckOptions, StoreDamage};

use crate::fsck::{breaks_app, layer_dir, two_images};

#[test]
fn a_changed_byte_is_found() {
    let scratch = two_images();
    let file = layer_dir(&scratch.store, "app").join("fs/bin/tool");
    let times = fs_err::metadata(&file).unwrap().modified().unwrap();
    fs_err::write(&file, "#!fool").unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(times).unwrap();
    let quick = FsckOptions { contents: false, ..FsckOptions::default() };
    assert!(scratch.store.fsck(&quick).unwrap().problems.is_empty(), "it looks the same");
    breaks_app(
        &scratch,
        |damage| matches!(damage, StoreDamage::LayerDamaged { first, count: 1, .. } if first[0].starts_with("bin/tool: ")),
    );
}

#[test]
fn a_missing_file_is_found() {
    let scratch = two_images();
    fs_err::remove_file(layer_dir(&scratch.store, "app").join("fs/etc/conf")).unwrap();
    breaks_app(&scratch, |damage| damage.to_string().contains("etc/conf: missing"));
}

#[test]
fn a_file_too_many_is_found() {
    let scratch = two_images();
    fs_err::write(layer_dir(&scratch.store, "app").join("fs/etc/extra"), "x").unwrap();
    breaks_app(&scratch, |damage| damage.to_string().contains("etc/extra"));
}

#[test]
fn a_missing_manifest_of_files_is_found() {
    let scratch = two_images();
    fs_err::remove_file(layer_dir(&scratch.store, "app").join("files.v1")).unwrap();
    breaks_app(&scratch, |damage| damage.to_string().contains("files.v1: missing"));
}
