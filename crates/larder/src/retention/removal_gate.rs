//! The lock between ensures and removals: an image that was just reported present is leased, and is not removed before
//! the lease expires.
//!
//! The lock is never held across a call. An ensure [begins a presence check](RemovalGate::begin_presence_check), asks
//! the backend, and [leases](PresenceCheck::lease) the image that it found; a removal
//! [begins](RemovalGate::try_begin_removal) only without a lease. If a removal of the image ran since the check began,
//! the lease is refused, because the backend's answer may be older than the removal, and the ensure checks again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::entry::{Lease, LeasePurpose, Retention, RetentionError, RetentionPurpose};
use super::source::RetentionSource;
use crate::reference::ImageId;

/// Leases that may have expired without being dropped.
const MAX_EXPIRED: usize = 256;

/// The longest lease: a year, so that no instant overflows.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Leases of images that were just ensured, and removals in progress. In memory, on tokio's clock.
#[derive(Debug)]
pub struct RemovalGate {
    state: Mutex<LeaseTable>,
    /// Notified whenever a removal ends.
    ended: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct LeaseTable {
    /// When each lease expires, by image ID and purpose.
    leases: HashMap<(ImageId, LeasePurpose), Instant>,
    removing: HashSet<ImageId>,
    /// The number of the last removal of each image that ended while a presence check was open.
    ended: HashMap<ImageId, u64>,
    /// How many removals have ended; this is the number of the next.
    removals: u64,
    /// The number of open presence checks, by the removal number at which they began.
    open_checks: BTreeMap<u64, usize>,
}

impl LeaseTable {
    /// Drops expired leases if there are many. Without GC rounds no other call does.
    fn drop_expired(&mut self, now: Instant) {
        if self.leases.len() >= MAX_EXPIRED {
            self.leases.retain(|_, ends| *ends > now);
        }
    }

    fn is_leased(&self, id: &ImageId, now: Instant) -> bool {
        self.leases.iter().any(|((leased, _), ends)| leased == id && *ends > now)
    }

    fn begin_presence_check(&mut self) -> u64 {
        *self.open_checks.entry(self.removals).or_default() += 1;
        self.removals
    }

    fn end_presence_check(&mut self, from: u64) {
        let Some(alike) = self.open_checks.get_mut(&from) else { return };
        *alike -= 1;
        if *alike > 0 {
            return;
        }
        let was_oldest = self.open_checks.first_key_value().is_some_and(|(oldest, _)| *oldest == from);
        self.open_checks.remove(&from);
        if was_oldest {
            // No open check needs removals that ended before all of them began.
            let oldest = self.open_checks.first_key_value().map_or(self.removals, |(oldest, _)| *oldest);
            self.ended.retain(|_, number| *number >= oldest);
        }
    }

    fn ended(&mut self, id: ImageId) {
        if !self.open_checks.is_empty() {
            self.ended.insert(id, self.removals);
        }
        self.removals += 1;
    }

    /// Whether a removal of the image ended since a check began.
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
    /// Must be called before asking the backend whether an image is present.
    pub fn begin_presence_check(self: &Arc<Self>) -> PresenceCheck {
        PresenceCheck { from: self.state().begin_presence_check(), gate: self.clone() }
    }

    /// Must be called right before an image is removed; drop the guard right after. `None` while the image is leased or
    /// already being removed.
    pub fn try_begin_removal(self: &Arc<Self>, id: impl Into<ImageId>) -> Option<RemovalGuard> {
        let (id, mut state) = (id.into(), self.state());
        if state.is_leased(&id, Instant::now()) || !state.removing.insert(id.clone()) {
            return None;
        }
        Some(RemovalGuard { gate: self.clone(), id })
    }

    /// Must be awaited before an explicitly requested removal; drop the guard right after. Ends the image's lease,
    /// because leases only defer garbage collection. Waits while the image is already being removed.
    pub async fn wait_begin_removal(self: &Arc<Self>, id: impl Into<ImageId>) -> RemovalGuard {
        let id = id.into();
        let mut ended = self.ended.subscribe();
        loop {
            {
                let mut state = self.state();
                if state.removing.insert(id.clone()) {
                    state.leases.retain(|(leased, _), _| *leased != id);
                    return RemovalGuard { gate: self.clone(), id };
                }
            }
            // This gate owns the sender, so the channel is open.
            let _ = ended.changed().await;
        }
    }

