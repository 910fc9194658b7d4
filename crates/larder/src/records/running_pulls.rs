//! The pulls that run in this process, by image as requested.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};

use crate::reference::{ImageId, ImageName};

/// By image as requested.
#[derive(Debug, Default)]
pub(super) struct RunningPulls(Mutex<HashMap<ImageName, RunningPull>>);

#[derive(Debug, Default)]
struct RunningPull {
    count: usize,
    before: PriorImage,
    /// Number of callers canceled during the pull.
    left: u64,
    /// Whether a task resolves the interrupted pulls.
    watched: bool,
}

/// The image that had the name before the first of these pulls.
#[derive(Debug, Default, PartialEq, Eq)]
enum PriorImage {
    /// Not checked.
    #[default]
    Unknown,
    /// The id, if there was an image.
    Known(Option<ImageId>),
    /// Unknown: another pull may have pulled the present image.
    Ambiguous,
}

impl RunningPulls {
    fn map(&self) -> MutexGuard<'_, HashMap<ImageName, RunningPull>> {
        self.0.lock()
    }

    /// Adds a pull. Returns whether it is the only one.
    pub(super) fn begin(&self, image: &ImageName) -> bool {
        let mut map = self.map();
        let running = map.entry(image.clone()).or_default();
        running.count += 1;
        if running.count > 1 && running.before == PriorImage::Unknown {
            running.before = PriorImage::Ambiguous;
        }
        running.count == 1
    }

    /// Ends a pull. Returns whether it was the last, or none was known.
    pub(super) fn end(&self, image: &ImageName) -> bool {
        let mut map = self.map();
        match map.get_mut(image) {
            Some(running) if running.count > 1 => {
                running.count -= 1;
                false
            }
            _ => {
                map.remove(image);
                true
            }
        }
    }

    pub(super) fn count(&self, image: &ImageName) -> usize {
        self.map().get(image).map_or(0, |running| running.count)
    }

    /// Whether a pull of a matching image runs.
    pub(super) fn any(&self, is_it: impl Fn(&ImageName) -> bool) -> bool {
        self.map().keys().any(is_it)
    }

    /// Records the image that is present before the only pull starts.
    pub(super) fn note_before(&self, image: &ImageName, id: Option<ImageId>) {
        if let Some(running) = self.map().get_mut(image)
            && running.before == PriorImage::Unknown
        {
            running.before = PriorImage::Known(id);
        }
    }

    /// Records that another process also pulls the image, or was interrupted while it did.
    pub(super) fn mark_ambiguous(&self, image: &ImageName) {
        if let Some(running) = self.map().get_mut(image) {
            running.before = PriorImage::Ambiguous;
        }
    }

    /// Whether exactly this image was present before.
    pub(super) fn was_prior_image(&self, image: &ImageName, id: &ImageId) -> bool {
        let was =
            |running: &RunningPull| matches!(&running.before, PriorImage::Known(Some(was)) if was == id);
        self.map().get(image).is_some_and(was)
    }

    /// Records a canceled caller. Returns whether a task must be started that resolves the pull; the task then takes
    /// the caller's place.
    pub(super) fn abandon(&self, image: &ImageName) -> bool {
        let mut map = self.map();
        let running =
            map.entry(image.clone()).or_insert_with(|| RunningPull { count: 1, ..RunningPull::default() });
        running.left += 1;
        if running.watched {
            running.count = running.count.saturating_sub(1);
        }
        !std::mem::replace(&mut running.watched, true)
    }

    /// Number of canceled callers.
    pub(super) fn abandoned_count(&self, image: &ImageName) -> u64 {
        self.map().get(image).map_or(0, |running| running.left)
    }

    /// Ends the resolving task, unless more callers were canceled since `left`. Returns whether it ended.
    pub(super) fn unwatch(&self, image: &ImageName, left: u64) -> bool {
        let mut map = self.map();
        let Some(running) = map.get_mut(image) else { return true };
        running.watched = running.left != left;
        !running.watched
    }
}
