//! Disk usage of directories, as `du` counts: allocated blocks, each inode once.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use larder::gc::DiskSpace;

/// Bytes in a block of `stat`, whatever the filesystem's own block size.
const BLOCK: u64 = 512;

/// Disk usage of a path and all below it. Excludes other mounts; skips files that disappear during the walk.
pub(crate) fn tree(path: &Path) -> io::Result<DiskSpace> {
    let top = fs_err::symlink_metadata(path)?;
    let mut linked = HashSet::new();
    let mut sum = DiskSpace { bytes: top.blocks() * BLOCK, inodes: 1 };
    let mut dirs = if top.is_dir() { vec![path.to_owned()] } else { Vec::new() };
    while let Some(dir) = dirs.pop() {
        let entries = match fs_err::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let found = match fs_err::symlink_metadata(entry.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            let counted = found.nlink() > 1 && !found.is_dir() && !linked.insert(found.ino());
            if found.dev() != top.dev() || counted {
                continue;
            }
            sum += DiskSpace { bytes: found.blocks() * BLOCK, inodes: 1 };
            if found.is_dir() {
                dirs.push(entry.path());
            }
        }
    }
    Ok(sum)
}

/// Measures the directory at `path`; zero for a missing path.
pub(crate) fn size_if_present(path: &Path) -> io::Result<DiskSpace> {
    match tree(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(DiskSpace::ZERO),
        measured => measured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_the_size_that_du_prints() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        fs_err::create_dir_all(path.join("a/b")).unwrap();
        fs_err::write(path.join("a/file"), vec![1; 100_000]).unwrap();
        fs_err::hard_link(path.join("a/file"), path.join("a/b/again")).unwrap();
        fs_err::os::unix::fs::symlink("nowhere", path.join("link")).unwrap();
        fs_err::File::create(path.join("hole")).unwrap().set_len(1 << 30).unwrap();
        let du = std::process::Command::new("du").args(["-s", "-B1"]).arg(path).output().unwrap();
        let total: u64 =
            String::from_utf8(du.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap();
        assert_eq!(tree(path).unwrap(), DiskSpace { bytes: total, inodes: 6 });
        assert_eq!(size_if_present(&path.join("missing")).unwrap(), DiskSpace::ZERO);
        assert!(tree(&path.join("missing")).is_err());
    }
}
