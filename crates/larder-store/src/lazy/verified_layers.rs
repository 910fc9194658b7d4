//! The complete layers of a store whose reads are verified.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::journal::FileId;
use super::verified_layer::{PieceDemand, VerifiedLayer};
use crate::store::LayerKey;
use crate::unpack::UnfilledLayer as _;

/// A layer whose reads begin to be verified.
pub(crate) type BegunLayer = (Arc<VerifiedLayer>, PieceDemand);

/// Complete layers that have pieces which are not verified, by their keys.
#[derive(Debug, Default)]
pub(crate) struct VerifiedLayers {
    /// Takes layers whose reads are to be verified; unset where they are not.
    begin: OnceLock<UnboundedSender<BegunLayer>>,
    layers: Mutex<HashMap<LayerKey, Arc<VerifiedLayer>>>,
    counts: Arc<VerificationCounts>,
    observer: ObservedDamage,
}

/// Pieces of layers since the start.
#[derive(Debug, Default)]
pub(crate) struct VerificationCounts {
    pub(crate) verified_bytes: AtomicU64,
    pub(crate) damaged: AtomicU64,
    pub(crate) repaired: AtomicU64,
}

/// Verification of complete layers when they are read, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadVerification {
    /// Layers that are guarded: some of their pieces were not read yet.
    pub guarded_layers: u64,
    /// Bytes that were verified.
    pub verified_bytes: u64,
    /// Pieces that were found damaged.
    pub damaged_pieces: u64,
    /// Pieces that were written again.
    pub repaired_pieces: u64,
}

/// Damage of a complete layer that reads have met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerDamage {
    /// The layer.
    pub layer: LayerKey,
    /// Names of the images that have the layer.
    pub images: Vec<String>,
    /// Why it is not repaired yet, and reads fail; `None` once it is repaired.
    pub failure: Option<String>,
}

/// Receives damage when it was repaired, and when reads begin to fail for it.
pub type DamageObserver = dyn Fn(&LayerDamage) + Send + Sync;

/// The receiver of damage, if there is one.
#[derive(Default)]
struct ObservedDamage(OnceLock<Box<DamageObserver>>);

impl fmt::Debug for ObservedDamage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservedDamage").finish_non_exhaustive()
    }
}

impl VerifiedLayers {
    /// Reports damage from now on.
    pub(crate) fn observe_damage(&self, observer: Box<DamageObserver>) {
        let _ = self.observer.0.set(observer);
    }

    /// Reports damage.
    pub(crate) fn report_damage(&self, damage: &LayerDamage) {
        let LayerDamage { layer, images, failure } = damage;
        match failure {
            None => tracing::warn!(%layer, ?images, "repaired a damaged layer that a container has read"),
            Some(reason) => {
                tracing::error!(%layer, ?images, reason, "reads of a damaged layer fail: it cannot be repaired yet");
            }
        }
        if let Some(observer) = self.observer.0.get() {
            observer(damage);
        }
    }

    /// Verifies reads from now on: `begin` takes the layers.
    pub(crate) fn enable(&self, begin: UnboundedSender<BegunLayer>) {
        let _ = self.begin.set(begin);
    }

    /// Whether reads are verified.
    pub(crate) fn is_enabled(&self) -> bool {
        self.begin.get().is_some()
    }

    /// Pieces since the start.
    pub(crate) fn counts(&self) -> Arc<VerificationCounts> {
        Arc::clone(&self.counts)
    }

    /// The layer of this key, if this file of it is guarded.
    pub(crate) fn get(&self, key: &LayerKey, file: FileId) -> Option<Arc<VerifiedLayer>> {
        let layer = self.layers.lock().get(key).cloned()?;
        (FileId::of(layer.file().as_fd()).ok()? == file).then_some(layer)
    }

    /// Begins to verify the reads of a layer, which are guarded.
    pub(crate) fn begin(&self, layer: &Arc<VerifiedLayer>, demand: PieceDemand) -> io::Result<()> {
        let begin = self.begin.get().ok_or(io::ErrorKind::Unsupported)?;
        begin
            .send((Arc::clone(layer), demand))
            .map_err(|_| io::Error::other("reads are not verified any more"))?;
        self.layers.lock().insert(layer.record.key.clone(), Arc::clone(layer));
        Ok(())
    }

    /// Takes a layer off the list.
    pub(crate) fn end(&self, layer: &Arc<VerifiedLayer>) {
        let mut layers = self.layers.lock();
        if layers.get(&layer.record.key).is_some_and(|listed| Arc::ptr_eq(listed, layer)) {
            layers.remove(&layer.record.key);
        }
    }

    /// Takes the layer of this key off the list.
    pub(crate) fn remove(&self, key: &LayerKey) -> Option<Arc<VerifiedLayer>> {
        self.layers.lock().remove(key)
    }

    /// All layers that are guarded.
    pub(crate) fn all(&self) -> Vec<Arc<VerifiedLayer>> {
        self.layers.lock().values().cloned().collect()
    }

    /// Verification since the start; `None` where reads are not verified.
    pub(crate) fn report(&self) -> Option<ReadVerification> {
        let VerificationCounts { verified_bytes, damaged, repaired } = &*self.counts;
        self.is_enabled().then(|| ReadVerification {
            guarded_layers: self.layers.lock().len() as u64,
            verified_bytes: verified_bytes.load(Ordering::Relaxed),
            damaged_pieces: damaged.load(Ordering::Relaxed),
            repaired_pieces: repaired.load(Ordering::Relaxed),
        })
    }
}
