//! Usage records: when each image was first seen and last used. Each observation updates them by pure functions; a
//! [`UsageRecordStore`] makes them durable.

mod clock;
mod file;

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

pub use clock::{Clock, ClockReading, SystemClock};
pub use file::{
    LoadedUsageRecords, UsageRecordFileStore, UsageRecordSaveError, UsageRecordStore, VolatileUsageRecords,
};

use super::activity::{ActivityKind, ImageActivity};
use super::policy::GcStrategy;
use super::unix_millis::UnixMillis;
use crate::backend::Image;
use crate::reference::ImageId;
use crate::retention::RetentionSet;

/// One image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageUsageRecord {
    /// Its id.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used; `None` is never.
    pub last_used: Option<UnixMillis>,
    /// Size in bytes, as the runtime counts.
    pub size: u64,
    /// Whether the runtime has pinned it.
    pub pinned: bool,
}

/// The key of a record: image ID and runtime handler.
type ImageUsageKey = (ImageId, String);

/// All images that were present at the last observation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageUsageRecords {
    by_key: BTreeMap<ImageUsageKey, ImageUsageRecord>,
    /// The clocks at the last observation.
    anchor: Option<ClockReading>,
    /// When the first observation was.
    watched: Option<UnixMillis>,
}

/// The runtime handler of an image, empty if it has none.
pub(super) fn handler_of(image: &Image) -> &str {
    image.spec.as_ref().map_or("", |spec| &spec.runtime_handler)
}

impl ImageUsageRecords {
    /// Applies which images are present and used now; a lease is no use. New images are first seen now, used images are
    /// last used now, records of images that are no longer present are dropped. With larder's strategy all times first
    /// move with a step of the clock.
    pub fn observe(
        &mut self,
        images: &[Image],
        uses: &RetentionSet,
        now: &ClockReading,
        strategy: GcStrategy,
    ) {
        if strategy == GcStrategy::Larder {
            self.follow(now);
        }
        let wall = now.wall;
        let first = || self.by_key.values().map(|record| record.first_seen).min();
        self.watched = self.watched.or_else(first).or(Some(wall));
        let mut seen = HashSet::with_capacity(images.len());
        for image in images {
            let key = (image.id.clone(), handler_of(image).to_owned());
            // A lease is no use: the ensure before it was, and is recorded as one.
            let in_use = uses.of_image(&key.0, &key.1).any(|reason| !reason.is_lease());
            let record = self.by_key.entry(key.clone()).or_insert_with(|| ImageUsageRecord {
                id: key.0.clone(),
                handler: key.1.clone(),
                first_seen: wall,
                last_used: None,
                size: 0,
                pinned: false,
            });
            if in_use {
                record.last_used = Some(wall);
            }
            (record.size, record.pinned) = (image.size, image.pinned);
            seen.insert(key);
        }
        if seen.len() < self.by_key.len() {
            self.by_key.retain(|key, _| seen.contains(key));
        }
    }

    /// Applies the activity until an observation began, after that observation. An image that was first seen since then
    /// is first seen when it was added; a use counts if it is the latest known.
    pub(crate) fn apply_activity(&mut self, activity: &[ImageActivity], began: UnixMillis) {
        for ImageActivity { image, at, what } in activity {
            let Some(record) = self.by_key.get_mut(&(image.clone(), String::new())) else { continue };
            let at = (*at).min(began);
            match what {
                ActivityKind::Added if record.first_seen >= began => record.first_seen = at,
                ActivityKind::Added => {}
                ActivityKind::Used => record.last_used = record.last_used.max(Some(at)),
            }
        }
    }

    /// Whether these have the same images with the same times.
    pub(crate) fn has_same_images(&self, other: &ImageUsageRecords) -> bool {
        self.by_key == other.by_key && self.watched == other.watched
    }

    /// Since when there are records.
    pub fn watched(&self) -> Option<UnixMillis> {
        self.watched
    }

    /// Records an ensure of these images as a use. They have no runtime handler.
    pub(crate) fn ensured<'a>(
        &mut self,
        ids: impl IntoIterator<Item = &'a ImageId>,
        now: &ClockReading,
        strategy: GcStrategy,
    ) {
        if strategy == GcStrategy::Larder {
            self.follow(now);
        }
        for id in ids {
            let record = self.by_key.entry((id.clone(), String::new())).or_insert_with(|| ImageUsageRecord {
                id: id.clone(),
                handler: String::new(),
                first_seen: now.wall,
                last_used: None,
                size: 0,
                pinned: false,
            });
            record.last_used = Some(now.wall);
        }
    }

    /// Moves all times by the step of the wall clock since the last observation, and caps future times at now.
    fn follow(&mut self, now: &ClockReading) {
        let step = self.anchor.as_ref().map_or(0, |anchor| anchor.step(now));
        self.anchor = Some(now.clone());
        let cut = |stamp: UnixMillis| stamp.moved(step).min(now.wall);
        self.watched = self.watched.map(cut);
        for record in self.by_key.values_mut() {
            record.first_seen = cut(record.first_seen);
            record.last_used = record.last_used.map(cut);
        }
    }

    /// The record of an image.
    pub fn get(&self, id: &ImageId, handler: &str) -> Option<&ImageUsageRecord> {
        self.by_key.get(&(id.clone(), handler.to_owned()))
    }

    /// All records, by id.
    pub fn iter(&self) -> impl Iterator<Item = &ImageUsageRecord> {
        self.by_key.values()
    }

    /// Drops the record of an image that was removed.
    pub(crate) fn forget(&mut self, id: &ImageId, handler: &str) {
        self.by_key.remove(&(id.clone(), handler.to_owned()));
    }
}
