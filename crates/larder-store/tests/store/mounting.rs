//! Mounts. All of it needs root, and an overlay filesystem in the kernel.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_store::disk::{Disk, DiskFile, FileOpenMode, FilesystemSync};
use larder_store::mounts::{MountError, MountOptions};
use larder_store::store::{LayerHandle, RemoveOptions, Store, StoreError};

use larder_testkit::archive::TarBuilderEntry;

use crate::fsck::{layer_dir, unpacked_entries, unpacked_layer};
use crate::help::*;

/// Whether mounts can be tried; says loudly when not.
pub(crate) fn can_mount() -> bool {
    if rustix::process::geteuid().is_root() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "CI must not skip mounts: run the tests as root");
    eprintln!("==== SKIPPED, NOT TESTED: mounting needs root; run the tests as root ====");
    false
}

/// A place to mount at, unmounted in the end whatever happens.
pub(crate) struct MountTarget(pub(crate) PathBuf);

impl MountTarget {
    pub(crate) fn new(scratch: &TempStore, name: &str) -> MountTarget {
        let path = scratch.dir.path().join(name);
        fs_err::create_dir(&path).unwrap();
        MountTarget(path)
    }
}

impl Drop for MountTarget {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

fn mount(store: &Store, image: &str, target: &Path, writable: bool) -> Result<String, MountError> {
    store
        .mount(image, target, MountOptions { writable, ..MountOptions::default() }, noon())
        .map(|mount| mount.id)
}

fn read(path: PathBuf) -> String {
    fs_err::read_to_string(path).unwrap()
}

#[test]
fn a_mount_that_fails_for_damage_records_it() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    let file = fs_err::File::options().write(true).open(layer_dir(&scratch.store, "app")).unwrap();
    // In the superblock: the kernel refuses it.
    std::os::unix::fs::FileExt::write_all_at(file.file(), b"damage", 1024).unwrap();
    let target = MountTarget::new(&scratch, "mnt");
    let refused = mount(&scratch.store, "app", &target.0, false).unwrap_err();
    assert!(matches!(&refused, MountError::Damaged { image, .. } if image.as_str() == "app"), "{refused:?}");
    assert_eq!(scratch.store.damaged_images().unwrap().len(), 1);
    assert!(scratch.store.mounts().unwrap().is_empty());
}

#[test]
fn a_mount_shows_the_layers_merged_and_takes_no_writes() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b", "c"]);
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, "app", &target.0, false).unwrap();
    assert_eq!(read(target.0.join("etc/name")), "c", "the topmost wins");
    assert_eq!(entries(&target.0), ["a", "b", "c", "etc"]);
    let error = fs_err::write(target.0.join("new"), "x").expect_err("read-only");
    assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
    let mounts = scratch.store.mounts().unwrap();
    assert!(mounts[0].mounted && mounts[0].name == "app");
    scratch.store.umount(&target.0).unwrap();
    assert!(entries(&target.0).is_empty());
    assert!(scratch.store.mounts().unwrap().is_empty());
    assert!(entries(&scratch.root().join("mounts")).is_empty());
}

#[test]
fn one_layer_and_none_will_do() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "one", &["a"]);
    commit(&scratch.store, "none", &[]);
    for (image, writable, files) in
        [("one", false, 2), ("none", false, 0), ("one", true, 2), ("none", true, 0)]
    {
        let target = MountTarget::new(&scratch, &format!("{image}{writable}"));
        mount(&scratch.store, image, &target.0, writable)
            .unwrap_or_else(|error| panic!("{image} {writable}: {error:?}"));
        assert_eq!(entries(&target.0).len(), files, "{image} {writable}");
        scratch.store.umount(&target.0).unwrap();
    }
}

#[test]
fn an_opaque_root_hides_all_layers_below() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    let layers = [&[("a", "1"), ("dir/a", "1")][..], &[("b", "2"), (".wh..wh..opq", "")], &[("dir/c", "3")]];
    let layers = layers.map(|files| unpacked_layer(&scratch.store, files));
    scratch.store.commit(&image(&["app"], &layers), noon()).unwrap();
    scratch.store.commit(&image(&["opaque"], &layers[..2]), noon()).unwrap();
    for writable in [false, true] {
        let target = MountTarget::new(&scratch, &format!("app{writable}"));
        mount(&scratch.store, "app", &target.0, writable).unwrap();
        assert_eq!(
            (entries(&target.0), entries(&target.0.join("dir"))),
            (vec!["b".into(), "dir".into()], vec!["c".into()])
        );
        let topmost = MountTarget::new(&scratch, &format!("opaque{writable}"));
        mount(&scratch.store, "opaque", &topmost.0, writable).unwrap();
        assert_eq!(entries(&topmost.0), ["b"]);
        for target in [&target, &topmost] {
            scratch.store.umount(&target.0).unwrap();
        }
    }
}

