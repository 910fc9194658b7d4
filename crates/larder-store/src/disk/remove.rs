//! Removing a tree of any depth, with any modes, without following a link.

use std::ffi::CStr;
use std::io;
use std::path::Path;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// Deepest nesting that is removed in place. What lies deeper is moved up first, so that the number of open directories
/// stays small whatever an image holds.
const DEEPEST: usize = 64;

/// Removes whatever `path` names. See [`Disk::remove_tree`](super::Disk::remove_tree).
pub(super) fn tree(path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
    match rustix::fs::unlinkat(CWD, path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    let mut steps = TreeRemoval { go_on, removed: 0, moved: 0 };
    loop {
        let before = (steps.removed, steps.moved);
        let dir = open_dir(CWD, path)?;
        empty(&dir, &dir, 1, &mut steps)?;
        // What was moved up is left for the next round.
        match rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR) {
            Ok(()) => return Ok(()),
            Err(Errno::NOTEMPTY) if before != (steps.removed, steps.moved) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How far a removal has come.
struct TreeRemoval<'a> {
    go_on: &'a dyn Fn() -> bool,
    removed: u64,
    moved: u64,
}

/// Removes what is in `dir`. Directories nested too deep go to `top` under new names.
fn empty(dir: &OwnedFd, top: &OwnedFd, depth: usize, steps: &mut TreeRemoval<'_>) -> io::Result<()> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if !(steps.go_on)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if entry.file_type() != FileType::Directory {
            match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
                Ok(()) => {
                    steps.removed += 1;
                    continue;
                }
                // The type was not known, and it is a directory after all.
                Err(Errno::ISDIR | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if depth == DEEPEST {
            move_up(dir, name, top, steps)?;
            continue;
        }
        let inner = open_dir(dir, name)?;
        empty(&inner, top, depth + 1, steps)?;
        drop(inner);
        match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
            Ok(()) => steps.removed += 1,
            // A filesystem may leave out entries of a directory that changes while it is read: the next round finds
            // them.
            Err(Errno::NOTEMPTY) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Opens a directory to be emptied, after making sure that its owner may.
fn open_dir(parent: impl AsFd, name: impl rustix::path::Arg + Copy) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = parent.as_fd();
    let opened = rustix::fs::openat(parent, name, flags, Mode::empty()).or_else(|error| {
        if error != Errno::ACCESS {
            return Err(error);
        }
        // Only without root. The entry is a directory, as unlink reported, and no other process writes here.
        rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty())?;
        rustix::fs::openat(parent, name, flags, Mode::empty())
    })?;
    let mode = rustix::fs::fstat(&opened)?.st_mode;
    if !Mode::from_raw_mode(mode).contains(Mode::RWXU) {
        rustix::fs::fchmod(&opened, Mode::RWXU)?;
    }
    Ok(opened)
}

/// Moves a directory to the top under an unused name.
fn move_up(dir: &OwnedFd, name: &CStr, top: &OwnedFd, steps: &mut TreeRemoval<'_>) -> io::Result<()> {
    loop {
        steps.moved += 1;
        let up = format!(".larder-deep-{}", steps.moved);
        match rustix::fs::renameat_with(dir, name, top, &up, RenameFlags::NOREPLACE) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_tree_is_removed_with_its_links_but_not_their_targets() {
        let scratch = tempfile::tempdir().unwrap();
        let kept = scratch.path().join("kept");
        fs_err::create_dir(&kept).unwrap();
        fs_err::write(kept.join("file"), "x").unwrap();
        let doomed = scratch.path().join("doomed");
        fs_err::create_dir_all(doomed.join("a/b")).unwrap();
        symlink(&kept, doomed.join("a/link")).unwrap();
        fs_err::write(doomed.join("a/b/file"), "x").unwrap();
        fs_err::set_permissions(doomed.join("a/b"), std::fs::Permissions::from_mode(0o000)).unwrap();
        tree(&doomed, &|| true).unwrap();
        assert!(!doomed.exists());
        assert!(kept.join("file").exists());
        tree(&doomed, &|| true).expect("nothing there is no error");
    }

    #[test]
    fn a_link_itself_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let link = scratch.path().join("link");
        symlink(scratch.path(), &link).unwrap();
        tree(&link, &|| true).unwrap();
        assert!(scratch.path().exists() && link.symlink_metadata().is_err());
    }

    #[test]
    fn a_tree_deeper_than_the_path_limit_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let doomed = scratch.path().join("doomed");
        fs_err::create_dir(&doomed).unwrap();
        let mut dir = open_dir(CWD, doomed.as_path()).unwrap();
        for _ in 0..2000 {
            rustix::fs::mkdirat(&dir, "deep", Mode::RWXU).unwrap();
            dir = open_dir(&dir, "deep").unwrap();
        }
        drop(dir);
        tree(&doomed, &|| true).unwrap();
        assert!(!doomed.exists());
    }

    #[test]
    fn removal_stops_when_canceled() {
        let scratch = tempfile::tempdir().unwrap();
        let doomed = scratch.path().join("doomed");
        fs_err::create_dir(&doomed).unwrap();
        fs_err::write(doomed.join("file"), "x").unwrap();
        let error = tree(&doomed, &|| false).expect_err("the removal was stopped");
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        assert!(doomed.join("file").exists());
    }
}
