//! Disk usage of a directory, counted as `du` counts it.

use std::collections::HashSet;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

pub use larder::gc::DiskSpace;

/// Measures a file, or a directory without its contents; a missing path takes nothing. Follows no links.
pub(crate) fn measure_one(path: &Path) -> io::Result<DiskSpace> {
    match fs_err::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(DiskSpace::ZERO),
        metadata => metadata.map(|metadata| amount(&metadata)),
    }
}

fn amount(of: &Metadata) -> DiskSpace {
    DiskSpace { bytes: of.blocks() * 512, inodes: 1 }
}

/// Measures `path` and everything below it. Follows no links; nothing there counts nothing. What vanishes while it is
/// being counted is left out.
pub fn measure(path: &Path) -> io::Result<DiskSpace> {
    let mut linked = HashSet::new();
    let mut total = DiskSpace::default();
    let mut waiting = vec![path.to_owned()];
    while let Some(path) = waiting.pop() {
        let metadata = match fs_err::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        if !metadata.is_dir() && metadata.nlink() > 1 && !linked.insert((metadata.dev(), metadata.ino())) {
            continue;
        }
        total += amount(&metadata);
        if !metadata.is_dir() {
            continue;
        }
        match fs_err::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            entries => {
                for entry in entries? {
                    waiting.push(entry?.path());
                }
            }
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hard_linked_file_counts_once_and_a_hole_takes_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let empty = measure(scratch.path()).unwrap();
        fs_err::write(scratch.path().join("a"), vec![1; 100_000]).unwrap();
        let one = measure(scratch.path()).unwrap();
        fs_err::hard_link(scratch.path().join("a"), scratch.path().join("b")).unwrap();
        assert_eq!(measure(scratch.path()).unwrap(), one);
        assert!(one.bytes - empty.bytes >= 100_000 && one.bytes - empty.bytes < 120_000);
        assert_eq!(one.inodes, 2);
        fs_err::File::create(scratch.path().join("hole")).unwrap().set_len(1 << 30).unwrap();
        assert!(measure(scratch.path()).unwrap().bytes < 200_000);
        assert_eq!(measure(&scratch.path().join("nothing")).unwrap(), DiskSpace::default());
    }
}
