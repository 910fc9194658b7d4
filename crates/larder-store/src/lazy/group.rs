//! The fanotify group whose events hold back reads of data that is not there yet.
//!
//! ```text
//! reader: read(EROFS file) -> kernel: event, reader waits -> event thread: journal, channel
//!                                                               -> next_event() -> filled -> answer()
//! ```
//!
//! The kernel knows an outstanding event by the number of the descriptor that came with it, in the table of whoever
//! read it, and takes the answer from any process that has the group. The number must be that of no other outstanding
//! event, before and after a restart. So events are read by a thread with a table of descriptors of its own: its
//! numbers are those of events only, and those of the process before this one are occupied before it reads. Also, no
//! other part of this process can use up its descriptors: the kernel denies an event for which there is none.
//!
//! A mark must be set before the file is mounted: whether a file raises events is decided when it is opened.
//! Metadata is read without events.

#![allow(
    unsafe_code,
    reason = "descriptors that come as numbers in events, and a thread with its own table of them"
)]

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use nix::sys::fanotify::{EventFFlags, Fanotify, FanotifyEvent, InitFlags, MarkFlags, MaskFlags};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::stdio::{dup2_stdin, dup2_stdout};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::journal::{EventJournal, EventRecord, FileId, SLOTS};
use super::keeper::{GroupKeeper, KeptGroup};

/// Bit of `FAN_PRE_ACCESS` in linux/fanotify.h, since Linux 6.14.
const FAN_PRE_ACCESS: u64 = 0x0010_0000;
const FAN_ALLOW: u32 = 1;
/// `FAN_DENY_ERRNO(EIO)`.
const FAN_DENY_EIO: u32 = 2 | (5 << 24);

/// First number after the standard streams: all from here on are descriptors of events.
const FIRST_NUMBER: RawFd = 3;

/// Numbers that events of any version of larder have, at most.
const MOST_NUMBERS: RawFd = 1 << 16;

/// How a group came to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupState {
    /// No group was in use since the machine started.
    New,
    /// The keeper had it: readers have waited, marks are set, outstanding events come again.
    Recovered,
    /// The group in use was closed: since then, readers may have got zeros of partial layers. Reported until
    /// [`PreContentGroup::acknowledge_loss`].
    Lost,
}

/// The answer to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The data is there: the reader reads it.
    Allow,
    /// The data cannot be had. Where EROFS reads ahead, it then reads page by page, with an event for each: the reader
    /// gets an input/output error (a signal, if it reads through a mapping) once the event of its page is denied. A
    /// page that was read alone is read once more first.
    Deny,
}

/// A read that waits for its answer.
///
/// A dropped event is denied, unless the group was stopped before: then it stays outstanding, for the next process.
#[derive(Debug)]
pub(crate) struct PreContentEvent {
    /// The file that is read; `None` if a kill came before it was recorded: the range of each partial layer is needed.
    pub(crate) file: Option<FileId>,
    /// Bytes that are read: at least those must be there for [`Answer::Allow`]. May exceed the end of the file.
    pub(crate) range: Range<u64>,
    /// Process that reads, as this process sees it: 0 outside its PID namespace.
    pub(crate) pid: i32,
    slot: usize,
    number: i32,
    shared: Arc<Shared>,
    answered: bool,
}

impl PreContentEvent {
    /// Ends the wait of the reader. Succeeds if the reader has ended.
    pub(crate) fn answer(mut self, answer: Answer) -> io::Result<()> {
        self.send(answer)
    }

    fn send(&mut self, answer: Answer) -> io::Result<()> {
        self.answered = true;
        respond(self.shared.kept.group.as_fd(), self.number, answer)?;
        self.shared.returned.lock().slots.push(self.slot);
        self.shared.wake()
    }
}

impl Drop for PreContentEvent {
    fn drop(&mut self) {
        if !self.answered
            && !self.shared.returned.lock().stopped
            && let Err(error) = self.send(Answer::Deny)
        {
            tracing::warn!(%error, "cannot deny a read of a partial layer");
        }
    }
}

