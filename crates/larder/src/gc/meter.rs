//! Measures what the removals of a sweep free.

use std::time::Duration;

use tokio::time::Instant;

use super::disk_space::DiskSpace;
use super::filesystem_stats::{self, FsStatsProvider};
use super::plan::PlannedRemoval;
use crate::image_service::FsStats;

/// How long a sweep waits for space that a backend frees in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimWait {
    /// Time between two measurements of the filesystem. Default 50 ms.
    pub poll: Duration,
    /// After this long without a change, a removal counts as complete. Default 1 s.
    pub quiet: Duration,
    /// The longest wait for one removal. Default 10 s.
    pub longest: Duration,
    /// The longest wait of a whole sweep. Default 1 min.
    pub sweep: Duration,
    /// A shortfall of this size is not waited for, because other processes write to the same filesystem. The next
    /// measurement includes it if it is freed later. Default 64 KiB and 4 inodes.
    pub tolerance: DiskSpace,
}

impl Default for ReclaimWait {
    fn default() -> Self {
        ReclaimWait {
            poll: Duration::from_millis(50),
            quiet: Duration::from_secs(1),
            longest: Duration::from_secs(10),
            sweep: Duration::from_secs(60),
            tolerance: DiskSpace { bytes: 64 << 10, inodes: 4 },
        }
    }
}

/// The amounts that removals freed: counted by the backend, else measured on the filesystem, else as planned.
pub(super) struct SpaceMeter<'a> {
    disk: &'a dyn FsStatsProvider,
    wait: ReclaimWait,
    /// The filesystem before the first removal; `None` if it is not measured, and planned amounts count.
    before: Option<FsStats>,
    /// The last measurement.
    now: Option<FsStats>,
    waited: Duration,
    /// Whether the backend counted the files of each removal.
    counts_files: bool,
    /// Whether the filesystem once did not show what a removal freed, because other processes write to it.
    is_disturbed: bool,
    /// The amount that this sweep's removals were planned to free.
    promised: DiskSpace,
    /// The amount that this sweep's removals freed, counted or measured.
    freed: DiskSpace,
    /// How many images this sweep removed.
    removals: usize,
    /// Bytes of this sweep's removals, counted or planned.
    freed_bytes: u64,
    /// Bytes measured right after this sweep's removals, for each at most the planned amount.
    shown_bytes: u64,
    /// Bytes that other processes were planned to free by removing images.
    freed_by_others: u64,
}

/// The removal that is measured, and the goal's view of it.
pub(super) struct MeteredRemoval<'a> {
    pub(super) removal: &'a PlannedRemoval,
    /// The size of the removed files, if the backend counted them.
    pub(super) counted: Option<DiskSpace>,
    /// The kinds of space that the goal counts: an amount of zero is not waited for.
    pub(super) relevant: DiskSpace,
    /// Whether the counted amount reaches the goal, so that the filesystem must show it.
    pub(super) completes_goal: bool,
}

