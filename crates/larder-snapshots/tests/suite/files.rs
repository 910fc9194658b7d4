//! Cases about the files that a mounted snapshot shows.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use fs_err as fs;

use crate::world::{MountedSnapshot, SuiteWorld};

fn write(root: &Path, path: &str, content: &str, mode: u32) {
    fs::write(root.join(path), content).unwrap();
    fs::set_permissions(root.join(path), std::fs::Permissions::from_mode(mode)).unwrap();
}

fn make_dir(root: &Path, path: &str, mode: u32) {
    fs::create_dir_all(root.join(path)).unwrap();
    fs::set_permissions(root.join(path), std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Each path below a directory, with its type, mode, owner and content.
fn tree(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let about = path.symlink_metadata().unwrap();
            let content = if about.is_file() { fs::read_to_string(&path).unwrap() } else { String::new() };
            let line = format!("{:o} {}:{} {content}", about.mode(), about.uid(), about.gid());
            found.insert(path.strip_prefix(root).unwrap().display().to_string(), line);
            if about.is_dir() {
                waiting.push(path);
            }
        }
    }
    found
}

type Change = fn(&Path);

/// Makes a layer of each change, and compares each mount with a plain directory that had the same changes.
fn check_layers(name: &str, changes: &[Change]) {
    let Some(world) = SuiteWorld::new() else { return };
    let flat = world.work("flat");
    let mut parent = String::new();
    for (at, change) in changes.iter().enumerate() {
        let key = format!("{name}-{at}-active");
        let mounted = world.prepare_mount(&key, &parent);
        assert_eq!(tree(mounted.path()), tree(&flat), "before change {at}");
        change(mounted.path());
        change(&flat);
        assert_eq!(tree(mounted.path()), tree(&flat), "after change {at}");
        drop(mounted);
        parent = format!("{name}-{at}");
        world.commit(&parent, &key).unwrap();
    }
    let view = MountedSnapshot::of(&world.view("view", &parent).unwrap(), world.work("view"));
    assert_eq!(tree(view.path()), tree(&flat));
}

#[test]
fn basic() {
    check_layers(
        "basic",
        &[
            |root| {
                write(root, "foo", "foo\n", 0o777);
                make_dir(root, "a/b/c", 0o755);
            },
            |root| {
                write(root, "bar", "bar\n", 0o777);
                write(root, "foo", "bar\n", 0o777);
                fs::remove_dir_all(root.join("a/b")).unwrap();
            },
        ],
    );
}

#[test]
fn layer_file_update() {
    check_layers(
        "update",
        &[
            |root| {
                make_dir(root, "etc", 0o700);
                write(root, "etc/hosts", "mydomain 10.0.0.1", 0o644);
                write(root, "etc/profile", "PATH=/usr/bin", 0o644);
            },
            |root| {
                write(root, "etc/hosts", "mydomain 10.0.0.2", 0o644);
                write(root, "etc/profile", "PATH=/usr/bin", 0o666);
                make_dir(root, "root", 0o700);
                write(root, "root/.bashrc", "PATH=/usr/sbin:/usr/bin", 0o644);
            },
        ],
    );
}

#[test]
fn remove_directory_in_lower_layer() {
    check_layers(
        "opaque",
        &[
            |root| {
                make_dir(root, "lib", 0o700);
                write(root, "lib/hidden", "", 0o644);
            },
            |root| {
                fs::remove_dir_all(root.join("lib")).unwrap();
                make_dir(root, "lib", 0o700);
                write(root, "lib/not-hidden", "", 0o644);
            },
            |root| write(root, "lib/newfile", "", 0o644),
        ],
    );
}

#[test]
fn chown_in_upper_layer() {
    check_layers(
        "chown",
        &[
            |root| {
                make_dir(root, "opt/a/b", 0o700);
                write(root, "opt/a/b/file.txt", "hello", 0o644);
            },
            |root| {
                for path in ["opt", "opt/a", "opt/a/b", "opt/a/b/file.txt"] {
                    chown(root.join(path), Some(1), Some(1)).unwrap();
                }
            },
        ],
    );
}

#[test]
fn directory_permission_on_commit() {
    check_layers(
        "permission",
        &[
            |root| {
                for number in 1..=5 {
                    make_dir(root, &format!("dir{number}"), 0o700);
                }
                write(root, "dir4/f1", "...", 0o644);
                write(root, "dir5/f1", "...", 0o644);
                for path in ["dir1", "dir2", "dir3", "dir5", "dir5/f1"] {
                    chown(root.join(path), Some(1), Some(1)).unwrap();
                }
            },
            |root| {
                chown(root.join("dir2"), Some(0), Some(0)).unwrap();
                fs::remove_dir_all(root.join("dir3")).unwrap();
                chown(root.join("dir4"), Some(1), Some(1)).unwrap();
                chown(root.join("dir4/f1"), Some(1), Some(1)).unwrap();
            },
            |root| {
                for path in ["dir3", "dir5"] {
                    let _ = fs::remove_dir_all(root.join(path));
                    make_dir(root, path, 0o700);
                    chown(root.join(path), Some(1), Some(1)).unwrap();
                }
            },
        ],
    );
}

