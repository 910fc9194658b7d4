use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsOptions, ErofsTime, ErofsWriter};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::MountFlags;
use tempfile::TempDir;

use super::*;
use crate::erofs::{DetachedMount, LayerMountKind, detach};

const BLOCK: u64 = 4096;
/// Bytes of the file `data` of the layer.
const SIZE: u64 = 8 << 20;

/// A layer whose data is missing: the file `data`, and a program.
struct PartialLayer {
    dir: TempDir,
    /// The layer with its data.
    full: Vec<u8>,
    /// Was opened before the mark, so it raises no events.
    fill: std::fs::File,
}

impl PartialLayer {
    /// `None`, loudly, if this machine cannot do it.
    fn new() -> Option<PartialLayer> {
        let dir = tempfile::tempdir().unwrap();
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip mounts: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: fanotify needs root; run the tests as root ====");
            return None;
        }
        if let Err(reason) = probe(dir.path()).unwrap() {
            eprintln!("==== SKIPPED, NOT TESTED: reads that wait for their data: {reason} ====");
            return None;
        }
        let full = full_layer();
        let mut options = fs_err::OpenOptions::new();
        let opened = options.create_new(true).read(true).write(true).open(dir.path().join("layer"));
        let (file, _) = opened.unwrap().into_parts();
        let metadata = metadata_start(&full);
        file.write_all_at(&full[..4096], 0).unwrap();
        file.write_all_at(&full[metadata..], metadata as u64).unwrap();
        for name in ["mnt", "upper", "work", "merged"] {
            fs_err::create_dir(dir.path().join(name)).unwrap();
        }
        Some(PartialLayer { dir, full, fill: file })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Marks the layer, then mounts it.
    fn mount(&self, group: &PreContentGroup) {
        group.mark(self.fill.as_fd()).unwrap();
        let mount = DetachedMount::of(&self.path("layer"), LayerMountKind::File).unwrap();
        mount.attach(&self.path("mnt")).unwrap();
    }

    /// Mounts an overlay of the mounted layer at `merged`.
    fn mount_overlay(&self) {
        let [lower, upper, work] = ["mnt", "upper", "work"].map(|name| self.path(name).display().to_string());
        let options =
            std::ffi::CString::new(format!("lowerdir={lower},upperdir={upper},workdir={work}")).unwrap();
        let target = self.path("merged");
        rustix::mount::mount("overlay", target, "overlay", MountFlags::empty(), options.as_c_str()).unwrap();
    }

    fn data(&self) -> &[u8] {
        &self.full[4096..][..usize::try_from(SIZE).unwrap()]
    }

    fn block(&self, block: u64) -> &[u8] {
        &self.data()[usize::try_from(block * BLOCK).unwrap()..][..4096]
    }

    fn fill_and_allow(&self, event: PreContentEvent) {
        fill(&self.fill, &self.full, &event.range);
        event.answer(Answer::Allow).unwrap();
    }

    /// Runs `read` while all events are answered, then stops the group.
    fn serving<T: Send>(&self, group: &PreContentGroup, read: impl FnOnce() -> T + Send) -> T {
        answering(group, |event| self.fill_and_allow(event), read)
    }
}

fn answering<T: Send>(
    group: &PreContentGroup,
    answer: impl Fn(PreContentEvent),
    read: impl FnOnce() -> T + Send,
) -> T {
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read));
            group.stop().unwrap();
            result
        });
        while let Some(event) = group.next_event() {
            answer(event.unwrap());
        }
        reading.join().unwrap().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Drop for PartialLayer {
    fn drop(&mut self) {
        let _ = detach(&self.path("merged"));
        let _ = detach(&self.path("mnt"));
    }
}

/// Block 0, the data of both files, metadata.
fn full_layer() -> Vec<u8> {
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    let data: Vec<u8> =
        (0..SIZE).map(|at| (at.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0] | 1).collect();
    let program = fs_err::read("/bin/true").unwrap();
    for (path, content) in [(b"data", &data), (b"true", &program)] {
        let entry = ErofsEntry {
            path,
            kind: ErofsEntryKind::File { size: content.len() as u64 },
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime: ErofsTime::default(),
            xattrs: &[],
        };
        writer.add(&entry).unwrap();
        writer.write_data(content).unwrap();
    }
    let (full, _) = writer.finish().unwrap();
    assert!(full[4096..][..data.len()] == data, "data follows block 0");
    full
}

/// The field `meta_blkaddr` of the superblock.
fn metadata_start(full: &[u8]) -> usize {
    let block = u32::from_le_bytes(full[1024 + 40..][..4].try_into().unwrap());
    assert!(u64::from(block) > SIZE / BLOCK);
    usize::try_from(block).unwrap() * 4096
}