/// Answers the event with this number. There is none if the kernel has withdrawn it, or it was answered before a kill.
fn respond(group: BorrowedFd<'_>, number: i32, answer: Answer) -> io::Result<()> {
    let response = match answer {
        Answer::Allow => FAN_ALLOW,
        Answer::Deny => FAN_DENY_EIO,
    };
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&number.to_ne_bytes());
    bytes[4..].copy_from_slice(&response.to_ne_bytes());
    loop {
        match rustix::io::write(group, &bytes) {
            Ok(_) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Descriptors that all threads but the event thread use.
#[derive(Debug)]
struct Shared {
    kept: KeptGroup,
    wake: OwnedFd,
    returned: Arc<Mutex<Returned>>,
}

/// Orders for the event thread. Without descriptors: it must not drop one of the other table.
#[derive(Debug, Default)]
struct Returned {
    /// Slots whose events are answered.
    slots: Vec<usize>,
    stopped: bool,
}

impl Shared {
    /// Has the event thread look at what was returned.
    fn wake(&self) -> io::Result<()> {
        rustix::io::write(&self.wake, &1_u64.to_ne_bytes())?;
        Ok(())
    }
}

/// A group of pre-content events, and the thread that reads them.
#[derive(Debug)]
pub(crate) struct PreContentGroup {
    shared: Arc<Shared>,
    events: Mutex<Receiver<io::Result<ReadEvent>>>,
    thread: Option<JoinHandle<()>>,
    marker: GroupMarker,
}

impl PreContentGroup {
    /// Takes the group of the process before this one from the keeper, or makes one. `marker` is the path of a file
    /// that exists while a group is in use.
    pub(crate) fn open(keeper: &dyn GroupKeeper, marker: &Path) -> io::Result<(PreContentGroup, GroupState)> {
        let marker = GroupMarker::new(marker)?;
        let (kept, journal, state) = match (keeper.take()?, marker.read()?) {
            (Some(kept), mark) => {
                let state = if mark == Mark::Lost { GroupState::Lost } else { GroupState::Recovered };
                let (kept, journal) = match EventJournal::open(&kept.journal) {
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        replace_journal(keeper, kept.group)?
                    }
                    journal => (kept, journal?),
                };
                (kept, journal, state)
            }
            (None, mark) => {
                let state = if mark == Mark::None { GroupState::New } else { GroupState::Lost };
                if state == GroupState::Lost {
                    marker.write(Mark::Lost)?; // before the keeper has a new group, which would look like the old one
                }
                keeper.release()?; // what is left of the lost group
                let kept = KeptGroup { group: new_group()?, journal: EventJournal::create()? };
                let journal = EventJournal::open(&kept.journal)?;
                keeper.keep(&kept)?;
                (kept, journal, state)
            }
        };
        if state != GroupState::Lost {
            marker.write(Mark::InUse)?;
        }
        Ok((PreContentGroup::start(kept, journal, marker)?, state))
    }

    fn start(kept: KeptGroup, journal: EventJournal, marker: GroupMarker) -> io::Result<PreContentGroup> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let returned = Arc::new(Mutex::new(Returned::default()));
        let (sender, events) = channel();
        let thread = EventThread::new(
            kept.group.as_raw_fd(),
            wake.as_raw_fd(),
            Arc::clone(&returned),
            journal,
            sender,
        );
        let shared = Arc::new(Shared { kept, wake, returned });
        let thread = std::thread::Builder::new().name("layer-events".into()).spawn(|| thread.run())?;
        Ok(PreContentGroup { shared, events: Mutex::new(events), thread: Some(thread), marker })
    }

    /// Reads of this file raise events from now on, where the file is opened or mounted afterwards.
    pub(crate) fn mark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        change_mark(self.shared.kept.group.as_fd(), MarkFlags::FAN_MARK_ADD, file)
    }

    /// Reads of this file raise no more events; those outstanding still need an answer. Succeeds without a mark.
    pub(crate) fn unmark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        match change_mark(self.shared.kept.group.as_fd(), MarkFlags::FAN_MARK_REMOVE, file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Inodes of the files that are marked.
    pub(crate) fn marked(&self) -> io::Result<HashSet<u64>> {
        let path = format!("/proc/self/fdinfo/{}", self.shared.kept.group.as_raw_fd());
        let mark = |line: &str| {
            let inode = line.strip_prefix("fanotify ino:")?.split(' ').next()?;
            u64::from_str_radix(inode, 16).ok()
        };
        Ok(fs_err::read_to_string(path)?.lines().filter_map(mark).collect())
    }

    /// Waits for the next event; `None` after [`stop`](PreContentGroup::stop). After an error no more events come.
    pub(crate) fn next_event(&self) -> Option<io::Result<PreContentEvent>> {
        let read = self.events.lock().recv().ok()?;
        let shared = Arc::clone(&self.shared);
        Some(read.map(|ReadEvent { slot, file, record: EventRecord { number, pid, range } }| {
            PreContentEvent { file, range, pid, slot, number, shared, answered: false }
        }))
    }

    /// Reads no more events. Those that are outstanding, and all that come, wait for the next process.
    pub(crate) fn stop(&self) -> io::Result<()> {
        self.shared.returned.lock().stopped = true;
        self.shared.wake()
    }

    /// Has the keeper keep the group if it does so no more: its process may have been killed.
    pub(crate) fn renew(&self, keeper: &dyn GroupKeeper) -> io::Result<()> {
        keeper.keep(&self.shared.kept)
    }

    /// The images that may have been read wrongly are dealt with: the next start does not report the loss again.
    pub(crate) fn acknowledge_loss(&self) -> io::Result<()> {
        self.marker.write(Mark::InUse)
    }

    /// Ends the group when no partial layer is left: the keeper closes it, too.
    pub(crate) fn release(&self, keeper: &dyn GroupKeeper) -> io::Result<()> {
        // The marker first: a kill before the keeper closes the group must not look like a loss.
        self.marker.remove()?;
        keeper.release()
    }
}

