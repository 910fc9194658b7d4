//! Whether nobody but root and this user decides what a program is.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Mode bits: others may write.
const OTHERS_WRITE: u32 = 0o002;
const GROUP_WRITES: u32 = 0o020;
const STICKY: u32 = 0o1000;
const EXECUTABLE: u32 = 0o111;

/// Why a program is not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// It is not there, or cannot be looked at.
    #[error("{}: {cause}", .path.display())]
    Absent {
        /// The program.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// It is no program.
    #[error("{} is not an executable file", .0.display())]
    NotExecutable(PathBuf),
    /// Others can write to it, or to a folder that leads to it, and so decide what is run.
    #[error("{} can be changed by others than root and this user (mode {mode:o}, owner {owner})", .path.display())]
    Writable {
        /// The file or folder.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// The uid of its owner.
        owner: u32,
    },
}

impl TrustError {
    /// What the reader could try next.
    pub fn hint(&self) -> &'static str {
        match self {
            TrustError::Absent { .. } => "install it, or correct its name",
            TrustError::NotExecutable(_) => "make it executable: chmod 755 FILE",
            TrustError::Writable { .. } => "make it root's alone: chown root:root, chmod go-w",
        }
    }
}

/// The real path of a program that only root and this user can replace: file and all folders that lead to it. A folder
/// with the sticky bit, as `/tmp`, may lead there, but not hold it.
pub(in super::super) fn check_program(path: &Path) -> Result<PathBuf, TrustError> {
    let absent = |cause| TrustError::Absent { path: path.to_owned(), cause };
    // Not fs_err: its text would repeat the path.
    let real = std::fs::canonicalize(path).map_err(absent)?;
    for (distance, place) in real.ancestors().enumerate() {
        let found = std::fs::symlink_metadata(place).map_err(absent)?;
        let (mode, owner) = (found.permissions().mode() & 0o7777, found.uid());
        if distance == 0 && (!found.is_file() || mode & EXECUTABLE == 0) {
            return Err(TrustError::NotExecutable(real));
        }
        let leads_only = distance > 1 && mode & STICKY != 0;
        let by_others = mode & OTHERS_WRITE != 0 || (mode & GROUP_WRITES != 0 && !is_own_group(found.gid()));
        let is_own = owner == 0 || owner == rustix::process::geteuid().as_raw();
        if (by_others && !leads_only) || !is_own {
            return Err(TrustError::Writable { path: place.to_owned(), mode, owner });
        }
    }
    Ok(real)
}

fn is_own_group(gid: u32) -> bool {
    gid == 0 || gid == rustix::process::getegid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;

    use super::*;

    #[test]
    fn what_others_can_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (bin, program) = (folder.path().join("bin"), folder.path().join("bin/p"));
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
        mode(folder.path(), 0o777);
        assert!(matches!(check_program(&program), Err(TrustError::Writable { .. })), "bin can be swapped");
    }
}
