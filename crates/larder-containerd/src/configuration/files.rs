//! The files of containerd's configuration: the main one and those that it imports.
//!
//! Promises: a file is replaced as a whole, with its mode and owner, after a copy of it was written beside it; if one
//! of several cannot be replaced, the others get their text back. A file that was changed since it was read is not
//! replaced.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use larder::glob;
use larder::hint::Hint;
use rustix::fs::{Gid, Uid};
use toml_edit::DocumentMut;

use super::ConfigurationError;

/// The end of the name of a copy.
const BACKUP: &str = "before-larder";

/// A file of the configuration.
#[derive(Debug, Clone)]
pub(super) struct ConfigFile {
    pub(super) path: PathBuf,
    /// `None`: it does not exist.
    pub(super) text: Option<String>,
    pub(super) document: DocumentMut,
}

/// Reads the main file and its imports, in the order in which containerd does. A main file that does not exist is
/// empty.
pub(super) fn read(main: &Path) -> Result<Vec<ConfigFile>, ConfigurationError> {
    let (mut files, mut waiting, mut seen) = (Vec::new(), vec![main.to_owned()], HashSet::new());
    while !waiting.is_empty() {
        let path = waiting.remove(0);
        if !seen.insert(path.clone()) {
            continue;
        }
        let file = read_one(path)?;
        waiting.extend(imports(&file)?);
        files.push(file);
    }
    Ok(files)
}

impl ConfigFile {
    /// The text of the edited document with the ends of lines of the file, of which the document knows none. The file's
    /// own text if nothing was edited.
    pub(super) fn edited(&self, document: &DocumentMut) -> String {
        let (old, mut new) = (self.text.as_deref().unwrap_or_default(), document.to_string());
        if new == self.document.to_string() {
            return old.to_owned();
        }
        if !old.is_empty() && !old.ends_with('\n') {
            new.truncate(new.trim_end_matches('\n').len());
        }
        if old.contains("\r\n") { new.replace('\n', "\r\n") } else { new }
    }
}

