//! How many images are ensured at the same time: fair to sets and to registries.
//!
//! Promises: a set has at most [`OF_ONE_SET`] slots for the images of one registry, all together have [`OF_ALL`], and
//! one more for each set and registry that has none: whatever hangs, the others proceed.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder::reference::{ImageName, Reference};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// All sets and registries have so many, with those that each one has of its own.
const OF_ALL: usize = 32;
/// One set has so many for one registry.
const OF_ONE_SET: usize = 16;

/// The slots in use.
#[derive(Clone, Default)]
pub(super) struct EnsureSlots {
    used: Arc<Mutex<BTreeMap<SlotOwner, usize>>>,
    freed: Arc<Notify>,
}

/// A set, and a registry that it has images of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotOwner {
    set: String,
    registry: String,
}

impl SlotOwner {
    /// An image that several sets want counts for the first one.
    pub(super) fn new(sets: &[(String, i64)], image: &ImageName) -> SlotOwner {
        let set = sets.first().map(|(name, _)| name.clone()).unwrap_or_default();
        let registry = Reference::parse(image.as_str()).map(|image| image.registry().to_owned());
        SlotOwner { set, registry: registry.unwrap_or_default() }
    }
}

/// A slot in use. Dropping it frees it.
pub(super) struct EnsureSlot<'a> {
    slots: &'a EnsureSlots,
    owner: &'a SlotOwner,
}

impl EnsureSlots {
    /// Waits for a slot.
    pub(super) async fn acquire<'a>(&'a self, owner: &'a SlotOwner) -> EnsureSlot<'a> {
        loop {
            let freed = self.freed.notified();
            if self.try_acquire(owner) {
                return EnsureSlot { slots: self, owner };
            }
            freed.await;
        }
    }

    fn try_acquire(&self, owner: &SlotOwner) -> bool {
        let mut used = self.used.lock();
        let all = used.values().sum::<usize>();
        let own = used.entry(owner.clone()).or_default();
        let is_free = *own == 0 || (*own < OF_ONE_SET && all < OF_ALL);
        *own += usize::from(is_free);
        is_free
    }
}

impl Drop for EnsureSlot<'_> {
    fn drop(&mut self) {
        let mut used = self.slots.used.lock();
        if let Some(own) = used.get_mut(self.owner) {
            *own -= 1;
            if *own == 0 {
                used.remove(self.owner);
            }
        }
        drop(used);
        self.slots.freed.notify_waiters();
    }
}
