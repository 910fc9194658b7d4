//! Steps of the wall clock. They must neither cause nor prevent a removal.
//!
//! Within one boot the monotonic clock gives the time that passed since the last observation; what the wall clock moved
//! beyond that is a step, and all recorded times move with it, so that ages do not change. Across a boot the time since
//! the boot has passed; of the time before it the wall clock is trusted for up to a day, and not at all if it went
//! back.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::gc::unix_millis::UnixMillis;

/// Less than this is no step: clocks drift and are adjusted gently.
const TOLERANCE_MS: i64 = 2_000;

/// The longest time that a machine is assumed to have been off.
const LONGEST_OFF_MS: i64 = 24 * 3600 * 1000;

/// All clocks at one moment. Stored on disk as the clocks at the last observation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockReading {
    /// The wall clock.
    pub wall: UnixMillis,
    /// Milliseconds since boot, including suspend; `None` if unavailable.
    pub since_boot: Option<i64>,
    /// The boot ID; empty if unavailable.
    pub boot: String,
}

impl ClockReading {
    /// A reading of the wall clock alone, without a monotonic clock.
    pub fn wall(now: UnixMillis) -> ClockReading {
        ClockReading { wall: now, since_boot: None, boot: String::new() }
    }

    /// The clocks of the system, now.
    pub fn now() -> ClockReading {
        SystemClock.read()
    }

    /// The time since then, without steps of the wall clock.
    pub fn age(&self, now: &ClockReading) -> Duration {
        Duration::from_millis(u64::try_from(self.elapsed(now)).unwrap_or_default())
    }

    /// The step of the wall clock since then, in milliseconds.
    pub(super) fn step(&self, now: &ClockReading) -> i64 {
        let step = now.wall.millis_since(self.wall).saturating_sub(self.elapsed(now));
        if step.abs() <= TOLERANCE_MS { 0 } else { step }
    }

    /// Milliseconds since then; never negative.
    fn elapsed(&self, now: &ClockReading) -> i64 {
        let moved = now.wall.millis_since(self.wall);
        match (self.since_boot, now.since_boot) {
            (Some(then), Some(since_boot)) if self.boot == now.boot && since_boot >= then => {
                since_boot - then
            }
            (_, Some(this_boot)) => {
                this_boot.saturating_add(moved.saturating_sub(this_boot).clamp(0, LONGEST_OFF_MS))
            }
            (_, None) => moved.max(0),
        }
    }
}

impl From<SystemTime> for ClockReading {
    /// Returns [`ClockReading::wall`] of the time.
    fn from(now: SystemTime) -> ClockReading {
        ClockReading::wall(now.into())
    }
}

/// Reads the time.
pub trait Clock: Send + Sync {
    /// All clocks, now.
    fn read(&self) -> ClockReading;
}

/// The clocks of the system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

/// The boot ID, read once; empty if unavailable.
fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        boot.trim().to_owned()
    })
}

impl Clock for SystemClock {
    fn read(&self) -> ClockReading {
        // Unlike /proc/uptime, this opens no file and is exact to the nanosecond.
        let time = clock_gettime(ClockId::Boottime);
        let since_boot = time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000);
        let boot = boot_id();
        ClockReading {
            wall: SystemTime::now().into(),
            since_boot: (!boot.is_empty()).then_some(since_boot),
            boot: boot.to_owned(),
        }
    }
}
