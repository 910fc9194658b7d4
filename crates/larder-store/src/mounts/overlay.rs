//! Mounts overlays through the kernel.
//!
//! Linux 6.5 and later takes each layer's path separately, up to 500. Earlier kernels take one page with all paths;
//! there the layers are named through short links, which is enough for about 200.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fd::{AsFd, AsRawFd as _, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
};
use rustix::thread::{CapabilitySet, capabilities};

use super::{MountError, table};

/// Options of every overlay. Images may carry the kernel's own marks in their files; none of these is followed.
const OPTIONS: [(&str, &str); 3] = [("redirect_dir", "nofollow"), ("metacopy", "off"), ("index", "off")];

/// Longest value that `fsconfig` takes, in bytes.
const LONGEST_VALUE: usize = 255;

/// Most bytes of options that `mount` takes, with the zero at their end.
const PAGE: usize = 4096;

/// An overlay to be made.
pub(super) struct OverlaySpec<'a> {
    /// The mount's own directory.
    pub(super) dir: &'a Path,
    /// Lower directories, topmost first.
    pub(super) lower: &'a [PathBuf],
    /// Upper and work directory of a writable one.
    pub(super) upper: Option<&'a (PathBuf, PathBuf)>,
    /// Honor set-user-ID bits and the like.
    pub(super) suid: bool,
    /// Honor device nodes.
    pub(super) devices: bool,
}

impl OverlaySpec<'_> {
    /// Mounts at the directory `place`, which errors call `target`.
    pub(super) fn mount(&self, place: &OwnedFd, target: &Path) -> Result<(), MountError> {
        match self.mount_by_parts(place) {
            Err(OverlayMountError { cause: Errno::NOSYS | Errno::INVAL, .. }) => {
                self.mount_at_once(place, target)
            }
            Err(OverlayMountError { cause, messages }) => Err(refused(target, cause, messages)),
            Ok(()) => Ok(()),
        }
    }

    /// The way of Linux 6.5.
    fn mount_by_parts(&self, place: &OwnedFd) -> Result<(), OverlayMountError> {
        let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let mut names = OverlayPaths::default();
        self.configure(&fs, &mut names)
            .map_err(|cause| OverlayMountError { cause, messages: messages(&fs) })?;
        let mut attributes = MountAttrFlags::empty();
        attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, self.upper.is_none());
        attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, !self.suid);
        attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, !self.devices);
        let mount = fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let by_descriptors =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&mount, "", place, "", by_descriptors)?;
        Ok(())
    }

    fn configure(&self, fs: &OwnedFd, names: &mut OverlayPaths) -> Result<(), Errno> {
        let source = table::source(self.dir);
        if source.len() <= LONGEST_VALUE {
            fsconfig_set_string(fs, "source", source.as_slice())?;
        } else {
            return Err(Errno::INVAL); // `mount` takes it, and without it the mount could not be found again
        }
        for lower in self.lower {
            fsconfig_set_string(fs, "lowerdir+", names.short(lower)?)?;
        }
        if let Some((upper, work)) = self.upper {
            fsconfig_set_string(fs, "upperdir", names.short(upper)?)?;
            fsconfig_set_string(fs, "workdir", names.short(work)?)?;
        }
        for (option, value) in OPTIONS {
            fsconfig_set_string(fs, option, value)?;
        }
        if in_user_namespace() {
            fsconfig_set_flag(fs, "userxattr")?;
        }
        fsconfig_create(fs)
    }

    /// The way of earlier kernels.
    pub(super) fn mount_at_once(&self, place: &OwnedFd, target: &Path) -> Result<(), MountError> {
        let failed = |error: io::Error| MountError::Refused {
            target: target.to_owned(),
            messages: String::new(),
            cause: error,
        };
        let mut all = self.lower.to_vec();
        all.extend(self.upper.iter().flat_map(|(upper, work)| [upper.clone(), work.clone()]));
        let links = ShortLinkDir::make(&self.dir.join("l"), &all).map_err(failed)?;
        let names: Vec<String> = (0..all.len()).map(|number| links.name(number)).collect();
        let mut options = format!("lowerdir={}", names[..self.lower.len()].join(":"));
        if let [upper, work] = &names[self.lower.len()..] {
            options = format!("{options},upperdir={upper},workdir={work}");
        }
        for (option, value) in OPTIONS {
            options = format!("{options},{option}={value}");
        }
        if in_user_namespace() {
            options.push_str(",userxattr");
        }
        if options.len() >= PAGE {
            return Err(MountError::TooManyLayers { layers: self.lower.len() });
        }
        let text = |bytes: Vec<u8>| CString::new(bytes).map_err(|error| failed(error.into()));
        let (source, options) = (text(table::source(self.dir))?, text(options.into_bytes())?);
        let mut flags = MountFlags::empty();
        flags.set(MountFlags::RDONLY, self.upper.is_none());
        flags.set(MountFlags::NOSUID, !self.suid);
        flags.set(MountFlags::NODEV, !self.devices);
        rustix::mount::mount(source.as_c_str(), through(place), "overlay", flags, Some(options.as_c_str()))
            .map_err(|cause| refused(target, cause, String::new()))
    }
}

/// Why the kernel refused, and what it said.
struct OverlayMountError {
    cause: Errno,
    messages: String,
}

impl From<Errno> for OverlayMountError {
    fn from(cause: Errno) -> OverlayMountError {
        OverlayMountError { cause, messages: String::new() }
    }
}