impl<'a> SpaceMeter<'a> {
    /// `before` is the filesystem before the first removal; `None` counts planned amounts.
    pub(super) fn new(
        disk: &'a dyn FsStatsProvider,
        wait: ReclaimWait,
        before: Option<FsStats>,
    ) -> SpaceMeter<'a> {
        SpaceMeter {
            disk,
            wait,
            before,
            now: before,
            waited: Duration::ZERO,
            counts_files: true,
            is_disturbed: false,
            promised: DiskSpace::ZERO,
            freed: DiskSpace::ZERO,
            removals: 0,
            freed_bytes: 0,
            shown_bytes: 0,
            freed_by_others: 0,
        }
    }

    pub(super) fn is_measuring(&self) -> bool {
        self.before.is_some()
    }

    /// The last measurement of the filesystem.
    pub(super) fn now(&self) -> Option<FsStats> {
        self.now
    }

    pub(super) fn promised(&self) -> DiskSpace {
        self.promised
    }

    /// Free space before the first removal, and what the removals freed since then.
    pub(super) fn expected_free(&self) -> Option<DiskSpace> {
        self.before.map(|before| filesystem_stats::free(before) + self.freed)
    }

    /// Bytes that the sweep and other processes freed, if the backend counted each removal of the sweep.
    pub(super) fn counted_bytes(&self) -> Option<u64> {
        (self.counts_files && self.removals > 0)
            .then(|| self.freed_by_others.saturating_add(self.freed_bytes))
    }

    /// Bytes that this sweep freed so far: counted or planned.
    pub(super) fn freed_bytes(&self) -> u64 {
        self.freed_bytes
    }

    /// Measures a removal of this sweep. Returns what it freed; `None` if that was neither counted nor measured.
    pub(super) async fn add(&mut self, of: MeteredRemoval<'_>) -> Option<DiskSpace> {
        let counted = of.counted.filter(|_| self.is_measuring());
        let of = MeteredRemoval { counted, ..of };
        self.counts_files &= counted.is_some();
        let planned = of.removal.frees;
        let measured = self.wait_until_freed(&of).await;
        let freed = counted.or(measured);
        self.promised += planned;
        self.freed += freed.unwrap_or_default();
        self.removals += 1;
        self.freed_bytes = self.freed_bytes.saturating_add(counted.unwrap_or(planned).bytes);
        let shown = freed.map_or(planned.bytes, |freed| freed.bytes.min(planned.bytes));
        self.shown_bytes = self.shown_bytes.saturating_add(shown);
        freed
    }

    /// Measures a removal by another process. Its space counts towards the goal, but not as freed by this sweep.
    pub(super) async fn add_by_another(&mut self, removal: &PlannedRemoval, relevant: DiskSpace) {
        if self.is_measuring() {
            let of = MeteredRemoval { removal, counted: None, relevant, completes_goal: false };
            self.wait_until_freed(&of).await;
            self.freed_by_others = self.freed_by_others.saturating_add(removal.frees.bytes);
        }
    }

    /// Measures until the counted or planned amount is free, or no more becomes free. Returns the measured amount;
    /// `None` if it cannot be measured. A counted amount is waited for only until the filesystem has once failed to
    /// show one.
    async fn wait_until_freed(&mut self, of: &MeteredRemoval<'_>) -> Option<DiskSpace> {
        let before = self.now.filter(|_| self.is_measuring())?;
        let expected = of.counted.unwrap_or(of.removal.frees);
        let (longest, is_waiting) = match of.counted {
            Some(_) => (self.wait.quiet, !self.is_disturbed || of.completes_goal),
            None => (self.wait.longest, true),
        };
        let (start, mut changed) = (Instant::now(), Instant::now());
        let mut last: Option<FsStats> = None;
        loop {
            let Ok(disk) = self.disk.measure_after_deletion().await else {
                self.now = Some(filesystem_stats::with_more_free(before, expected));
                return None;
            };
            if last != Some(disk) {
                (last, changed) = (Some(disk), Instant::now());
            }
            self.now = Some(disk);
            let freed = filesystem_stats::free(before).shortfall_to(filesystem_stats::free(disk));
            let missing = only_relevant(freed.shortfall_to(expected), of.relevant);
            let elapsed = start.elapsed();
            let has_ended = !is_waiting
                || changed.elapsed() >= self.wait.quiet
                || elapsed >= longest
                || self.waited + elapsed >= self.wait.sweep;
            let is_complete = self.wait.tolerance.shortfall_to(missing) == DiskSpace::ZERO;
            if is_complete || has_ended {
                self.is_disturbed |= of.counted.is_some() && !is_complete;
                self.waited += elapsed;
                return Some(freed);
            }
            tokio::time::sleep(self.wait.poll).await;
        }
    }

    /// Change of the available bytes since before the first removal, including what other processes changed.
    pub(super) fn available_change(&self) -> Option<i64> {
        let [before, now] =
            [self.before?, self.now?].map(|disk| i128::from(filesystem_stats::free(disk).bytes));
        Some(i64::try_from(now - before).unwrap_or(i64::MAX))
    }

    /// Bytes that this sweep freed in all: counted by the backend; else the change of the filesystem, without what
    /// other processes freed; planned if nothing is measured.
    pub(super) fn total_freed(&self) -> u64 {
        let (false, Some(before), Some(now)) = (self.counts_files, self.before, self.now) else {
            return self.freed_bytes;
        };
        let freed = filesystem_stats::free(before).shortfall_to(filesystem_stats::free(now)).bytes;
        // The space of other processes' removals may have been free before the first measurement, so this is at least
        // what was measured after this sweep's own removals.
        freed.saturating_sub(self.freed_by_others).max(self.shown_bytes.min(freed))
    }
}

fn only_relevant(amount: DiskSpace, relevant: DiskSpace) -> DiskSpace {
    DiskSpace {
        bytes: if relevant.bytes > 0 { amount.bytes } else { 0 },
        inodes: if relevant.inodes > 0 { amount.inodes } else { 0 },
    }
}
