//! Images that only the layers below complete.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_store::unpack::layer_manifest::{LayerManifestReader, RecordKind};
use larder_store::unpack::{
    ExpectedLayer, FinishedImage, ImageMemory, UnpackError, UnpackOptions, UnpackedLayer, unpack_image,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::support::{digest, is_root, mount_image};

/// Images of layers, each mounted.
struct Stack {
    dir: tempfile::TempDir,
    roots: Vec<PathBuf>,
}

impl Drop for Stack {
    fn drop(&mut self) {
        for root in &self.roots {
            let _ = rustix::mount::unmount(root, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

impl Stack {
    fn new() -> Stack {
        Stack { dir: tempfile::tempdir().unwrap(), roots: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{}{name}", self.roots.len()))
    }

    /// Unpacks a layer on top of the others.
    fn push(&mut self, entries: Vec<TarBuilderEntry>) -> Result<FinishedImage, UnpackError> {
        let archive = TarBuilder::new().extend(entries).finish();
        let diff_id = digest(&archive);
        let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
        let (image, root) = (self.path("image"), self.path("root"));
        let (_, pending) = unpack_image(&archive[..], &expected, &image, &UnpackOptions::default())?;
        let open = |root: &PathBuf| Arc::new(OwnedFd::from(fs_err::File::open(root).unwrap().into_parts().0));
        let finished = pending.finish(self.roots.iter().rev().map(open).collect(), &self.path("files.v1"))?;
        fs_err::create_dir(&root).unwrap();
        mount_image(&image, &root);
        self.roots.push(root);
        Ok(finished)
    }

    /// Permissions, owner and time of a path in the topmost layer.
    fn meta(&self, path: &str) -> (u32, u32, u32, i64) {
        let meta = fs_err::symlink_metadata(self.roots.last().unwrap().join(path)).unwrap();
        (meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime())
    }
}

fn implied_in(files: &Path) -> Vec<String> {
    let records = LayerManifestReader::open(files).unwrap().map(Result::unwrap);
    let implied =
        records.filter(|record| matches!(record.kind, RecordKind::Directory { implicit: true, .. }));
    let mut paths: Vec<_> = implied.map(|record| String::from_utf8(record.path).unwrap()).collect();
    paths.sort();
    paths
}

#[test]
fn an_implied_directory_of_an_image_looks_like_the_one_below() {
    if !is_root() {
        return;
    }
    let mut stack = Stack::new();
    let below = vec![
        TarBuilderEntry::dir(".").mode(0o711),
        TarBuilderEntry::dir("etc").mode(0o2750).owner(3, 4).mtime(99).xattr("user.a", "1"),
        TarBuilderEntry::dir("etc/sub").mode(0o700),
        TarBuilderEntry::dir("plain"),
    ];
    assert!(!stack.push(below).unwrap().changed);
    assert!(stack.push(vec![TarBuilderEntry::file("etc/other", "")]).unwrap().changed);
    let top = ["etc/sub/f", "plain/f", "own/f"].map(|path| TarBuilderEntry::file(path, ""));
    let files = stack.path("files.v1");
    assert!(stack.push(top.to_vec()).unwrap().changed);
    assert_eq!(stack.meta("etc"), (0o2750, 3, 4, 99));
    assert_eq!(stack.meta("etc/sub").0, 0o700);
    assert_eq!((stack.meta("own").0, stack.meta("plain").0, stack.meta("").0), (0o755, 0o755, 0o711));
    let mut value = [0; 8];
    let length = rustix::fs::lgetxattr(stack.roots[2].join("etc"), "user.a", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"1");
    assert_eq!(implied_in(&files), ["", "etc", "etc/sub", "own", "plain"]);
}

#[test]
fn an_image_that_takes_nothing_from_below_fits_all_lowers_and_has_no_manifest() {
    if !is_root() {
        return;
    }
    let mut stack = Stack::new();
    stack
        .push(vec![
            TarBuilderEntry::dir("."),
            TarBuilderEntry::dir("usr"),
            TarBuilderEntry::file("usr/a", ""),
        ])
        .unwrap();
    assert!(
        !stack.push(vec![TarBuilderEntry::file("usr/b", "")]).unwrap().changed,
        "it looks as it would alone"
    );
    let files = stack.path("files.v1");
    let complete =
        vec![TarBuilderEntry::dir("."), TarBuilderEntry::dir("usr"), TarBuilderEntry::file("usr/c", "")];
    assert!(!stack.push(complete).unwrap().changed);
    assert!(!files.exists());
}

#[test]
fn a_hard_link_to_a_lower_file_needs_a_directory() {
    if !is_root() {
        return;
    }
    let mut stack = Stack::new();
    stack.push(vec![TarBuilderEntry::file("a", "1")]).unwrap();
    let error = stack.push(vec![TarBuilderEntry::hard_link("b", "a")]).unwrap_err();
    assert!(
        matches!(&error, UnpackError::NeedsDirectory { reason } if reason.contains("hard link")),
        "{error}"
    );
}

/// Unpacks one archive into an image that nothing completes.
fn unpacked(entries: Vec<TarBuilderEntry>) -> Result<UnpackedLayer, UnpackError> {
    let dir = tempfile::tempdir().unwrap();
    let archive = TarBuilder::new().extend(entries).finish();
    let diff_id = digest(&archive);
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let path = dir.path().join("image");
    unpack_image(&archive[..], &expected, &path, &UnpackOptions::default()).map(|(unpacked, _)| unpacked)
}

#[test]
fn implied_directories_whose_paths_take_much_memory_need_a_directory() {
    // 2,000 directories each, whose paths take 4 MB.
    let nested = |name: char| TarBuilderEntry::file(format!("{name}/{}f", "d/".repeat(2000)), "");
    assert!(unpacked(('a'..='d').map(nested).collect()).is_ok());
    let error = unpacked(('a'..='e').map(nested).collect()).unwrap_err();
    assert!(
        matches!(&error, UnpackError::NeedsDirectory { reason } if reason.contains("implied directories")),
        "{error}"
    );
}

#[test]
fn attributes_that_an_image_leaves_out_are_counted() {
    let file = TarBuilderEntry::file("a", "").xattr("user.overlay.opaque", "y").xattr("user.kept", "1");
    let link = TarBuilderEntry::symlink("b", "a").xattr("user.a", "1");
    assert_eq!(unpacked(vec![file, link]).unwrap().skipped_xattrs, 2);
}

#[test]
fn images_that_wait_for_their_lowers_share_the_memory_for_names() {
    let memory = ImageMemory::new(4 << 20);
    let options = UnpackOptions { image_memory: memory, ..UnpackOptions::default() };
    let names =
        (0..20_000).map(|number| TarBuilderEntry::file(format!("a-name-of-some-length-{number}"), ""));
    let archive = TarBuilder::new().extend(names).finish();
    let (diff_id, dir) = (digest(&archive), tempfile::tempdir().unwrap());
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let unpack = |name: &str| unpack_image(&archive[..], &expected, &dir.path().join(name), &options);
    let mut waiting = Vec::new();
    let refused = loop {
        match unpack(&waiting.len().to_string()) {
            Ok(image) => waiting.push(image),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, UnpackError::NeedsDirectory { .. }), "{refused}");
    assert!((1..5).contains(&waiting.len()), "{}", waiting.len());
    drop(waiting.pop());
    unpack("another").expect("there is memory again");
}
