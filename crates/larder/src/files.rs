//! Files with state: replaced atomically, and as JSON documents with a version.

use std::io::{self, Write as _};
use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::hint::Hint;

/// Replaces a file: readers find the old or the new content, also after a power failure. Durable when it returns. The
/// new file is written beside it first, as `NAME.new`. May block.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_with_mode(path, content, 0o644)
}

/// Like [`replace`], of a file with this mode, less the process's umask. What has the name of the new file is removed
/// first: a link is not followed.
pub fn replace_with_mode(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    match fs_err::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs_err::OpenOptions::new().create_new(true).write(true).mode(mode).open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs_err::rename(&new, path)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::File::open(dir)?.sync_all()
}

/// Returns the next step after a file could not be written, where the disk is full.
pub fn hint_of_full_disk(error: io::ErrorKind) -> Option<Hint> {
    match error {
        io::ErrorKind::StorageFull => {
            Some(Hint::from("free disk space: ").command(["df"]).text(" shows disk usage (bytes and inodes)"))
        }
        io::ErrorKind::QuotaExceeded => {
            Some(Hint::from("the user's disk quota is exceeded: ").command(["df"]).text(" shows disk usage"))
        }
        _ => None,
    }
}

/// Reads a JSON document whose field `version` must be `expected`, or returns why it cannot be used. The version is
/// read first, because a document of another version may have other fields.
pub fn decode_document<T: DeserializeOwned>(text: &[u8], expected: u32) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let Versioned { version } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if version != expected {
        return Err(format!("unsupported version {version}: expected {expected}"));
    }
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_link_with_the_name_of_the_new_file_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, outside) = (dir.path().join("records.json"), dir.path().join("outside"));
        fs_err::write(&outside, "untouched").unwrap();
        fs_err::os::unix::fs::symlink(&outside, dir.path().join("records.json.new")).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs_err::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs_err::read_to_string(&outside).unwrap(), "untouched");
        let found = fs_err::symlink_metadata(&path).unwrap();
        assert!(found.is_file() && found.mode() & 0o022 == 0, "{:o}", found.mode());
    }
}
