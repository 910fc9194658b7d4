//! Keeps a reserve of a filesystem free while data is written to it, and what is promised to other data.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder::go_format;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::DiskSpace;

/// Space that may be written between two measurements of the filesystem: each costs a system call, and other
/// processes write too.
const STEP: DiskSpace = DiskSpace { bytes: 4 << 20, inodes: 256 };

/// Admits writes to one filesystem as long as the reserve stays free. Clones share it.
#[derive(Debug, Clone)]
pub struct SpaceReserve(Arc<SpaceReserveInner>);

/// How long a measurement of the promised space is used: it looks at each incomplete layer.
const PROMISED_FOR: Duration = Duration::from_secs(1);

/// Space that is promised to data which is yet to be written, and is none of what is admitted.
pub(crate) type MeasurePromised = dyn Fn() -> io::Result<DiskSpace> + Send + Sync;

struct SpaceReserveInner {
    root: PathBuf,
    reserve: DiskSpace,
    measure_promised: Box<MeasurePromised>,
    /// The promised space, and when it was measured.
    promised: Mutex<Option<(DiskSpace, Instant)>>,
    /// Space that may be written before the next measurement.
    budget: Mutex<DiskSpace>,
}

impl fmt::Debug for SpaceReserveInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpaceReserveInner { root, reserve, .. } = self;
        f.debug_struct("SpaceReserveInner")
            .field("root", root)
            .field("reserve", reserve)
            .finish_non_exhaustive()
    }
}

impl SpaceReserve {
    /// Keeps `reserve` free on the filesystem of `root`. Where it is zero, nothing is refused.
    pub fn new(root: PathBuf, reserve: DiskSpace) -> SpaceReserve {
        SpaceReserve::beside(root, reserve, Box::new(|| Ok(DiskSpace::ZERO)))
    }

    /// Keeps what is promised free as well.
    pub(crate) fn beside(
        root: PathBuf,
        reserve: DiskSpace,
        measure_promised: Box<MeasurePromised>,
    ) -> SpaceReserve {
        let (promised, budget) = (Mutex::default(), Mutex::default());
        SpaceReserve(Arc::new(SpaceReserveInner { root, reserve, measure_promised, promised, budget }))
    }

    /// The directory whose filesystem it is.
    pub fn root(&self) -> &Path {
        &self.0.root
    }

    /// Admits a write of this amount, or fails with [`io::ErrorKind::StorageFull`] and the figures. To be called before
    /// the write.
    pub fn admit(&self, amount: DiskSpace) -> io::Result<()> {
        if self.0.reserve == DiskSpace::ZERO || take(&mut self.0.budget.lock(), amount) {
            return Ok(());
        }
        // A pull must not fail for space that was written since.
        self.0.measure(amount, PROMISED_FOR).or_else(|_| self.0.measure(amount, Duration::ZERO))
    }
}

/// Takes an amount from a budget, if that has it.
fn take(budget: &mut DiskSpace, amount: DiskSpace) -> bool {
    let is_enough = budget.shortfall_to(amount) == DiskSpace::ZERO;
    if is_enough {
        *budget = amount.shortfall_to(*budget);
    }
    is_enough
}

impl SpaceReserveInner {
    /// Measures the filesystem, and takes an amount from what may be written.
    fn measure(&self, amount: DiskSpace, max_age: Duration) -> io::Result<()> {
        // Writes within the budget do not wait for it.
        let promised = self.promised(max_age)?;
        let mut budget = self.budget.lock();
        // Another write has measured since: what it may write is not free.
        if take(&mut budget, amount) {
            return Ok(());
        }
        // What is written in between counts twice, and not as free.
        let next = next_budget(amount, promised.shortfall_to(free_space(&self.root)?), self.reserve)
            .map_err(|full| io::Error::new(io::ErrorKind::StorageFull, full))?;
        *budget = amount.shortfall_to(next);
        Ok(())
    }

    /// The promised space, as it was at most this long ago.
    fn promised(&self, max_age: Duration) -> io::Result<DiskSpace> {
        let mut promised = self.promised.lock();
        if let Some((known, _)) = promised.filter(|(_, measured)| measured.elapsed() < max_age) {
            return Ok(known);
        }
        let found = (self.measure_promised)()?;
        *promised = Some((found, Instant::now()));
        Ok(found)
    }
}

/// Free space of a filesystem for unprivileged users. Some filesystems make inodes as needed and report none.
pub(crate) fn free_space(root: &Path) -> io::Result<DiskSpace> {
    let stat = rustix::fs::statvfs(root)?;
    let inodes = if stat.f_files == 0 { u64::MAX } else { stat.f_favail };
    Ok(DiskSpace { bytes: stat.f_bavail.saturating_mul(stat.f_frsize), inodes })
}

/// Returns the space that may be written before the next measurement, at least `amount`.
fn next_budget(amount: DiskSpace, free: DiskSpace, reserve: DiskSpace) -> Result<DiskSpace, ReserveReached> {
    // A reserve of none leaves it to the filesystem to refuse.
    let usable = |free: u64, reserve: u64| if reserve == 0 { u64::MAX } else { free.saturating_sub(reserve) };
    let usable =
        DiskSpace { bytes: usable(free.bytes, reserve.bytes), inodes: usable(free.inodes, reserve.inodes) };
    if usable.shortfall_to(amount) != DiskSpace::ZERO {
        return Err(ReserveReached { free, reserve, lacks_inodes: usable.bytes >= amount.bytes });
    }
    Ok(DiskSpace {
        bytes: usable.bytes.min(STEP.bytes.max(amount.bytes)),
        inodes: usable.inodes.min(STEP.inodes.max(amount.inodes)),
    })
}

