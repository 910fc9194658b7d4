//! Checks that only root and this user can replace a program.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::trusted_path::{self, PathError};

const EXECUTABLE: u32 = 0o111;

/// Why a program is not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// It does not exist or cannot be inspected.
    #[error("{}: {cause}", .path.display())]
    Absent {
        /// The program.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// It is not an executable file.
    #[error("{} is not an executable file", .0.display())]
    NotExecutable(PathBuf),
    /// Other users can write to it, or to a directory on its path.
    #[error("{} is writable by users other than root and this user (mode {mode:o}, owner {owner})", .path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// The uid of its owner.
        owner: u32,
    },
}

impl TrustError {
    /// The next step.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            TrustError::Absent { .. } => "install it or correct its name",
            TrustError::NotExecutable(_) => "make it executable: chmod 755 FILE",
            TrustError::Writable { .. } => "restrict it to root: chown root:root, chmod go-w",
        }
    }
}

/// The real path of a program that only root and this user can replace: file, all directories that lead to it, and all
/// links on the way with theirs. A directory with the sticky bit, as `/tmp`, may lead there, but not hold it.
pub(in super::super) fn check_program(path: &Path) -> Result<PathBuf, TrustError> {
    let absent = |cause| TrustError::Absent { path: path.to_owned(), cause };
    // Not fs_err: its text would repeat the path.
    let real = std::fs::canonicalize(path).map_err(absent)?;
    let file = std::fs::symlink_metadata(&real).map_err(absent)?;
    if !file.is_file() || file.permissions().mode() & EXECUTABLE == 0 {
        return Err(TrustError::NotExecutable(real));
    }
    match trusted_path::check_file(path) {
        Ok(_) => Ok(real),
        Err(PathError::Writable { path, mode, owner }) => Err(TrustError::Writable { path, mode, owner }),
        Err(error) => Err(absent(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn a_program_that_others_can_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (bin, program) = (dir.path().join("bin"), dir.path().join("bin/p"));
        fs_err::create_dir_all(&bin).unwrap();
        assert!(matches!(check_program(&program), Err(TrustError::Absent { .. })));
        fs_err::write(&program, "#!/bin/sh\n").unwrap();
        let mode = |path: &Path, mode| fs_err::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        mode(&program, 0o644);
        assert!(matches!(check_program(&program), Err(TrustError::NotExecutable(_))));
        mode(&program, 0o755);
        assert_eq!(check_program(&program).unwrap(), std::fs::canonicalize(&program).unwrap());
        mode(&program, 0o757);
        assert!(matches!(check_program(&program), Err(TrustError::Writable { .. })));
        mode(&program, 0o755);
        for open in [0o757, 0o1777] {
            mode(&bin, open);
            assert!(matches!(check_program(&program), Err(TrustError::Writable { .. })), "{open:o}");
        }
        mode(&bin, 0o755);
        mode(dir.path(), 0o777);
        assert!(matches!(check_program(&program), Err(TrustError::Writable { .. })), "bin can be swapped");
    }

    #[test]
    fn a_link_that_others_can_replace_is_refused_wherever_it_is_on_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["good", "open"] {
            fs_err::create_dir(at(name)).unwrap();
        }
        fs_err::write(at("good/p"), "#!/bin/sh\n").unwrap();
        let mode = |path: &Path, mode| fs_err::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        mode(&at("good/p"), 0o755);
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, at(name)).unwrap();
        link("../good/p", "open/p");
        link("../open/p", "good/by-open");
        link("../good", "open/dir");
        link("good", "dir");
        let real = std::fs::canonicalize(at("good/p")).unwrap();
        for (open, name, trusted) in [
            (0o777, "good/p", true),
            (0o777, "dir/p", true),
            (0o777, "open/p", false),
            (0o777, "good/by-open", false),
            (0o777, "open/dir/p", false),
            (0o777, "open/dir/../good/p", false),
            (0o1777, "open/p", false),
            (0o1777, "open/dir/p", true),
            (0o755, "good/by-open", true),
        ] {
            mode(&at("open"), open);
            match check_program(&at(name)) {
                Ok(found) => assert!(trusted && found == real, "{name} {open:o}: {found:?}"),
                Err(error) => assert!(!trusted, "{name} {open:o}: {error}"),
            }
        }
    }
}