fn refused(target: &Path, cause: Errno, messages: String) -> MountError {
    MountError::Refused { target: target.to_owned(), messages, cause: cause.into() }
}

/// Returns the kernel's messages beside the error, on one line.
fn messages(fs: &OwnedFd) -> String {
    let mut lines = Vec::new();
    let mut buffer = [0; 512];
    while let Ok(length) = rustix::io::read(fs, &mut buffer) {
        let line = String::from_utf8_lossy(&buffer[..length]);
        // Each begins with its kind: "e " for errors.
        lines.push(line.trim_start_matches(['e', 'w', 'i']).trim().to_owned());
        if length == 0 || lines.len() == 16 {
            break;
        }
    }
    lines.join("; ")
}

/// Paths short enough for the kernel; long ones are named through an open directory.
#[derive(Default)]
struct OverlayPaths(Vec<OwnedFd>);

impl OverlayPaths {
    fn short(&mut self, path: &Path) -> Result<Vec<u8>, Errno> {
        if path.as_os_str().len() <= LONGEST_VALUE {
            return Ok(path.as_os_str().as_bytes().to_vec());
        }
        let dir = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let name = through(&dir);
        self.0.push(dir);
        Ok(name.into_bytes())
    }
}

pub(super) fn through(dir: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd())
}

/// A directory of short links to long paths.
struct ShortLinkDir {
    dir: OwnedFd,
}

impl ShortLinkDir {
    fn make(path: &Path, targets: &[PathBuf]) -> io::Result<ShortLinkDir> {
        fs_err::create_dir_all(path)?;
        for (number, target) in targets.iter().enumerate() {
            let link = path.join(short_number(number));
            let _ = fs_err::remove_file(&link); // of an earlier attempt
            fs_err::os::unix::fs::symlink(target, link)?;
        }
        let dir = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(ShortLinkDir { dir })
    }

    fn name(&self, number: usize) -> String {
        format!("{}/{}", through(&self.dir), short_number(number))
    }
}

/// `0` to `9`, `a` to `z`, `10`, ...
fn short_number(number: usize) -> String {
    let digit = |value: usize| char::from(b"0123456789abcdefghijklmnopqrstuvwxyz"[value % 36]);
    if number < 36 {
        digit(number).to_string()
    } else {
        short_number(number / 36) + &digit(number).to_string()
    }
}

/// Whether this process's user is not the machine's root, whatever its id here.
pub(super) fn in_user_namespace() -> bool {
    // If unknown, the kernel decides.
    let map = fs_err::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.is_empty() && map.split_whitespace().ne(["0", "0", "4294967295"])
}

/// Returns true when this process has the capability that mounts need. If unknown, the kernel decides.
pub(super) fn may_mount() -> bool {
    capabilities(None).map_or(true, |sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Unmounts what is on top at `target`.
pub(super) fn unmount(target: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        // Already unmounted by another process.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(Errno::BUSY) => Err(MountError::Busy { target: target.to_owned() }),
        Err(cause) => Err(MountError::Unmount { target: target.to_owned(), cause: cause.into() }),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::StatVfsMountFlags;

    use super::*;

    #[test]
    fn short_numbers_are_short_and_differ() {
        let names: std::collections::HashSet<String> = (0..500).map(short_number).collect();
        assert_eq!(names.len(), 500);
        assert!(names.iter().all(|name| name.len() <= 2));
        assert_eq!((short_number(35), short_number(36)), ("z".into(), "10".into()));
    }

    #[test]
    fn earlier_kernels_take_two_hundred_layers() {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip mounts: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: mounting needs root; run the tests as root ====");
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        let make = |name: String| {
            let path = scratch.path().join("a-rather-long-name-of-a-directory-with-all-layers").join(name);
            fs_err::create_dir_all(&path).unwrap();
            path
        };
        let lower: Vec<PathBuf> = (0..200).map(|number| make(format!("{number:064}"))).collect();
        for dir in &lower {
            fs_err::write(dir.join(dir.file_name().unwrap()), "").unwrap();
        }
        for upper in [None, Some((make("upper".into()), make("work".into())))] {
            let dir = make("mount".into());
            let target = make("target".into());
            let upper = upper.as_ref();
            let overlay = OverlaySpec { dir: &dir, lower: &lower, upper, suid: false, devices: false };
            let place = OwnedFd::from(fs_err::File::open(&target).unwrap().into_parts().0);
            overlay.mount_at_once(&place, &target).unwrap();
            drop(place);
            let seen = fs_err::read_dir(&target).unwrap().count();
            let known = table::MountTable::read().unwrap().has(&dir, &target);
            let flags = rustix::fs::statvfs(&target).unwrap().f_flag;
            unmount(&target).unwrap();
            assert_eq!((seen, known), (200, true));
            assert!(flags.contains(StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV), "{flags:?}");
        }
        let many: Vec<PathBuf> = lower.iter().cycle().take(300).cloned().collect();
        let dir = make("m".into());
        let overlay = OverlaySpec { dir: &dir, lower: &many, upper: None, suid: false, devices: false };
        let place = OwnedFd::from(fs_err::File::open(scratch.path()).unwrap().into_parts().0);
        let error = overlay.mount_at_once(&place, scratch.path()).expect_err("more than fit on a page");
        assert!(matches!(error, MountError::TooManyLayers { layers: 300 }), "{error}");
    }
}
