//! Space that a backend takes beside images, and that is reclaimed before any image is removed.

use std::fmt;
use std::ops::{Add, AddAssign};

use async_trait::async_trait;

use super::disk_space::DiskSpace;
use crate::backend::BackendError;
use crate::go_format;

/// Why space is reclaimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimTrigger {
    /// A scheduled round, and no space is needed: only what no later pull can use is reclaimed.
    Schedule,
    /// Space is needed: the filesystem is past a threshold, or a pull does not fit.
    Pressure,
    /// A command asked for space.
    Request,
}

/// Space beside images, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReclaimableSpace {
    /// Downloads of failed and interrupted pulls.
    pub downloads: DiskSpace,
    /// Layers without an image: of failed and interrupted pulls, or of expired leases.
    pub layers: DiskSpace,
    /// Remnants of removed layers that are of no more use.
    pub remnants: DiskSpace,
    /// Removed files that are not deleted yet.
    pub trash: DiskSpace,
    /// Build cache.
    pub build_cache: DiskSpace,
}

/// Frees space beside images.
#[async_trait]
pub trait SpaceReclaimer: Send + Sync {
    /// Returns the space that [`reclaim`](SpaceReclaimer::reclaim) would free now. By default unknown, which counts
    /// as nothing.
    async fn reclaimable(&self, trigger: ReclaimTrigger) -> Result<ReclaimableSpace, BackendError> {
        let _ = trigger;
        Ok(ReclaimableSpace::default())
    }

    /// Frees what the trigger allows. Never frees what a running pull uses. Called by each round before any image is
    /// removed; a failure does not end the round.
    async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome;
}

/// Space that a reclaim freed, and the error that ended it early.
#[derive(Debug, Clone)]
pub struct ReclaimOutcome<E = BackendError> {
    /// Freed, before the error if there was one.
    pub freed: ReclaimableSpace,
    /// Why the rest was not freed.
    pub error: Option<E>,
}

impl<E> Default for ReclaimOutcome<E> {
    fn default() -> Self {
        ReclaimOutcome { freed: ReclaimableSpace::default(), error: None }
    }
}

impl<E> From<Result<ReclaimableSpace, E>> for ReclaimOutcome<E> {
    fn from(reclaimed: Result<ReclaimableSpace, E>) -> Self {
        match reclaimed {
            Ok(freed) => ReclaimOutcome { freed, error: None },
            Err(error) => ReclaimOutcome { error: Some(error), ..ReclaimOutcome::default() },
        }
    }
}

impl ReclaimableSpace {
    /// The sum of all kinds.
    pub fn total(&self) -> DiskSpace {
        self.downloads + self.layers + self.remnants + self.trash + self.build_cache
    }
}

impl Add for ReclaimableSpace {
    type Output = ReclaimableSpace;

    fn add(self, other: ReclaimableSpace) -> ReclaimableSpace {
        ReclaimableSpace {
            downloads: self.downloads + other.downloads,
            layers: self.layers + other.layers,
            remnants: self.remnants + other.remnants,
            trash: self.trash + other.trash,
            build_cache: self.build_cache + other.build_cache,
        }
    }
}

impl AddAssign for ReclaimableSpace {
    fn add_assign(&mut self, other: ReclaimableSpace) {
        *self = *self + other;
    }
}

/// `156MB (downloads 150MB, layers without an image 6MB)`
impl fmt::Display for ReclaimableSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            ("downloads", self.downloads),
            ("layers without an image", self.layers),
            ("remnants of layers", self.remnants),
            ("trash", self.trash),
            ("build cache", self.build_cache),
        ];
        let kinds = kinds.iter().filter(|(_, space)| *space != DiskSpace::ZERO);
        let kinds: Vec<_> =
            kinds.map(|(kind, space)| format!("{kind} {}", go_format::bytes(space.bytes))).collect();
        write!(f, "{}", go_format::bytes(self.total().bytes))?;
        if kinds.is_empty() { Ok(()) } else { write!(f, " ({})", kinds.join(", ")) }
    }
}
