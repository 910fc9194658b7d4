//! Finds and reads the files that `-f` names.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use larder::hint::Hint;

use super::problem::{InputPlace, InputProblem, LocatedProblem};

/// The largest file that is read, in bytes: 16 MiB.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Names of files that are read from a directory end like this.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Where manifests come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestSource {
    /// Standard input, `-`.
    Stdin,
    /// A file.
    File(PathBuf),
    /// A directory: its manifests by name, those of directories below it too if `recursive`.
    Directory {
        /// The directory.
        path: PathBuf,
        /// Whether directories below it count.
        recursive: bool,
    },
}

/// A file and what it holds.
#[derive(Debug)]
pub(super) struct ManifestFile {
    /// The name as the user gave it, or `standard input`.
    pub(super) name: String,
    /// Its text.
    pub(super) text: String,
}

impl ManifestSource {
    /// The source that an argument of `-f` names.
    pub fn of(argument: &Path, recursive: bool) -> Self {
        match argument {
            path if path == Path::new("-") => ManifestSource::Stdin,
            path if path.is_dir() => ManifestSource::Directory { path: path.to_owned(), recursive },
            path => ManifestSource::File(path.to_owned()),
        }
    }

    /// Reads the files. Files of a directory that are skipped are added to `warnings`.
    pub(super) fn files(&self, warnings: &mut Vec<String>) -> Vec<Result<ManifestFile, LocatedProblem>> {
        match self {
            ManifestSource::Stdin => vec![read("standard input", || Ok(io::stdin().lock()))],
            ManifestSource::File(path) => vec![read_file(path)],
            ManifestSource::Directory { path, recursive } => read_directory(path, *recursive, warnings),
        }
    }
}

impl fmt::Display for ManifestSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ManifestSource::Stdin => f.write_str("standard input"),
            ManifestSource::File(path) | ManifestSource::Directory { path, .. } => path.display().fmt(f),
        }
    }
}

fn read_directory(
    path: &Path,
    recursive: bool,
    warnings: &mut Vec<String>,
) -> Vec<Result<ManifestFile, LocatedProblem>> {
    let mut found = Vec::new();
    let mut problems = Vec::new();
    collect(path, recursive, &mut found, &mut problems);
    // Reading a pipe found in a directory could block forever. A pipe that is named explicitly is read.
    found.retain(|path| {
        let readable = fs_err::metadata(path).map_or(true, |found| found.is_file());
        if !readable {
            warnings.push(format!("{}: skipped: not a regular file", path.display()));
        }
        readable
    });
    if found.is_empty() && problems.is_empty() {
        let deeper = if recursive { "" } else { ", or use -R for subdirectories" };
        let problem = InputProblem::new("no .yaml, .yml or .json file in the directory")
            .hint(format!("name a directory with manifests{deeper}"));
        problems.push(InputPlace::file(path.display().to_string()).locate(problem));
    }
    let files = found.iter().map(|path| read_file(path));
    problems.into_iter().map(Err).chain(files).collect()
}

/// The manifests of a directory: files before directories below it, each sorted by name.
fn collect(path: &Path, recursive: bool, found: &mut Vec<PathBuf>, problems: &mut Vec<LocatedProblem>) {
    let listed = fs_err::read_dir(path).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()
    });
    let mut entries = match listed {
        Ok(entries) => entries,
        Err(error) => return problems.push(unreadable(&path.display().to_string(), &error)),
    };
    entries.sort();
    let (directories, files): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| entry.is_dir());
    let wanted =
        |file: &PathBuf| file.extension().is_some_and(|end| EXTENSIONS.iter().any(|known| end == *known));
    found.extend(files.into_iter().filter(wanted));
    // A link to a directory is not followed: it may lead back up.
    for directory in directories.iter().filter(|directory| recursive && !directory.is_symlink()) {
        collect(directory, recursive, found, problems);
    }
}

/// A hint that pipes documents into larder.
fn piped(text: String) -> Hint {
    Hint::from(text).command(["ensure", "-f", "-"])
}

fn read_file(path: &Path) -> Result<ManifestFile, LocatedProblem> {
    let name = path.display().to_string();
    if name.contains("://") {
        let problem = InputProblem::new("not a file")
            .hint(piped(format!("larder fetches no manifests: curl {name} | ")));
        return Err(InputPlace::file(name).locate(problem));
    }
    read(&name, || fs_err::File::open(path))
}

fn read<R: Read>(name: &str, open: impl FnOnce() -> io::Result<R>) -> Result<ManifestFile, LocatedProblem> {
    let bytes = open().and_then(read_bounded).map_err(|error| unreadable(name, &error))?;
    match String::from_utf8(bytes) {
        Ok(text) => Ok(ManifestFile { name: name.to_owned(), text }),
        Err(error) if is_utf16(error.as_bytes()) => {
            let problem = InputProblem::new("not valid UTF-8: this is UTF-16")
                .hint(piped(format!("iconv -f UTF-16 -t UTF-8 {name} | ")));
            Err(InputPlace::file(name).locate(problem))
        }
        Err(error) => {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = good.split(|byte| *byte == b'\n').count();
            Err(InputPlace::file(name).locate(InputProblem::new(format!("not valid UTF-8 (line {line})"))))
        }
    }
}

/// Whether a text begins with the mark of UTF-16, as editors of Windows write it.
fn is_utf16(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff")
}

/// Reads everything, unless it is more than [`MAX_FILE_BYTES`].
fn read_bounded(reader: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "larger than 16 MiB"));
    }
    Ok(bytes)
}

fn unreadable(name: &str, error: &io::Error) -> LocatedProblem {
    let problem = match error.kind() {
        io::ErrorKind::NotFound => InputProblem::new("no such file or directory"),
        io::ErrorKind::PermissionDenied => InputProblem::new("permission denied"),
        io::ErrorKind::IsADirectory => InputProblem::new("is a directory"),
        io::ErrorKind::FileTooLarge => {
            InputProblem::new("larger than the limit of 16 MiB").hint("split the file")
        }
        _ => InputProblem::new(error.to_string()),
    };
    InputPlace::file(name).locate(problem)
}
