//! The archive: a directory with one file for each part.

use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use tar::{Builder, Header};
use tempfile::NamedTempFile;

use crate::{BundleError, BundleFile};

/// Where the archive is written to. Dropped before [`BundleOutput::commit`], it leaves no file.
pub(crate) enum BundleOutput {
    Stdout(io::Stdout),
    /// A file for its owner alone with another name, and the path that it gets when it is complete.
    File(NamedTempFile, PathBuf),
}

impl BundleOutput {
    /// Without a path, the standard output.
    pub(crate) fn create(path: Option<&Path>) -> Result<BundleOutput, BundleError> {
        let Some(path) = path else {
            if io::stdout().is_terminal() {
                return Err(BundleError::Terminal);
            }
            return Ok(BundleOutput::Stdout(io::stdout()));
        };
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") || path.is_dir() {
            return Err(BundleError::Directory(path.to_owned()));
        }
        if path.symlink_metadata().is_ok() {
            return Err(BundleError::Exists(path.to_owned()));
        }
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or_else(|| Path::new("."));
        let file = tempfile::Builder::new().prefix(".larder-bundle-").tempfile_in(directory);
        let file = file.map_err(|error| {
            if error.kind() == io::ErrorKind::NotFound {
                return BundleError::NoDirectory(path.to_owned());
            }
            // The error names the temporary file.
            let cause = error.raw_os_error().map_or(error.kind().into(), io::Error::from_raw_os_error);
            BundleError::Write(io::Error::new(error.kind(), format!("{}: {cause}", path.display())))
        })?;
        Ok(BundleOutput::File(file, path.to_owned()))
    }

    /// Gives the complete file its name. It replaces none.
    fn commit(self) -> Result<(), BundleError> {
        let BundleOutput::File(file, path) = self else { return Ok(()) };
        match file.persist_noclobber(&path) {
            Ok(_) => Ok(()),
            Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
                Err(BundleError::Exists(path))
            }
            Err(error) => Err(BundleError::Write(error.error)),
        }
    }
}

impl Write for BundleOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            BundleOutput::Stdout(stdout) => stdout.write(bytes),
            // Its own errors name the temporary file.
            BundleOutput::File(file, path) => file
                .as_file_mut()
                .write(bytes)
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            BundleOutput::Stdout(stdout) => stdout.flush(),
            BundleOutput::File(file, _) => file.flush(),
        }
    }
}

/// Writes the files into the directory `name` of an archive: plain into a file with the suffix `.tar`, else with gzip.
pub(crate) fn write(
    mut out: BundleOutput,
    name: &str,
    files: &[BundleFile],
    now: Timestamp,
) -> Result<(), BundleError> {
    if matches!(&out, BundleOutput::File(_, path) if path.extension().is_some_and(|suffix| suffix == "tar")) {
        add_files(&mut out, name, files, now)?;
    } else {
        let mut compressed = GzEncoder::new(&mut out, Compression::default());
        add_files(&mut compressed, name, files, now)?;
        compressed.finish()?;
    }
    out.flush()?;
    out.commit()
}

fn add_files(out: impl Write, name: &str, files: &[BundleFile], now: Timestamp) -> io::Result<()> {
    let mut archive = Builder::new(out);
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
    archive.finish()
}
