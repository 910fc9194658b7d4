//! Every kind of damage is found, and only that.

use std::os::unix::fs::symlink;
use std::path::Path;

use larder_store::unpack::{CheckDepth, MismatchKind, verify};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use rustix::fs::{
    AtFlags, CWD, Mode, Timespec, Timestamps, XattrFlags, chmodat, chownat, setxattr, utimensat,
};

use crate::support::{UnpackDir, is_root};

type DamageFn = fn(&Path);

fn sample() -> UnpackDir {
    let layer = UnpackDir::new();
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::dir("d").xattr("user.a", "1"))
        .with(TarBuilderEntry::file("d/file", "content").xattr("user.a", "1"))
        .with(TarBuilderEntry::hard_link("d/link", "d/file"))
        .with(TarBuilderEntry::symlink("d/soft", "file"))
        .with(TarBuilderEntry::fifo("d/pipe"))
        .with(TarBuilderEntry::file("d/.wh.gone", ""))
        .with(TarBuilderEntry::file("d/sub/deep", "x"))
        .with(TarBuilderEntry::file("o/.wh..wh..opq", ""))
        .with(TarBuilderEntry::char_device("d/null", 1, 3))
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
    let remove: DamageFn = |path| fs_err::remove_file(path).unwrap();
    let cases: Vec<(&str, DamageFn, MismatchKind)> = vec![
        ("d/soft", remove, MismatchKind::Missing),
        ("d/link", remove, MismatchKind::Missing),
        ("d/gone", remove, MismatchKind::Missing),
        ("d/sub/deep", remove, MismatchKind::Missing),
        ("d/file", |path| fs_err::write(path, "Content").unwrap(), MismatchKind::Content),
        ("d/file", |path| fs_err::write(path, "contents").unwrap(), MismatchKind::Size),
        (
            "d/file",
            |path| chmodat(CWD, path, Mode::from_raw_mode(0o4644), AtFlags::empty()).unwrap(),
            MismatchKind::Mode,
        ),
        (
            "d/sub",
            |path| chmodat(CWD, path, Mode::from_raw_mode(0o777), AtFlags::empty()).unwrap(),
            MismatchKind::Mode,
        ),
        (
            "d/soft",
            |path| {
                chownat(CWD, path, Some(rustix::fs::Uid::from_raw(9)), None, AtFlags::SYMLINK_NOFOLLOW)
                    .unwrap();
            },
            MismatchKind::Owner,
        ),
        ("d/file", |path| setxattr(path, "user.b", b"2", XattrFlags::empty()).unwrap(), MismatchKind::Xattrs),
        (
            "d",
            |path| setxattr(path, "trusted.overlay.opaque", b"y", XattrFlags::empty()).unwrap(),
            MismatchKind::Xattrs,
        ),
        ("o", |path| rustix::fs::removexattr(path, "trusted.overlay.opaque").unwrap(), MismatchKind::Xattrs),
        (
            "d/soft",
            |path| {
                fs_err::remove_file(path).unwrap();
                symlink("/etc/passwd", path).unwrap();
            },
            MismatchKind::Link,
        ),
        (
            "d/link",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::write(path, "content").unwrap();
            },
            MismatchKind::Link,
        ),
        (
            "d/soft",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::write(path, "file").unwrap();
            },
            MismatchKind::Type,
        ),
        (
            "d/null",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::write(path, "").unwrap();
            },
            MismatchKind::Type,
        ),
        (
            "d/pipe",
            |path| {
                fs_err::remove_file(path).unwrap();
                fs_err::create_dir(path).unwrap();
            },
            MismatchKind::Type,
        ),
        (
            "d/sub/deep",
            |path| {
                fs_err::remove_file(path).unwrap();
                symlink("/dev/zero", path).unwrap();
            },
            MismatchKind::Type,
        ),
        ("d/more", |path| fs_err::write(path, "").unwrap(), MismatchKind::Extra),
        ("o/more", |path| fs_err::create_dir(path).unwrap(), MismatchKind::Extra),
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
        verify(&layer.root(), &layer.files(), CheckDepth::Metadata).unwrap().map(Result::unwrap).collect();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].path.as_path(), found[0].kind), (Path::new("d/file"), MismatchKind::Time));
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
    assert_eq!(found, [("d/sub".into(), MismatchKind::Type), ("d/sub/deep".into(), MismatchKind::Missing)]);
}
