//! Layers that only the layers below complete.

use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;

use larder_erofs::{EntryProblem, ErofsInode, InodeKind};
use larder_store::unpack::{
    EntryRefusal, ExpectedLayer, FinishedLayer, LayerMemory, LayerReader, MergedLayers, PendingLayer,
    UnpackError, UnpackOptions, UnpackProgress, UnpackedLayer, open_layer, unpack_layer,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::support::digest;

/// Layers, each unpacked on top of the others.
struct Stack {
    dir: tempfile::TempDir,
    files: Vec<PathBuf>,
}

impl Stack {
    fn new() -> Stack {
        Stack { dir: tempfile::tempdir().unwrap(), files: Vec::new() }
    }

    /// The layers so far, the nearest first.
    fn merged(&self) -> MergedLayers {
        let layers = self.files.iter().rev().map(|file| open_layer(file).unwrap());
        MergedLayers::new(layers.collect()).unwrap()
    }

    /// Unpacks a layer on top of the others.
    fn push(&mut self, entries: Vec<TarBuilderEntry>) -> Result<FinishedLayer, UnpackError> {
        let archive = TarBuilder::new().extend(entries).finish();
        let diff_id = digest(&archive);
        let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
        let file = self.dir.path().join(self.files.len().to_string());
        let (_, pending) = unpack_layer(&archive[..], &expected, &file, &UnpackOptions::default())?;
        let finished = pending.finish(&self.merged(), &Arc::default())?;
        self.files.push(file);
        Ok(finished)
    }

    /// The topmost layer.
    fn top(&self) -> LayerReader {
        open_layer(self.files.last().unwrap()).unwrap()
    }

    fn inode(&self, path: &str) -> ErofsInode {
        self.top().find(path.as_bytes()).unwrap().expect(path)
    }

    /// Permissions, owner and time of a path in the topmost layer.
    fn meta(&self, path: &str) -> (u32, u32, u32, i64) {
        let inode = self.inode(path);
        (inode.mode, inode.uid, inode.gid, inode.mtime.seconds)
    }
}

#[test]
fn an_implied_directory_looks_like_the_one_below() {
    let mut stack = Stack::new();
    let below = vec![
        TarBuilderEntry::dir(".").mode(0o711),
        TarBuilderEntry::dir("etc").mode(0o2750).owner(3, 4).mtime(99).xattr("user.a", "1"),
        TarBuilderEntry::dir("etc/sub").mode(0o700),
        TarBuilderEntry::dir("plain"),
    ];
    assert!(!stack.push(below).unwrap().depends_on_lowers);
    assert!(stack.push(vec![TarBuilderEntry::file("etc/other", "")]).unwrap().depends_on_lowers);
    let top = ["etc/sub/f", "plain/f", "own/f"].map(|path| TarBuilderEntry::file(path, ""));
    let finished = stack.push(top.to_vec()).unwrap();
    assert!(finished.depends_on_lowers && finished.file.implied_bytes > 0);
    assert_eq!(stack.meta("etc"), (0o2750, 3, 4, 99));
    assert_eq!(stack.meta("etc/sub").0, 0o700);
    assert_eq!((stack.meta("own").0, stack.meta("plain").0, stack.meta("").0), (0o755, 0o755, 0o711));
    let xattrs = stack.top().xattrs(&stack.inode("etc")).unwrap();
    assert_eq!(xattrs, [(b"user.a".to_vec(), b"1".to_vec())]);
}

#[test]
fn only_what_is_visible_below_counts() {
    let mut stack = Stack::new();
    for layer in [
        vec![
            TarBuilderEntry::dir("gone").mode(0o700),
            TarBuilderEntry::dir("o").mode(0o711),
            TarBuilderEntry::dir("o/d").mode(0o700),
            TarBuilderEntry::dir("f").mode(0o700),
        ],
        vec![
            TarBuilderEntry::file(".wh.gone", ""),
            TarBuilderEntry::dir("o").mode(0o712),
            TarBuilderEntry::file("o/.wh..wh..opq", ""),
            TarBuilderEntry::file("f", ""),
        ],
        vec![
            TarBuilderEntry::file("gone/x", ""),
            TarBuilderEntry::file("o/d/x", ""),
            TarBuilderEntry::file("f/x", ""),
        ],
    ] {
        stack.push(layer).unwrap();
    }
    for (path, mode) in [("gone", 0o755), ("o", 0o712), ("o/d", 0o755), ("f", 0o755)] {
        assert_eq!(stack.meta(path).0, mode, "{path}");
    }
}

#[test]
fn a_directory_that_replaces_a_link_looks_like_its_target() {
    let mut stack = Stack::new();
    for layer in [
        vec![
            TarBuilderEntry::dir("usr/lib").mode(0o711),
            TarBuilderEntry::symlink("lib", "usr/lib"),
            TarBuilderEntry::symlink("out", "/../../etc"),
        ],
        vec![TarBuilderEntry::file("lib/x", ""), TarBuilderEntry::file("out/x", "")],
    ] {
        stack.push(layer).unwrap();
    }
    assert_eq!(stack.inode("lib").kind, InodeKind::Directory);
    assert_eq!((stack.meta("lib").0, stack.meta("out").0), (0o711, 0o755));
}

#[test]
fn a_layer_that_takes_nothing_from_below_fits_all_lowers() {
    let mut stack = Stack::new();
    stack
        .push(vec![
            TarBuilderEntry::dir("."),
            TarBuilderEntry::dir("usr").mtime(1),
            TarBuilderEntry::file("usr/a", ""),
        ])
        .unwrap();
    let implied = stack.push(vec![TarBuilderEntry::file("usr/b", "")]).unwrap();
    assert!(!implied.depends_on_lowers, "it looks as it would alone");
    let complete =
        vec![TarBuilderEntry::dir("."), TarBuilderEntry::dir("usr"), TarBuilderEntry::file("usr/c", "")];
    let complete = stack.push(complete).unwrap();
    assert!(!complete.depends_on_lowers && complete.file.implied_bytes == 0);
}

#[test]
fn a_hard_link_to_a_file_of_a_lower_layer_is_a_link_to_a_copy() {
    let mut stack = Stack::new();
    let tool = TarBuilderEntry::file("usr/bin/tool", "content").mode(0o4711).owner(3, 4).xattr("user.a", "1");
    let below =
        [TarBuilderEntry::dir("usr/bin").mode(0o700), tool, TarBuilderEntry::symlink("bin", "usr/bin")];
    stack.push(below.to_vec()).unwrap();
    let links =
        [("first", "usr/bin/tool"), ("second", "/bin/tool"), ("third", "first"), ("fourth", "own/tool")];
    let links = links.map(|(name, target)| TarBuilderEntry::hard_link(name, target));
    let own = TarBuilderEntry::symlink("own", "usr/bin");
    assert!(stack.push([own].into_iter().chain(links).collect()).unwrap().depends_on_lowers);
    let copy = stack.inode("usr/bin/tool");
    assert_eq!((copy.mode, copy.uid, copy.gid, copy.nlink, copy.size), (0o4711, 3, 4, 5, 7));
    for name in ["first", "second", "third", "fourth"] {
        assert_eq!(stack.inode(name), copy, "{name}");
    }
    assert_eq!(stack.top().xattrs(&copy).unwrap(), [(b"user.a".to_vec(), b"1".to_vec())]);
    let mut content = String::new();
    stack.top().reader(&copy).read_to_string(&mut content).unwrap();
    assert_eq!((content.as_str(), stack.meta("usr/bin").0), ("content", 0o700));
}

#[test]
fn a_hard_link_to_a_file_that_the_layer_hides_is_the_only_name_of_the_copy() {
    let mut stack = Stack::new();
    stack
        .push(vec![TarBuilderEntry::file("old", "content"), TarBuilderEntry::file("dir/old", "other")])
        .unwrap();
    let moved = [
        TarBuilderEntry::hard_link("new", "old"),
        TarBuilderEntry::file(".wh.old", ""),
        TarBuilderEntry::hard_link("kept", "dir/old"),
        TarBuilderEntry::file("dir/.wh..wh..opq", ""),
    ];
    stack.push(moved.to_vec()).unwrap();
    assert_eq!((stack.inode("new").nlink, stack.inode("new").size), (1, 7));
    assert_eq!((stack.inode("kept").nlink, stack.inode("kept").size), (1, 5));
    assert!(stack.inode("old").is_whiteout());
    assert!(stack.top().find(b"dir/old").unwrap().is_none());
}

#[test]
fn a_hard_link_to_nothing_or_to_a_directory_is_refused() {
    for (lower, target, reason) in [
        (TarBuilderEntry::dir("d"), "x/none", EntryRefusal::Entry(EntryProblem::LinkTarget)),
        (TarBuilderEntry::dir("x"), "x", EntryRefusal::Entry(EntryProblem::LinkToDirectory)),
    ] {
        let mut stack = Stack::new();
        stack.push(vec![lower]).unwrap();
        let error = stack.push(vec![TarBuilderEntry::hard_link("l", target)]).unwrap_err();
        assert!(matches!(error, UnpackError::Refused { reason: found, .. } if found == reason), "{error}");
    }
}

#[test]
fn what_an_opaque_root_hides_is_not_linked_to() {
    let mut stack = Stack::new();
    stack.push(vec![TarBuilderEntry::file("hidden", "1")]).unwrap();
    stack.push(vec![TarBuilderEntry::file(".wh..wh..opq", ""), TarBuilderEntry::file("seen", "2")]).unwrap();
    let error = stack.push(vec![TarBuilderEntry::hard_link("copy", "hidden")]).unwrap_err();
    assert!(
        matches!(error, UnpackError::Refused { reason: EntryRefusal::Entry(EntryProblem::LinkTarget), .. }),
        "{error:?}"
    );
}

/// Unpacks one archive into a layer that nothing completes.
fn unpacked(entries: Vec<TarBuilderEntry>) -> Result<UnpackedLayer, UnpackError> {
    let dir = tempfile::tempdir().unwrap();
    let archive = TarBuilder::new().extend(entries).finish();
    let diff_id = digest(&archive);
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let path = dir.path().join("layer");
    unpack_layer(&archive[..], &expected, &path, &UnpackOptions::default()).map(|(unpacked, _)| unpacked)
}

#[test]
fn implied_directories_whose_paths_take_much_memory_are_not_supported() {
    // 2,000 directories each, whose paths take 4 MB.
    let nested = |name: char| TarBuilderEntry::file(format!("{name}/{}f", "d/".repeat(2000)), "");
    assert!(unpacked(('a'..='d').map(nested).collect()).is_ok());
    let error = unpacked(('a'..='e').map(nested).collect()).unwrap_err();
    assert!(
        matches!(&error, UnpackError::Unsupported { reason } if reason.contains("implied directories")),
        "{error}"
    );
}

#[test]
fn attributes_that_a_layer_leaves_out_are_counted() {
    let file = TarBuilderEntry::file("a", "").xattr("user.overlay.opaque", "y").xattr("user.kept", "1");
    let link = TarBuilderEntry::symlink("b", "a").xattr("user.a", "1");
    assert_eq!(unpacked(vec![file, link]).unwrap().skipped_xattrs, 2);
}

#[test]
fn links_to_one_hidden_file_of_a_lower_layer_are_one_file() {
    let mut stack = Stack::new();
    let below = [
        TarBuilderEntry::file("file", "content").owner(3, 4),
        TarBuilderEntry::hard_link("same", "file"),
        TarBuilderEntry::file("other", "content"),
    ];
    stack.push(below.to_vec()).unwrap();
    let above = vec![
        TarBuilderEntry::hard_link("a", "file"),
        TarBuilderEntry::hard_link("b", "file"),
        TarBuilderEntry::hard_link("c", "same"),
        TarBuilderEntry::hard_link("d", "other"),
        TarBuilderEntry::file(".wh.file", ""),
        TarBuilderEntry::file(".wh.same", ""),
        TarBuilderEntry::file(".wh.other", ""),
    ];
    stack.push(above).unwrap();
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|path| stack.inode(path));
    assert_eq!((a.nid, b.nid, a.nlink, a.uid), (c.nid, c.nid, 3, 3));
    assert!(d.nid != a.nid && d.nlink == 1);
}