impl Drop for PreContentGroup {
    fn drop(&mut self) {
        // The thread uses numbers of `shared` when it starts, so it ends first.
        if self.stop().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Begins with a group whose journal another version of larder has written. Which events are outstanding is unknown, so
/// all numbers are denied that they may have: what was denied is read again, with a new event.
fn replace_journal(keeper: &dyn GroupKeeper, group: OwnedFd) -> io::Result<(KeptGroup, EventJournal)> {
    (0..MOST_NUMBERS).try_for_each(|number| respond(group.as_fd(), number, Answer::Deny))?;
    let kept = KeptGroup { group, journal: EventJournal::create()? };
    let journal = EventJournal::open(&kept.journal)?;
    keeper.release()?;
    keeper.keep(&kept)?;
    Ok((kept, journal))
}

fn new_group() -> io::Result<OwnedFd> {
    let class =
        InitFlags::FAN_CLASS_PRE_CONTENT | InitFlags::FAN_UNLIMITED_QUEUE | InitFlags::FAN_UNLIMITED_MARKS;
    let flags = class | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
    // A descriptor of an event is used for its number, so reading is all that it allows.
    Ok(Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_LARGEFILE | EventFFlags::O_CLOEXEC)?
        .into())
}

fn change_mark(group: BorrowedFd<'_>, change: MarkFlags, file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the descriptor is a fanotify group.
    let group = unsafe { Fanotify::from_owned_fd(group.try_clone_to_owned()?) };
    Ok(group.mark(change, MaskFlags::from_bits_retain(FAN_PRE_ACCESS), file, None::<&Path>)?)
}

/// Opens a file that is marked, so that its reads and writes raise no events: to fill it.
///
/// Only a descriptor that was opened before the mark, or that comes with an event, raises none. So this opens the file
/// and takes the descriptor that comes with the notification of it.
pub(crate) fn open_without_events(path: &Path) -> io::Result<OwnedFd> {
    let flags = InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
    let group =
        Fanotify::init(flags, EventFFlags::O_RDWR | EventFFlags::O_LARGEFILE | EventFFlags::O_CLOEXEC)?;
    group.mark(
        MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_DONT_FOLLOW,
        MaskFlags::FAN_OPEN,
        CWD,
        Some(path),
    )?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let _opened = rustix::fs::open(path, flags, Mode::empty())?;
    let events = group.read_events()?;
    let file = events.iter().find_map(FanotifyEvent::fd).ok_or(io::ErrorKind::NotFound)?;
    file.try_clone_to_owned()
}

/// Opens the file of a layer to check it as it is. Where this process may, without events: nothing answers those of a
/// group that is kept while no daemon runs.
pub(crate) fn open_to_check(path: &Path) -> io::Result<std::fs::File> {
    match open_without_events(path) {
        Ok(file) => Ok(file.into()),
        Err(_) => Ok(fs_err::File::open(path)?.into_parts().0),
    }
}

/// Why layers cannot be used here before they are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PreContentUnsupported {
    /// No `CAP_SYS_ADMIN` in the initial user namespace.
    #[error("it needs CAP_SYS_ADMIN")]
    NotPermitted,
    /// Older than Linux 6.14, or without `CONFIG_FANOTIFY_ACCESS_PERMISSIONS`.
    #[error("it needs Linux 6.14 with CONFIG_FANOTIFY_ACCESS_PERMISSIONS")]
    Kernel,
    /// A file system other than ext4, XFS and btrfs.
    #[error("it needs ext4, XFS or btrfs below the store")]
    FileSystem,
}

