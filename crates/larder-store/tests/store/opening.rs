//! Opening a store, whatever was there before.

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use larder_store::fsck::FsckOptions;
use larder_store::store::{ImageCommit, LeaseRecord, LeaseResources, Store, StoreOpenError};

use crate::help::*;

#[test]
fn a_store_is_opened_once_and_names_its_owner() {
    let scratch = TempStore::new();
    let error = Store::open(&scratch.root(), config()).expect_err("it is open");
    assert!(
        matches!(&error, StoreOpenError::InUse { holder, .. } if holder.contains(&std::process::id().to_string())),
        "{error}"
    );
    assert!(error.to_string().contains("process "), "{error}");
    let layer = layer(&scratch.store, "a");
    let root = scratch.root();
    let TempStore { store, dir } = scratch;
    drop(store);
    Store::open(&root, config()).expect_err("a layer that was given out keeps it open");
    drop(layer);
    open(&root);
    drop(dir);
}

#[test]
fn the_lock_is_the_kernels_and_not_the_files() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path());
    fs_err::write(dir.path().join("lock"), "1\n").unwrap();
    open(dir.path());
}

#[test]
fn another_process_may_hold_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path());
    let mut holder = Command::new("flock")
        .arg(dir.path().join("lock"))
        .args(["sh", "-c", "echo ready; read line"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut ready).unwrap();
    let error = Store::open(dir.path(), config()).expect_err("it is locked");
    assert!(matches!(error, StoreOpenError::InUse { .. }), "{error}");
    assert!(error.hint().is_some());
    drop(holder.stdin.take());
    holder.wait().unwrap();
    open(dir.path());
}

#[test]
fn a_directory_of_other_things_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    fs_err::write(dir.path().join("letter.txt"), "dear").unwrap();
    symlink("letter.txt", dir.path().join("release")).unwrap();
    let error = Store::open(dir.path(), config()).expect_err("not a store");
    assert!(matches!(error, StoreOpenError::NotAStore { .. }), "{error}");
    assert_eq!(entries(dir.path()), ["letter.txt", "release"]);
}

#[test]
fn where_there_is_no_store_none_is_made_unless_wanted() {
    let dir = tempfile::tempdir().unwrap();
    for root in [dir.path().to_owned(), dir.path().join("nowhere")] {
        let error = Store::open_existing(&root, config()).expect_err("no store");
        assert!(matches!(&error, StoreOpenError::NoStore { root: named } if *named == root), "{error}");
        let error = Store::rebuild(&root, config()).expect_err("nothing to rebuild from");
        assert!(matches!(error, StoreOpenError::NoStore { .. }), "{error}");
    }
    assert!(entries(dir.path()).is_empty());
    open(dir.path());
    Store::open_existing(dir.path(), config()).unwrap();
    fs_err::remove_file(dir.path().join("format")).unwrap();
    Store::open_existing(dir.path(), config()).expect_err("its format is unknown");
    Store::rebuild(dir.path(), config()).expect("from what is there");
    let file = dir.path().join("lock");
    for root in [file.clone(), file.join("below")] {
        let error = Store::open(&root, config()).expect_err("a file");
        assert!(matches!(error, StoreOpenError::NotADirectory { .. }) && error.hint().is_some(), "{error}");
    }
}

#[test]
fn a_fresh_file_system_will_do() {
    let dir = tempfile::tempdir().unwrap();
    fs_err::create_dir(dir.path().join("lost+found")).unwrap();
    open(dir.path());
    open(dir.path());
}

#[test]
fn another_format_is_refused_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path());
    for other in
        ["larder store 2\n", "larder image store 5\n", "larder store 0\n", "larder store 1", "", "else"]
    {
        fs_err::write(dir.path().join("format"), other).unwrap();
        let before = snapshot(dir.path());
        for opened in [Store::open(dir.path(), config()), Store::open_for_check(dir.path(), config())] {
            let error = opened.expect_err(other);
            assert!(
                matches!(&error, StoreOpenError::Format { found, .. } if found == other.trim_end()),
                "{error}"
            );
            let is_damaged = ["larder store 1", "", "else"].contains(&other);
            let hint = error.hint().unwrap().to_string();
            assert_eq!(hint.contains("echo larder store 1 > "), is_damaged, "{other:?}: {hint}");
        }
        assert_eq!(snapshot(dir.path()), before);
    }
}

