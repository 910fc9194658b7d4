//! Files that are replaced as a whole.

use std::io::{self, Write as _};
use std::path::Path;

/// Replaces a file: readers, and who comes after a power cut, have the old content or the new one. Durable when it
/// returns. The new file is written beside it first, as `NAME.new`. May block.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut file = fs_err::File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs_err::rename(&new, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::File::open(folder)?.sync_all()
}
