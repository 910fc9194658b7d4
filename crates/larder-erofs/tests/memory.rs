//! A million entries need little memory: that of the whole process, as the kernel counts it. One test, since it is
//! measured.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

#[path = "support/file_scratch.rs"]
mod file_scratch;

use std::fmt::Write as _;
use std::io;

use file_scratch::FileScratch;
use larder_erofs::{
    ErofsEntry, ErofsEntryKind, ErofsOptions, ErofsOutput, ErofsScratch, ErofsTime, ErofsWriter,
};

const ENTRIES: u32 = 1_000_000;
const LIMIT: u64 = 64 << 20;
/// For a quarter of the entries.
const LIMIT_WITHOUT_NAMES: u64 = 14 << 20;

/// Counts, and forgets.
struct NullOutput(u64);

impl ErofsOutput for NullOutput {
    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        Ok(Box::new(FileScratch::new()?))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0 += bytes.len() as u64;
        Ok(())
    }

    fn write_at(&mut self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// Most memory that this process ever had, in bytes.
fn peak_memory() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Paths as in a layer of Node.js or Python packages, but for repeated names: 23 bytes of name, 10 files in a
/// directory, a link for every 20 files and a hard link for every 50.
#[test]
fn a_million_entries_fit_into_64_mib_and_names_may_be_in_a_file() {
    let options = ErofsOptions { max_name_bytes: 0, ..ErofsOptions::default() };
    let peak = write_entries(ENTRIES / 4, options);
    assert!(peak < LIMIT_WITHOUT_NAMES, "{peak} bytes");
    let peak = write_entries(ENTRIES, ErofsOptions::default());
    assert!(peak < LIMIT, "{peak} bytes");
}

/// Returns the peak of the process's memory.
fn write_entries(entries: u32, options: ErofsOptions) -> u64 {
    let before = peak_memory();
    let mut writer = ErofsWriter::new(NullOutput(0), options).unwrap();
    let (mut path, mut target) = (String::new(), String::new());
    let data = [7; 700];
    for at in 0..entries {
        path.clear();
        let (package, dir) = (at / 1000, at / 10);
        write!(path, "usr/lib/node_modules/package-{package}/lib/dir-{dir}").unwrap();
        let kind = match at {
            at if at % 10 == 0 => ErofsEntryKind::Directory,
            at if at % 20 == 1 => {
                target.clear();
                write!(target, "../../dir-{}/module-{at}.js", dir / 2).unwrap();
                ErofsEntryKind::Symlink { target: target.as_bytes() }
            }
            at if at % 50 == 2 && at > 100 => {
                target.clear();
                write!(target, "{path}/some-module-{:08}.js", at + 1).unwrap();
                ErofsEntryKind::HardLink { target: target.as_bytes() }
            }
            at => ErofsEntryKind::File { size: u64::from(at % 700) },
        };
        if at % 10 != 0 {
            write!(path, "/some-module-{at:08}.js").unwrap();
        }
        let mtime = ErofsTime { seconds: at.into(), nanos: 1 };
        writer
            .add(&ErofsEntry {
                path: path.as_bytes(),
                kind,
                mode: 0o644,
                uid: at,
                gid: 0,
                mtime,
                xattrs: &[],
            })
            .unwrap();
        if let ErofsEntryKind::File { size } = kind {
            writer.write_data(&data[..usize::try_from(size).unwrap()]).unwrap();
        }
    }
    let built = peak_memory();
    let (output, summary) = writer.finish().unwrap();
    let peak = peak_memory();
    eprintln!(
        "at the start {before}, after all entries {built}, in the end {peak}; layer of {} bytes",
        output.0
    );
    assert!(summary.inodes > u64::from(entries) / 10 * 9 && summary.size == output.0);
    peak
}
