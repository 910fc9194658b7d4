//! Loop devices: block devices whose content is a file.
//!
//! A device is set up with its file in one step, and clears itself when it is closed for the last time. So it never
//! outlives the mount, nor this process if that ends before the mount.

#![allow(unsafe_code, reason = "two ioctls, whose arguments the kernel's header linux/loop.h describes")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, ioctl};

const LOOP_CTL_GET_FREE: Opcode = 0x4C82;
const LOOP_CONFIGURE: Opcode = 0x4C0A;

const READ_ONLY: u32 = 1;
const AUTOCLEAR: u32 = 4;

/// Other processes take free devices too; each attempt that loses one tries the next.
const ATTEMPTS: usize = 1000;

/// A device that reads a file.
pub(super) struct LoopDevice {
    path: String,
    _open: OwnedFd,
}

impl LoopDevice {
    /// Sets up a free device. `name` is what `losetup` shows.
    pub(super) fn for_file(file: BorrowedFd<'_>, name: &Path) -> io::Result<LoopDevice> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let control = open("/dev/loop-control", flags, Mode::empty()).map_err(|errno| match errno {
            // There are none, as in most containers.
            Errno::NOENT => Errno::NODEV,
            errno => errno,
        })?;
        for _ in 0..ATTEMPTS {
            // SAFETY: `GetFree` passes no pointer, and the kernel returns the number of a device.
            let number = unsafe { ioctl(&control, GetFree) }?;
            let path = format!("/dev/loop{number}");
            let device = open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let config = LoopConfig::new(file, name);
            // SAFETY: `LoopConfig` has the layout of `struct loop_config`, which is what this request reads.
            let configured = unsafe { ioctl(&device, Setter::<LOOP_CONFIGURE, LoopConfig>::new(config)) };
            match configured {
                Ok(()) => return Ok(LoopDevice { path, _open: device }),
                Err(Errno::BUSY) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(Errno::BUSY.into())
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }
}

/// `struct loop_config`, with `struct loop_info64` inside.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

impl LoopConfig {
    fn new(file: BorrowedFd<'_>, name: &Path) -> LoopConfig {
        let mut file_name = [0; 64];
        let name = name.as_os_str().as_bytes();
        let shown = &name[name.len().saturating_sub(63)..];
        file_name[..shown.len()].copy_from_slice(shown);
        LoopConfig {
            fd: file.as_raw_fd().cast_unsigned(),
            block_size: 0,
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: READ_ONLY | AUTOCLEAR,
            file_name,
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
            reserved: [0; 8],
        }
    }
}

/// The request for the number of a free device; the kernel adds one if all are in use.
struct GetFree;

// SAFETY: the request takes no argument, and its result is the return value.
unsafe impl Ioctl for GetFree {
    type Output = u32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(number: IoctlOutput, _: *mut c_void) -> rustix::io::Result<u32> {
        u32::try_from(number).map_err(|_| Errno::NODEV)
    }
}
