//! The archive: a directory with one file for each part.

use std::io::{self, IsTerminal as _, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use jiff::Timestamp;
use tar::{Builder, Header};

use crate::{BundleError, BundleFile};

/// Creates the file, for its owner alone; without a path, the standard output.
pub(crate) fn create(path: Option<&Path>) -> Result<Box<dyn Write + Send>, BundleError> {
    let Some(path) = path else {
        if io::stdout().is_terminal() {
            return Err(BundleError::Terminal);
        }
        return Ok(Box::new(io::stdout()));
    };
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") || path.is_dir() {
        return Err(BundleError::Directory(path.to_owned()));
    }
    let created = fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match created {
        Ok(file) => Ok(Box::new(file)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(BundleError::Exists(path.to_owned()))
        }
        Err(error) => Err(BundleError::Write(error)),
    }
}

/// Writes the files into the directory `name` of an archive.
pub(crate) fn write(out: impl Write, name: &str, files: &[BundleFile], now: Timestamp) -> io::Result<()> {
    let mut archive = Builder::new(GzEncoder::new(out, Compression::default()));
    let mut add = |path: String, text: &str| {
        let mut header = Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(u64::try_from(now.as_second()).unwrap_or_default());
        archive.append_data(&mut header, path, text.as_bytes())
    };
    for file in files {
        add(format!("{name}/{}", file.name), &file.text)?;
        if let Some(error) = &file.error {
            add(format!("{name}/{}.error", file.name), error)?;
        }
    }
    archive.into_inner()?.finish()?.flush()
}
