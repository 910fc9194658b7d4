//! Every kind of damage is found, and only that.

use std::os::unix::fs::symlink;
use std::path::Path;

use larder_store::unpack::{DamageKind, Depth, verify};
use larder_testkit::archive::{Archive, Entry};
use rustix::fs::{
    AtFlags, CWD, Mode, Timespec, Timestamps, XattrFlags, chmodat, chownat, setxattr, utimensat,
};

use crate::support::{Layer, is_root};

type Harm = fn(&Path);

fn sample() -> Layer {
    let layer = Layer::new();
    let archive = Archive::new()
        .with(Entry::dir("d").xattr("user.a", "1"))
        .with(Entry::file("d/file", "content").xattr("user.a", "1"))
        .with(Entry::hard_link("d/link", "d/file"))
        .with(Entry::symlink("d/soft", "file"))
        .with(Entry::fifo("d/pipe"))
        .with(Entry::file("d/.wh.gone", ""))
        .with(Entry::file("d/sub/deep", "x"))
        .with(Entry::file("o/.wh..wh..opq", ""))
        .with(Entry::char_device("d/null", 1, 3))
        .finish();
    layer.unpack(&archive).unwrap();
    assert_eq!(layer.damage(), []);
    layer
}

/// Puts the times back that the damage itself has changed, so that only the damage shows.
fn with_old_times(path: &Path, damage: impl FnOnce(&Path)) {
    let time = Timespec { tv_sec: 1_700_000_000, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    damage(path);
    for path in [path, path.parent().unwrap()] {
        // It may be gone.
        let _ = utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW);
    }
}

#[test]
fn each_kind_of_damage_is_named() {
    if !is_root() {
        return;
    }
    let remove: Harm = |path| fs_err::remove_file(path).unwrap();
    let cases: Vec<(&str, Harm, DamageKind)> = vec![
        ("d/soft", remove, DamageKind::Missing),
        ("d/link", remove, DamageKind::Missing),
        ("d/gone", remove, DamageKind::Missing),
        ("d/sub/deep", remove, DamageKind::Missing),
        ("d/file", |path| fs_err::write(path, "Content").unwrap(), DamageKind::Content),
        ("d/file", |path| fs_err::write(path, "contents").unwrap(), DamageKind::Size),
        (
            "d/file",
            |path| chmodat(CWD, path, Mode::from_raw_mode(0o4644), AtFlags::empty()).unwrap(),
            DamageKind::Mode,
        ),
        (
            "d/sub",
            |path| chmodat(CWD, path, Mode::from_raw_mode(0o777), AtFlags::empty()).unwrap(),
            DamageKind::Mode,
        ),
        (
            "d/soft",
            |path| {
                chownat(CWD, path, Some(rustix::fs::Uid::from_raw(9)), None, AtFlags::SYMLINK_NOFOLLOW)
                    .unwrap();
            },
            DamageKind::Owner,
        ),
        ("d/file", |path| setxattr(path, "user.b", b"2", XattrFlags::empty()).unwrap(), DamageKind::Xattrs),
        (
            "d",
            |path| setxattr(path, "trusted.overlay.opaque", b"y", XattrFlags::empty()).unwrap(),
            DamageKind::Xattrs,
        ),
        ("o", |path| rustix::fs::removexattr(path, "trusted.overlay.opaque").unwrap(), DamageKind::Xattrs),
        (
            "d/soft",
            |path| {
                fs_err::remove_file(path).unwrap();
                symlink("/etc/passwd", path).unwrap();
            },
            DamageKind::Link,
        ),
        (
            "d/link",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::write(path, "content").unwrap();
            },
            DamageKind::Link,
        ),
        (
            "d/soft",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::write(path, "file").unwrap();
            },
            DamageKind::Type,
        ),
        (
            "d/null",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::write(path, "").unwrap();
            },
            DamageKind::Type,
        ),
        (
            "d/pipe",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::create_dir(path).unwrap();
            },
            DamageKind::Type,
        ),
        (
            "d/sub/deep",
            |path| {
                fs_err::remove_file(path).unwrap();
                symlink("/dev/zero", path).unwrap();
            },
            DamageKind::Type,
        ),
        ("d/more", |path| fs_err::write(path, "").unwrap(), DamageKind::Extra),
        ("o/more", |path| fs_err::create_dir(path).unwrap(), DamageKind::Extra),
    ];
    for (path, harm, kind) in cases {
        let layer = sample();
        with_old_times(&layer.root().join(path), harm);
        let found: Vec<_> = layer.damage().into_iter().map(|damage| (damage.path, damage.kind)).collect();
        assert_eq!(found, [(path.into(), kind)], "{path} {kind}");
    }
}

#[test]
fn a_changed_time_is_noticed_without_reading_contents() {
    let layer = sample();
    let before = fs_err::metadata(layer.root().join("d")).unwrap();
    fs_err::write(layer.root().join("d/file"), "Content").unwrap();
    assert_eq!(
        before.modified().unwrap(),
        fs_err::metadata(layer.root().join("d")).unwrap().modified().unwrap()
    );
    let found: Vec<_> =
        verify(&layer.root(), &layer.files(), Depth::Metadata).unwrap().map(Result::unwrap).collect();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].path.as_path(), found[0].kind), (Path::new("d/file"), DamageKind::Time));
}

#[test]
fn a_directory_that_became_a_link_is_damage_and_not_followed() {
    let layer = sample();
    let sub = layer.root().join("d/sub");
    with_old_times(&sub, |sub| {
        fs_err::remove_dir_all(sub).unwrap();
        symlink(layer.outside(), sub).unwrap();
    });
    let mut found: Vec<_> = layer.damage().into_iter().map(|damage| (damage.path, damage.kind)).collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, [("d/sub".into(), DamageKind::Type), ("d/sub/deep".into(), DamageKind::Missing)]);
}