/// Writes the bytes of the range, as far as the layer has it.
fn fill(file: &std::fs::File, full: &[u8], range: &Range<u64>) {
    let end = usize::try_from(range.end.min(full.len() as u64)).unwrap();
    let start = usize::try_from(range.start).unwrap();
    file.write_all_at(&full[start..end], range.start).unwrap();
}

fn read_block(path: &Path, block: u64) -> io::Result<Vec<u8>> {
    let (file, _) = fs_err::File::open(path)?.into_parts();
    // Without read-ahead, whose size depends on the device.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
    let mut bytes = vec![0; 4096];
    file.read_exact_at(&mut bytes, block * BLOCK)?;
    Ok(bytes)
}

fn start_reading(layer: &PartialLayer, block: u64) -> JoinHandle<io::Result<Vec<u8>>> {
    let path = layer.path("mnt/data");
    thread::spawn(move || read_block(&path, block))
}

/// Holds the group in this process, like the keeper's process would.
#[derive(Debug, Default)]
struct Holder(Mutex<Option<KeptGroup>>);

impl GroupKeeper for Holder {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        self.0.lock().as_ref().map(KeptGroup::try_clone).transpose()
    }

    fn keep(&self, kept: &KeptGroup) -> io::Result<()> {
        *self.0.lock() = Some(kept.try_clone()?);
        Ok(())
    }

    fn release(&self) -> io::Result<()> {
        *self.0.lock() = None;
        Ok(())
    }
}

/// The keeper of a process that has inherited the descriptors.
#[derive(Debug)]
struct Inherited(KeptGroup);

impl GroupKeeper for Inherited {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        self.0.try_clone().map(Some)
    }

    fn keep(&self, _kept: &KeptGroup) -> io::Result<()> {
        unreachable!("it has a group")
    }

    fn release(&self) -> io::Result<()> {
        Ok(())
    }
}

fn next(group: &PreContentGroup) -> PreContentEvent {
    group.next_event().expect("not stopped").unwrap()
}

fn open_new(layer: &PartialLayer) -> (Holder, PreContentGroup) {
    let holder = Holder::default();
    let (group, state) = PreContentGroup::open(&holder, &layer.path("marker")).unwrap();
    assert_eq!(state, GroupState::New);
    layer.mount(&group);
    (holder, group)
}

fn reopen(layer: &PartialLayer, holder: &Holder) -> (PreContentGroup, GroupState) {
    PreContentGroup::open(holder, &layer.path("marker")).unwrap()
}

#[test]
fn a_reader_waits_for_missing_bytes_and_gets_them() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    let read = start_reading(&layer, 7);
    let event = next(&group);
    assert_eq!(event.file, Some(FileId::of(layer.fill.as_fd()).unwrap()));
    assert!(event.range.contains(&(8 * BLOCK)), "{event:?}");
    assert_eq!(event.pid, std::process::id().cast_signed());
    assert!(!read.is_finished());
    layer.fill_and_allow(event);
    assert!(read.join().unwrap().unwrap() == layer.block(7));
    let read = layer.serving(&group, || fs_err::read(layer.path("mnt/data")).unwrap());
    assert!(read == layer.data());
}

#[test]
fn mapped_executed_and_direct_reads_wait_through_an_overlay_too() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    layer.mount_overlay();
    layer.serving(&group, || {
        assert!(map(&layer.path("merged/data")) == layer.data());
        let ran = Command::new(layer.path("merged/true")).status().unwrap();
        assert!(ran.success(), "{ran}");
    });
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    if let Some(direct) = layer.serving(&group, || read_direct(&layer.path("mnt/data"), 9)) {
        assert!(direct.unwrap() == layer.block(9));
    }
}

/// The bytes of a file, read through a mapping.
fn map(path: &Path) -> Vec<u8> {
    let file = fs_err::File::open(path).unwrap();
    let length = usize::try_from(SIZE).unwrap();
    let (protection, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
    // SAFETY: a new mapping of a file that does not change its size.
    unsafe {
        let address = rustix::mm::mmap(std::ptr::null_mut(), length, protection, flags, &file, 0).unwrap();
        let bytes = std::slice::from_raw_parts(address.cast::<u8>(), length).to_vec();
        rustix::mm::munmap(address, length).unwrap();
        bytes
    }
}

/// Reads a block past the page cache of the mounted file; `None` with a kernel that does not open it for that.
fn read_direct(path: &Path, block: u64) -> Option<io::Result<Vec<u8>>> {
    let direct = OFlags::DIRECT.bits().cast_signed();
    let opened = fs_err::OpenOptions::new().read(true).custom_flags(direct).open(path);
    if opened.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
        return None;
    }
    let (file, _) = opened.unwrap().into_parts();
    let mut bytes = vec![0; 2 * 4096];
    let aligned = bytes.as_ptr().align_offset(4096);
    let read = file.read_exact_at(&mut bytes[aligned..][..4096], block * BLOCK);
    Some(read.map(|()| bytes[aligned..][..4096].to_vec()))
}

