//! Bound on the files that all pulls together keep open, divided among the parts that need many.

use rustix::process::{Resource, getrlimit};

/// Files that one pull after another may keep open, whatever their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OpenFileBudget {
    /// Of each layer that is being unpacked.
    pub(super) of_layer: usize,
    /// Large files that wait to be written early.
    pub(super) waiting: usize,
    /// Layers that others are settled on.
    pub(super) lowers: u32,
}

impl OpenFileBudget {
    /// Shares out `total` where up to `layers` are unpacked at once: half of it to them, a quarter to each of the others.
    pub(super) fn of(total: usize, layers: usize) -> OpenFileBudget {
        OpenFileBudget {
            of_layer: (total / 2 / layers.max(1)).clamp(16, 160),
            waiting: (total / 4).clamp(1, 64),
            lowers: u32::try_from(total / 4).unwrap_or(u32::MAX).clamp(2, 1024),
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
        assert_eq!(OpenFileBudget::of(192, 4), OpenFileBudget { of_layer: 24, waiting: 48, lowers: 48 });
        assert_eq!(
            OpenFileBudget::of(1 << 20, 4),
            OpenFileBudget { of_layer: 160, waiting: 64, lowers: 1024 }
        );
        assert_eq!(OpenFileBudget::of(0, 0), OpenFileBudget { of_layer: 16, waiting: 1, lowers: 2 });
        for total in (128..4000).step_by(7) {
            let files = OpenFileBudget::of(total, 4);
            assert!(
                4 * files.of_layer + files.waiting + files.lowers as usize <= total,
                "{total}: {files:?}"
            );
        }
    }
}
