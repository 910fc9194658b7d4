//! The kernel's mount table, limited to larder's overlays.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use super::MountError;
use crate::disk::Disk;
use crate::store::MountRecord;

/// Prefix of the source of larder's overlays, before the path of the mount's directory.
const SOURCE: &str = "larder:";

/// Mounts in this process's mount namespace.
#[derive(Debug, Default)]
pub(super) struct MountTable {
    /// Overlays that are ours: directory and target.
    overlays: Vec<(PathBuf, PathBuf)>,
    /// Targets of all EROFS filesystems.
    layers: HashSet<PathBuf>,
}

impl MountTable {
    pub(super) fn read() -> Result<MountTable, MountError> {
        let text = fs_err::read("/proc/self/mountinfo").map_err(MountError::Table)?;
        Ok(MountTable::parse(&text))
    }

    /// `ID PARENT MAJOR:MINOR ROOT TARGET OPTIONS [TAGS] - TYPE SOURCE SUPER_OPTIONS`
    pub(super) fn parse(text: &[u8]) -> MountTable {
        let entry = |line: &'_ [u8]| {
            let mut words = line.split(|b| *b == b' ');
            let target = path(unescape(words.nth(4)?));
            words.find(|word| word == b"-")?;
            Some((words.next()?.to_vec(), unescape(words.next()?), target))
        };
        let mut table = MountTable::default();
        for (kind, source, target) in text.split(|b| *b == b'\n').filter_map(entry) {
            match (kind.as_slice(), source.strip_prefix(SOURCE.as_bytes())) {
                (b"overlay", Some(dir)) => table.overlays.push((path(dir.to_vec()), target)),
                (b"erofs", _) => drop(table.layers.insert(target)),
                _ => {}
            }
        }
        table
    }

    /// Whether an EROFS filesystem is mounted at `target`.
    pub(super) fn has_layer(&self, target: &Path) -> bool {
        self.layers.contains(target)
    }

    /// Whether the mount with this directory is at `target`.
    pub(super) fn has(&self, dir: &Path, target: &Path) -> bool {
        self.overlays.iter().any(|(known, at)| known == dir && at == target)
    }

    /// Whether any of ours is at `target`.
    pub(super) fn has_target(&self, target: &Path) -> bool {
        self.overlays.iter().any(|(_, at)| at == target)
    }

    /// Where the mounts are whose directories lie in `mounts`.
    pub(super) fn targets_in(&self, mounts: &Path) -> Vec<String> {
        let ours = self.overlays.iter().filter(|(dir, _)| dir.parent() == Some(mounts));
        ours.map(|(_, target)| target.display().to_string()).collect()
    }

    /// Whether the mount with this directory is anywhere.
    pub(super) fn has_dir(&self, dir: &Path) -> bool {
        self.overlays.iter().any(|(known, _)| known == dir)
    }
}

/// The source of the overlay with this directory.
pub(super) fn source(dir: &Path) -> Vec<u8> {
    [SOURCE.as_bytes(), dir.as_os_str().as_bytes()].concat()
}

/// The mount namespace and run of the machine in which this process is.
pub(super) fn namespace_id(disk: &dyn Disk) -> String {
    // Without /proc nothing can be compared, and the mount table cannot be read either.
    let namespace = fs_err::read_link("/proc/self/ns/mnt").unwrap_or_default();
    format!("{} {}", disk.boot_id(), namespace.display())
}

/// Whether the machine was not rebooted since this was mounted.
pub(super) fn same_boot(disk: &dyn Disk, mount: &MountRecord) -> bool {
    mount.seen_from.split(' ').next() == Some(&disk.boot_id())
}

fn path(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}

/// Undoes the kernel's way to write blanks: `\040`.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                plain.push(byte);
                rest = &tail[3..];
            }
            _ => {
                plain.push(*first);
                rest = tail;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_found_among_others() {
        let table = MountTable::parse(
            b"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
              40 22 0:41 / /mnt/a\\040b ro,relatime shared:1 master:2 - overlay larder:/x\\040y/mounts/1 ro,lowerdir=..\n\
              41 22 0:42 / /mnt/c rw - overlay overlay rw\n\
              short line\n",
        );
        assert!(table.has(Path::new("/x y/mounts/1"), Path::new("/mnt/a b")));
        assert!(!table.has(Path::new("/x y/mounts/1"), Path::new("/mnt/c")));
        assert!(table.has_dir(Path::new("/x y/mounts/1")));
        assert_eq!(table.overlays.len(), 1);
    }

    #[test]
    fn text_that_resembles_an_escape_is_not_changed() {
        assert_eq!(unescape(b"a\\04"), b"a\\04");
        assert_eq!(unescape(b"\\999\\134"), b"\\999\\");
    }
}