const MAP_FILE: &str = "LARDER_TEST_MAP_FILE";

#[test]
fn a_denied_reader_gets_an_error_and_later_ones_the_bytes() {
    if let Some(path) = std::env::var_os(MAP_FILE) {
        map(Path::new(&path));
        return;
    }
    let Some(layer) = PartialLayer::new() else { return };
    let (holder, group) = open_new(&layer);
    answering(
        &group,
        |event| event.answer(Answer::Deny).unwrap(),
        || {
            let error = read_block(&layer.path("mnt/data"), 3).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
            if let Some(read) = read_direct(&layer.path("mnt/data"), 3) {
                assert_eq!(Errno::from_io_error(&read.unwrap_err()), Some(Errno::IO));
            }
            let error = Command::new(layer.path("mnt/true")).status();
            assert!(!error.as_ref().is_ok_and(std::process::ExitStatus::success), "{error:?}");
            let mapped = run_again("a_denied_reader_gets_an_error_and_later_ones_the_bytes")
                .env(MAP_FILE, layer.path("mnt/data"))
                .output()
                .unwrap();
            assert_eq!(mapped.status.signal(), Some(7), "SIGBUS: {mapped:?}");
        },
    );
    drop(group);
    let (group, state) = reopen(&layer, &holder);
    assert_eq!(state, GroupState::Recovered);
    let read = layer.serving(&group, || fs_err::read(layer.path("mnt/data")).unwrap());
    assert!(read == layer.data());
}

/// This program, to run one test again.
fn run_again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("lazy::group::tests::{test}"), "--nocapture"]);
    command
}

#[test]
fn an_event_that_is_dropped_is_denied() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    answering(&group, drop, || read_block(&layer.path("mnt/data"), 3).unwrap_err());
}

#[test]
fn events_come_again_after_a_restart_and_keep_their_numbers() {
    let Some(layer) = PartialLayer::new() else { return };
    let (holder, group) = open_new(&layer);
    let reads = [100, 300, 500].map(|block| (block, start_reading(&layer, block)));
    let outstanding = [next(&group), next(&group), next(&group)];
    let facts = |event: &PreContentEvent| (event.number, event.file, event.range.clone(), event.pid);
    let mut before: Vec<_> = outstanding.iter().map(facts).collect();
    before.sort_by_key(|(number, ..)| *number);
    group.stop().unwrap();
    drop(outstanding);
    drop(group);

    let (group, state) = reopen(&layer, &holder);
    assert_eq!(state, GroupState::Recovered);
    let mut recovered = vec![next(&group), next(&group), next(&group)];
    recovered.sort_by_key(|event| event.number);
    assert_eq!(recovered.iter().map(facts).collect::<Vec<_>>(), before);
    let new_read = start_reading(&layer, 700);
    let event = next(&group);
    assert!(before.iter().all(|(number, ..)| *number != event.number), "{event:?}");
    layer.fill_and_allow(event);
    assert!(new_read.join().unwrap().unwrap() == layer.block(700));
    assert!(reads.iter().all(|(_, read)| !read.is_finished()));
    for event in recovered.into_iter().rev() {
        layer.fill_and_allow(event);
    }
    for (block, read) in reads {
        assert!(read.join().unwrap().unwrap() == layer.block(block), "block {block}");
    }
}

