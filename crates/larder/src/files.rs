//! Files with state: replaced atomically, and as JSON documents with a version.

use std::io::{self, Write as _};
use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Replaces a file: readers find the old or the new content, also after a power failure. Durable when it returns. The
/// new file is written beside it first, as `NAME.new`. May block.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_with_mode(path, content, 0o666)
}

/// Like [`replace`], of a file with this mode, less the process's umask.
pub fn replace_with_mode(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut file =
        fs_err::OpenOptions::new().create(true).truncate(true).write(true).mode(mode).open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs_err::rename(&new, path)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::File::open(dir)?.sync_all()
}

/// Reads a JSON document whose field `version` must be `expected`, or returns why it cannot be used. The version is read
/// first, because a document of another version may have other fields.
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
