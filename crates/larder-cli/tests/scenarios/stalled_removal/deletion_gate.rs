//! Holds the deletion of what a store has removed: the kernel asks before a directory is opened, and gets no answer.

use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::event::{PollFd, PollFlags, Timespec};

/// How long the thread waits for the kernel before it looks whether it is to end.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// The gate. Dropping it lets everything pass.
pub(super) struct DeletionGate {
    shared: Arc<FanotifyState>,
    thread: Option<JoinHandle<()>>,
}

struct FanotifyState {
    kernel: Fanotify,
    /// The directory in which is deleted.
    trash: PathBuf,
    hold: AtomicBool,
    end: AtomicBool,
    held: Mutex<Option<FanotifyEvent>>,
}

impl DeletionGate {
    /// Before what is in this directory. `None`, after a loud message, where this needs root.
    pub(super) fn of(trash: &Path) -> Option<DeletionGate> {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip this: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: deletion can be held by root alone ====");
            return None;
        }
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
        let kernel = Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC).unwrap();
        let mask = MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_ONDIR | MaskFlags::FAN_EVENT_ON_CHILD;
        let dir = fs_err::File::open(trash).unwrap();
        kernel.mark(MarkFlags::FAN_MARK_ADD, mask, &dir, None::<&Path>).unwrap();
        let (hold, end) = (AtomicBool::new(false), AtomicBool::new(false));
        let trash = fs_err::canonicalize(trash).unwrap();
        let shared = Arc::new(FanotifyState { kernel, trash, hold, end, held: Mutex::default() });
        let answering = Arc::clone(&shared);
        let thread = thread::spawn(move || answering.answer());
        Some(DeletionGate { shared, thread: Some(thread) })
    }

    /// Blocks the next process that opens a directory for deletion. The deletion of a layer is one call of the system,
    /// which cannot be held, so there is a directory that is deleted before it.
    pub(super) fn hold(&self) {
        // It comes into the trash whole: the daemon may be emptying it.
        let made = self.shared.trash.with_file_name("to-hold");
        fs_err::create_dir_all(made.join("held")).unwrap();
        self.shared.hold.store(true, Ordering::SeqCst);
        fs_err::rename(&made, self.shared.trash.join("0")).unwrap();
    }

    pub(super) fn has_held(&self) -> bool {
        self.shared.held.lock().unwrap().is_some()
    }

    pub(super) fn release(&self) {
        self.shared.hold.store(false, Ordering::SeqCst);
        if let Some(event) = self.shared.held.lock().unwrap().take() {
            self.shared.allow(&event);
        }
    }
}

impl Drop for DeletionGate {
    fn drop(&mut self) {
        self.release();
        self.shared.end.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl FanotifyState {
    fn answer(&self) {
        while !self.end.load(Ordering::SeqCst) {
            let mut kernel = [PollFd::new(&self.kernel, PollFlags::IN)];
            if rustix::event::poll(&mut kernel, Some(&LOOK_EVERY)).is_ok_and(|ready| ready == 0) {
                continue;
            }
            for event in self.kernel.read_events().unwrap_or_default() {
                if self.hold.load(Ordering::SeqCst) && self.is_below(&event) {
                    self.hold.store(false, Ordering::SeqCst);
                    *self.held.lock().unwrap() = Some(event);
                } else {
                    self.allow(&event);
                }
            }
        }
    }

    /// Whether something in the directory is opened, not the directory itself.
    fn is_below(&self, event: &FanotifyEvent) -> bool {
        let link = event.fd().map(|fd| format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let opened = link.and_then(|link| fs_err::read_link(link).ok());
        opened.is_some_and(|opened| opened != self.trash && opened.starts_with(&self.trash))
    }

    fn allow(&self, event: &FanotifyEvent) {
        if let Some(fd) = event.fd() {
            self.kernel.write_response(FanotifyResponse::new(fd, Response::FAN_ALLOW)).unwrap();
        }
    }
}