#[test]
fn reads_that_another_version_of_larder_has_left_are_answered() {
    let Some(layer) = PartialLayer::new() else { return };
    let (holder, group) = open_new(&layer);
    let reads = [100, 300, 500].map(|block| (block, start_reading(&layer, block)));
    let outstanding = [next(&group), next(&group), next(&group)];
    group.stop().unwrap();
    drop(outstanding);
    drop(group);
    let other = rustix::fs::memfd_create("another-layout", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    holder.0.lock().as_mut().unwrap().journal = other;

    let (group, state) = reopen(&layer, &holder);
    assert_eq!(state, GroupState::Recovered, "its group is as good as any");
    layer.serving(&group, || {
        for (block, read) in reads {
            assert!(read.join().unwrap().unwrap() == layer.block(block), "block {block}");
        }
    });
    drop(group);
    let (_group, state) = reopen(&layer, &holder);
    assert_eq!(state, GroupState::Recovered, "with the new journal");
}

#[test]
fn a_thousand_readers_get_their_bytes() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    let path = layer.path("mnt/data");
    let readers = |block_of: fn(u64) -> u64| {
        let (layer, path) = (&layer, &path);
        thread::scope(|scope| {
            for reader in 0..1000 {
                let read = move || {
                    let block = block_of(reader);
                    assert!(read_block(path, block).unwrap() == layer.block(block), "block {block}");
                };
                thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, read).unwrap();
            }
        });
    };
    thread::scope(|scope| {
        let one_range = scope.spawn(|| readers(|_| 5));
        let first = next(&group);
        layer.fill_and_allow(first);
        one_range.join().unwrap();
        let ranges = scope.spawn(|| readers(|reader| 6 + 2 * reader));
        // As many as the journal has slots; the kernel queues the others.
        let outstanding: Vec<PreContentEvent> = (0..SLOTS).map(|_| next(&group)).collect();
        for event in outstanding {
            layer.fill_and_allow(event);
        }
        layer.serving(&group, || ranges.join().unwrap());
    });
}

#[test]
fn a_reader_that_is_killed_while_it_waits_ends_at_once() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    let mut cat = Command::new("cat").arg(layer.path("mnt/data")).stdout(Stdio::null()).spawn().unwrap();
    let event = next(&group);
    assert_eq!(event.pid, cat.id().cast_signed());
    let other = start_reading(&layer, 0);
    cat.kill().unwrap();
    assert_eq!(cat.wait().unwrap().signal(), Some(9), "without an answer");
    layer.fill_and_allow(event);
    layer.serving(&group, || assert!(other.join().unwrap().unwrap() == layer.block(0)));
}

#[test]
fn a_group_that_was_closed_is_reported_as_lost_until_that_is_dealt_with() {
    let Some(layer) = PartialLayer::new() else { return };
    let (holder, group) = open_new(&layer);
    let read = start_reading(&layer, 7);
    let event = next(&group);
    group.stop().unwrap();
    holder.release().unwrap();
    drop((event, group));
    assert!(
        read.join().unwrap().unwrap() == [0; 4096],
        "why it must not be lost: the kernel lets the reader go on"
    );

    for _ in 0..2 {
        let (_group, state) = reopen(&layer, &holder);
        assert_eq!(state, GroupState::Lost);
    }
    let (group, _) = reopen(&layer, &holder);
    group.mark(layer.fill.as_fd()).unwrap();
    group.acknowledge_loss().unwrap();
    drop(group);
    let (group, state) = reopen(&layer, &holder);
    assert_eq!(state, GroupState::Recovered);
    let marked_again = layer.serving(&group, || read_block(&layer.path("mnt/data"), 600).unwrap());
    assert!(marked_again == layer.block(600));

    group.release(&holder).unwrap();
    let (_group, state) = reopen(&layer, &Holder::default());
    assert_eq!(state, GroupState::New, "after the last partial layer");
}

#[test]
fn a_group_of_before_the_machine_started_is_not_lost() {
    let Some(layer) = PartialLayer::new() else { return };
    fs_err::write(layer.path("marker"), "00000000-0000-0000-0000-000000000000 in-use\n").unwrap();
    open_new(&layer);
}

#[test]
fn reads_of_an_unmarked_file_and_of_one_opened_without_events_do_not_wait() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    let opened = std::fs::File::from(open_without_events(&layer.path("layer")).unwrap());
    let mut bytes = [1; 4096];
    opened.read_exact_at(&mut bytes, BLOCK).unwrap();
    assert_eq!(bytes, [0; 4096]);
    opened.write_all_at(layer.block(0), BLOCK).unwrap();
    opened.sync_data().unwrap();
    group.unmark(layer.fill.as_fd()).unwrap();
    group.unmark(layer.fill.as_fd()).unwrap();
    assert!(read_block(&layer.path("mnt/data"), 0).unwrap() == layer.block(0));
}

const EXHAUSTED: &str = "LARDER_TEST_NO_DESCRIPTORS";

#[test]
fn a_process_without_free_descriptors_still_answers() {
    let name = "a_process_without_free_descriptors_still_answers";
    if std::env::var_os(EXHAUSTED).is_none() {
        let run = run_again(name).env(EXHAUSTED, "1").output().unwrap();
        assert!(run.status.success(), "{run:?}");
        return;
    }
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    let (file, _) = fs_err::File::open(layer.path("mnt/data")).unwrap().into_parts();
    let mut taken = Vec::new();
    while let Ok(copy) = file.try_clone() {
        taken.push(copy);
    }
    let mut bytes = vec![0; 4096];
    layer.serving(&group, || file.read_exact_at(&mut bytes, 9 * BLOCK).unwrap());
    assert!(bytes == layer.block(9));
}

