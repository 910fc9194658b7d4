//! Leases on disk, so that garbage collection of a later process retains the images as well.
//!
//! One process at a time writes the file. Lost leases would let images be removed, so a file that cannot be read is an
//! error until it is repaired or removed.

use std::io::{self, Read as _};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::entry::{Lease, LeasePurpose};
use crate::files;
use crate::gc::ClockReading;
use crate::hint::Hint;
use crate::reference::ImageId;

const VERSION: u32 = 1;
/// The most leases that are saved: those of ensures last, and of each kind first the ones that expire last.
const MAX_LEASES: usize = 10_000;
/// Limit of the file in bytes; more than that many leases take.
const MAX_BYTES: u64 = 8 << 20;

/// The file.
#[derive(Debug)]
pub(super) struct LeaseFile {
    path: PathBuf,
    /// The longest time for which a lease of an ensure in the file counts.
    longest_ensure: Duration,
}

/// Why leases cannot be read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} the leases: {cause}")]
pub struct LeaseFileError {
    operation: &'static str,
    cause: String,
    kind: io::ErrorKind,
}

impl LeaseFileError {
    fn new(operation: &'static str, cause: &io::Error) -> LeaseFileError {
        LeaseFileError { operation, cause: cause.to_string(), kind: cause.kind() }
    }

