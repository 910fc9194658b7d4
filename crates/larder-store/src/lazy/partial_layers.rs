//! The layers of a store whose data is being filled in.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder::backend::FillProblem;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::fill_activity::FillActivity;
use super::partial_layer::{FillProgress, PartialLayer};
use super::read_demand::ReadDemand;
use super::reads::GuardedReads;
use crate::store::LayerKey;

/// Time between two warnings that an image cannot be completed yet.
const WARN_EVERY: Duration = Duration::from_secs(300);

/// Starts to fill a layer in the background.
pub(crate) type StartFill = Box<dyn FnOnce() + Send>;

/// Layers of a store that are being filled, each under its key.
#[derive(Debug, Default)]
pub(crate) struct PartialLayers {
    reads: OnceLock<Arc<GuardedReads>>,
    /// Why reads are not guarded, if that was tried.
    unguarded: Mutex<Option<String>>,
    layers: Mutex<HashMap<LayerKey, FillingLayer>>,
    demand: Arc<ReadDemand>,
    /// When the last warning was logged that an image cannot be completed yet.
    warned: Mutex<HashMap<String, Instant>>,
    /// Also of layers that are not being filled yet.
    activities: Mutex<HashMap<LayerKey, Arc<FillActivity>>>,
}

struct FillingLayer {
    layer: Arc<PartialLayer>,
    /// `None` once it has begun.
    start: Option<StartFill>,
}

impl std::fmt::Debug for FillingLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.layer.fmt(f)
    }
}

impl Drop for PartialLayers {
    fn drop(&mut self) {
        // Before the waiting reads are dropped: they wait for the next process.
        if let Some(Err(error)) = self.reads.get().map(|reads| reads.stop()) {
            tracing::warn!(%error, "cannot leave waiting reads to the next process");
        }
    }
}

impl PartialLayers {
    fn lock(&self) -> MutexGuard<'_, HashMap<LayerKey, FillingLayer>> {
        self.layers.lock()
    }

    /// Guards the reads of layers from now on: without that, no layer is filled while it is read.
    pub(crate) fn enable(&self, reads: Arc<GuardedReads>) {
        let _ = self.reads.set(reads);
        *self.unguarded.lock() = None;
    }

    /// Notes why reads are not guarded.
    pub(crate) fn note_unguarded(&self, reason: String) {
        *self.unguarded.lock() = Some(reason);
    }

    /// Why reads are not guarded, if that was tried and failed.
    pub(crate) fn unguarded(&self) -> Option<String> {
        self.unguarded.lock().clone()
    }

    /// The guard of reads, if there is one.
    pub(crate) fn reads(&self) -> Option<&Arc<GuardedReads>> {
        self.reads.get()
    }

    /// The reads that wait for data.
    pub(crate) fn demand(&self) -> &Arc<ReadDemand> {
        &self.demand
    }

    /// Guards a layer, which nothing has mounted. `start` runs once an image has it.
    pub(crate) fn begin(&self, key: LayerKey, layer: Arc<PartialLayer>, start: StartFill) -> io::Result<()> {
        let reads = self.reads.get().ok_or(io::ErrorKind::Unsupported)?;
        reads.guard(&layer)?;
        let before = self.lock().insert(key, FillingLayer { layer, start: Some(start) });
        if let Some(before) = before {
            before.layer.end();
        }
        Ok(())
    }

    /// Starts to fill a layer that a pull has brought, unless that has begun.
    pub(crate) fn start_new(&self, key: &LayerKey) {
        if let Some(start) = self.take_start(key) {
            self.demand.expect_end_of_pull(Instant::now());
            start();
        }
    }

    /// Goes on to fill a layer of an earlier process.
    pub(crate) fn resume(&self, key: &LayerKey) {
        if let Some(start) = self.take_start(key) {
            start();
        }
    }

    fn take_start(&self, key: &LayerKey) -> Option<StartFill> {
        self.lock().get_mut(key).and_then(|filling| filling.start.take())
    }

    /// The layer of this key, while it is being filled.
    pub(crate) fn get(&self, key: &LayerKey) -> Option<Arc<PartialLayer>> {
        self.lock().get(key).map(|filling| Arc::clone(&filling.layer))
    }

    /// Record of the requests for the data of an incomplete layer: the host, the failures, the bytes.
    pub(crate) fn activity(&self, key: &LayerKey) -> Arc<FillActivity> {
        Arc::clone(self.activities.lock().entry(key.clone()).or_default())
    }

    /// Whether a warning about an image is due: its layers fail for the same reason, and one is enough.
    pub(crate) fn is_warning_due(&self, image: &str, now: Instant) -> bool {
        let mut warned = self.warned.lock();
        warned.retain(|_, at| now.duration_since(*at) < WARN_EVERY);
        let is_due = !warned.contains_key(image);
        warned.entry(image.to_owned()).or_insert(now);
        is_due
    }

    /// The host that has sent data of an incomplete layer last, and why none comes.
    pub(crate) fn source(&self, key: &LayerKey, now: Instant) -> (Option<String>, Option<FillProblem>) {
        let activity = self.activities.lock().get(key).cloned();
        activity.map(|activity| (activity.host(), activity.problem(now))).unwrap_or_default()
    }

    /// Whether missing data of a layer comes while it is read.
    pub(crate) fn is_guarded(&self, key: &LayerKey) -> bool {
        self.lock().contains_key(key)
    }

    /// Ends a layer that was removed, or has failed: it is not filled any more.
    pub(crate) fn forget(&self, key: &LayerKey) {
        self.activities.lock().remove(key);
        let Some(filling) = self.lock().remove(key) else { return };
        filling.layer.end();
        if let Some(Err(error)) = self.reads.get().map(|reads| reads.fail(&filling.layer)) {
            tracing::warn!(%error, layer = %key, "cannot fail the reads of a layer that is not filled any more");
        }
    }

    /// Takes a layer off the list that is complete: nothing guards it any more.
    pub(crate) fn complete(&self, key: &LayerKey, layer: &Arc<PartialLayer>) {
        let mut layers = self.lock();
        if layers.get(key).is_some_and(|filling| Arc::ptr_eq(&filling.layer, layer)) {
            layers.remove(key);
            self.activities.lock().remove(key);
        }
        drop(layers);
        layer.set_complete();
        if let Some(Err(error)) = self.reads.get().map(|reads| reads.release(layer)) {
            tracing::warn!(%error, layer = %key, "cannot end the guard of a complete layer: its reads stay slower");
        }
    }

    /// How much is there of each.
    pub(crate) fn progress(&self) -> Vec<(LayerKey, FillProgress)> {
        self.lock().iter().map(|(key, filling)| (key.clone(), filling.layer.progress())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_whose_layers_fail_has_one_warning_in_a_while() {
        let (layers, now) = (PartialLayers::default(), Instant::now());
        let due = |image, seconds| layers.is_warning_due(image, now + Duration::from_secs(seconds));
        assert_eq!(
            [due("a:1", 0), due("a:1", 1), due("b:1", 1), due("a:1", 299)],
            [true, false, true, false]
        );
        assert_eq!([due("a:1", 300), due("a:1", 301)], [true, false]);
    }
}
