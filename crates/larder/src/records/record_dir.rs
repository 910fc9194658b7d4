//! Pull records on disk in kubelet's layout: a directory `pulling` of intents and a directory `pulled` of records.
//!
//! Promises: a file is written under a temporary name, synced and renamed, so that a reader finds the old or the new
//! one; directories are accessible only to the owner; only regular files of bounded size are read; processes that
//! change files take a lock.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use super::document::{Decoded, DocumentError, ImagePullIntent, ImagePulledRecord, file_name};
use super::lock::lock_exclusive;
use super::pull_locks::{PullLock, PullLockFile};
use crate::reference::{ImageId, ImageName};

/// The largest file that is read, in bytes.
const LARGEST: u64 = 64 << 20;
/// From this number of files on, one sync of the filesystem replaces a sync of each file.
const MANY: usize = 4;
const PREFIX: &str = "sha256-";
/// Of the temporary files of larder; kubelet has others.
const SUFFIX: &str = ".larder-tmp";
/// Length of the name of an intent or a record: the prefix and 64 hexadecimal digits.
const NAME_LENGTH: usize = PREFIX.len() + 64;

/// A step on the disk, reported before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordDirStep {
    /// A file is written under a temporary name.
    Write,
    /// A file, or the whole filesystem, is synced.
    Sync,
    /// A file is renamed to its final name.
    Move,
    /// A directory is synced.
    SyncDir,
    /// A file is removed.
    Remove,
}

/// Called before each step, which is not done if this fails: tests count steps and fail in the middle of them.
pub type StepHook = Arc<dyn Fn(RecordDirStep, &Path) -> io::Result<()> + Send + Sync>;

/// One of the two directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RecordDirKind {
    Pulling,
    Pulled,
}

