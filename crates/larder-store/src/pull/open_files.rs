//! Bound on the files that all pulls together keep open, divided among the parts that need many.

use rustix::process::{Resource, getrlimit};

/// Files that one pull after another may keep open, whatever their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OpenFileBudget {
    /// Files of layers that wait to be written early.
    pub(super) waiting: usize,
    /// Layers that others are merged with, for as long as that takes.
    pub(super) lowers: u32,
}

impl OpenFileBudget {
    /// Shares out half of `total`: layers that are unpacked need few files.
    pub(super) fn of(total: usize) -> OpenFileBudget {
        let lowers = u32::try_from(total / 4).unwrap_or(u32::MAX);
        OpenFileBudget { waiting: (total / 4).clamp(1, 64), lowers: lowers.clamp(2, 512) }
    }
}

/// Default bound: three quarters of the process's limit, which leaves the rest to connections, the database and the
/// embedding program.
pub(super) fn default_total() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4 * 3).unwrap_or(usize::MAX).min(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_shared_out_within_the_bound_and_no_further_than_is_of_use() {
        assert_eq!(OpenFileBudget::of(192), OpenFileBudget { waiting: 48, lowers: 48 });
        assert_eq!(OpenFileBudget::of(1 << 20), OpenFileBudget { waiting: 64, lowers: 512 });
        assert_eq!(OpenFileBudget::of(0), OpenFileBudget { waiting: 1, lowers: 2 });
    }
}