fn read_text(path: &Path) -> io::Result<Option<String>> {
    match fs_err::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_one(path: PathBuf) -> Result<ConfigFile, ConfigurationError> {
    let text = read_text(&path).map_err(|error| ConfigurationError::failed(error.to_string()))?;
    let parsed = text.as_deref().unwrap_or_default().parse::<DocumentMut>();
    let document = parsed.map_err(|error| {
        let place = path.display();
        if text.as_deref().is_some_and(|text| text.contains("{{")) {
            let hint = Hint::from(
                "write out what its {{ }} stand for, as in the config.toml that is made of it, and name that \
                                   file with ",
            );
            return ConfigurationError::bad_input(format!("{place}: a template, which is not TOML as it is"))
                .hint(hint.setting("config", "FILE"));
        }
        ConfigurationError::bad_input(format!("{place}: not TOML: {}", error.to_string().trim_end()))
            .hint(format!("fix {place}; containerd does not start with it either"))
    })?;
    Ok(ConfigFile { path, text, document })
}

fn imports(file: &ConfigFile) -> Result<Vec<PathBuf>, ConfigurationError> {
    let patterns = file.document.get("imports").and_then(|imports| imports.as_array());
    let patterns = patterns.into_iter().flatten().filter_map(toml_edit::Value::as_str);
    let dir = file.path.parent().unwrap_or(Path::new("/"));
    let mut found = Vec::new();
    for pattern in patterns {
        let path = dir.join(pattern);
        if pattern.contains('*') {
            found.extend(matching(&path).map_err(|error| ConfigurationError::failed(error.to_string()))?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// The files that match a pattern in the last part of a path, by name.
fn matching(pattern: &Path) -> io::Result<Vec<PathBuf>> {
    let (Some(dir), Some(name)) = (pattern.parent(), pattern.file_name()) else { return Ok(Vec::new()) };
    let entries = match fs_err::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    let is_match = |path: &PathBuf| {
        path.file_name().is_some_and(|file| glob(&name.to_string_lossy(), &file.to_string_lossy()))
    };
    let mut found: Vec<PathBuf> = paths.into_iter().filter(is_match).collect();
    found.sort();
    Ok(found)
}

/// A file with its new text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replacement<'a> {
    pub(super) path: &'a Path,
    pub(super) old: Option<&'a str>,
    pub(super) new: &'a str,
}

/// Writes new texts. Returns the paths of the copies of the old ones.
pub(super) fn replace_all(replacements: &[Replacement<'_>]) -> Result<Vec<PathBuf>, ConfigurationError> {
    let mut backups = Vec::new();
    for (at, replacement) in replacements.iter().enumerate() {
        match replace_one(replacement) {
            Ok(backup) => backups.extend(backup),
            Err(error) => {
                let rest = put_back(&replacements[..at]);
                let path = replacement.path.display();
                return Err(ConfigurationError::failed(format!("cannot write {path}: {error}; {rest}")));
            }
        }
    }
    Ok(backups)
}

/// Gives files their old texts. Returns a phrase for an error: whether all have it, else the others with their copies.
pub(super) fn put_back(replacements: &[Replacement<'_>]) -> String {
    let mut failed = String::new();
    for Replacement { path, old, .. } in replacements {
        let restored = match old {
            Some(text) => write_whole(path, text),
            None => fs_err::remove_file(path),
        };
        if let Err(error) = restored {
            let next = match old.map(|text| backup_of(path, text)) {
                Some(Ok(copy)) => format!("its old text is in {}", copy.display()),
                Some(Err(error)) => format!("it has no copy: {error}"),
                None => "remove it".to_owned(),
            };
            let _ = write!(failed, "\n  {}: {error}; {next}", path.display());
        }
    }
    match failed.as_str() {
        "" => "all files have their old text".to_owned(),
        failed => format!("files without their old text:{failed}"),
    }
}

fn replace_one(replacement: &Replacement<'_>) -> io::Result<Option<PathBuf>> {
    let Replacement { path, old, new } = replacement;
    if read_text(path)?.as_deref() != *old {
        return Err(io::Error::other("another program has changed it; rerun the command"));
    }
    let backup = old.map(|old| backup_of(path, old)).transpose()?;
    write_whole(path, new)?;
    Ok(backup)
}

/// A copy beside the file; an earlier copy with another text is not replaced.
fn backup_of(path: &Path, text: &str) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let numbered = (1..).map(|number| match number {
        1 => format!("{name}.{BACKUP}"),
        more => format!("{name}.{BACKUP}.{more}"),
    });
    for name in numbered {
        let backup = path.with_file_name(name);
        match fs_err::read_to_string(&backup) {
            Ok(present) if present == text => return Ok(backup),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                write_like(&backup, text, fs_err::metadata(path).ok().as_ref())?;
                return Ok(backup);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no name is left for a copy"))
}

fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs_err::create_dir_all(dir)?;
    }
    // A link stays one.
    let path = fs_err::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    write_like(&path, text, fs_err::metadata(&path).ok().as_ref())
}

/// Writes a file under another name, durably, then renames it; with the mode and owner of another.
fn write_like(path: &Path, text: &str, like: Option<&std::fs::Metadata>) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.larder-{}", std::process::id()));
    let written = (|| {
        let mut file = fs_err::File::create(&new)?;
        let mode = like.map_or(0o644, |like| like.mode() & 0o7777);
        fs_err::set_permissions(&new, std::fs::Permissions::from_mode(mode))?;
        if let Some(like) = like {
            rustix::fs::chown(&new, Some(Uid::from_raw(like.uid())), Some(Gid::from_raw(like.gid())))?;
        }
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()?;
        fs_err::rename(&new, path)?;
        path.parent().map_or(Ok(()), |dir| fs_err::File::open(dir)?.sync_all())
    })();
    if written.is_err() {
        let _ = fs_err::remove_file(&new);
    }
    written
}
