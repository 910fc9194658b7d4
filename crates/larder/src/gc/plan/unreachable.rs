//! What a plan removes when all candidates together do not reach its goal. Pure.

use std::collections::HashSet;

use super::layer_graph::RemovalStep;
use crate::gc::disk_space::DiskSpace;

/// All candidates are removed if together they free one part in so many of what is missing.
const WORTHWHILE_TOGETHER: u64 = 2;
/// Else an image is removed if it frees one part in so many of what is missing.
const WORTHWHILE_ALONE: u64 = 10;

/// What a plan cannot reach.
pub(super) struct UnreachableGoal {
    /// What was missing when the round began.
    pub(super) missing: DiskSpace,
    /// What has to be freed to get below the threshold where a round starts, for goals that have one.
    pub(super) relief: Option<DiskSpace>,
}

impl UnreachableGoal {
    /// The removals that help although they do not reach the goal. `all` are those of all candidates; `free` plans the
    /// removals that free this much, of all candidates or of these only.
    pub(super) fn helpful(
        &self,
        all: Vec<RemovalStep>,
        free: impl Fn(Option<&HashSet<usize>>, DiskSpace) -> Vec<RemovalStep>,
    ) -> Vec<RemovalStep> {
        let together = total(&all);
        if let Some(relief) = self.relief
            && together.shortfall_to(relief) == DiskSpace::ZERO
        {
            return free(None, relief);
        }
        if self.is_part(together, WORTHWHILE_TOGETHER) {
            return all;
        }
        let mut steps = all;
        loop {
            let worthwhile = groups(&steps).filter(|group| self.is_part(total(group), WORTHWHILE_ALONE));
            let images: HashSet<usize> = worthwhile.flatten().map(|step| step.image).collect();
            if images.len() == steps.len() {
                return steps;
            }
            // Without the others, these free less where they share layers.
            steps = free(Some(&images), self.missing);
        }
    }

    /// Whether this is one part in `parts` of the bytes or of the inodes that are missing.
    fn is_part(&self, amount: DiskSpace, parts: u64) -> bool {
        let is_part = |amount: u64, missing: u64| missing > 0 && amount.saturating_mul(parts) >= missing;
        is_part(amount.bytes, self.missing.bytes) || is_part(amount.inodes, self.missing.inodes)
    }
}

fn total(steps: &[RemovalStep]) -> DiskSpace {
    steps.iter().map(|step| step.frees).sum()
}

/// Removals that only together free a layer.
fn groups(steps: &[RemovalStep]) -> impl Iterator<Item = &[RemovalStep]> {
    steps.chunk_by(|a, b| a.shared.is_some() && a.shared == b.shared)
}