/// Why a record could not be read. Names the file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", .path.display())]
pub(super) struct RecordReadError {
    path: PathBuf,
    problem: RecordReadCause,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum RecordReadCause {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not a regular file of at most {} MiB", LARGEST >> 20)]
    NotARecord,
    #[error(transparent)]
    Document(#[from] DocumentError),
}

pub(super) struct RecordDir {
    root: PathBuf,
    hook: Option<StepHook>,
    pull_locks: PullLockFile,
}

/// The lock of this process on the directory; released when dropped.
#[derive(Debug)]
pub(super) struct RecordDirLock {
    _lock: std::fs::File,
}

impl RecordDir {
    /// Creates missing directories, if there is space.
    pub(super) fn open(root: &Path, hook: Option<StepHook>) -> io::Result<RecordDir> {
        let dir =
            RecordDir { root: root.to_owned(), hook, pull_locks: PullLockFile::new(root.join("alive")) };
        match dir.lock().and_then(|turn| dir.tidy(&turn)) {
            // Garbage collection must be able to start on a full disk. Until there is space, nothing is pulled, and
            // present images without a record are accessible to no pod.
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                tracing::warn!("no space for pull records: {error}");
            }
            tidied => tidied?,
        }
        Ok(dir)
    }

    fn make(&self) -> io::Result<()> {
        for path in
            [self.root.clone(), self.path_of(RecordDirKind::Pulling), self.path_of(RecordDirKind::Pulled)]
        {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(|error| named(&error, &path))?;
            let found = fs_err::symlink_metadata(&path)?;
            if !found.is_dir() {
                return Err(named(&ErrorKind::NotADirectory.into(), &path));
            }
            if found.permissions().mode() & 0o077 != 0 {
                fs_err::set_permissions(&path, Permissions::from_mode(0o700))?;
            }
        }
        Ok(())
    }

    /// Locks the directory against other processes; waits for up to a minute.
    pub(super) fn lock(&self) -> io::Result<RecordDirLock> {
        self.make()?;
        let path = self.root.join("lock");
        let mut options = OpenOptions::new();
        options.mode(0o600).create(true).truncate(false).write(true);
        let lock = options.open(&path).map_err(|error| named(&error, &path))?;
        #[expect(
            clippy::disallowed_methods,
            reason = "this thread has nothing else to do; tests bring another sleep"
        )]
        lock_exclusive(&lock, &path, std::thread::sleep)?;
        Ok(RecordDirLock { _lock: lock })
    }

    /// The record of an image; `None` if the file records another one.
    pub(super) fn record(&self, image_ref: &ImageId) -> Result<Option<ImagePulledRecord>, RecordReadError> {
        let path = self.path(RecordDirKind::Pulled, image_ref.as_str());
        let found = read(&path, ImagePulledRecord::decode)?;
        Ok(found.map(|decoded| decoded.document).filter(|record| record.image_ref == *image_ref))
    }

    /// Whether a pull of an image, named as requested, is running or was interrupted.
    pub(super) fn has_intent(&self, image: &ImageName) -> Result<bool, RecordReadError> {
        let found = read(&self.path(RecordDirKind::Pulling, image.as_str()), ImagePullIntent::decode)?;
        Ok(found.is_some_and(|decoded| decoded.document.image == *image))
    }

    /// Whether any intent matches. An unreadable intent matches.
    pub(super) fn has_intent_like(&self, is_it: impl Fn(&ImageName) -> bool) -> io::Result<bool> {
        for name in self.names(RecordDirKind::Pulling)? {
            let path = self.path_of(RecordDirKind::Pulling).join(name);
            match read(&path, ImagePullIntent::decode) {
                Ok(Some(found)) if is_it(&found.document.image) => return Ok(true),
                Ok(_) => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }

    /// All readable files with the right name, ordered by name; others are logged.
    pub(super) fn intents(&self) -> io::Result<Vec<Decoded<ImagePullIntent>>> {
        self.all(RecordDirKind::Pulling, ImagePullIntent::decode, |intent| intent.image.as_str())
    }

    /// See [`intents`](RecordDir::intents).
    pub(super) fn records(&self) -> io::Result<Vec<Decoded<ImagePulledRecord>>> {
        self.all(RecordDirKind::Pulled, ImagePulledRecord::decode, |record| record.image_ref.as_str())
    }

    /// How many files there are.
    pub(super) fn count(&self, kind: RecordDirKind) -> io::Result<usize> {
        self.names(kind).map(|names| names.len())
    }

    /// Writes all of these files, each atomically; durable when it returns.
    pub(super) fn write(&self, files: &[(RecordDirKind, String, String)]) -> io::Result<()> {
        let mut written = Vec::new();
        for (kind, key, text) in files {
            let path = self.path(*kind, key);
            let beside = suffixed(&path);
            self.step(RecordDirStep::Write, &beside)?;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600).custom_flags(no_follow());
            let mut file = options.open(&beside).map_err(|error| named(&error, &beside))?;
            file.write_all(text.as_bytes()).map_err(|error| named(&error, &beside))?;
            written.push((file, beside, path));
        }
        if written.len() < MANY {
            for (file, beside, _) in &written {
                self.step(RecordDirStep::Sync, beside)?;
                file.sync_all().map_err(|error| named(&error, beside))?;
            }
        } else if let Some((file, ..)) = written.first() {
            self.step(RecordDirStep::Sync, &self.root)?;
            rustix::fs::syncfs(file).map_err(|error| named(&error.into(), &self.root))?;
        }
        for (_, beside, path) in &written {
            self.step(RecordDirStep::Move, path)?;
            fs_err::rename(beside, path)?;
        }
        for kind in [RecordDirKind::Pulling, RecordDirKind::Pulled] {
            if files.iter().any(|(of, ..)| *of == kind) {
                let dir = self.path_of(kind);
                self.step(RecordDirStep::SyncDir, &dir)?;
                fs_err::File::open(&dir)?.sync_all()?;
            }
        }
        Ok(())
    }

    /// Removes a file, if present. It may reappear after a power failure.
    pub(super) fn remove(&self, kind: RecordDirKind, key: &str) -> io::Result<()> {
        let path = self.path(kind, key);
        self.step(RecordDirStep::Remove, &path)?;
        match fs_err::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Locks the pull of an image until the result is dropped.
    pub(super) fn hold(&self, image: &ImageName) -> io::Result<PullLock> {
        self.pull_locks.hold(image.as_str())
    }

    /// Whether another live process pulls the image; true if that cannot be determined. Requires the lock.
    pub(super) fn is_pulled_by_other_process(&self, image: &ImageName) -> bool {
        self.pull_locks.is_locked_by_other_process(image.as_str()).unwrap_or_else(|error| {
            tracing::warn!("cannot determine whether another process pulls {image}: {error}");
            true
        })
    }

    /// Removes temporary files of dead writers. Requires the lock.
    fn tidy(&self, _turn: &RecordDirLock) -> io::Result<()> {
        for kind in [RecordDirKind::Pulling, RecordDirKind::Pulled] {
            for entry in fs_err::read_dir(self.path_of(kind))? {
                let entry = entry?;
                let name = entry.file_name();
                let name = name.to_string_lossy();
                if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
                    fs_err::remove_file(entry.path())?;
                }
            }
        }
        Ok(())
    }

    fn all<T>(
        &self,
        kind: RecordDirKind,
        decode: fn(&[u8]) -> Result<Decoded<T>, DocumentError>,
        key: fn(&T) -> &str,
    ) -> io::Result<Vec<Decoded<T>>> {
        let mut found = Vec::new();
        for name in self.names(kind)? {
            let path = self.path_of(kind).join(&name);
            match read(&path, decode) {
                Ok(None) => {}
                Ok(Some(decoded)) if file_name(key(&decoded.document)) == name => found.push(decoded),
                Ok(Some(_)) => {
                    tracing::warn!("ignored pull record {}: it records another image", path.display());
                }
                Err(error) => tracing::warn!("ignored pull record: {error}"),
            }
        }
        Ok(found)
    }

    fn names(&self, kind: RecordDirKind) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs_err::read_dir(self.path_of(kind))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(PREFIX) && name.len() == NAME_LENGTH && !entry.file_type()?.is_dir() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn path(&self, kind: RecordDirKind, key: &str) -> PathBuf {
        self.path_of(kind).join(file_name(key))
    }

    fn path_of(&self, kind: RecordDirKind) -> PathBuf {
        self.root.join(match kind {
            RecordDirKind::Pulling => "pulling",
            RecordDirKind::Pulled => "pulled",
        })
    }

    fn step(&self, step: RecordDirStep, path: &Path) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(step, path))
    }
}

fn read<T>(
    path: &Path,
    decode: fn(&[u8]) -> Result<Decoded<T>, DocumentError>,
) -> Result<Option<Decoded<T>>, RecordReadError> {
    let read = || -> Result<Option<Decoded<T>>, RecordReadCause> {
        let Some(text) = bounded(path)? else { return Ok(None) };
        Ok(Some(decode(&text)?))
    };
    read().map_err(|problem| RecordReadError { path: path.to_owned(), problem })
}

/// `None` if there is no such file.
fn bounded(path: &Path) -> Result<Option<Vec<u8>>, RecordReadCause> {
    let flags = no_follow() | OFlags::NONBLOCK.bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let found = file.metadata()?;
    if !found.is_file() || found.len() > LARGEST {
        return Err(RecordReadCause::NotARecord);
    }
    let mut text = Vec::new();
    file.take(LARGEST).read_to_end(&mut text)?;
    Ok(Some(text))
}

fn no_follow() -> i32 {
    OFlags::NOFOLLOW.bits().cast_signed()
}

fn suffixed(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

fn named(error: &io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