#[test]
fn two_hundred_layers_can_be_mounted_also_writable() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    let names: Vec<String> = (0..200).map(|number| format!("layer{number:03}")).collect();
    let layers: Vec<LayerHandle> = names.iter().map(|name| layer(&scratch.store, name)).collect();
    scratch.store.commit(&image(&["deep"], &layers), noon()).unwrap();
    for writable in [false, true] {
        let target = MountTarget::new(&scratch, &format!("mnt{writable}"));
        mount(&scratch.store, "deep", &target.0, writable).unwrap();
        assert_eq!(entries(&target.0).len(), 201);
        assert_eq!(read(target.0.join("etc/name")), "layer199");
        scratch.store.umount(&target.0).unwrap();
    }
}

#[test]
fn a_writable_mount_keeps_its_files_apart_and_drops_them_in_the_end() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    let record = commit(&scratch.store, "app", &["a", "b"]);
    let (one, two) = (MountTarget::new(&scratch, "one"), MountTarget::new(&scratch, "two"));
    mount(&scratch.store, "app", &one.0, true).unwrap();
    mount(&scratch.store, "app", &two.0, true).unwrap();
    fs_err::write(one.0.join("etc/name"), "changed").unwrap();
    fs_err::remove_file(one.0.join("a")).unwrap();
    assert_eq!(read(two.0.join("etc/name")), "b");
    assert!(two.0.join("a").exists());
    let layer = scratch.store.layer(&record.layers[1].key).unwrap().unwrap();
    assert_eq!(name_in(&layer), "b", "layers are never written to");
    assert!(scratch.store.usage().unwrap().mounts.inodes > 4);
    fs_err::write(one.0.join("large"), vec![1; 100_000]).unwrap();
    let mounts = scratch.store.mounts().unwrap();
    let [large, small] = [&mounts[0], &mounts[1]].map(|mount| scratch.store.written_to(mount).unwrap().bytes);
    assert!(large >= 100_000 && small < 100_000, "{large} and {small} bytes written");
    scratch.store.umount(&one.0).unwrap();
    scratch.store.umount(&two.0).unwrap();
    assert!(entries(&scratch.root().join("mounts")).is_empty());
}

#[test]
fn the_root_of_a_mount_has_the_metadata_of_the_image() {
    use std::os::unix::fs::MetadataExt as _;
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    let layer = unpacked_entries(&scratch.store, [TarBuilderEntry::dir(".").mode(0o1751).owner(12, 34)]);
    scratch.store.commit(&image(&["app"], &[layer]), noon()).unwrap();
    for writable in [false, true] {
        let target = MountTarget::new(&scratch, &format!("mnt{writable}"));
        mount(&scratch.store, "app", &target.0, writable).unwrap();
        let root = fs_err::metadata(&target.0).unwrap();
        assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o1751, 12, 34), "{writable}");
        scratch.store.umount(&target.0).unwrap();
    }
}

#[test]
fn a_mounted_image_is_not_removed_unless_forced() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b"]);
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, "app", &target.0, false).unwrap();
    let error = scratch.store.remove("app", &RemoveOptions::default()).expect_err("in use");
    assert!(matches!(&error, StoreError::Mounted { .. }), "{error}");
    assert!(error.to_string().contains(&target.0.display().to_string()), "{error}");
    let force = RemoveOptions { force: true, ..RemoveOptions::default() };
    let removed = scratch.store.remove("app", &force).unwrap().unwrap();
    assert!(removed.layers.is_empty(), "the mount needs them");
    let scratch = scratch.reopen();
    assert_eq!(read(target.0.join("etc/name")), "b", "and has them, also after a restart");
    scratch.store.umount(&target.0).unwrap();
    assert!(entries(&scratch.root().join("layers")).is_empty(), "now they go");
}

