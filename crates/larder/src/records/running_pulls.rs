//! The pulls that run in this process, by image as requested.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::reference::{ImageId, ImageName};

/// By image as requested.
#[derive(Debug, Default)]
pub(super) struct RunningPulls(Mutex<HashMap<ImageName, RunningPull>>);

#[derive(Debug, Default)]
struct RunningPull {
    count: usize,
    before: PriorImage,
    /// How many callers left in the middle.
    left: u64,
    /// Whether somebody waits to see what became of them.
    watched: bool,
}

/// What was under the name before the first of these pulls.
#[derive(Debug, Default, PartialEq, Eq)]
enum PriorImage {
    /// Nobody has looked.
    #[default]
    Unknown,
    /// The id, if there was an image.
    Known(Option<ImageId>),
    /// Nobody can tell any more: another pull may have brought what is there.
    Ambiguous,
}

impl RunningPulls {
    fn map(&self) -> MutexGuard<'_, HashMap<ImageName, RunningPull>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether it is the only one.
    pub(super) fn begin(&self, image: &ImageName) -> bool {
        let mut map = self.map();
        let running = map.entry(image.clone()).or_default();
        running.count += 1;
        if running.count > 1 && running.before == PriorImage::Unknown {
            running.before = PriorImage::Ambiguous;
        }
        running.count == 1
    }

    /// Says whether it was the last, or none was known.
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

    /// Whether a pull runs of an image that this says yes to.
    pub(super) fn any(&self, is_it: impl Fn(&ImageName) -> bool) -> bool {
        self.map().keys().any(is_it)
    }

    /// Notes what is there before the only pull starts.
    pub(super) fn note_before(&self, image: &ImageName, id: Option<ImageId>) {
        if let Some(running) = self.map().get_mut(image)
            && running.before == PriorImage::Unknown
        {
            running.before = PriorImage::Known(id);
        }
    }

    /// Another process pulls the image as well, or was cut off while it did.
    pub(super) fn mark_ambiguous(&self, image: &ImageName) {
        if let Some(running) = self.map().get_mut(image) {
            running.before = PriorImage::Ambiguous;
        }
    }

    /// Whether exactly this was there before.
    pub(super) fn was_prior_image(&self, image: &ImageName, id: &ImageId) -> bool {
        let was =
            |running: &RunningPull| matches!(&running.before, PriorImage::Known(Some(was)) if was == id);
        self.map().get(image).is_some_and(was)
    }

    /// A caller leaves in the middle of its pull. Says whether somebody has to be found who looks what becomes of it; then
    /// its place is theirs.
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

    /// How many callers left so far.
    pub(super) fn abandoned_count(&self, image: &ImageName) -> u64 {
        self.map().get(image).map_or(0, |running| running.left)
    }

    /// Nobody watches any more, if nobody left since this was the number. Says whether that is so.
    pub(super) fn unwatch(&self, image: &ImageName, left: u64) -> bool {
        let mut map = self.map();
        let Some(running) = map.get_mut(image) else { return true };
        running.watched = running.left != left;
        !running.watched
    }
}
