//! Bound on the files that all pulls together keep open, divided among the parts that need many.

use rustix::process::{Resource, getrlimit};

/// Files that one pull after another may keep open, whatever their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OpenFileBudget {
    /// Of each layer that is being unpacked.
    pub(super) of_layer: usize,
    /// Large files that wait to be written early.
    pub(super) waiting: usize,
    /// Layers that others are settled on, for as long as that takes.
    pub(super) lowers: u32,
    /// The same, for as long as the pull takes.
    pub(super) kept_lowers: u32,
}

impl OpenFileBudget {
    /// Shares out `total` where up to `layers` are unpacked at once: half of it to them, a quarter to files that wait, and a
    /// quarter to lowers.
    pub(super) fn of(total: usize, layers: usize) -> OpenFileBudget {
        let lowers = u32::try_from(total / 8).unwrap_or(u32::MAX).min(512);
        OpenFileBudget {
            of_layer: (total / 2 / layers.max(1)).clamp(16, 160),
            waiting: (total / 4).clamp(1, 64),
            lowers: lowers.max(2),
            kept_lowers: lowers,
        }
    }
}

/// Default bound: three quarters of the process's limit, which leaves the rest to connections, the database and the
/// embedding program.
pub(super) fn usual() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4 * 3).unwrap_or(usize::MAX).min(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_shared_out_within_the_bound_and_no_further_than_is_of_use() {
        assert_eq!(
            OpenFileBudget::of(192, 4),
            OpenFileBudget { of_layer: 24, waiting: 48, lowers: 24, kept_lowers: 24 }
        );
        assert_eq!(
            OpenFileBudget::of(1 << 20, 4),
            OpenFileBudget { of_layer: 160, waiting: 64, lowers: 512, kept_lowers: 512 }
        );
        assert_eq!(
            OpenFileBudget::of(0, 0),
            OpenFileBudget { of_layer: 16, waiting: 1, lowers: 2, kept_lowers: 0 }
        );
        for total in (128..4000).step_by(7) {
            let files = OpenFileBudget::of(total, 4);
            let lowers = (files.lowers + files.kept_lowers) as usize;
            assert!(4 * files.of_layer + files.waiting + lowers <= total, "{total}: {files:?}");
        }
    }
}