#[test]
fn a_mount_that_ended_without_us_is_no_use_after_a_restart() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b"]);
    let [kept, plain, written] = ["kept", "plain", "written"].map(|name| MountTarget::new(&scratch, name));
    mount(&scratch.store, "app", &kept.0, false).unwrap();
    mount(&scratch.store, "app", &plain.0, true).unwrap();
    mount(&scratch.store, "app", &written.0, true).unwrap();
    fs_err::write(written.0.join("work"), "of a day").unwrap();
    for gone in [&plain, &written] {
        rustix::mount::unmount(&gone.0, rustix::mount::UnmountFlags::empty()).unwrap();
    }
    let scratch = scratch.reopen();
    let mounts = scratch.store.mounts().unwrap();
    let seen: Vec<_> = mounts.iter().map(|mount| (mount.target.as_path(), mount.mounted)).collect();
    assert_eq!(seen, [(kept.0.as_path(), true), (written.0.as_path(), false)]);
    let upper = scratch.root().join("mounts").join(&mounts[1].id).join("upper");
    assert_eq!(read(upper.join("work")), "of a day", "what was written is not lost");
    scratch.store.umount(&written.0).expect("the way to drop it");
    assert!(!upper.exists());
    scratch.store.umount(&kept.0).unwrap();
}

#[test]
fn errors_name_their_input() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    let nowhere = scratch.dir.path().join("nowhere");
    let error = mount(&scratch.store, "app", &nowhere, false).expect_err("no such directory");
    assert!(matches!(error, MountError::Target { .. }) && error.hint().is_some(), "{error}");
    let error = mount(&scratch.store, "app", &scratch.root().join("format"), false).expect_err("a file");
    assert!(matches!(error, MountError::Target { .. }), "{error}");
    let target = scratch.dir.path().join("mnt");
    fs_err::create_dir(&target).unwrap();
    let error = mount(&scratch.store, "other", &target, false).expect_err("no such image");
    assert!(matches!(error, MountError::Store(StoreError::NoImage { .. })), "{error}");
    let error = scratch.store.umount(scratch.dir.path()).expect_err("nothing mounted");
    assert!(matches!(error, MountError::NotOurs { .. }), "{error}");
    assert!(scratch.store.mounts().unwrap().is_empty());
}

#[test]
fn no_mount_hides_the_store() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    let (home, root) = (scratch.dir.path(), scratch.root());
    let link = home.join("link");
    std::os::unix::fs::symlink(&root, &link).unwrap();
    for target in [home.to_owned(), root.clone(), root.join("layers"), link] {
        let target = MountTarget(target);
        let error = mount(&scratch.store, "app", &target.0, false).expect_err("it hides the store");
        assert!(matches!(error, MountError::HidesStore { .. }) && error.hint().is_some(), "{error}");
    }
    assert!(scratch.store.mounts().unwrap().is_empty());
}

/// A disk on which another process replaces a directory by a link, once a mount has looked at its target.
#[derive(Debug)]
struct SwappingDisk {
    real: Arc<dyn Disk>,
    directory: PathBuf,
    link_to: PathBuf,
}

impl Disk for SwappingDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        if path.parent().is_some_and(|parent| parent.ends_with("mounts")) {
            fs_err::rename(&self.directory, self.directory.with_extension("moved")).unwrap();
            std::os::unix::fs::symlink(&self.link_to, &self.directory).unwrap();
        }
        self.real.create_dir(path)
    }

    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        self.real.open(path, how)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.real.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.real.remove_file(path)
    }

    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        self.real.remove_tree(path, go_on)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.real.sync_dir(path)
    }

    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        self.real.open_sync(path)
    }

    fn boot_id(&self) -> String {
        self.real.boot_id()
    }
}

#[test]
fn a_target_whose_path_changes_is_mounted_where_it_was_checked() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (directory, other) = (dir.path().join("place"), dir.path().join("other"));
    for made in [&directory, &other] {
        fs_err::create_dir_all(made.join("mnt")).unwrap();
    }
    let disk = SwappingDisk { real: real(), directory: directory.clone(), link_to: other.clone() };
    let store = Store::open_on(Arc::new(disk), &dir.path().join("store"), config()).unwrap();
    commit(&store, "app", &["a"]);
    let key = store.image("app").unwrap().expect("an image").layers[0].key.clone();
    let _layer = MountTarget(store.root().join("lowers").join(key.as_str()));
    let (moved, elsewhere) =
        (MountTarget(dir.path().join("place.moved/mnt")), MountTarget(other.join("mnt")));
    mount(&store, "app", &directory.join("mnt"), false).unwrap();
    assert_eq!(entries(&elsewhere.0), [""; 0], "nothing was mounted where the link leads");
    assert_eq!(read(moved.0.join("etc/name")), "a");
}

#[test]
fn a_directory_takes_one_image_at_a_time() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b"]);
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, "app", &target.0, true).unwrap();
    let error = mount(&scratch.store, "app", &target.0, false).expect_err("something is there");
    assert!(matches!(error, MountError::Taken { .. }) && error.hint().is_some(), "{error}");
    assert_eq!(scratch.store.mounts().unwrap().len(), 1);
    scratch.store.umount(&target.0).unwrap();
    mount(&scratch.store, "app", &target.0, false).unwrap();
    scratch.store.umount(&target.0).unwrap();
}