#[test]
fn leftovers_of_a_killed_process_are_removed() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    // A layer that was being unpacked, one that was finished, a blob of an image that was not committed.
    let staging = scratch.store.begin_layer().unwrap();
    fs_err::write(staging.dir().join("layer.erofs"), "").unwrap();
    let finished = layer(&scratch.store, "finished");
    let root = scratch.root();
    fs_err::write(root.join("blobs/sha256").join(digest("x").hex()), "x").unwrap();
    fs_err::write(root.join("ingest/rubbish"), "x").unwrap();
    fs_err::write(root.join("images/rubbish.json"), "x").unwrap();
    fs_err::create_dir(root.join("mounts/000007")).unwrap();
    let killed = scratch.dir.path().join("killed");
    copy(&root, &killed);
    drop((staging, finished));

    let store = open(&killed);
    assert_eq!(tags(&store), ["docker.io/library/app:latest"]);
    assert_eq!(entries(&killed.join("layers")), [key("a").as_str()]);
    assert_eq!(entries(&killed.join("blobs/sha256")).len(), 2);
    assert_eq!(entries(&killed.join("images")).len(), 1);
    for dir in ["staging", "ingest", "mounts"] {
        assert!(entries(&killed.join(dir)).is_empty(), "{dir}");
    }
    // New names do not meet old ones.
    commit(&store, "web", &["w"]);
    store.empty_trash().unwrap();
    assert!(entries(&killed.join("trash")).is_empty());
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}

#[test]
fn an_image_without_a_layer_is_hidden_until_its_own_pull_or_if_it_was_preloaded_any_fetches_the_layer() {
    for preloaded in [false, true] {
        hide_image_without_a_layer(preloaded);
    }
}

fn hide_image_without_a_layer(preloaded: bool) {
    let scratch = TempStore::new();
    let layers = ["base", "app"].map(|name| layer(&scratch.store, name));
    scratch.store.commit(&ImageCommit { preloaded, ..image(&["app"], &layers) }, noon()).unwrap();
    drop(layers);
    commit(&scratch.store, "web", &["base", "web"]);
    fs_err::remove_file(scratch.root().join("layers").join(key("app").as_str())).unwrap();
    let scratch = scratch.reopen();
    assert_eq!(tags(&scratch.store), ["docker.io/library/web:latest"]);
    assert!(scratch.store.image("app").unwrap().is_none());
    assert!(scratch.store.layer(&key("app")).unwrap().is_none());
    scratch.store.sweep(&noon().into()).unwrap();
    assert!(scratch.store.layer(&key("base")).unwrap().is_some(), "the others wait for it");
    // As the pull of another image with the layer.
    let layers = ["base", "app"].map(|name| layer(&scratch.store, name));
    scratch.store.commit_layers(&layers[1..], None).unwrap();
    assert_eq!(
        scratch.store.image("app").unwrap().is_some(),
        preloaded,
        "its users show their credentials again"
    );
    scratch.store.commit(&image(&["app"], &layers), noon()).unwrap();
    assert!(scratch.store.image("app").unwrap().is_some());
}

