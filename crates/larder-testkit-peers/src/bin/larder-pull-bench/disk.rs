//! A new filesystem for one pull.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::Outcome;

/// How the loop device writes to the file behind it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoopFileIo {
    /// Through the page cache: each byte is cached twice.
    Cached,
    /// Past the page cache, as to a disk.
    Direct,
}

/// An ext4 on a loop device, mounted. Dropping it unmounts and removes it.
pub(crate) struct LoopDisk {
    dir: TempDir,
    device: String,
    mounted: PathBuf,
}

impl LoopDisk {
    /// Makes one below `dir`; it takes what is written to it, 16 GB at most.
    ///
    /// Nothing is left to be written later but what the pull writes: an ext4 fills in its inode tables when it is first
    /// mounted, a quarter of a gigabyte here, unless they are made at once.
    pub(crate) fn new(dir: &Path, loop_io: LoopFileIo) -> Outcome<LoopDisk> {
        let dir = tempfile::Builder::new().prefix("larder-pull-bench-").tempdir_in(dir)?;
        let (image, mounted) = (dir.path().join("disk"), dir.path().join("mnt"));
        fs_err::File::create(&image)?.set_len(16 << 30)?;
        fs_err::create_dir(&mounted)?;
        let mut attach = Command::new("losetup");
        attach.args(["-f", "--show"]);
        if loop_io == LoopFileIo::Direct {
            attach.arg("--direct-io=on");
        }
        let device = run(attach.arg(&image))?.trim().to_owned();
        let disk = LoopDisk { dir, device, mounted };
        let at_once = "lazy_itable_init=0,lazy_journal_init=0";
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", at_once, &disk.device]))?;
        run(Command::new("mount").arg(&disk.device).arg(&disk.mounted))?;
        run(&mut Command::new("sync"))?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        &self.mounted
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let unmounted = run(Command::new("umount").args(["-l"]).arg(&self.mounted));
        // The mount ends when no file in it is open.
        if let Err(error) = unmounted.and(run(Command::new("losetup").args(["-d", &self.device]))) {
            eprintln!("cannot remove {}: {error}", self.dir.path().display());
        }
    }
}

/// Runs a command; what it printed.
fn run(command: &mut Command) -> Outcome<String> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout)?);
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
