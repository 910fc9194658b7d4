//! Leases of ensured images of a runtime, on disk: GC of a later process retains the images as well.
//!
//! One process at a time writes the file: the one that has the lock of the state directory. Lost entries would let images
//! be removed, so a file that cannot be read ends a round of collection.

use std::io::{self, Read as _};
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use larder::files;
use larder::gc::{ClockReading, SavedClockReading};
use larder::reference::ImageId;
use larder::retention::{Lease, LeasePurpose, Retention, RetentionError, RetentionPurpose, RetentionSource};
use serde::{Deserialize, Serialize};

use super::dir::StateDir;
use crate::Error;

const VERSION: u32 = 1;
/// The most images that are remembered, the latest first.
const MOST: usize = 10_000;
/// More than so many images take, in bytes.
const LONGEST_FILE: u64 = 8 << 20;

/// The file.
#[derive(Clone)]
pub(crate) struct EnsureLeaseFile {
    path: PathBuf,
    /// Duration of a lease.
    lease: Duration,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct EnsureLeaseDocument {
    version: u32,
    images: Vec<EnsureLeaseEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EnsureLeaseEntry {
    /// Id of the image.
    id: ImageId,
    /// When it was made present.
    at: SavedClockReading,
}

impl Default for EnsureLeaseDocument {
    fn default() -> Self {
        EnsureLeaseDocument { version: VERSION, images: Vec::new() }
    }
}

impl EnsureLeaseDocument {
    /// Adds leases of these images from now on, and drops expired ones.
    fn with(mut self, ids: &[ImageId], now: &ClockReading, lease: Duration) -> EnsureLeaseDocument {
        self.images.retain(|known| known.at.age(now) < lease && !ids.contains(&known.id));
        let at = SavedClockReading::from_reading(now);
        self.images.extend(ids.iter().map(|id| EnsureLeaseEntry { id: id.clone(), at: at.clone() }));
        self.images.sort_by_key(|entry| entry.at.age(now));
        self.images.truncate(MOST);
        self
    }

    /// The leases that have not expired.
    fn retentions(self, now: &ClockReading, lease: Duration) -> Vec<Retention> {
        let still = |EnsureLeaseEntry { id, at }: EnsureLeaseEntry| {
            let left = lease.checked_sub(at.age(now)).filter(|left| !left.is_zero())?;
            Some(Retention::new(id, RetentionPurpose::Lease(Lease::durable(LeasePurpose::Ensure, left))))
        };
        self.images.into_iter().filter_map(still).collect()
    }
}

impl EnsureLeaseFile {
    /// The file of this state directory, with leases of this duration.
    pub(crate) fn at(place: &StateDir, lease: Duration) -> EnsureLeaseFile {
        EnsureLeaseFile { path: place.ensured(), lease }
    }

    /// Leases these images from now on. Durable when it returns. To be called by one thread at
    /// a time of the process that has the lock of the state directory.
    pub(crate) fn add(&self, ids: &[ImageId]) -> Result<(), Error> {
        let failed = |error: &dyn std::fmt::Display| Error::failed(error.to_string());
        let known = self.read().map_err(|error| failed(&error))?;
        let all = known.with(ids, &ClockReading::now(), self.lease);
        self.write(&all).map_err(|error| failed(&error))
    }

    /// Ends the leases of these images, as [`add`](EnsureLeaseFile::add) begins them.
    pub(crate) fn remove(&self, ids: &[ImageId]) -> Result<(), Error> {
        let failed = |error: &dyn std::fmt::Display| Error::failed(error.to_string());
        let mut known = self.read().map_err(|error| failed(&error))?;
        let before = known.images.len();
        known.images.retain(|entry| !ids.contains(&entry.id));
        if known.images.len() == before {
            return Ok(());
        }
        self.write(&known).map_err(|error| failed(&error))
    }

    fn write(&self, document: &EnsureLeaseDocument) -> io::Result<()> {
        files::replace(&self.path, &serde_json::to_vec(document)?)
    }

    fn read(&self) -> Result<EnsureLeaseDocument, RetentionError> {
        let path = self.path.display();
        let broken = |why: &dyn std::fmt::Display| {
            RetentionError::other(format!("cannot read the recent ensures: {path}: {why}; remove the file"))
        };
        let mut text = Vec::new();
        match fs_err::File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(EnsureLeaseDocument::default());
            }
            opened => opened.and_then(|file| file.take(LONGEST_FILE).read_to_end(&mut text)),
        }
        .map_err(|error| RetentionError::other(format!("cannot read the recent ensures: {error}")))?;
        files::decode_document(&text, VERSION).map_err(|problem| broken(&problem))
    }
}

#[async_trait]
impl RetentionSource for EnsureLeaseFile {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let file = self.clone();
        let read = tokio::task::spawn_blocking(move || file.read()).await;
        let ensured = read.map_err(|error| RetentionError::other(error.to_string()))??;
        Ok(ensured.retentions(&ClockReading::now(), self.lease))
    }
}