#[test]
fn a_busy_mount_is_retained() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b"]);
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, "app", &target.0, false).unwrap();
    let user = fs_err::File::open(target.0.join("a")).unwrap();
    let error = scratch.store.umount(&target.0).expect_err("busy");
    assert!(matches!(error, MountError::Busy { .. }), "{error}");
    assert!(scratch.store.mounts().unwrap()[0].mounted);
    drop(user);
    scratch.store.umount(&target.0).unwrap();
}

/// The mount options of a mountpoint, from `/proc/self/mountinfo`.
fn options_of(target: &Path) -> Vec<String> {
    let table = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
    let mut fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let of_target = fields.find(|fields| Path::new(fields[4]) == target).expect("it is mounted");
    of_target[5].split(',').map(str::to_owned).collect()
}

#[test]
fn set_id_bits_and_devices_of_an_image_have_no_effect_unless_requested() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    const UNPRIVILEGED: u32 = 65534;
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    fs_err::set_permissions(scratch.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let id = fs_err::read("/usr/bin/id").unwrap();
    let layer = unpacked_entries(
        &scratch.store,
        [
            TarBuilderEntry::dir("."),
            TarBuilderEntry::file("id", id).mode(0o4755),
            // Of /dev/null.
            TarBuilderEntry::char_device("null", 1, 3).mode(0o666),
        ],
    );
    scratch.store.commit(&image(&["app"], &[layer]), noon()).unwrap();
    for (writable, honored) in [(false, false), (true, false), (false, true)] {
        let target = MountTarget::new(&scratch, &format!("mnt{writable}{honored}"));
        let options = MountOptions { writable, suid: honored, dev: honored };
        scratch.store.mount("app", &target.0, options, noon()).unwrap();
        let flags = options_of(&target.0);
        for flag in ["nosuid", "nodev"] {
            assert_eq!(flags.iter().any(|set| set == flag), !honored, "{flag} in {flags:?}");
        }
        let id = std::process::Command::new(target.0.join("id"))
            .arg("-u")
            .uid(UNPRIVILEGED)
            .gid(UNPRIVILEGED)
            .output();
        let seen = String::from_utf8(id.unwrap().stdout).unwrap();
        assert_eq!(seen.trim(), if honored { "0" } else { "65534" }, "{flags:?}");
        assert_eq!(fs_err::File::open(target.0.join("null")).is_ok(), honored, "{flags:?}");
        scratch.store.umount(&target.0).unwrap();
    }
}

#[test]
fn a_copy_of_a_mount_in_a_cloned_namespace_keeps_its_layers() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b"]);
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, "app", &target.0, false).unwrap();
    let mut other = std::process::Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sleep", "1000"])
        .spawn()
        .unwrap();
    let proc = PathBuf::from(format!("/proc/{}", other.id()));
    let own = fs_err::read_link("/proc/self/ns/mnt").unwrap();
    // `sleep` runs after the namespace was cloned and made private.
    let ready = || {
        let command = fs_err::read_to_string(proc.join("comm")).ok()?;
        let cloned = fs_err::read_link(proc.join("ns/mnt")).ok()? != own;
        (cloned && command.trim() == "sleep").then_some(())
    };
    larder_testkit_peers::process::poll(std::time::Duration::from_secs(20), ready).expect("the clone");

    let error = scratch.store.umount(&target.0).expect_err("the clone has it");
    let held_by = |error: &MountError| match error {
        MountError::OtherNamespace { process, .. } => *process,
        _ => None,
    };
    assert_eq!(held_by(&error), Some(other.id()), "{error}");
    assert!(entries(&target.0).is_empty(), "it is unmounted here");
    let force = RemoveOptions { force: true, ..RemoveOptions::default() };
    scratch.store.remove("app", &force).unwrap().unwrap();
    let scratch = scratch.reopen();
    let copy = proc.join("root").join(target.0.strip_prefix("/").unwrap());
    let files = fs_err::read_to_string(copy.join("etc/name"));
    let again = scratch.store.umount(&target.0);
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(files.unwrap(), "b", "the clone has its files, also after a restart");
    assert_eq!(again.err().as_ref().and_then(held_by), Some(other.id()));
    scratch.store.umount(&target.0).expect("no namespace has it");
    assert!(entries(&scratch.root().join("layers")).is_empty());
}