#[test]
fn a_merge_ends_soon_after_it_is_canceled() {
    let mut stack = Stack::new();
    stack.push(vec![TarBuilderEntry::file("file", "content")]).unwrap();
    let entries = (0..100).map(|number| TarBuilderEntry::hard_link(format!("link{number}"), "file"));
    let archive = TarBuilder::new().extend(entries).finish();
    let diff_id = digest(&archive);
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let path = stack.dir.path().join("canceled");
    let (_, pending) = unpack_layer(&archive[..], &expected, &path, &UnpackOptions::default()).unwrap();
    let progress = Arc::<UnpackProgress>::default();
    progress.cancel();
    let error = pending.finish(&stack.merged(), &progress).unwrap_err();
    assert!(matches!(error, UnpackError::Canceled), "{error:?}");
}

#[test]
fn layers_that_wait_for_their_lowers_share_the_memory() {
    let limit = 4 << 20;
    let memory = LayerMemory::new(limit);
    let options = UnpackOptions { layer_memory: memory.clone(), ..UnpackOptions::default() };
    let names =
        (0..20_000).map(|number| TarBuilderEntry::file(format!("a-name-of-some-length-{number}"), ""));
    let archive = TarBuilder::new().extend(names).finish();
    let (diff_id, dir) = (digest(&archive), tempfile::tempdir().unwrap());
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let unpack = |name: &str, options: &UnpackOptions| {
        unpack_layer(&archive[..], &expected, &dir.path().join(name), options).unwrap().1
    };
    let waiting: Vec<_> = (0..8).map(|number| unpack(&number.to_string(), &options)).collect();
    let scratch_files = || {
        let names = fs_err::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().contains("scratch")).count()
    };
    assert!(scratch_files() > 8, "most layers wait in files, and inodes of all are there");
    let used = memory.used();
    assert!(used > limit / 2 && used <= limit, "{used} bytes");
    let finish = |layer: PendingLayer| layer.finish(&MergedLayers::default(), &Arc::default()).unwrap().file;
    let expected = finish(unpack("with much memory", &UnpackOptions::default()));
    for layer in waiting {
        assert_eq!(finish(layer), expected);
    }
    assert_eq!(scratch_files(), 0);
}
