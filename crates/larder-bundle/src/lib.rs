//! One archive about a node's larder, for a bug report.
//!
//! ```text
//! parts::ALL -> Collector (programs, files, the daemon's metrics; each within a time limit) -> redact -> archive
//! ```
//!
//! A part is the output of a command of this program, of another program, or of the daemon. One that fails is a file
//! with its error, and the others follow. Files that may hold credentials are not read; [`redact`] removes secrets from
//! what is.

mod archive;
mod collect;
mod parts;
pub mod redact;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;

use crate::archive::BundleOutput;

/// Options of a bundle.
#[derive(Debug, Clone)]
pub struct BundleOptions {
    /// The program whose commands are run.
    pub program: PathBuf,
    /// Its arguments before each command, which select the images.
    pub arguments: Vec<OsString>,
    /// larder's settings file, if there is one.
    pub settings_file: Option<PathBuf>,
    /// The file to write; a name in the working directory by default. It must not exist. `-` is the standard output.
    /// With the suffix `.tar` the archive is plain, else it is compressed with gzip.
    pub output: Option<PathBuf>,
    /// Time span of the log of the daemon's unit to include.
    pub since: Duration,
    /// Time limit of each part.
    pub part_timeout: Duration,
    /// Time limit of all parts together: those that remain after it are left out.
    pub timeout: Duration,
    /// Lines about the program: version, features.
    pub about: String,
}

/// A bundle that was written.
#[derive(Debug)]
pub struct Bundle {
    /// Where; `None` is the standard output.
    pub path: Option<PathBuf>,
    /// Files of the bundle.
    pub files: Vec<BundleFile>,
}

/// A file of a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleFile {
    /// Its name in the bundle.
    pub name: String,
    /// Description of the file.
    pub about: &'static str,
    /// The content.
    pub text: String,
    /// Why the part failed, if it did; the content is what there was until then.
    pub error: Option<String>,
}

/// Why no bundle was written.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file exists.
    #[error("{}: already exists", .0.display())]
    Exists(PathBuf),
    /// Its directory does not exist.
    #[error("{}: no such directory: {}", .0.display(), .0.parent().unwrap_or(.0).display())]
    NoDirectory(PathBuf),
    /// It is a directory.
    #[error("{}: is a directory", .0.display())]
    Directory(PathBuf),
    /// The standard output is a terminal.
    #[error("standard output is a terminal")]
    Terminal,
    /// It cannot be written.
    #[error("cannot write the bundle")]
    Write(#[from] std::io::Error),
}

/// Collects all parts and writes the archive, with mode 0600. Ends within the time limit of the options and that of one
/// part.
pub async fn write_bundle(options: BundleOptions) -> Result<Bundle, BundleError> {
    let now = Timestamp::now();
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let host: String = host.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')).collect();
    let name = format!("larder-bundle-{host}-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let path = Some(path).filter(|path| path.as_os_str() != "-");
    let out = BundleOutput::create(path.as_deref())?;
    let collected = collect::collect(&options).await;
    let mut files = redact::redacted_files(collected);
    files.insert(0, parts::readme(&files, now, options.since));
    archive::write(out, &name, &files, now)?;
    Ok(Bundle { path, files })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn options(dir: &Path, script: &str) -> BundleOptions {
        BundleOptions {
            program: PathBuf::from("/bin/sh"),
            arguments: vec!["-c".into(), script.into(), "larder".into()],
            settings_file: None,
            output: Some(dir.join("report.tar.gz")),
            since: Duration::from_secs(1),
            part_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(60),
            about: String::new(),
        }
    }

    fn names(dir: &Path) -> Vec<OsString> {
        fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    #[tokio::test]
    async fn an_interrupted_bundle_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut bundle = Box::pin(write_bundle(options(dir.path(), "exec sleep 60")));
        assert!(tokio::time::timeout(Duration::from_millis(10), &mut bundle).await.is_err());
        assert_eq!(names(dir.path()).len(), 1, "the file is written under another name");
        assert_ne!(names(dir.path()), ["report.tar.gz"]);
        drop(bundle);
        assert_eq!(names(dir.path()), Vec::<OsString>::new());
    }

    #[tokio::test]
    async fn a_file_that_was_created_while_parts_were_collected_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("report.tar.gz");
        let script = format!("echo other > '{}'", file.display());
        let written = write_bundle(options(dir.path(), &script)).await;
        assert!(matches!(written, Err(BundleError::Exists(path)) if path == file));
        assert_eq!(fs_err::read_to_string(&file).unwrap(), "other\n");
        assert_eq!(names(dir.path()), ["report.tar.gz"]);
    }
}