/// Finds out whether files of this directory raise pre-content events. An error says nothing about that.
pub(crate) fn probe(dir: &Path) -> io::Result<Result<(), PreContentUnsupported>> {
    let not_supported = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::PERM | Errno::ACCESS) => Ok(Err(PreContentUnsupported::NotPermitted)),
        Some(Errno::INVAL | Errno::NOSYS) => Ok(Err(PreContentUnsupported::Kernel)),
        Some(Errno::OPNOTSUPP) => Ok(Err(PreContentUnsupported::FileSystem)),
        _ => Err(error),
    };
    let group = match new_group() {
        Ok(group) => group,
        Err(error) => return not_supported(error),
    };
    let file = tempfile_in(dir)?;
    change_mark(group.as_fd(), MarkFlags::FAN_MARK_ADD, file.as_fd()).map(Ok).or_else(not_supported)
}

fn tempfile_in(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?)
}

/// Message of the event thread: no descriptors, which would be of the wrong table.
#[derive(Debug)]
struct ReadEvent {
    slot: usize,
    file: Option<FileId>,
    record: EventRecord,
}

/// The thread that reads events.
///
/// Its table of descriptors is its own. So nothing in it may use, drop or log through a descriptor of the others: it
/// speaks to them by memory only.
struct EventThread {
    /// Numbers of the group and of the eventfd in the table of the other threads, which this thread's begins as.
    group: RawFd,
    wake: RawFd,
    returned: Arc<Mutex<Returned>>,
    journal: EventJournal,
    sender: Sender<io::Result<ReadEvent>>,
    /// By slot: occupies the number of the event until it is answered.
    numbers: Vec<Option<OwnedFd>>,
    free: Vec<usize>,
}

impl EventThread {
    fn new(
        group: RawFd,
        wake: RawFd,
        returned: Arc<Mutex<Returned>>,
        journal: EventJournal,
        sender: Sender<io::Result<ReadEvent>>,
    ) -> EventThread {
        let numbers = (0..SLOTS).map(|_| None).collect();
        EventThread { group, wake, returned, journal, sender, numbers, free: Vec::new() }
    }

    fn run(mut self) {
        if let Err(error) =
            self.own_table().and_then(|()| self.recover()).and_then(|()| self.read_until_stopped())
        {
            let _ = self.sender.send(Err(error));
        }
    }

