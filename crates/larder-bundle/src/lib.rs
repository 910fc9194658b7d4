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

/// What a bundle is made of.
#[derive(Debug, Clone)]
pub struct BundleOptions {
    /// The program whose commands are run.
    pub program: PathBuf,
    /// Its arguments before each command, which select the images.
    pub arguments: Vec<OsString>,
    /// The file to write; a name in the working directory by default. It must not exist. `-` is the standard output.
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
    /// What it contains.
    pub files: Vec<BundleFile>,
}

/// A file of a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleFile {
    /// Its name in the bundle.
    pub name: String,
    /// What it is.
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

/// Collects all parts and writes the archive, with mode 0600. Ends within the time limit of the options and that of one part.
pub async fn write_bundle(options: BundleOptions) -> Result<Bundle, BundleError> {
    let now = Timestamp::now();
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy();
    let host: String = host.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')).collect();
    let name = format!("larder-bundle-{host}-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = options.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let path = Some(path).filter(|path| path.as_os_str() != "-");
    let out = archive::create(path.as_deref())?;
    let collected = collect::collect(&options).await;
    let mut files = redact::redacted_files(collected);
    files.insert(0, parts::readme(&files, now, options.since));
    if let Err(error) = archive::write(out, &name, &files, now) {
        if let Some(path) = &path {
            let _ = fs_err::remove_file(path); // half of an archive is of no use
        }
        return Err(error.into());
    }
    Ok(Bundle { path, files })
}