    /// Ends the leases of these images.
    pub fn end_leases(&self, images: &[ImageId]) {
        self.state().leases.retain(|(id, _), _| !images.contains(id));
    }

    /// Waits until every removal that is in progress now has ended, for at most this long.
    pub(crate) async fn wait_for_removals(&self, at_most: Duration) {
        let mut ended = self.ended.subscribe();
        let in_progress = self.state().removing.clone();
        let ended_all = async {
            while !self.state().removing.is_disjoint(&in_progress) && ended.changed().await.is_ok() {}
        };
        // The caller retries either way.
        let _ = timeout(at_most, ended_all).await;
    }

    /// The current leases, by image ID.
    pub fn active_leases(&self) -> Vec<(ImageId, Lease)> {
        let now = Instant::now();
        let mut state = self.state();
        state.leases.retain(|_, ends| *ends > now);
        let leased = state
            .leases
            .iter()
            .map(|((id, purpose), ends)| (id.clone(), Lease::in_memory(*purpose, ends.duration_since(now))));
        let mut leased: Vec<_> = leased.collect();
        leased.sort();
        leased
    }

    fn state(&self) -> MutexGuard<'_, LeaseTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open presence check. Removals are recorded until it is dropped.
#[derive(Debug)]
pub struct PresenceCheck {
    gate: Arc<RemovalGate>,
    from: u64,
}

impl PresenceCheck {
    /// Whether a removal of any image ran since this check began.
    pub(crate) fn has_raced_removal(&self) -> bool {
        let state = self.gate.state();
        !state.removing.is_empty() || state.removals > self.from
    }

    /// Leases an image that was found present since this check began. False if a removal may have overtaken the answer:
    /// check again. Waits while the image is being removed.
    pub async fn lease(self, id: impl Into<ImageId>, purpose: LeasePurpose, time: Duration) -> bool {
        let id = id.into();
        let mut ended = self.gate.ended.subscribe();
        let removing = {
            let mut state = self.gate.state();
            let removing = state.removing.contains(&id);
            let overtaken = removing || state.ended_since(self.from, &id);
            if !overtaken {
                let ends = Instant::now() + time.min(LONGEST);
                state.drop_expired(Instant::now());
                let lease = state.leases.entry((id, purpose)).or_insert(ends);
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

/// A removal in progress.
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
impl RetentionSource for RemovalGate {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let leased = self.active_leases().into_iter();
        Ok(leased.map(|(image, lease)| Retention::new(image, RetentionPurpose::Lease(lease))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn expired_leases_do_not_pile_up_without_collection() {
        let gate = Arc::new(RemovalGate::default());
        for number in 0..1000 {
            assert!(
                gate.begin_presence_check()
                    .lease(format!("image {number}"), LeasePurpose::Ensure, MINUTE)
                    .await
            );
            tokio::time::advance(MINUTE / 10).await;
        }
        assert!(gate.state().leases.len() <= MAX_EXPIRED, "{}", gate.state().leases.len());
    }

    #[tokio::test(start_paused = true)]
    async fn removals_are_remembered_once_and_only_for_checks_that_saw_them_end() {
        let gate = Arc::new(RemovalGate::default());
        let remembered = || gate.state().ended.len();
        drop(gate.try_begin_removal("a"));
        assert_eq!(remembered(), 0, "no open check");
        let hung = gate.begin_presence_check();
        for _ in 0..100 {
            drop(gate.try_begin_removal("a"));
        }
        let second = gate.begin_presence_check();
        drop(gate.try_begin_removal("b"));
        assert_eq!(remembered(), 2, "each image once");
        drop(hung);
        assert_eq!(remembered(), 1, "that of b alone");
        assert!(second.lease("a", LeasePurpose::Ensure, MINUTE).await, "it was removed before the check");
        assert_eq!(remembered(), 0);
        let check = gate.begin_presence_check();
        drop(gate.try_begin_removal("b"));
        assert!(!check.lease("b", LeasePurpose::Ensure, MINUTE).await);
    }
}