    /// Leaves the table of the other threads. Standard input becomes the eventfd, standard output the group, and only
    /// standard error stays what it was, for the message of a panic.
    fn own_table(&self) -> io::Result<()> {
        // SAFETY: from here on, this thread uses no descriptors but those that it opens.
        unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
        // SAFETY: both are open: the group outlives this thread, and this table is a copy.
        let (group, wake) =
            unsafe { (BorrowedFd::borrow_raw(self.group), BorrowedFd::borrow_raw(self.wake)) };
        dup2_stdin(wake)?;
        dup2_stdout(group)?;
        let numbers: Vec<RawFd> = fs_err::read_dir("/proc/thread-self/fd")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        for number in numbers.into_iter().filter(|number| *number >= FIRST_NUMBER) {
            // SAFETY: a copy in this table, which has no owner, or the descriptor of `read_dir`, which is closed.
            unsafe {
                if rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(number)).is_ok() {
                    rustix::io::close(number);
                }
            }
        }
        Ok(())
    }

    /// Sends the events that the process before this one has not answered.
    fn recover(&mut self) -> io::Result<()> {
        for (slot, file, records) in self.journal.recover() {
            let mut records = records.into_iter();
            let Some(record) = records.next() else { continue };
            // Numbers are given from the lowest on, and the table is empty: this occupies exactly this number.
            let occupied = rustix::io::fcntl_dupfd_cloexec(wake_fd(), record.number)?;
            self.numbers[slot] = Some(occupied);
            deny_all(records)?;
            self.send(slot, file, record);
        }
        let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
        let most = limit.map_or(SLOTS, |limit| limit.saturating_sub(8).min(SLOTS));
        self.free = (0..SLOTS).filter(|slot| self.numbers[*slot].is_none()).take(most).collect();
        Ok(())
    }

    fn read_until_stopped(&mut self) -> io::Result<()> {
        loop {
            let mut count = [0; 8];
            let _ = rustix::io::read(wake_fd(), &mut count);
            let (answered, stopped) = {
                let mut returned = self.returned.lock();
                (std::mem::take(&mut returned.slots), returned.stopped)
            };
            for slot in answered {
                self.journal.clear(slot);
                self.numbers[slot] = None;
                self.free.push(slot);
            }
            if stopped {
                return Ok(());
            }
            let Some(slot) = self.free.last().copied() else {
                wait(&mut [PollFd::from_borrowed_fd(wake_fd(), PollFlags::IN)])?;
                continue;
            };
            if self.read_into(slot)? {
                self.free.pop();
                continue;
            }
            let polled = [wake_fd(), group_fd()];
            wait(&mut polled.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)))?;
        }
    }

    /// Reads one event into a free slot, and sends it; false if there is none.
    fn read_into(&mut self, slot: usize) -> io::Result<bool> {
        let read = rustix::io::read(group_fd(), self.journal.buffer(slot));
        let records = match read {
            Ok(_) => EventRecord::parse(self.journal.buffer(slot)),
            Err(errno) => {
                self.journal.clear(slot);
                return match errno {
                    // In the last three cases the kernel has denied an event for which it has no descriptor.
                    Errno::AGAIN | Errno::INTR | Errno::NOMEM | Errno::NFILE | Errno::MFILE => Ok(false),
                    errno => Err(errno.into()),
                };
            }
        };
        let mut records = records.into_iter().filter(|record| record.number >= 0);
        let Some(record) = records.next() else {
            self.journal.clear(slot);
            return Ok(false);
        };
        // SAFETY: the kernel has opened this number for this thread.
        let opened = unsafe { OwnedFd::from_raw_fd(record.number) };
        let file = FileId::of(opened.as_fd())?;
        self.journal.set_file(slot, file);
        self.numbers[slot] = Some(opened);
        // Two events fit in only if neither has a range: none of them is of a mounted layer.
        let extra: Vec<EventRecord> = records.collect();
        deny_all(extra.iter().cloned())?;
        for record in extra {
            // SAFETY: as above; the event is answered.
            drop(unsafe { OwnedFd::from_raw_fd(record.number) });
        }
        self.send(slot, Some(file), record);
        Ok(true)
    }

    /// Nothing receives after the group is dropped: then the event stays outstanding.
    fn send(&self, slot: usize, file: Option<FileId>, record: EventRecord) {
        let _ = self.sender.send(Ok(ReadEvent { slot, file, record }));
    }
}

fn deny_all(records: impl Iterator<Item = EventRecord>) -> io::Result<()> {
    records.into_iter().try_for_each(|record| respond(group_fd(), record.number, Answer::Deny))
}

/// The group, in the event thread.
fn group_fd() -> BorrowedFd<'static> {
    rustix::stdio::stdout()
}

/// The eventfd, in the event thread.
fn wake_fd() -> BorrowedFd<'static> {
    rustix::stdio::stdin()
}

fn wait(polled: &mut [PollFd<'_>]) -> io::Result<()> {
    match poll(polled, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A file that says that a group is in use, and since which start of the machine.
#[derive(Debug)]
struct GroupMarker {
    path: std::path::PathBuf,
    boot: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// No group is in use since the machine started.
    None,
    InUse,
    Lost,
}

impl GroupMarker {
    fn new(path: &Path) -> io::Result<GroupMarker> {
        let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(GroupMarker { path: path.to_owned(), boot })
    }

    fn read(&self) -> io::Result<Mark> {
        match fs_err::read_to_string(&self.path) {
            Ok(text) => Ok(match text.split_whitespace().collect::<Vec<_>>()[..] {
                [boot, "in-use"] if boot == self.boot => Mark::InUse,
                [boot, "lost"] if boot == self.boot => Mark::Lost,
                _ => Mark::None,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Mark::None),
            Err(error) => Err(error),
        }
    }

    /// Takes effect at once or not at all. Not synced: a crash of the machine ends the group, too.
    fn write(&self, mark: Mark) -> io::Result<()> {
        let word = if mark == Mark::Lost { "lost" } else { "in-use" };
        let new = self.path.with_extension("new");
        fs_err::write(&new, format!("{} {word}\n", self.boot))?;
        fs_err::rename(new, &self.path)
    }

    fn remove(&self) -> io::Result<()> {
        match fs_err::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