#[test]
fn deleted_files_in_child_snapshot() {
    check_layers(
        "deleted",
        &[
            |root| {
                write(root, "foo", "foo\n", 0o777);
                write(root, "foobar", "foobar\n", 0o777);
            },
            |root| fs::remove_file(root.join("foobar")).unwrap(),
            |_| (),
        ],
    );
}

#[test]
fn move_file_from_lower_layer() {
    check_layers(
        "move",
        &[
            |root| {
                make_dir(root, "dir1", 0o700);
                write(root, "dir1/f1", "Hello", 0o644);
                make_dir(root, "dir2", 0o700);
                write(root, "dir2/f2", "...", 0o644);
            },
            |root| {
                make_dir(root, "dir3", 0o700);
                write(root, "dir3/f1", "Hello", 0o644);
                fs::remove_dir_all(root.join("dir1")).unwrap();
                fs::hard_link(root.join("dir2/f2"), root.join("dir3/f2")).unwrap();
                fs::remove_file(root.join("dir2/f2")).unwrap();
            },
        ],
    );
}

/// Without the rename of a directory, which an overlay refuses: the suite leaves it out for `overlayfs`, too.
#[test]
fn rename() {
    check_layers(
        "rename",
        &[
            |root| {
                make_dir(root, "somefiles", 0o700);
                write(root, "somefiles/f1", "was here first!", 0o644);
                write(root, "somefiles/f2", "nothing interesting", 0o644);
            },
            |root| {
                write(root, "somefiles/f1-overwrite", "new content 1", 0o644);
                fs::rename(root.join("somefiles/f1-overwrite"), root.join("somefiles/f1")).unwrap();
                fs::rename(root.join("somefiles/f2"), root.join("somefiles/f3")).unwrap();
            },
        ],
    );
}

#[test]
fn view_readonly() {
    let Some(world) = SuiteWorld::new() else { return };
    world.layer("one", "", |_| ());
    world.layer("two", "one", |_| ());
    for parent in ["", "one", "two"] {
        let name = format!("view-{parent}");
        let view = MountedSnapshot::of(&world.view(&name, parent).unwrap(), world.work(&name));
        let refused = fs::write(view.path().join("file"), "").unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{parent}");
        drop(view);
        world.remove(&name).unwrap();
    }
}

#[test]
fn root_permission() {
    let Some(world) = SuiteWorld::new() else { return };
    let mode = |mounted: &MountedSnapshot| fs::metadata(mounted.path()).unwrap().mode() & 0o777;
    assert_eq!(mode(&world.prepare_mount("bottom", "")), 0o755);
    world.layer("base", "", |root| chown(root, Some(3), Some(4)).unwrap());
    let upper = world.prepare_mount("upper", "base");
    let about = fs::metadata(upper.path()).unwrap();
    assert_eq!((mode(&upper), about.uid(), about.gid()), (0o755, 3, 4), "the owner is that of the parent");
}

#[test]
fn usage_is_what_a_snapshot_has_itself() {
    let Some(world) = SuiteWorld::new() else { return };
    let write = |root: &Path| fs::write(root.join("data"), vec![1; 100_000]).unwrap();
    let mounted = world.prepare_mount("active", "");
    let empty = world.usage("active").unwrap();
    write(mounted.path());
    let active = world.usage("active").unwrap();
    assert!((100_000..120_000).contains(&(active.size - empty.size)), "{active:?}");
    assert_eq!(active.inodes, empty.inodes + 1);
    drop(mounted);
    world.commit("base", "active").unwrap();
    assert_eq!(world.usage("base").unwrap(), active);
    world.prepare("above", "base").unwrap();
    assert_eq!(world.usage("above").unwrap(), empty, "without its parent");
    world.view("view", "base").unwrap();
    assert_eq!(world.usage("view").unwrap().size, 0);
}

#[test]
fn mounts_of_128_layers() {
    let Some(world) = SuiteWorld::new() else { return };
    let flat = world.work("flat");
    let bottom = |root: &Path| {
        write(root, "bottom", "way at the bottom\n", 0o777);
        write(root, "overwriteme", "FIRST!\n", 0o777);
        make_dir(root, "addhere", 0o755);
        make_dir(root, "onlyme", 0o755);
        write(root, "onlyme/bottom", "bye!\n", 0o777);
    };
    bottom(&flat);
    let mut parent = world.layer("layer-0", "", bottom);
    for number in 1..128 {
        let change = |root: &Path| {
            write(root, "overwriteme", &format!("{number} WAS HERE!\n"), 0o777);
            write(root, &format!("addhere/file-{number}"), "same\n", 0o755);
            fs::remove_dir_all(root.join("onlyme")).unwrap();
            make_dir(root, "onlyme", 0o755);
            write(root, &format!("onlyme/file-{number}"), "only me!\n", 0o777);
        };
        change(&flat);
        parent = world.layer(&format!("layer-{number}"), &parent, change);
    }
    let view = MountedSnapshot::of(&world.view("view", &parent).unwrap(), world.work("view"));
    assert_eq!(tree(view.path()), tree(&flat));
}
