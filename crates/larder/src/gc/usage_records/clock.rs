//! Steps of the wall clock. They must neither cause nor prevent a removal.
//!
//! Within one boot the monotonic clock gives the time that passed since the last observation; what the wall clock moved
//! beyond that is a step, and all recorded times move with it, so that ages do not change. Across a boot the elapsed
//! time is unknown: a wall clock that went back counts as a step of that size, and one that went forward is trusted for
//! up to a day.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::gc::unix_millis::UnixMillis;

/// Less than this is no step: clocks drift and are adjusted gently.
const TOLERANCE_MS: i64 = 2_000;

/// The longest time that a machine is assumed to have been off.
const LONGEST_OFF_MS: i64 = 24 * 3600 * 1000;

/// All clocks at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

/// The clocks at the last observation, as stored on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedClockReading {
    wall: UnixMillis,
    #[serde(default)]
    since_boot: Option<i64>,
    #[serde(default)]
    boot: String,
}

impl SavedClockReading {
    /// The clocks as they are now.
    pub fn from_reading(now: &ClockReading) -> SavedClockReading {
        SavedClockReading { wall: now.wall, since_boot: now.since_boot, boot: now.boot.clone() }
    }

    /// The time since then, without steps of the wall clock.
    pub fn age(&self, now: &ClockReading) -> Duration {
        now.wall.since(self.wall.moved(self.step(now)))
    }

    /// The step of the wall clock since then, in milliseconds.
    pub(super) fn step(&self, now: &ClockReading) -> i64 {
        let moved = now.wall.millis_since(self.wall);
        let step = match (self.since_boot, now.since_boot) {
            (Some(then), Some(since_boot)) if self.boot == now.boot && since_boot >= then => {
                moved.saturating_sub(since_boot - then)
            }
            _ if moved < 0 => return moved,
            _ => return (moved - LONGEST_OFF_MS).max(0),
        };
        if step.abs() <= TOLERANCE_MS { 0 } else { step }
    }
}

/// Reads the time.
pub trait Clock: Send + Sync {
    /// All clocks, now.
    fn read(&self) -> ClockReading;
}

/// The clocks of the system.
#[derive(Debug, Clone)]
pub struct SystemClock {
    boot: String,
}

impl SystemClock {
    /// Reads the boot ID once.
    pub fn new() -> SystemClock {
        let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        SystemClock { boot: boot.trim().to_owned() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        SystemClock::new()
    }
}

impl Clock for SystemClock {
    fn read(&self) -> ClockReading {
        // Unlike /proc/uptime, this opens no file and is exact to the nanosecond.
        let time = clock_gettime(ClockId::Boottime);
        let since_boot = time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000);
        ClockReading {
            wall: std::time::SystemTime::now().into(),
            since_boot: (!self.boot.is_empty()).then_some(since_boot),
            boot: self.boot.clone(),
        }
    }
}
