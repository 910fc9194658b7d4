//! The kernel shows what was written, from a file and from a loop device.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::collection::vec;
use proptest::test_runner::{Config, TestRunner};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

use crate::properties::{accepted, script_entry};
use crate::reader::{ReadTree, read};
use crate::script::{ScriptKind, dir, entry, file, write};
use crate::tools::all_kinds;

/// A mounted layer. Dropping it unmounts it.
pub(crate) struct ErofsMount {
    dir: TempDir,
}

impl ErofsMount {
    /// Whether this process can mount layers. Prints a loud message if it cannot.
    ///
    /// # Panics
    /// When it cannot and the environment variable `CI` is set.
    pub(crate) fn is_available() -> bool {
        let root = rustix::process::geteuid().is_root();
        let known = fs_err::read_to_string("/proc/filesystems").unwrap().contains("\terofs\n");
        if root && (known || Command::new("modprobe").arg("erofs").status().is_ok_and(|done| done.success()))
        {
            return true;
        }
        assert!(
            std::env::var_os("CI").is_none(),
            "CI must not skip mounts: run as root, on a kernel with EROFS"
        );
        eprintln!("==== SKIPPED, NOT TESTED: mounts of EROFS layers need root, and a kernel with EROFS ====");
        false
    }

    pub(crate) fn on_loop_device(layer: &[u8]) -> ErofsMount {
        let mounted = ErofsMount::prepare(layer);
        let mount =
            Command::new("mount").args(["-t", "erofs", "-o", "loop,ro"]).args(mounted.paths()).output();
        let mount = mount.unwrap();
        assert!(mount.status.success(), "{}", String::from_utf8_lossy(&mount.stderr));
        mounted
    }

    /// `None` where the kernel cannot mount files.
    pub(crate) fn on_file(layer: &[u8]) -> Option<ErofsMount> {
        let mounted = ErofsMount::prepare(layer);
        let [file, at] = mounted.paths();
        match mount(&file, &at, "erofs", MountFlags::RDONLY, None) {
            Ok(()) => Some(mounted),
            Err(Errno::NOTBLK) => None,
            Err(error) => panic!("mount: {error}"),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    fn prepare(layer: &[u8]) -> ErofsMount {
        let mounted = ErofsMount { dir: tempfile::tempdir().unwrap() };
        fs_err::create_dir(mounted.path()).unwrap();
        fs_err::write(mounted.dir.path().join("layer"), layer).unwrap();
        mounted
    }

    fn paths(&self) -> [PathBuf; 2] {
        [self.dir.path().join("layer"), self.path()]
    }
}

impl Drop for ErofsMount {
    fn drop(&mut self) {
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}

/// All paths below a directory, the directory itself as the empty one.
pub(crate) fn walk(root: &Path) -> BTreeMap<Vec<u8>, PathBuf> {
    let mut found = BTreeMap::from([(Vec::new(), root.to_owned())]);
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs_err::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                todo.push(path.clone());
            }
            found.insert(path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec(), path);
        }
    }
    found
}

/// Names and values of a path's attributes.
pub(crate) fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 65_536];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    names.truncate(length);
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let mut value = vec![0; 65_536];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        value.truncate(length);
        value
    };
    names.map(|name| (name.to_vec(), value(name))).collect()
}

fn compare(root: &Path, tree: &ReadTree) {
    let paths = walk(root);
    assert_eq!(paths.keys().collect::<Vec<_>>(), tree.keys().collect::<Vec<_>>());
    let mut numbers = BTreeMap::new();
    for (name, path) in &paths {
        let (node, shown) = (&tree[name], fs_err::symlink_metadata(path).unwrap());
        assert_eq!(shown.mode(), u32::from(node.mode), "{}", path.display());
        assert_eq!((shown.uid(), shown.gid()), (node.uid, node.gid), "{}", path.display());
        assert_eq!(
            (shown.mtime(), shown.mtime_nsec()),
            (node.mtime.0, node.mtime.1.into()),
            "{}",
            path.display()
        );
        assert_eq!((shown.nlink(), shown.size()), (node.links.into(), node.size), "{}", path.display());
        assert_eq!(xattrs(path), node.xattrs, "{}", path.display());
        assert_eq!(*numbers.entry(shown.ino()).or_insert(node.number), node.number, "{}", path.display());
        if shown.is_file() {
            assert!(fs_err::read(path).unwrap() == node.content, "{}", path.display());
        } else if shown.is_symlink() {
            assert_eq!(fs_err::read_link(path).unwrap().as_os_str().as_bytes(), node.content);
        } else {
            let (major, minor) =
                (node.device >> 8 & 0xfff, node.device & 0xff | node.device >> 12 & 0xf_ff00);
            assert_eq!(shown.rdev(), rustix::fs::makedev(major, minor), "{}", path.display());
        }
        // Names are found one by one as well as in a list.
        assert!(path.symlink_metadata().is_ok());
    }
}

#[test]
fn the_kernel_shows_all_kinds_from_a_loop_device() {
    if !ErofsMount::is_available() {
        return;
    }
    let (layer, _) = write(&all_kinds()).unwrap();
    compare(&ErofsMount::on_loop_device(&layer).path(), &read(&layer));
}

#[test]
fn the_kernel_shows_all_kinds_from_a_file() {
    if !ErofsMount::is_available() {
        return;
    }
    let (layer, _) = write(&all_kinds()).unwrap();
    match ErofsMount::on_file(&layer) {
        Some(mounted) => compare(&mounted.path(), &read(&layer)),
        None => eprintln!("==== SKIPPED, NOT TESTED: this kernel mounts EROFS from block devices only ===="),
    }
}

#[test]
fn the_kernel_shows_random_layers() {
    if !ErofsMount::is_available() {
        return;
    }
    let mut runner = TestRunner::new(Config { cases: 20, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&vec(script_entry(), 0..60), |entries| {
        let (layer, _) = write(&accepted(entries).0).unwrap();
        let mounted = ErofsMount::on_file(&layer).unwrap_or_else(|| ErofsMount::on_loop_device(&layer));
        compare(&mounted.path(), &read(&layer));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn an_overlay_hides_what_whiteouts_name_and_shows_escaped_attributes() {
    if !ErofsMount::is_available() {
        return;
    }
    let whiteout = |path: &str| entry(path, ScriptKind::Fifo);
    let lower =
        write(&[file("a/gone", "1"), file("a/stays", "2"), file("b/hidden", "3"), dir("c")]).unwrap().0;
    let upper = write(&[
        whiteout("a/.wh.gone"),
        whiteout("b/.wh..wh..opq"),
        file("b/new", "4"),
        dir("c").xattr("trusted.overlay.opaque", "y").xattr("trusted.overlay.redirect", "/a"),
    ]);
    let (lower, upper) = (ErofsMount::on_loop_device(&lower), ErofsMount::on_loop_device(&upper.unwrap().0));
    let merged = tempfile::tempdir().unwrap();
    let option = format!("lowerdir={}:{}", upper.path().display(), lower.path().display());
    let option = std::ffi::CString::new(option).unwrap();
    mount("overlay", merged.path(), "overlay", MountFlags::RDONLY, Some(option.as_c_str())).unwrap();
    let shown: Vec<_> =
        walk(merged.path()).into_keys().map(|path| String::from_utf8(path).unwrap()).collect();
    unmount(merged.path(), UnmountFlags::DETACH).unwrap();
    assert_eq!(shown, ["", "a", "a/stays", "b", "b/new", "c"]);
}
