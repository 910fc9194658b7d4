//! How long a pod spent pulling, for the metric of pod start-up.
//!
//! A start opens a session and a finish closes the oldest open one, so a failed pull stays open until a later finish:
//! its whole retry time counts. Only pods that were announced with [`PullTimes::track`] count.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Records when `ensure` starts and finishes pulls.
pub trait PullTimeRecorder: Send + Sync {
    /// A pull for the pod starts; it may have to wait in the queue.
    fn started_pulling(&self, pod_uid: &str, now: Instant);
    /// A pull for the pod succeeded, or its image was found present.
    fn finished_pulling(&self, pod_uid: &str, now: Instant);
}

/// Keeps the pulling time of each tracked pod.
#[derive(Debug, Default)]
pub struct PullTimes {
    pods: Mutex<HashMap<String, PullingSessions>>,
}

#[derive(Debug, Default)]
struct PullingSessions {
    /// Starts without a finish, oldest first.
    open: std::collections::VecDeque<Instant>,
    closed: Vec<(Instant, Instant)>,
}

impl PullTimes {
    /// Marks of this pod count from now on.
    pub fn track(&self, pod_uid: &str) {
        self.with(|pods| {
            pods.entry(pod_uid.to_owned()).or_default();
        });
    }

    /// Forgets a pod.
    pub fn forget(&self, pod_uid: &str) {
        self.with(|pods| {
            pods.remove(pod_uid);
        });
    }

    /// Time covered by at least one closed session; overlaps count once. Zero for a pod that is not tracked.
    pub fn total(&self, pod_uid: &str) -> Duration {
        self.with(|pods| pods.get(pod_uid).map_or(Duration::ZERO, |pod| union(&pod.closed)))
    }

    /// Sessions that are still open.
    pub fn open(&self, pod_uid: &str) -> usize {
        self.with(|pods| pods.get(pod_uid).map_or(0, |pod| pod.open.len()))
    }

    fn with<T>(&self, work: impl FnOnce(&mut HashMap<String, PullingSessions>) -> T) -> T {
        work(&mut self.pods.lock())
    }
}

impl PullTimeRecorder for PullTimes {
    fn started_pulling(&self, pod_uid: &str, now: Instant) {
        self.with(|pods| {
            if let Some(pod) = pods.get_mut(pod_uid) {
                pod.open.push_back(now);
            }
        });
    }

    fn finished_pulling(&self, pod_uid: &str, now: Instant) {
        self.with(|pods| {
            if let Some(pod) = pods.get_mut(pod_uid)
                && let Some(start) = pod.open.pop_front()
            {
                pod.closed.push((start, now));
            }
        });
    }
}

fn union(sessions: &[(Instant, Instant)]) -> Duration {
    let mut sessions = sessions.to_vec();
    sessions.sort();
    let mut total = Duration::ZERO;
    let mut covered: Option<Instant> = None;
    for (start, end) in sessions {
        let from = covered.map_or(start, |covered| covered.max(start));
        total += end.saturating_duration_since(from);
        covered = Some(covered.map_or(end, |covered| covered.max(end)));
    }
    total
}
