//! What is being pulled right now, for whoever wants to watch.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::backend::{Bytes, Progress};

/// Where a pull stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It waits for its turn.
    Queued,
    /// It has its turn and waits because too many pulls were started lately.
    Throttled,
    /// The runtime pulls.
    Pulling,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Queued => "queued",
            Phase::Throttled => "throttled",
            Phase::Pulling => "pulling",
        })
    }
}

/// One pull in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullStatus {
    /// The image, with its tag.
    pub image: String,
    /// Where it stands.
    pub phase: Phase,
    /// What it waits for, as a sentence part: "waits for ...".
    pub waiting: Option<&'static str>,
    /// How far it has come, where the backend can tell.
    pub bytes: Option<Bytes>,
    /// When it was first wanted.
    pub since: Instant,
}

/// All pulls in flight. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub(super) struct Board {
    pulls: Arc<Mutex<BTreeMap<u64, watch::Receiver<PullStatus>>>>,
}

impl Board {
    /// Puts a new pull on the board. It leaves when the entry is dropped.
    pub(super) fn enter(&self, image: &str, now: Instant) -> BoardEntry {
        let (sender, receiver) = watch::channel(PullStatus {
            image: image.to_owned(),
            phase: Phase::Queued,
            waiting: None,
            bytes: None,
            since: now,
        });
        let mut pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
        let id = pulls.last_key_value().map_or(0, |(last, _)| last + 1);
        pulls.insert(id, receiver);
        BoardEntry { board: self.clone(), id, status: sender }
    }

    /// What is on the board now, oldest first.
    pub(super) fn snapshot(&self) -> Vec<PullStatus> {
        let pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
        pulls.values().map(|status| status.borrow().clone()).collect()
    }

    /// The oldest pull of an image on the board.
    pub(super) fn watch(&self, image: &str) -> Option<watch::Receiver<PullStatus>> {
        let pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
        pulls.values().find(|status| status.borrow().image == image).cloned()
    }
}

/// A pull's place on the board.
#[derive(Debug)]
pub(super) struct BoardEntry {
    board: Board,
    id: u64,
    status: watch::Sender<PullStatus>,
}

impl BoardEntry {
    pub(super) fn set(&self, phase: Phase, waiting: Option<&'static str>) {
        self.status.send_modify(|status| {
            status.phase = phase;
            status.waiting = waiting;
        });
    }

    /// A progress whose bytes show on the board.
    pub(super) fn progress(&self) -> Progress {
        let status = self.status.clone();
        Progress::to(move |bytes| status.send_modify(|status| status.bytes = Some(bytes)))
    }
}

impl Drop for BoardEntry {
    fn drop(&mut self) {
        self.board.pulls.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
