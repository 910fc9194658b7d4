//! What an ensure and a collection agree on: an image that was just made present is not removed before somebody had the
//! time to use it.
//!
//! Both go through one lock that is never held across a call. An ensure says that it [looks](RemovalGate::look), asks the
//! backend, and [leases](PresenceCheck::lease) what it found; a removal [begins](RemovalGate::try_begin_removal) only without a lease. If a
//! removal of that image was under way since the look, the lease is refused, because the answer may be older than the removal:
//! the ensure looks again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::uses::{ImageUse, ImageUseError, ImageUseSource, ReportedUse};
use crate::reference::ImageId;

/// The longest lease: a year. No clock ends before that.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Leases of images that were just ensured, and removals under way. Lives in memory, counts on tokio's clock.
#[derive(Debug)]
pub struct RemovalGate {
    state: Mutex<LeaseTable>,
    /// Told whenever a removal ends.
    ended: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct LeaseTable {
    /// When each lease ends, by image id.
    leases: HashMap<ImageId, Instant>,
    removing: HashSet<ImageId>,
    /// The last removal of each image that ended while anybody looks, by its number.
    ended: HashMap<ImageId, u64>,
    /// How many removals have ended; this is the number of the next.
    removals: u64,
    /// The looks that live: how many there are since the removal of which number.
    looks: BTreeMap<u64, usize>,
}

impl LeaseTable {
    fn look(&mut self) -> u64 {
        *self.looks.entry(self.removals).or_default() += 1;
        self.removals
    }

    fn end_presence_check(&mut self, from: u64) {
        let Some(alike) = self.looks.get_mut(&from) else { return };
        *alike -= 1;
        if *alike > 0 {
            return;
        }
        let was_oldest = self.looks.first_key_value().is_some_and(|(oldest, _)| *oldest == from);
        self.looks.remove(&from);
        if was_oldest {
            // What ended before all looks began, nobody asks for.
            let oldest = self.looks.first_key_value().map_or(self.removals, |(oldest, _)| *oldest);
            self.ended.retain(|_, number| *number >= oldest);
        }
    }

    fn ended(&mut self, id: ImageId) {
        if !self.looks.is_empty() {
            self.ended.insert(id, self.removals);
        }
        self.removals += 1;
    }

    /// Whether a removal of the image ended since a look.
    fn ended_since(&self, from: u64, id: &ImageId) -> bool {
        self.ended.get(id).is_some_and(|number| *number >= from)
    }
}

impl Default for RemovalGate {
    fn default() -> Self {
        RemovalGate { state: Mutex::default(), ended: watch::Sender::new(()) }
    }
}

impl RemovalGate {
    /// To be called before the backend is asked whether an image is present.
    pub fn begin_presence_check(self: &Arc<Self>) -> PresenceCheck {
        PresenceCheck { from: self.state().look(), gate: self.clone() }
    }

    /// To be called right before an image is removed, and dropped right after. `None` while it is leased, or being
    /// removed already.
    pub fn try_begin_removal(self: &Arc<Self>, id: impl Into<ImageId>) -> Option<RemovalGuard> {
        let (id, mut state) = (id.into(), self.state());
        if state.leases.get(&id).is_some_and(|ends| *ends > Instant::now())
            || !state.removing.insert(id.clone())
        {
            return None;
        }
        Some(RemovalGuard { gate: self.clone(), id })
    }

    /// To be awaited before an image is removed because somebody asked for just that, and dropped right after. Leases
    /// are there for collection: this ends the image's own. Waits while the image is being removed already.
    pub async fn wait_begin_removal(self: &Arc<Self>, id: impl Into<ImageId>) -> RemovalGuard {
        let id = id.into();
        let mut ended = self.ended.subscribe();
        loop {
            {
                let mut state = self.state();
                if state.removing.insert(id.clone()) {
                    state.leases.remove(&id);
                    return RemovalGuard { gate: self.clone(), id };
                }
            }
            // Its sender is this gate's, so it does not go away meanwhile.
            let _ = ended.changed().await;
        }
    }

