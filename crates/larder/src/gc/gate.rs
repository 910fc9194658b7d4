//! What an ensure and a collection agree on: an image that was just made present is not removed before somebody had the
//! time to use it.
//!
//! Both go through one lock that is never held across a call. An ensure says that it [looks](Gate::look), asks the
//! backend, and [leases](Look::lease) what it found; a removal [begins](Gate::begin_removal) only without a lease. If a
//! removal of that image was under way since the look, the lease is refused, because the answer may be older than the removal:
//! the ensure looks again.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::Instant;

use super::uses::{Found, Use, UseError, UseSource};

/// The longest lease: a year. No clock ends before that.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Leases of images that were just ensured, and removals under way. Lives in memory, counts on tokio's clock.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<State>,
    /// Told whenever a removal ends.
    ended: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    /// When each lease ends, by image id.
    leases: HashMap<String, Instant>,
    removing: HashSet<String>,
    /// Removals that ended while anybody looks, in order.
    ended: Vec<String>,
    looks: usize,
}

impl Default for Gate {
    fn default() -> Self {
        Gate { state: Mutex::default(), ended: watch::Sender::new(()) }
    }
}

impl Gate {
    /// To be called before the backend is asked whether an image is present.
    pub fn look(self: &Arc<Self>) -> Look {
        let mut state = self.state();
        state.looks += 1;
        Look { from: state.ended.len(), gate: self.clone() }
    }

    /// To be called right before an image is removed, and dropped right after. `None` while it is leased, or being
    /// removed already.
    pub fn begin_removal(self: &Arc<Self>, id: &str) -> Option<Removing> {
        let mut state = self.state();
        if state.leases.get(id).is_some_and(|ends| *ends > Instant::now())
            || !state.removing.insert(id.to_owned())
        {
            return None;
        }
        Some(Removing { gate: self.clone(), id: id.to_owned() })
    }

    /// To be awaited before an image is removed because somebody asked for just that, and dropped right after. Leases
    /// are there for collection: this ends the image's own. Waits while the image is being removed already.
    pub async fn removal(self: &Arc<Self>, id: &str) -> Removing {
        let mut ended = self.ended.subscribe();
        loop {
            {
                let mut state = self.state();
                if state.removing.insert(id.to_owned()) {
                    state.leases.remove(id);
                    return Removing { gate: self.clone(), id: id.to_owned() };
                }
            }
            // Its sender is this gate's, so it does not go away meanwhile.
            let _ = ended.changed().await;
        }
    }

    /// The images leased now and for how much longer, by id.
    pub fn leased(&self) -> Vec<(String, Duration)> {
        let now = Instant::now();
        let mut state = self.state();
        state.leases.retain(|_, ends| *ends > now);
        let mut leased: Vec<_> =
            state.leases.iter().map(|(id, ends)| (id.clone(), ends.duration_since(now))).collect();
        leased.sort();
        leased
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look at what is present. While it lives, removals are remembered.
#[derive(Debug)]
pub struct Look {
    gate: Arc<Gate>,
    from: usize,
}

impl Look {
    /// Leases an image that was seen present since this look began. False if a removal of it may have overtaken that:
    /// then look again. Waits while it is being removed.
    pub async fn lease(self, id: &str, time: Duration) -> bool {
        let mut ended = self.gate.ended.subscribe();
        let removing = {
            let mut state = self.gate.state();
            let removing = state.removing.contains(id);
            let overtaken = removing || state.ended[self.from..].iter().any(|ended| ended == id);
            if !overtaken {
                let ends = Instant::now() + time.min(LONGEST);
                let lease = state.leases.entry(id.to_owned()).or_insert(ends);
                *lease = ends.max(*lease);
                return true;
            }
            removing
        };
        if removing {
            while self.gate.state().removing.contains(id) && ended.changed().await.is_ok() {}
        }
        false
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        state.looks -= 1;
        if state.looks == 0 {
            state.ended.clear();
        }
    }
}

/// A removal under way.
#[derive(Debug)]
pub struct Removing {
    gate: Arc<Gate>,
    id: String,
}

impl Drop for Removing {
    fn drop(&mut self) {
        {
            let mut state = self.gate.state();
            state.removing.remove(&self.id);
            if state.looks > 0 {
                state.ended.push(std::mem::take(&mut self.id));
            }
        }
        self.gate.ended.send_replace(());
    }
}

#[async_trait]
impl UseSource for Gate {
    async fn uses(&self) -> Result<Vec<Found>, UseError> {
        let leased = self.leased().into_iter();
        Ok(leased.map(|(image, left)| Found { image, handler: None, by: Use::Ensured { left } }).collect())
    }
}
