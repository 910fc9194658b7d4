//! Removal history: one line of JSON for each removal, in a file of bounded size.

use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::disk_space::DiskSpace;
use super::unix_millis::UnixMillis;
use crate::reference::ImageId;

/// One removal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovalHistoryEntry {
    /// When it was removed.
    pub at: UnixMillis,
    /// Id of the image.
    pub id: ImageId,
    /// Its names.
    pub names: Vec<String>,
    /// The goal, such as `age`, `space`, `free` or `allUnused`; `request` for an image that a client removed.
    pub reason: String,
    /// The reason, as text.
    pub why: String,
    /// The planned amount.
    pub promised: DiskSpace,
    /// Whether the planned amount was estimated.
    pub estimated: bool,
    /// The measured amount that was freed; `None` if it was not measured.
    pub freed: Option<DiskSpace>,
}

/// Records removals. Must be quick.
pub trait RemovalHistory: Send + Sync {
    /// Records one removal.
    fn record(&self, entry: &RemovalHistoryEntry) -> io::Result<()>;
}

/// The entries of a history file, oldest first, and the number of unreadable lines, including a last line that a crash
/// cut off.
pub(super) fn read(text: &str) -> (Vec<RemovalHistoryEntry>, usize) {
    let mut unreadable = 0;
    let mut entries = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        match serde_json::from_str(line) {
            Ok(entry) => entries.push(entry),
            Err(_) => unreadable += 1,
        }
    }
    (entries, unreadable)
}

/// A history file, and the previous one in `FILE.1`.
#[derive(Debug)]
pub struct HistoryFile {
    path: PathBuf,
    /// Size in bytes from which a new file is started.
    most: u64,
    writing: Mutex<()>,
}

impl HistoryFile {
    /// A history in this file, whose directory must exist, of at most twice 1 MiB.
    pub fn new(path: impl Into<PathBuf>) -> HistoryFile {
        HistoryFile::bounded(path, 1 << 20)
    }

    /// A history with another bound for each of the two files, in bytes.
    pub(crate) fn bounded(path: impl Into<PathBuf>, most: u64) -> HistoryFile {
        HistoryFile { path: path.into(), most, writing: Mutex::new(()) }
    }

    /// All entries, oldest first, and the number of unreadable lines.
    pub fn entries(&self) -> io::Result<(Vec<RemovalHistoryEntry>, usize)> {
        let _quiet = self.writing.lock();
        let (mut entries, mut unreadable) = (Vec::new(), 0);
        for path in [self.before(), self.path.clone()] {
            let (more, bad) = read(&text_of(&path)?);
            entries.extend(more);
            unreadable += bad;
        }
        Ok((entries, unreadable))
    }

    fn before(&self) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(".1");
        name.into()
    }
}

fn text_of(path: &Path) -> io::Result<String> {
    match fs_err::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

impl RemovalHistory for HistoryFile {
    fn record(&self, entry: &RemovalHistoryEntry) -> io::Result<()> {
        let _alone = self.writing.lock();
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        let mut options = fs_err::OpenOptions::new();
        options.create(true).append(true).read(true).mode(0o644);
        let mut file = options.open(&self.path)?;
        let size = file.metadata()?.len();
        if size > 0 && size.saturating_add(line.len() as u64) > self.most {
            fs_err::rename(&self.path, self.before())?;
            file = options.open(&self.path)?;
        } else if size > 0 {
            // A crash may have cut the last line off.
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != [b'\n'] {
                line.insert(0, b'\n');
            }
        }
        file.write_all(&line)?;
        file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str) -> RemovalHistoryEntry {
        RemovalHistoryEntry {
            at: UnixMillis(7),
            id: id.into(),
            names: vec!["a:1".into()],
            reason: "space".into(),
            why: "unused".into(),
            promised: DiskSpace { bytes: 10, inodes: 1 },
            estimated: false,
            freed: Some(DiskSpace { bytes: 9, inodes: 1 }),
        }
    }

    fn ids(file: &HistoryFile) -> (Vec<ImageId>, usize) {
        let (entries, unreadable) = file.entries().unwrap();
        (entries.into_iter().map(|entry| entry.id).collect(), unreadable)
    }

    #[test]
    fn recorded_entries_are_read_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let file = HistoryFile::new(dir.path().join("history"));
        assert_eq!(ids(&file), (vec![], 0));
        file.record(&entry("a")).unwrap();
        file.record(&entry("b")).unwrap();
        assert_eq!(ids(&file), (vec!["a".into(), "b".into()], 0));
        assert_eq!(file.entries().unwrap().0[0], entry("a"));
    }

    #[test]
    fn a_torn_last_line_costs_that_line_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let file = HistoryFile::new(&path);
        file.record(&entry("a")).unwrap();
        file.record(&entry("torn")).unwrap();
        let text = fs_err::read(&path).unwrap();
        fs_err::write(&path, &text[..text.len() - 20]).unwrap();
        file.record(&entry("b")).unwrap();
        assert_eq!(ids(&file), (vec!["a".into(), "b".into()], 1));
    }

    #[test]
    fn the_journal_is_bounded_and_keeps_the_latest() {
        let dir = tempfile::tempdir().unwrap();
        let file = HistoryFile::bounded(dir.path().join("history"), 1000);
        for n in 0..100 {
            file.record(&entry(&format!("i{n}"))).unwrap();
        }
        let (ids, unreadable) = ids(&file);
        assert_eq!(unreadable, 0);
        assert_eq!(ids.last().unwrap(), "i99");
        assert!((4..20).contains(&ids.len()), "{}", ids.len());
        let sizes = fs_err::read_dir(dir.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        assert!(sizes.into_iter().all(|size| size <= 1000));
    }
}
