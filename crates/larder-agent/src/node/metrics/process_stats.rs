//! The kernel's figures of this process, for the metrics that Prometheus clients share.

use std::time::Duration;

use rustix::process::{Resource, getrlimit};

/// Resource usage of this process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ProcessStats {
    /// User and system time, in seconds.
    pub(super) cpu_seconds: f64,
    pub(super) resident_bytes: u64,
    pub(super) virtual_bytes: u64,
    pub(super) open_fds: u64,
    pub(super) max_fds: u64,
}

impl ProcessStats {
    /// The usage now; `None` without procfs.
    pub(super) fn read() -> Option<ProcessStats> {
        let stat = fs_err::read_to_string("/proc/self/stat").ok()?;
        let usage = CpuAndMemory::parse(&stat)?;
        let open_fds = fs_err::read_dir("/proc/self/fd").ok()?.count() as u64;
        Some(ProcessStats {
            cpu_seconds: Duration::from_millis(usage.ticks * 1000 / rustix::param::clock_ticks_per_second())
                .as_secs_f64(),
            resident_bytes: usage.resident_pages * rustix::param::page_size() as u64,
            virtual_bytes: usage.virtual_bytes,
            open_fds,
            max_fds: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
        })
    }
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct CpuAndMemory {
    ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl CpuAndMemory {
    fn parse(stat: &str) -> Option<CpuAndMemory> {
        // The command before it may contain spaces and parentheses.
        let (_, fields) = stat.rsplit_once(')')?;
        let field = |number: usize| fields.split_ascii_whitespace().nth(number - 3)?.parse::<u64>().ok();
        Some(CpuAndMemory {
            ticks: field(14)? + field(15)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_found_behind_any_command() {
        let stat =
            "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 12 30 0 0 20 0 4 0 55 1000000 250 18446744073709551615";
        let expected = CpuAndMemory { ticks: 42, virtual_bytes: 1_000_000, resident_pages: 250 };
        assert_eq!(CpuAndMemory::parse(stat), Some(expected));
        assert_eq!(CpuAndMemory::parse("7 (a) S 1"), None);
        let own = ProcessStats::read().unwrap();
        assert!(own.resident_bytes > 1 << 20 && own.virtual_bytes >= own.resident_bytes, "{own:?}");
        assert!(own.open_fds > 2 && own.max_fds >= own.open_fds, "{own:?}");
    }
}
