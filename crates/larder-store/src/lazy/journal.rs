//! Events that the kernel has handed out and that are not answered, in memory that outlives the process.
//!
//! The kernel itself writes an event into its slot, as the buffer of `read`: a kill leaves no moment between the
//! hand-out of an event and its record. The file of the layer is added next, since the event names it by a descriptor
//! only, which dies with the process. A slot is cleared after the event is answered. A kill between the two leaves a
//! record of an answered event: it is answered once more, to no effect.
//!
//! The memory is that of a memory file, which the keeper of the group holds beside the group: the journal is valid for
//! as long as the group, and needs no room on a disk.

#![allow(unsafe_code, reason = "a mapping of memory that the kernel writes events to")]

use std::ffi::c_void;
use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Events that may be outstanding; the kernel queues any others.
pub(super) const SLOTS: usize = 512;

/// Bytes of an event with a range. One read never returns more than one of them.
const EVENT_SIZE: usize = METADATA_SIZE + RANGE_SIZE;
const METADATA_SIZE: usize = 24;
const RANGE_SIZE: usize = 24;
/// `FAN_EVENT_INFO_TYPE_RANGE` of linux/fanotify.h.
const RANGE_TYPE: u8 = 6;

/// Changes with the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"larderE1");

/// A file, by device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId {
    pub(crate) dev: u64,
    pub(crate) ino: u64,
}

impl FileId {
    /// Identifies an open file.
    pub(crate) fn of(file: BorrowedFd<'_>) -> io::Result<FileId> {
        let stat = rustix::fs::fstat(file)?;
        Ok(FileId { dev: stat.st_dev, ino: stat.st_ino })
    }
}

/// An event as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EventRecord {
    /// Descriptor in the table of the thread that read it; negative without one.
    pub(super) number: i32,
    /// Process that reads.
    pub(super) pid: i32,
    /// Bytes that it reads; an event without a range is about the whole file.
    pub(super) range: Range<u64>,
}

impl EventRecord {
    /// Reads the events of a buffer that `read` has filled, up to the first byte that is not of one.
    pub(super) fn parse(mut bytes: &[u8]) -> Vec<EventRecord> {
        let mut records = Vec::new();
        while let Some(length) = u32_at(bytes, 0).and_then(|length| usize::try_from(length).ok())
            && length >= METADATA_SIZE
            && let Some(event) = bytes.get(..length)
        {
            let field = |at| u32_at(event, at).unwrap_or_default().cast_signed();
            records.push(EventRecord { number: field(16), pid: field(20), range: range_of(event) });
            bytes = &bytes[length..];
        }
        records
    }
}

