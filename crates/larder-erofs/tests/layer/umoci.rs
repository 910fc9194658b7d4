//! An EROFS layer shows what `umoci unpack` makes of an OCI image with that layer.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_erofs::{ErofsOptions, ErofsWriter};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry as Entry};
use larder_testkit_peers::packages::Package;
use larder_testkit_peers::{ImageBuilder, LayerFiles, require};

use crate::kernel::{ErofsMount, walk, xattrs};
use crate::reader::read;
use crate::tar_source::add_archive;

/// All that two equal trees have in common. Times of directories are those of their last change in umoci's.
#[derive(Debug, PartialEq, Eq)]
struct PathView {
    mode: u32,
    owner: (u32, u32),
    mtime: Option<(i64, i64)>,
    device: Option<u64>,
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    same_as: Option<Vec<u8>>,
}

fn look_at(root: &Path) -> BTreeMap<Vec<u8>, PathView> {
    let (mut views, mut first) = (BTreeMap::new(), BTreeMap::new());
    for (name, path) in walk(root) {
        let shown = fs_err::symlink_metadata(&path).unwrap();
        let is_device = matches!(shown.mode() & 0o170_000, 0o020_000 | 0o060_000);
        let content = match () {
            () if shown.is_file() => fs_err::read(&path).unwrap(),
            () if shown.is_symlink() => fs_err::read_link(&path).unwrap().as_os_str().as_bytes().to_vec(),
            () => Vec::new(),
        };
        let same_as = first.entry(shown.ino()).or_insert_with(|| name.clone()).clone();
        let view = PathView {
            mode: shown.mode(),
            owner: (shown.uid(), shown.gid()),
            mtime: (!shown.is_dir()).then(|| (shown.mtime(), shown.mtime_nsec())),
            device: is_device.then(|| shown.rdev()),
            content,
            xattrs: xattrs(&path),
            same_as: (!shown.is_dir()).then_some(same_as),
        };
        views.insert(name, view);
    }
    views
}

fn compare(name: &str, archive: Vec<u8>) {
    if !require(&[Package::Umoci]).is_available() || !ErofsMount::is_available() {
        return;
    }
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    add_archive(&archive[..], &mut writer).unwrap();
    let (layer, summary) = writer.finish().unwrap();
    let tree = read(&layer);
    let mounted = ErofsMount::on_loop_device(&layer);
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("bundle");
    ImageBuilder::new().layer(LayerFiles::archive(archive)).write(&dir.path().join("layout")).unwrap();
    let layout = format!("{}:image", dir.path().join("layout").display());
    let unpack = Command::new("umoci").args(["unpack", "--image", &layout]).arg(&bundle).output().unwrap();
    assert!(unpack.status.success(), "{}", String::from_utf8_lossy(&unpack.stderr));
    let (ours, theirs) = (look_at(&mounted.path()), look_at(&bundle.join("rootfs")));
    let names = |views: &BTreeMap<Vec<u8>, PathView>| -> Vec<PathBuf> {
        views.keys().map(|name| String::from_utf8_lossy(name).into_owned().into()).collect()
    };
    assert_eq!(names(&ours), names(&theirs), "{name}");
    for (path, view) in &ours {
        assert_eq!(view, &theirs[path], "{name}: {}", String::from_utf8_lossy(path));
    }
    eprintln!("{name}: {} paths equal, layer of {} bytes", tree.len(), summary.size);
}

fn pack(arguments: &[&str]) -> Vec<u8> {
    let tar = Command::new("tar")
        .args(["-C", "/", "-c", "--sort=name", "--one-file-system"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(tar.stdout.len() > 1 << 20, "{}", String::from_utf8_lossy(&tar.stderr));
    tar.stdout
}

/// A distribution's own files, as GNU tar packs them: what there is on any machine that runs this.
#[test]
fn a_layer_of_a_distribution_equals_umoci() {
    let paths = ["etc", "sbin", "usr/share/zoneinfo", "usr/share/doc"];
    compare("debian", pack(&[&["--format=pax", "--xattrs", "--xattrs-include=*"], &paths[..]].concat()));
}

/// Entries of all types, in an order that no packer makes.
#[test]
fn a_layer_of_unusual_entries_equals_umoci() {
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let entries = vec![
        Entry::file("a/b/early", "its parent comes later").mode(0o4711),
        Entry::dir("a").mode(0o1777).owner(70_000, 80_000),
        Entry::file("bin/tool", vec![7; 9000]).mode(0o755).xattr("security.capability", capability),
        Entry::hard_link("bin/link", "bin/tool"),
        Entry::symlink("lib", "usr/lib"),
        Entry::file("lib/through", "a link"),
        Entry::file("f", "old"),
        Entry::file("f", "new"),
        Entry::fifo("pipe"),
        Entry::char_device("dev/null", 1, 3).mode(0o666),
        Entry::file(vec![b'n'; 255], "long name").mtime(1),
        Entry::file("user", "x").xattr("user.note", vec![1; 3000]),
    ];
    compare("unusual", entries.into_iter().fold(TarBuilder::new(), TarBuilder::with).finish());
}