/// A write would use up the reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReserveReached {
    /// Free space.
    pub free: DiskSpace,
    /// Space that must remain free.
    pub reserve: DiskSpace,
    lacks_inodes: bool,
}

impl ReserveReached {
    /// Returns true if inodes are short, and not bytes.
    pub fn lacks_inodes(self) -> bool {
        self.lacks_inodes
    }
}

/// `insufficient space: 67.2MB free (67.1MB reserved)`
impl fmt::Display for ReserveReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReserveReached { free, reserve, .. } = self;
        if self.lacks_inodes {
            write!(f, "insufficient space: {} inodes free ({} reserved)", free.inodes, reserve.inodes)
        } else {
            let (free, reserve) = (go_format::bytes(free.bytes), go_format::bytes(reserve.bytes));
            write!(f, "insufficient space: {free} free ({reserve} reserved)")
        }
    }
}

impl std::error::Error for ReserveReached {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn space(bytes: u64, inodes: u64) -> DiskSpace {
        DiskSpace { bytes, inodes }
    }

    #[test]
    fn a_write_into_the_reserve_is_refused_with_the_figures() {
        let reserve = space(64 * MIB, 1000);
        let budget = |amount, free| next_budget(amount, free, reserve);
        assert_eq!(budget(space(MIB, 1), space(999 * MIB, 9999)), Ok(STEP), "no more than a step");
        assert_eq!(budget(space(9 * MIB, 1), space(999 * MIB, 9999)), Ok(space(9 * MIB, 256)));
        assert_eq!(
            budget(space(MIB, 1), space(66 * MIB, 1010)),
            Ok(space(2 * MIB, 10)),
            "no more than there is"
        );
        let full = budget(space(3 * MIB, 1), space(66 * MIB, 9999)).unwrap_err();
        assert_eq!(full.to_string(), "insufficient space: 69.2MB free (67.1MB reserved)");
        let full = budget(space(MIB, 1), space(999 * MIB, 1000)).unwrap_err();
        assert_eq!(full.to_string(), "insufficient space: 1000 inodes free (1000 reserved)");
        assert!(budget(space(0, 0), space(0, 0)).is_ok(), "nothing is written");
    }

    #[test]
    fn what_has_no_reserve_is_left_to_the_filesystem() {
        assert!(next_budget(space(MIB, 1), space(0, 9999), space(0, 1000)).is_ok());
        let nowhere = SpaceReserve::new("/does/not/exist".into(), DiskSpace::ZERO);
        assert!(nowhere.admit(space(u64::MAX, u64::MAX)).is_ok());
    }

    #[test]
    fn promised_space_is_not_free() {
        let dir = tempfile::tempdir().unwrap();
        let beside = |promised| {
            let promised = Box::new(move || Ok(space(promised, 0)));
            SpaceReserve::beside(dir.path().to_owned(), space(1, 0), promised).admit(space(MIB, 0))
        };
        beside(0).expect("there is space");
        let full = beside(u64::MAX).expect_err("all of it is promised");
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }

    #[tokio::test(start_paused = true)]
    async fn promised_space_is_measured_once_in_a_while_and_before_a_refusal() {
        let dir = tempfile::tempdir().unwrap();
        let (promised, measured) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (now, counted) = (Arc::clone(&promised), Arc::clone(&measured));
        let measure = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(space(now.load(Ordering::Relaxed), 0))
        };
        let reserve = SpaceReserve::beside(dir.path().to_owned(), space(1, 0), Box::new(measure));
        for _ in 0..5 {
            reserve.admit(space(STEP.bytes, 0)).unwrap();
        }
        assert_eq!(measured.load(Ordering::Relaxed), 1);
        promised.store(u64::MAX, Ordering::Relaxed);
        tokio::time::advance(PROMISED_FOR).await;
        reserve.admit(space(STEP.bytes, 0)).expect_err("all of it is promised");
        promised.store(0, Ordering::Relaxed);
        reserve.admit(space(STEP.bytes, 0)).expect("it was refused by an old measurement");
    }

    #[test]
    fn nothing_is_admitted_while_the_promised_space_is_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let unknown = Box::new(|| Err(io::Error::other("the database cannot be read")));
        let reserve = SpaceReserve::beside(dir.path().to_owned(), space(1, 0), unknown);
        reserve.admit(space(MIB, 0)).expect_err("it may be promised");
    }

    #[test]
    fn the_filesystem_is_measured_once_per_step() {
        let dir = tempfile::tempdir().unwrap();
        let reserve = SpaceReserve::new(dir.path().to_owned(), space(1, 1));
        reserve.admit(space(MIB, 1)).unwrap();
        let left = *reserve.0.budget.lock();
        assert_eq!(left, space(3 * MIB, 255));
        drop(dir);
        reserve.admit(space(3 * MIB, 1)).expect("within the step");
        reserve.admit(space(1, 0)).expect_err("the directory is gone, and so it is not measured");
    }
}