fn range_of(event: &[u8]) -> Range<u64> {
    let mut info = event.get(METADATA_SIZE..).unwrap_or_default();
    while let [kind, _, length @ ..] = info
        && let [low, high, ..] = length
    {
        let length = usize::from(u16::from_ne_bytes([*low, *high]));
        if *kind == RANGE_TYPE
            && let (Some(offset), Some(count)) = (u64_at(info, 8), u64_at(info, 16))
        {
            return offset..offset.saturating_add(count);
        }
        info = if length == 0 { &[] } else { info.get(length..).unwrap_or_default() };
    }
    0..u64::MAX
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[repr(C)]
struct Slot {
    /// Zeros if the slot is free.
    event: [u8; EVENT_SIZE],
    file: FileSlot,
}

#[repr(C)]
struct FileSlot {
    dev: u64,
    ino: u64,
    /// 1 once the two are written.
    known: u64,
}

#[repr(C)]
struct Memory {
    magic: u64,
    slots: [Slot; SLOTS],
}

/// The journal of a group. One thread writes it.
#[derive(Debug)]
pub(super) struct EventJournal {
    memory: ptr::NonNull<Memory>,
}

// SAFETY: the mapping belongs to this value alone, and no thread has anything of its own in it.
unsafe impl Send for EventJournal {}

impl EventJournal {
    /// A new memory file with an empty journal.
    pub(super) fn create() -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("larder-events", flags)?;
        rustix::fs::ftruncate(&file, size_of::<Memory>() as u64)?;
        // A file that becomes shorter would end this process when it next writes.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        rustix::io::pwrite(&file, &MAGIC.to_ne_bytes(), 0)?;
        Ok(file)
    }

    /// Maps a journal; an error of the kind `InvalidData` if the file is none, or one of another larder's layout.
    pub(super) fn open(file: &OwnedFd) -> io::Result<EventJournal> {
        let sealed = rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let mut magic = [0; 8];
        let size = rustix::fs::fstat(file)?.st_size.cast_unsigned();
        let read = rustix::io::pread(file, &mut magic, 0)?;
        if !sealed || size != size_of::<Memory>() as u64 || (read, magic) != (8, MAGIC.to_ne_bytes()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a journal of this larder's events"));
        }
        let (protection, length) = (ProtFlags::READ | ProtFlags::WRITE, size_of::<Memory>());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, at an address that the kernel chooses, of a file that cannot become shorter.
        let address =
            unsafe { rustix::mm::mmap(ptr::null_mut(), length, protection, flags, file.as_fd(), 0) }?;
        // Only a page that is in memory is written in spite of a kill; with the limit of locked memory at zero, swap
        // may delay a page.
        // SAFETY: the mapping from above.
        let _ = unsafe { rustix::mm::mlock(address, length) };
        let memory = ptr::NonNull::new(address.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(EventJournal { memory })
    }

    fn slots(&mut self) -> &mut [Slot; SLOTS] {
        // SAFETY: the mapping is of this size and lives until `self` is dropped; all bit patterns are valid slots; the
        // keeper's process only holds the file, and the process before this one has ended.
        unsafe { &mut (*self.memory.as_ptr()).slots }
    }

    /// Buffer for the kernel to write one event to. The slot must be free.
    pub(super) fn buffer(&mut self, slot: usize) -> &mut [u8] {
        &mut self.slots()[slot].event
    }

    /// Adds the file of the event.
    pub(super) fn set_file(&mut self, slot: usize, id: FileId) {
        let file = ptr::from_mut(&mut self.slots()[slot].file);
        // SAFETY: a slot of the mapping. Volatile, so that a kill between them leaves no half that counts.
        unsafe {
            ptr::write_volatile(&raw mut (*file).dev, id.dev);
            ptr::write_volatile(&raw mut (*file).ino, id.ino);
            ptr::write_volatile(&raw mut (*file).known, 1);
        }
    }

    /// Frees a slot.
    pub(super) fn clear(&mut self, slot: usize) {
        let slot = ptr::from_mut(&mut self.slots()[slot]);
        // SAFETY: as in `set_file`. A kill in between leaves an event that is answered already, of an unknown file.
        unsafe {
            ptr::write_volatile(&raw mut (*slot).file.known, 0);
            ptr::write_volatile(&raw mut (*slot).event, [0; EVENT_SIZE]);
        }
    }

    /// Slots with the events that the process before this one left, each with its file if that is known.
    pub(super) fn recover(&mut self) -> Vec<(usize, Option<FileId>, Vec<EventRecord>)> {
        let slots = self.slots().iter().enumerate().filter_map(|(index, Slot { event, file })| {
            let id = (file.known == 1).then_some(FileId { dev: file.dev, ino: file.ino });
            let records = EventRecord::parse(event);
            (!records.is_empty()).then_some((index, id, records))
        });
        slots.collect()
    }
}

impl Drop for EventJournal {
    fn drop(&mut self) {
        // SAFETY: the mapping of `open`, which nothing borrows any more.
        let _ = unsafe { rustix::mm::munmap(self.memory.as_ptr().cast::<c_void>(), size_of::<Memory>()) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An event as the kernel writes it, with a range or without.
    fn event(number: i32, range: Option<(u64, u64)>) -> Vec<u8> {
        let length = if range.is_some() { EVENT_SIZE } else { METADATA_SIZE };
        let mut bytes = u32::try_from(length).unwrap().to_ne_bytes().to_vec();
        bytes.extend([3, 0]); // version, reserved
        bytes.extend(24_u16.to_ne_bytes());
        bytes.extend(0x0010_0000_u64.to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(42_i32.to_ne_bytes());
        if let Some((offset, count)) = range {
            bytes.extend([RANGE_TYPE, 0]);
            bytes.extend(24_u16.to_ne_bytes());
            bytes.extend([0; 4]);
            bytes.extend([offset.to_ne_bytes(), count.to_ne_bytes()].concat());
        }
        bytes
    }

    fn record(number: i32, range: Range<u64>) -> EventRecord {
        EventRecord { number, pid: 42, range }
    }

    #[test]
    fn an_event_without_a_range_is_about_the_whole_file() {
        assert_eq!(EventRecord::parse(&event(5, Some((4096, 100)))), [record(5, 4096..4196)]);
        assert_eq!(EventRecord::parse(&event(5, Some((1, u64::MAX)))), [record(5, 1..u64::MAX)]);
        let two = [event(6, None), event(7, None)].concat();
        assert_eq!(EventRecord::parse(&two), [record(6, 0..u64::MAX), record(7, 0..u64::MAX)]);
        assert_eq!(EventRecord::parse(&[0; EVENT_SIZE]), []);
    }

    proptest! {
        #[test]
        fn no_bytes_make_reading_an_event_panic(bytes: Vec<u8>, count in 0_u64..100, cut in 0_usize..48) {
            EventRecord::parse(&bytes);
            let event = event(5, Some((0, count)));
            EventRecord::parse(&[&event[..cut], &bytes[..]].concat());
        }
    }

    #[test]
    fn the_next_process_finds_events_that_are_not_cleared() {
        let file = EventJournal::create().unwrap();
        let id = FileId { dev: 1, ino: 2 };
        {
            let mut journal = EventJournal::open(&file).unwrap();
            for (slot, number) in [(0, 10), (1, 11), (511, 12)] {
                journal.buffer(slot).copy_from_slice(&event(number, Some((0, 1))));
            }
            journal.set_file(0, id);
            journal.set_file(1, id);
            journal.clear(0);
        }
        let mut journal = EventJournal::open(&file).unwrap();
        let expected = [(1, Some(id), vec![record(11, 0..1)]), (511, None, vec![record(12, 0..1)])];
        assert_eq!(journal.recover(), expected, "a kill came before the file of the last one was added");
        journal.clear(511);
        journal.buffer(0).copy_from_slice(&event(13, Some((0, 1))));
        assert_eq!(journal.recover()[0].1, None, "the file of an earlier event does not count");
    }

    #[test]
    fn another_file_is_no_journal() {
        let other = rustix::fs::memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&other, size_of::<Memory>() as u64).unwrap();
        assert_eq!(EventJournal::open(&other).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