#[cfg(test)]
mod tests {
    use larder::gc::{GcError, UnixMillis};

    use super::*;

    const LEASE: Duration = Duration::from_secs(600);

    fn seconds(wall: i64, since_boot: i64) -> ClockReading {
        ClockReading {
            wall: UnixMillis(wall * 1000),
            since_boot: Some(since_boot * 1000),
            boot: "this".to_owned(),
        }
    }

    fn images(found: &[Retention]) -> Vec<&str> {
        found.iter().map(|found| found.image.as_str()).collect()
    }

    fn file(dir: &tempfile::TempDir) -> EnsureLeaseFile {
        EnsureLeaseFile { path: dir.path().join("ensured.json"), lease: LEASE }
    }

    #[test]
    fn an_image_is_retained_for_the_lease_of_its_last_ensure() {
        let first = EnsureLeaseDocument::default().with(&["a".into(), "b".into()], &seconds(1000, 10), LEASE);
        let second = first.with(&["a".into()], &seconds(1500, 510), LEASE);
        let left = |at: i64| {
            let all = EnsureLeaseDocument { version: VERSION, images: second.images.clone() };
            all.retentions(&seconds(at, at - 990), LEASE)
        };
        assert_eq!(images(&left(1599)), ["a", "b"]);
        assert_eq!(images(&left(1600)), ["a"]);
        assert_eq!(images(&left(2100)), [""; 0]);
        let by = RetentionPurpose::Lease(Lease::durable(LeasePurpose::Ensure, Duration::from_secs(501)));
        assert_eq!(left(1599)[0].purpose, by);
        assert_eq!(by.to_string(), "lease (expires in 8m21s)");
    }

    #[test]
    fn a_step_of_the_wall_clock_neither_ends_nor_prolongs_it() {
        let day = 24 * 3600;
        for step in [day, -day] {
            let ensured =
                || EnsureLeaseDocument::default().with(&["a".into()], &seconds(10 * day, 10), LEASE);
            assert_eq!(
                images(&ensured().retentions(&seconds(10 * day + step + 599, 609), LEASE)),
                ["a"],
                "{step}"
            );
            assert_eq!(
                images(&ensured().retentions(&seconds(10 * day + step + 601, 611), LEASE)),
                [""; 0],
                "{step}"
            );
        }
    }

    #[test]
    fn an_image_ensured_with_the_clock_ahead_is_a_candidate_after_the_lease_in_the_next_boot() {
        let ahead = 10 * 365 * 24 * 3600;
        let ensured = || EnsureLeaseDocument::default().with(&["a".into()], &seconds(ahead, 10), LEASE);
        let next = |since_boot: i64| ClockReading { boot: "next".to_owned(), ..seconds(5000, since_boot) };
        assert_eq!(images(&ensured().retentions(&next(599), LEASE)), ["a"]);
        assert_eq!(images(&ensured().retentions(&next(600), LEASE)), [""; 0]);
    }

    #[test]
    fn expired_entries_are_dropped_and_the_file_is_bounded() {
        let ids: Vec<ImageId> = (0..MOST).map(|number| format!("sha256:{number:064x}").into()).collect();
        let many = EnsureLeaseDocument::default().with(&ids, &seconds(1000, 10), LEASE).with(
            &["new".into()],
            &seconds(1001, 11),
            LEASE,
        );
        assert_eq!((many.images.len(), many.images[0].id.as_str()), (MOST, "new"));
        assert!((serde_json::to_vec_pretty(&many).unwrap().len() as u64) < LONGEST_FILE);
        let later = many.with(&["later".into()], &seconds(1601, 611), LEASE);
        assert_eq!(later.images.len(), 1);
    }

    #[tokio::test]
    async fn it_is_read_as_it_was_written_and_what_cannot_be_read_is_not_taken_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(&dir);
        assert_eq!(file.retentions().await, Ok(Vec::new()), "there is none");
        file.add(&["a".into()]).unwrap();
        file.add(&["b".into()]).unwrap();
        let found = file.retentions().await.unwrap();
        let mut both = images(&found);
        both.sort_unstable();
        assert_eq!(both, ["a", "b"]);
        for text in ["", "{", r#"{"version":2,"images":[]}"#, r#"{"version":1,"images":[{"id":"a"}]}"#] {
            fs_err::write(&file.path, text).unwrap();
            let error = file.retentions().await.unwrap_err();
            let failure = crate::control::gc::failure(GcError::Uses(error));
            let (error, steps) = (failure.message(), format!("{:?}", failure.next_steps()));
            assert!(error.contains("ensured.json") && error.contains("remove the file"), "{text}: {error}");
            assert!(!steps.contains("runtime"), "it has no part in this: {steps}");
            assert!(file.add(&["c".into()]).is_err(), "{text}");
        }
    }
}