    /// Returns the next step, if there is one.
    pub fn hint(&self) -> Option<Hint> {
        files::hint_of_full_disk(self.kind)
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LeaseDocument {
    version: u32,
    written_at: ClockReading,
    leases: Vec<LeaseRecord>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct LeaseRecord {
    image: ImageId,
    purpose: LeasePurpose,
    /// Time until it expires, when the file was written.
    left_millis: u64,
}

impl LeaseFile {
    pub(super) fn new(path: PathBuf, longest_ensure: Duration) -> LeaseFile {
        LeaseFile { path, longest_ensure }
    }

    /// The leases that have not expired; none without a file. Steps of the wall clock neither end nor prolong a lease.
    pub(super) fn read(&self, now: &ClockReading) -> Result<Vec<(ImageId, Lease)>, LeaseFileError> {
        let failed = |cause: io::Error| LeaseFileError::new("read", &cause);
        let mut text = Vec::new();
        match fs_err::File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened.and_then(|file| file.take(MAX_BYTES).read_to_end(&mut text)),
        }
        .map_err(failed)?;
        let document: LeaseDocument = files::decode_document(&text, VERSION)
            .map_err(|problem| format!("{}: {problem}; remove the file", self.path.display()))
            .map_err(|problem| failed(io::Error::new(io::ErrorKind::InvalidData, problem)))?;
        let age = document.written_at.age(now);
        let lease = |LeaseRecord { image, purpose, left_millis }: LeaseRecord| {
            let mut left = Duration::from_millis(left_millis).saturating_sub(age);
            if purpose == LeasePurpose::Ensure {
                left = left.min(self.longest_ensure);
            }
            (!left.is_zero()).then_some((image, Lease { purpose, left }))
        };
        Ok(document.leases.into_iter().filter_map(lease).collect())
    }

    /// Replaces the leases. Durable when it returns. One call at a time.
    pub(super) fn write(
        &self,
        mut leases: Vec<(ImageId, Lease)>,
        now: &ClockReading,
    ) -> Result<(), LeaseFileError> {
        leases
            .sort_by_key(|(_, lease)| (lease.purpose == LeasePurpose::Ensure, std::cmp::Reverse(lease.left)));
        leases.truncate(MAX_LEASES);
        let record = |(image, Lease { purpose, left }): (ImageId, Lease)| LeaseRecord {
            image,
            purpose,
            left_millis: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        };
        let document = LeaseDocument {
            version: VERSION,
            written_at: now.clone(),
            leases: leases.into_iter().map(record).collect(),
        };
        let written = serde_json::to_vec(&document).map_err(io::Error::from);
        let written = written.and_then(|text| files::replace(&self.path, &text));
        written.map_err(|error| LeaseFileError::new("write", &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gc::UnixMillis;

    const LEASE: Duration = Duration::from_secs(600);
    const DAY: i64 = 24 * 3600;

    fn seconds(wall: i64, since_boot: i64) -> ClockReading {
        ClockReading {
            wall: UnixMillis(wall * 1000),
            since_boot: Some(since_boot * 1000),
            boot: "a".to_owned(),
        }
    }

    fn file(dir: &tempfile::TempDir) -> LeaseFile {
        LeaseFile::new(dir.path().join("leases.json"), LEASE)
    }

    fn ensure(image: &str, left: Duration) -> (ImageId, Lease) {
        (image.into(), Lease { purpose: LeasePurpose::Ensure, left })
    }

    fn images(read: Result<Vec<(ImageId, Lease)>, LeaseFileError>) -> Vec<String> {
        read.unwrap().into_iter().map(|(image, _)| image.to_string()).collect()
    }

    #[test]
    fn a_lease_lasts_until_its_time_also_across_restarts() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(file(&dir).read(&seconds(1000, 10)), Ok(Vec::new()), "there is no file");
        file(&dir).write(vec![ensure("a", LEASE), ensure("b", LEASE / 2)], &seconds(1000, 10)).unwrap();
        assert_eq!(images(file(&dir).read(&seconds(1299, 309))), ["a", "b"]);
        assert_eq!(images(file(&dir).read(&seconds(1300, 310))), ["a"]);
        assert_eq!(images(file(&dir).read(&seconds(1600, 610))), [""; 0]);
        let left = file(&dir).read(&seconds(1099, 109)).unwrap().remove(0).1;
        assert_eq!(left.to_string(), "lease (expires in 8m21s)");
    }

    #[test]
    fn a_step_of_the_wall_clock_neither_ends_nor_prolongs_a_lease() {
        let dir = tempfile::tempdir().unwrap();
        for step in [DAY, -DAY, 10 * 365 * DAY] {
            file(&dir).write(vec![ensure("a", LEASE)], &seconds(20 * DAY, 10)).unwrap();
            assert_eq!(images(file(&dir).read(&seconds(20 * DAY + step + 599, 609))), ["a"], "{step}");
            assert_eq!(images(file(&dir).read(&seconds(20 * DAY + step + 601, 611))), [""; 0], "{step}");
        }
    }

    #[test]
    fn a_lease_with_the_clock_ahead_ends_at_most_its_time_after_the_next_boot() {
        let dir = tempfile::tempdir().unwrap();
        file(&dir).write(vec![ensure("a", LEASE)], &seconds(10 * 365 * DAY, 10)).unwrap();
        let next = |since_boot| ClockReading { boot: "b".to_owned(), ..seconds(5000, since_boot) };
        assert_eq!(images(file(&dir).read(&next(599))), ["a"]);
        assert_eq!(images(file(&dir).read(&next(600))), [""; 0]);
    }

    #[test]
    fn a_shorter_setting_shortens_the_leases_of_ensures_only() {
        let dir = tempfile::tempdir().unwrap();
        let requested = ("b".into(), Lease { purpose: LeasePurpose::Request, left: LEASE });
        file(&dir).write(vec![ensure("a", LEASE), requested], &seconds(1000, 10)).unwrap();
        let none = LeaseFile { longest_ensure: Duration::ZERO, ..file(&dir) };
        assert_eq!(images(none.read(&seconds(1000, 10))), ["b"]);
    }

    #[test]
    fn the_file_is_bounded_and_keeps_requested_leases() {
        let dir = tempfile::tempdir().unwrap();
        let mut many: Vec<_> = (0..MAX_LEASES).map(|n| ensure(&format!("sha256:{n:064x}"), LEASE)).collect();
        many.push(("b".into(), Lease { purpose: LeasePurpose::Request, left: Duration::from_secs(1) }));
        file(&dir).write(many, &seconds(1000, 10)).unwrap();
        let read = images(file(&dir).read(&seconds(1000, 10)));
        assert!(read.len() == MAX_LEASES && read.contains(&"b".to_owned()));
        assert!(fs_err::metadata(&file(&dir).path).unwrap().len() < MAX_BYTES);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_not_taken_for_one_without_leases() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "{", r#"{"version":2,"images":[]}"#, r#"{"version":1,"leases":[{"image":"a"}]}"#] {
            fs_err::write(&file(&dir).path, text).unwrap();
            let error = file(&dir).read(&seconds(1000, 10)).unwrap_err().to_string();
            assert!(error.contains("leases.json") && error.contains("remove the file"), "{text}: {error}");
        }
    }
}
