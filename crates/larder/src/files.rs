//! Atomic replacement of files.

use std::io::{self, Write as _};
use std::path::Path;

/// Replaces a file: readers find the old or the new content, also after a power failure. Durable when it returns. The
/// new file is written beside it first, as `NAME.new`. May block.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut file = fs_err::File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs_err::rename(&new, path)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::File::open(dir)?.sync_all()
}
