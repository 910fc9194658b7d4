//! How a pull gets on: what a backend tells of it, for whoever watches.
//!
//! Bytes are pushed as they come. All else is asked for by who wants to know it: a pull that nobody watches pays for
//! two counters.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::reference::LayerId;

/// How far a pull has come, in bytes, where a backend can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteProgress {
    /// Bytes fetched so far.
    pub done: u64,
    /// Bytes to fetch in all, once known.
    pub total: Option<u64>,
}

/// What a pull does right now, where a backend can tell.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PullDetail {
    /// How far it is.
    pub step: PullStep,
    /// What it waits for as a whole; layers have waits of their own.
    pub waiting: Option<PullWait>,
    /// Bytes per second that came lately, once that can be told.
    pub rate: Option<u64>,
    /// The layers that were not here, from the bottom up.
    pub layers: Vec<LayerProgress>,
}

/// How far a pull is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PullStep {
    /// It asks the registry what the image is.
    #[default]
    Resolving,
    /// It fetches and unpacks layers.
    Layers,
    /// Everything is here; it is made durable and visible.
    Committing,
}

/// One layer of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerProgress {
    /// The layer, as the manifest names it: `sha256:...`.
    pub digest: LayerId,
    /// What happens to it.
    pub phase: LayerPhase,
    /// How much of it came for this pull.
    pub bytes: ByteProgress,
    /// Bytes per second that came lately, once that can be told.
    pub rate: Option<u64>,
    /// What it waits for.
    pub waiting: Option<PullWait>,
}

/// What happens to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LayerPhase {
    /// It waits for its turn among all layers.
    #[default]
    Queued,
    /// Another pull brings it.
    FetchedByOtherPull,
    /// It is fetched, and unpacked behind that.
    Fetching,
    /// All of it came; the rest is unpacked.
    Unpacking,
    /// It is unpacked, and waits for those below it.
    Unpacked,
    /// It is in its place.
    Done,
}

/// What something waits for. Prints as `rate limited by registry.example, 12s left`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullWait {
    /// The reason, without the time.
    pub reason: String,
    /// When it ends, if that is known.
    pub until: Option<Instant>,
}

impl PullWait {
    /// The reason, and how long it still takes.
    pub fn at(&self, now: Instant) -> String {
        match self.until.map(|until| until.saturating_duration_since(now)) {
            Some(left) if !left.is_zero() => {
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                format!("{}, {} left", self.reason, crate::go_format::duration(Duration::from_secs(seconds)))
            }
            _ => self.reason.clone(),
        }
    }
}

impl fmt::Display for PullStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PullStep::Resolving => "resolving",
            PullStep::Layers => "pulling",
            PullStep::Committing => "committing",
        })
    }
}

impl fmt::Display for LayerPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LayerPhase::Queued => "queued",
            LayerPhase::FetchedByOtherPull => "fetched by another pull",
            LayerPhase::Fetching => "fetching",
            LayerPhase::Unpacking => "unpacking",
            LayerPhase::Unpacked => "unpacked",
            LayerPhase::Done => "done",
        })
    }
}

/// Tells what a pull does right now.
pub(crate) type DetailProvider = Arc<dyn Fn() -> PullDetail + Send + Sync>;

/// A backend's end of a pull's progress. Backends that know nothing leave it alone (CRI has no such field).
#[derive(Clone)]
pub struct ProgressReporter {
    bytes: Arc<dyn Fn(ByteProgress) + Send + Sync>,
    describe: Arc<dyn Fn(DetailProvider) + Send + Sync>,
}

impl ProgressReporter {
    /// A progress whose bytes are told to `listener`, which must be quick.
    pub(crate) fn to(listener: impl Fn(ByteProgress) + Send + Sync + 'static) -> ProgressReporter {
        ProgressReporter::described(listener, |_| {})
    }

    /// A progress whose bytes are told to `listener`, and which can be described by what `keep` is given.
    pub(crate) fn described(
        listener: impl Fn(ByteProgress) + Send + Sync + 'static,
        keep: impl Fn(DetailProvider) + Send + Sync + 'static,
    ) -> ProgressReporter {
        ProgressReporter { bytes: Arc::new(listener), describe: Arc::new(keep) }
    }

    /// A progress that nobody watches.
    pub fn unwatched() -> ProgressReporter {
        ProgressReporter::to(|_| {})
    }

    /// Says how far the pull has come.
    pub fn set(&self, bytes: ByteProgress) {
        (self.bytes)(bytes);
    }

    /// From now on, whoever wants to know what the pull does asks `describe`. It must be quick, and outlives the pull.
    pub fn describe_by(&self, describe: impl Fn() -> PullDetail + Send + Sync + 'static) {
        (self.describe)(Arc::new(describe));
    }
}

impl fmt::Debug for ProgressReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wait_says_how_long_it_still_takes() {
        let now = Instant::now();
        let wait = PullWait {
            reason: "rate limited by r.example".into(),
            until: Some(now + Duration::from_secs(12)),
        };
        assert_eq!(wait.at(now), "rate limited by r.example, 12s left");
        assert_eq!(wait.at(now + Duration::from_millis(11_500)), "rate limited by r.example, 1s left");
        assert_eq!(wait.at(now + Duration::from_secs(20)), "rate limited by r.example");
    }
}
