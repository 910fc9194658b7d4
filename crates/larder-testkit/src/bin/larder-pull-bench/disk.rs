//! A new file system for one pull.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::Outcome;

/// An ext4 on a loop device, mounted. Dropping it unmounts and removes it.
pub(crate) struct Disk {
    folder: TempDir,
    mounted: PathBuf,
}

impl Disk {
    /// Makes one below `dir`; it takes what is written to it, 16 GB at most.
    pub(crate) fn new(dir: &Path) -> Outcome<Disk> {
        let folder = tempfile::Builder::new().prefix("larder-pull-bench-").tempdir_in(dir)?;
        let (image, mounted) = (folder.path().join("disk"), folder.path().join("mnt"));
        fs_err::File::create(&image)?.set_len(16 << 30)?;
        fs_err::create_dir(&mounted)?;
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).args([&image, &mounted]))?;
        Ok(Disk { folder, mounted })
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        &self.mounted
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("umount").args(["-l"]).arg(&self.mounted)) {
            eprintln!("{} is left behind: {error}", self.folder.path().display());
        }
    }
}

fn run(command: &mut Command) -> Outcome<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