#[test]
fn the_event_thread_holds_no_descriptors_of_other_threads() {
    let Some(layer) = PartialLayer::new() else { return };
    let (_holder, group) = open_new(&layer);
    let read = start_reading(&layer, 7);
    let event = next(&group);
    let tasks = fs_err::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let mine =
        tasks.filter(|task| fs_err::read_to_string(task.join("comm")).unwrap().trim() == "layer-events");
    let tables = mine.map(|task| {
        let mut table: Vec<i32> = fs_err::read_dir(task.join("fd"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect();
        table.sort_unstable();
        table
    });
    assert_eq!(tables.collect::<Vec<_>>(), [[0, 1, 2, event.number]]);
    layer.fill_and_allow(event);
    read.join().unwrap().unwrap();
}

const LAYER_DIR: &str = "LARDER_TEST_LAYER_DIR";
const GROUP: &str = "LARDER_TEST_GROUP";
const JOURNAL: &str = "LARDER_TEST_JOURNAL";

#[test]
fn readers_get_right_bytes_however_often_the_process_is_killed() {
    if let Some(dir) = std::env::var_os(LAYER_DIR) {
        return answer_until_killed(Path::new(&dir));
    }
    let Some(layer) = PartialLayer::new() else { return };
    let (holder, group) = open_new(&layer);
    drop(group);
    fs_err::write(layer.path("full"), &layer.full).unwrap();
    let blocks = 600;
    let (readers, read) = (8, AtomicU64::new(0));
    let kills = thread::scope(|scope| {
        for reader in 0..readers {
            let (layer, read) = (&layer, &read);
            scope.spawn(move || {
                for step in 0..blocks / readers {
                    let block = (reader + step * readers) * 3;
                    let bytes = read_block(&layer.path("mnt/data"), block).unwrap();
                    assert!(bytes == layer.block(block), "block {block}");
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut kills = 0;
        while read.load(Ordering::Relaxed) < blocks {
            let (mut child, mut said) = start_child(&layer, &holder);
            // The child says each of its steps: the kill comes in or after one of them.
            let mut steps = 1 + kills * 7 % 30;
            while steps > 0 && read.load(Ordering::Relaxed) < blocks {
                let polled = PollFd::new(&said, PollFlags::IN);
                let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                if poll(&mut [polled], Some(&soon)).unwrap() == 1 {
                    let said_now = said.read(&mut vec![0; steps]).unwrap();
                    assert!(said_now > 0, "the child ended by itself");
                    steps -= said_now;
                }
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
        }
        kills
    });
    assert!(kills > 20, "{kills} kills");
}

fn start_child(layer: &PartialLayer, holder: &Holder) -> (Child, ChildStdout) {
    let kept = holder.take().unwrap().unwrap();
    // Copies that are inherited.
    let group = rustix::io::dup(&kept.group).unwrap();
    let journal = rustix::io::dup(&kept.journal).unwrap();
    let mut child = run_again("readers_get_right_bytes_however_often_the_process_is_killed")
        .env(LAYER_DIR, layer.dir.path())
        .env(GROUP, group.as_raw_fd().to_string())
        .env(JOURNAL, journal.as_raw_fd().to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = child.stdout.take().unwrap();
    (child, said)
}

fn answer_until_killed(dir: &Path) {
    let inherited = |name| {
        let number = std::env::var(name).unwrap().parse().unwrap();
        // SAFETY: the parent has passed it.
        unsafe { OwnedFd::from_raw_fd(number) }
    };
    let kept = KeptGroup { group: inherited(GROUP), journal: inherited(JOURNAL) };
    let (group, state) = PreContentGroup::open(&Inherited(kept), &dir.join("marker")).unwrap();
    assert_eq!(state, GroupState::Recovered);
    let layer = std::fs::File::from(open_without_events(&dir.join("layer")).unwrap());
    let full = fs_err::read(dir.join("full")).unwrap();
    let say = || rustix::io::write(rustix::stdio::stdout(), b".").unwrap();
    while let Some(event) = group.next_event() {
        let event = event.unwrap();
        say();
        match event.file {
            Some(file) => assert_eq!(file, FileId::of(layer.as_fd()).unwrap()),
            None => eprintln!("an event of an unknown file: {event:?}"),
        }
        fill(&layer, &full, &event.range);
        say();
        event.answer(Answer::Allow).unwrap();
        say();
    }
}