#[test]
fn a_damaged_database_is_rebuilt_and_a_check_says_what_to_do() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    let leased = LeaseResources::default();
    let lease = LeaseRecord::granted("held/1", leased, Duration::MAX, &noon().into());
    let TempStore { store, dir } = scratch;
    let root = store.root().to_owned();
    drop(store);
    let database = root.join("larder.db");
    for damage in [None, Some(vec![]), Some(vec![7; 100_000]), Some(vec![0; 4096])] {
        match &damage {
            Some(bytes) => fs_err::write(&database, bytes).unwrap(),
            None => fs_err::remove_file(&database).unwrap(),
        }
        let before = fs_err::read(&database).ok();
        let error = Store::open_for_check(&root, config()).expect_err("damaged");
        assert!(error.is_damage() && error.hint().unwrap().to_string().contains("--rebuild"), "{error:?}");
        assert_eq!(fs_err::read(&database).ok(), before, "a check changes nothing");
        assert_eq!(entries(&root.join("layers")), [key("a").as_str()], "nothing was cleaned");
        let store = open(&root);
        assert_eq!(tags(&store), ["docker.io/library/app:latest"]);
        assert!(store.layer(&key("a")).unwrap().is_some());
        store.lease(&lease).unwrap();
    }
    // What can be read of it is used.
    let mut bytes = fs_err::read(&database).unwrap();
    let listed = b"docker.io/library/app";
    let at = bytes.windows(listed.len()).position(|part| part == listed).expect("the name of the image");
    bytes[at] ^= 1;
    fs_err::write(&database, bytes).unwrap();
    let store = open(&root);
    assert_eq!(tags(&store), ["docker.io/library/app:latest"]);
    assert_eq!(store.leases(&noon().into()).unwrap(), [lease]);
    assert!(store.ratio().unwrap().bytes > 0.0);
    drop(dir);
}

#[test]
fn a_check_leaves_what_an_interrupted_operation_left() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    let TempStore { store, dir } = scratch;
    let root = store.root().to_owned();
    drop(store);
    fs_err::create_dir(root.join("layers").join(key("unlisted").as_str())).unwrap();
    fs_err::create_dir(root.join("staging/7")).unwrap();
    let store = Store::open_for_check(&root, config()).unwrap();
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert_eq!((report.problems.len(), report.is_sound()), (1, true), "{report:?}");
    drop(store);
    assert_eq!((entries(&root.join("layers")).len(), entries(&root.join("staging")).len()), (2, 1));
    open(&root);
    assert_eq!((entries(&root.join("layers")).len(), entries(&root.join("staging")).len()), (1, 0));
    drop(dir);
}

#[test]
fn a_directory_that_vanished_is_made_again_and_its_layers_are_missing() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["base", "app"]);
    fs_err::remove_dir_all(scratch.root().join("layers")).unwrap();
    let scratch = scratch.reopen();
    assert!(scratch.store.image("app").unwrap().is_none());
    commit(&scratch.store, "app", &["base", "app"]);
    assert!(scratch.store.image("app").unwrap().is_some());
}

#[test]
fn a_store_on_a_disk_of_ones_own_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open_on(real(), dir.path(), config()).unwrap();
    commit(&store, "app", &["a"]);
    drop(store);
    assert_eq!(tags(&open(dir.path())).len(), 1);
}

/// Each path below a directory, with the digest of its content, and its time.
fn snapshot(root: &Path) -> Vec<(String, String, i64, i64)> {
    use std::os::unix::fs::MetadataExt as _;
    let mut found = Vec::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let metadata = fs_err::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            waiting.extend(fs_err::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let content = if metadata.is_file() { fs_err::read(&path).unwrap() } else { Vec::new() };
        let content = digest(content).to_string();
        found.push((path.to_string_lossy().into_owned(), content, metadata.mtime(), metadata.mtime_nsec()));
    }
    // The lock names the process.
    found.retain(|(path, ..)| !path.ends_with("/lock"));
    found.sort();
    found
}

#[test]
fn a_check_changes_nothing() {
    let unclean = |dir: &Path| {
        let root = dir.join("store");
        let store = open(&root);
        commit(&store, "app", &["a"]);
        let log = fs_err::read(root.join("larder.db-wal")).unwrap();
        drop(store);
        fs_err::write(root.join("larder.db-wal"), log).unwrap();
        root
    };
    let without_directories = |dir: &Path| {
        let root = unclean(dir);
        for name in ["ingest", "mounts", "staging", "trash"] {
            fs_err::remove_dir(root.join(name)).unwrap();
        }
        root
    };
    for prepare in [&unclean as &dyn Fn(&Path) -> PathBuf, &without_directories] {
        let dir = tempfile::tempdir().unwrap();
        let root = prepare(dir.path());
        let before = snapshot(&root);
        let store = Store::open_for_check(&root, config()).unwrap();
        let options = FsckOptions::default();
        assert!(store.fsck(&options).unwrap().is_sound());
        drop(store);
        assert_eq!(snapshot(&root), before);
        open(&root);
    }
}