    /// Waits until every removal that is under way now has ended, but no longer than this.
    pub(crate) async fn wait_for_removals(&self, at_most: Duration) {
        let mut ended = self.ended.subscribe();
        let under_way = self.state().removing.clone();
        let gone = async {
            while !self.state().removing.is_disjoint(&under_way) && ended.changed().await.is_ok() {}
        };
        // Who waits tries again either way.
        let _ = timeout(at_most, gone).await;
    }

    /// The images leased now and for how much longer, by id.
    pub fn active_leases(&self) -> Vec<(ImageId, Duration)> {
        let now = Instant::now();
        let mut state = self.state();
        state.leases.retain(|_, ends| *ends > now);
        let mut leased: Vec<_> =
            state.leases.iter().map(|(id, ends)| (id.clone(), ends.duration_since(now))).collect();
        leased.sort();
        leased
    }

    fn state(&self) -> MutexGuard<'_, LeaseTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look at what is present. While it lives, removals are remembered.
#[derive(Debug)]
pub struct PresenceCheck {
    gate: Arc<RemovalGate>,
    from: u64,
}

impl PresenceCheck {
    /// Whether any image was being removed since this look began.
    pub(crate) fn has_raced_removal(&self) -> bool {
        let state = self.gate.state();
        !state.removing.is_empty() || state.removals > self.from
    }

    /// Leases an image that was seen present since this look began. False if a removal of it may have overtaken that:
    /// then look again. Waits while it is being removed.
    pub async fn lease(self, id: impl Into<ImageId>, time: Duration) -> bool {
        let id = id.into();
        let mut ended = self.gate.ended.subscribe();
        let removing = {
            let mut state = self.gate.state();
            let removing = state.removing.contains(&id);
            let overtaken = removing || state.ended_since(self.from, &id);
            if !overtaken {
                let ends = Instant::now() + time.min(LONGEST);
                let lease = state.leases.entry(id).or_insert(ends);
                *lease = ends.max(*lease);
                return true;
            }
            removing
        };
        if removing {
            while self.gate.state().removing.contains(&id) && ended.changed().await.is_ok() {}
        }
        false
    }
}

impl Drop for PresenceCheck {
    fn drop(&mut self) {
        self.gate.state().end_presence_check(self.from);
    }
}

/// A removal under way.
#[derive(Debug)]
pub struct RemovalGuard {
    gate: Arc<RemovalGate>,
    id: ImageId,
}

impl Drop for RemovalGuard {
    fn drop(&mut self) {
        {
            let mut state = self.gate.state();
            state.removing.remove(&self.id);
            state.ended(std::mem::take(&mut self.id));
        }
        self.gate.ended.send_replace(());
    }
}

#[async_trait]
impl ImageUseSource for RemovalGate {
    async fn uses(&self) -> Result<Vec<ReportedUse>, ImageUseError> {
        let ensured = |left| ImageUse::Ensured { ago: None, left };
        let leased = self.active_leases().into_iter();
        Ok(leased.map(|(image, left)| ReportedUse { image, handler: None, by: ensured(left) }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn removals_are_remembered_once_and_only_for_looks_that_saw_them_end() {
        let gate = Arc::new(RemovalGate::default());
        let remembered = || gate.state().ended.len();
        drop(gate.try_begin_removal("a"));
        assert_eq!(remembered(), 0, "nobody looks");
        let hung = gate.begin_presence_check();
        for _ in 0..100 {
            drop(gate.try_begin_removal("a"));
        }
        let late = gate.begin_presence_check();
        drop(gate.try_begin_removal("b"));
        assert_eq!(remembered(), 2, "each image once");
        drop(hung);
        assert_eq!(remembered(), 1, "that of b alone");
        assert!(late.lease("a", MINUTE).await, "it was removed before the look");
        assert_eq!(remembered(), 0);
        let look = gate.begin_presence_check();
        drop(gate.try_begin_removal("b"));
        assert!(!look.lease("b", MINUTE).await);
    }
}
