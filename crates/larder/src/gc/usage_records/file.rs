//! Usage records on disk: one versioned file, replaced atomically.
//!
//! A file that is invalid or from a later version is moved aside and reported once, and garbage collection starts
//! without it. Its images then count as first seen now, so that losing it never removes anything.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{ClockReading, ImageUsageRecord, ImageUsageRecords};
use crate::files::{decode_document, replace};
use crate::gc::unix_millis::UnixMillis;

const VERSION: u32 = 1;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct UsageRecordFile {
    version: u32,
    clock: Option<ClockReading>,
    watched: Option<UnixMillis>,
    images: Vec<ImageUsageRecord>,
}

/// The result of loading.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadedUsageRecords {
    /// The records; empty if the file was missing or unreadable.
    pub records: ImageUsageRecords,
    /// A message with the error and the new path of an unreadable file.
    pub notice: Option<String>,
}

/// Why records could not be written. They remain in memory and are written with the next change.
#[derive(Debug, thiserror::Error)]
#[error("cannot write image usage records to {}: {cause}; image ages are lost on restart", path.display())]
pub struct UsageRecordSaveError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

/// Stores records across restarts. Blocks on the disk.
pub trait UsageRecordStore: Send + Sync {
    /// Loads what was saved last. Never fails: an unreadable file is moved aside.
    fn load(&self) -> LoadedUsageRecords;
    /// Saves all of it; durable when it returns.
    fn save(&self, records: &ImageUsageRecords) -> Result<(), UsageRecordSaveError>;
}

/// Keeps records in memory only, as kubelet does.
#[derive(Debug, Default)]
pub struct VolatileUsageRecords(Mutex<ImageUsageRecords>);

impl UsageRecordStore for VolatileUsageRecords {
    fn load(&self) -> LoadedUsageRecords {
        let records = self.0.lock().clone();
        LoadedUsageRecords { records, notice: None }
    }

    fn save(&self, records: &ImageUsageRecords) -> Result<(), UsageRecordSaveError> {
        self.0.lock().clone_from(records);
        Ok(())
    }
}

/// Stores records in one file.
#[derive(Debug)]
pub struct UsageRecordFileStore {
    path: PathBuf,
}

impl UsageRecordFileStore {
    /// Records in this file, whose directory must exist.
    pub fn new(path: impl Into<PathBuf>) -> UsageRecordFileStore {
        UsageRecordFileStore { path: path.into() }
    }

    fn read(&self) -> Result<Option<ImageUsageRecords>, String> {
        let file = match fs_err::File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let size = file.metadata().map_err(|error| error.to_string())?;
        if !size.is_file() || size.len() > LARGEST {
            return Err("not an image usage record file".into());
        }
        drop(file);
        let text = fs_err::read(&self.path).map_err(|error| error.to_string())?;
        let file: UsageRecordFile = decode_document(&text, VERSION)?;
        let keyed =
            file.images.into_iter().map(|record| ((record.id.clone(), record.handler.clone()), record));
        Ok(Some(ImageUsageRecords {
            by_key: keyed.collect::<BTreeMap<_, _>>(),
            anchor: file.clock,
            watched: file.watched,
        }))
    }

    /// Renames the file within its directory.
    fn set_aside(&self, why: &str) -> String {
        let place = self.path.display();
        let aside =
            (1..1000).map(|n| suffixed(&self.path, &format!(".broken-{n}"))).find(|path| !path.exists());
        let moved = aside.ok_or_else(|| io::Error::other("too many broken files in the directory"));
        match moved.and_then(|aside| fs_err::rename(&self.path, &aside).map(|()| aside)) {
            Ok(aside) => {
                format!("{place}: {why}; moved it to {}; image ages restart now", aside.display())
            }
            Err(error) => format!("{place}: {why}; cannot move it ({error}); image ages restart now"),
        }
    }
}

impl UsageRecordStore for UsageRecordFileStore {
    fn load(&self) -> LoadedUsageRecords {
        match self.read() {
            Ok(records) => LoadedUsageRecords { records: records.unwrap_or_default(), notice: None },
            Err(why) => LoadedUsageRecords {
                records: ImageUsageRecords::default(),
                notice: Some(self.set_aside(&why)),
            },
        }
    }

    fn save(&self, records: &ImageUsageRecords) -> Result<(), UsageRecordSaveError> {
        let images = records.iter().cloned().collect();
        let (clock, watched) = (records.anchor.clone(), records.watched);
        let file = UsageRecordFile { version: VERSION, clock, watched, images };
        serde_json::to_vec(&file)
            .map_err(io::Error::from)
            .and_then(|text| replace(&self.path, &text))
            .map_err(|cause| UsageRecordSaveError { path: self.path.clone(), cause })
    }
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