/// Entries of a directory, with modes and contents, in order.
fn tree(dir: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs_err::symlink_metadata(&path).unwrap();
        let content = if metadata.is_file() { fs_err::read(&path).unwrap() } else { Vec::new() };
        found.push((path.clone(), metadata.permissions().mode() & 0o7777, content));
        if metadata.is_dir() {
            found.extend(tree(&path));
        }
    }
    found.sort();
    found
}

#[test]
fn a_root_that_someone_else_prepared_is_refused_and_nothing_outside_changes() {
    let scratch = tempfile::tempdir().unwrap();
    let (outside, root) = (scratch.path().join("outside"), scratch.path().join("above/root"));
    fs_err::create_dir_all(outside.join("1/deep")).unwrap();
    fs_err::write(outside.join("1/deep/file"), "untouched").unwrap();
    let before = tree(&outside);
    let refused = |what: &str| {
        let opened = [Store::open(&root, config()), Store::open_existing(&root, config())];
        for opened in opened.into_iter().chain([Store::open_for_check(&root, config())]) {
            let Err(StoreOpenError::Io { cause, .. }) = opened else { panic!("{what}: {opened:?}") };
            assert_eq!(cause.kind(), std::io::ErrorKind::PermissionDenied, "{what}: {cause}");
            assert!(cause.to_string().contains("another directory"), "{what}: {cause}");
        }
        assert_eq!(tree(&outside), before, "{what}");
    };
    drop(open(&root));
    let names: Vec<PathBuf> = fs_err::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(names.len() > 8, "{names:?}");
    let kept = scratch.path().join("kept");
    for name in names.into_iter().chain(["format.new", "larder.db.new", "lowers"].map(|name| root.join(name)))
    {
        let had = name.exists();
        if had {
            fs_err::rename(&name, &kept).unwrap();
        }
        symlink(&outside, &name).unwrap();
        refused(name.to_str().unwrap());
        fs_err::remove_file(&name).unwrap();
        if had {
            fs_err::rename(&kept, &name).unwrap();
        }
    }
    let mode = |path: &Path, mode| fs_err::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    for open_to_others in [root.clone(), root.join("trash"), scratch.path().join("above")] {
        mode(&open_to_others, 0o777);
        refused(open_to_others.to_str().unwrap());
        mode(&open_to_others, 0o755);
    }
    // Only root can give a directory away.
    if rustix::process::geteuid().is_root() {
        for owned in [root.clone(), root.join("layers"), scratch.path().join("above")] {
            chown(&owned, Some(7), Some(7)).unwrap();
            refused(owned.to_str().unwrap());
            chown(&owned, Some(0), Some(0)).unwrap();
        }
    }
    mode(&scratch.path().join("above"), 0o1777);
    drop(open(&root));
}

#[test]
fn no_umask_makes_the_store_writable_by_others() {
    const ROOT: &str = "LARDER_TEST_UMASK_ROOT";
    if let Some(root) = std::env::var_os(ROOT) {
        commit(&open(Path::new(&root)), "app:1", &["a"]);
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let name = "opening::no_umask_makes_the_store_writable_by_others";
    let command = format!("umask 0; exec \"$0\" --exact {name}");
    let mut child = Command::new("sh");
    child.args(["-c", &command]).arg(std::env::current_exe().unwrap());
    let root = scratch.path().join("above/root");
    assert!(child.env(ROOT, &root).status().unwrap().success());
    let made = tree(scratch.path());
    assert!(made.iter().any(|(path, ..)| path.starts_with(root.join("layers"))), "{made:?}");
    let open: Vec<_> =
        made.iter().filter(|(_, mode, _)| mode & 0o022 != 0).map(|(path, mode, _)| (path, mode)).collect();
    assert!(open.is_empty(), "{open:?}");
}
