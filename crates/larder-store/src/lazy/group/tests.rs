use std::collections::BTreeSet;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsOptions, ErofsTime, ErofsWriter};
use tempfile::TempDir;

use super::*;
use crate::erofs::{DetachedMount, LayerMountKind, detach};

const BLOCK: u64 = 4096;
/// Bytes of the file in the layer.
const SIZE: u64 = 4 << 20;

/// A mounted layer with one file, `data`, whose bytes are missing; and all its bytes.
struct PartialLayer {
    dir: TempDir,
    full: Vec<u8>,
    /// Raises no events.
    fill: fs_err::File,
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
        let full = layer();
        let fill =
            fs_err::OpenOptions::new().create_new(true).read(true).write(true).open(dir.path().join("layer"));
        let fill = fill.unwrap();
        fill.file().write_all_at(&full[..4096], 0).unwrap();
        fill.file().write_all_at(&full[usize::try_from(BLOCK + SIZE).unwrap()..], BLOCK + SIZE).unwrap();
        for name in ["mnt", "upper", "work", "merged"] {
            fs_err::create_dir(dir.path().join(name)).unwrap();
        }
        Some(PartialLayer { dir, full, fill })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Marks the layer, then mounts it.
    fn mount(&self, group: &PreContentGroup) {
        group.mark(self.fill.file().as_fd()).unwrap();
        let mount = DetachedMount::of(&self.path("layer"), LayerMountKind::File).unwrap();
        mount.attach(&self.path("mnt")).unwrap();
    }

    fn content(&self) -> &[u8] {
        &self.full[usize::try_from(BLOCK).unwrap()..usize::try_from(BLOCK + SIZE).unwrap()]
    }

    fn fill(&self, range: &Range<u64>) {
        fill(self.fill.file(), &self.full, range);
    }

    /// Reads one block of the mounted file in a thread.
    fn read_block(&self, block: u64) -> JoinHandle<io::Result<Vec<u8>>> {
        let path = self.path("mnt/data");
        thread::spawn(move || {
            let mut bytes = vec![0; 4096];
            let file = fs_err::File::open(path)?;
            // Without read-ahead, whose size depends on the device.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
            file.file().read_exact_at(&mut bytes, block * BLOCK)?;
            Ok(bytes)
        })
    }

    fn assert_block(&self, block: u64, read: JoinHandle<io::Result<Vec<u8>>>) {
        let start = usize::try_from(block * BLOCK).unwrap();
        assert!(read.join().unwrap().unwrap() == self.content()[start..start + 4096], "block {block}");
    }
}

impl Drop for PartialLayer {
    fn drop(&mut self) {
        let _ = detach(&self.path("merged"));
        let _ = detach(&self.path("mnt"));
    }
}

/// The layer with all its bytes: block 0, the data of the file, metadata.
fn layer() -> Vec<u8> {
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    let data: Vec<u8> = (0..SIZE).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect();
    let entry = ErofsEntry {
        path: b"data",
        kind: ErofsEntryKind::File { size: SIZE },
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: ErofsTime::default(),
        xattrs: &[],
    };
    writer.add(&entry).unwrap();
    writer.write_data(&data).unwrap();
    let (full, _) = writer.finish().unwrap();
    assert!(full[4096..][..data.len()] == data, "data follows block 0");
    full
}

/// Writes the bytes of the range, as far as the layer has it.
fn fill(file: &std::fs::File, full: &[u8], range: &Range<u64>) {
    let end = range.end.min(full.len() as u64);
    let (start, end) = (usize::try_from(range.start).unwrap(), usize::try_from(end).unwrap());
    if start < end {
        file.write_all_at(&full[start..end], range.start).unwrap();
    }
}

/// Holds the group in this process, like the keeper's process would.
#[derive(Debug, Default)]
struct Holder(Mutex<Option<KeptGroup>>);

impl GroupKeeper for Holder {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        self.0.lock().as_ref().map(copy).transpose()
    }

    fn keep(&self, kept: &KeptGroup) -> io::Result<()> {
        *self.0.lock() = Some(copy(kept)?);
        Ok(())
    }

    fn release(&self) -> io::Result<()> {
        *self.0.lock() = None;
        Ok(())
    }
}

fn copy(kept: &KeptGroup) -> io::Result<KeptGroup> {
    Ok(KeptGroup { group: kept.group.try_clone()?, journal: kept.journal.try_clone()? })
}

fn next(group: &PreContentGroup) -> PreContentEvent {
    group.next_event().expect("not stopped").unwrap()
}

#[test]
fn a_reader_waits_for_missing_bytes_and_gets_them() {
    let Some(layer) = PartialLayer::new() else { return };
    let holder = Holder::default();
    let (group, state) = PreContentGroup::open(&holder, &layer.path("marker")).unwrap();
    assert_eq!(state, GroupState::New);
    layer.mount(&group);
    let read = layer.read_block(7);
    let event = next(&group);
    assert_eq!(event.file, Some(FileId::of(layer.fill.file().as_fd()).unwrap()));
    assert!(event.range.contains(&(8 * BLOCK)), "{event:?}");
    assert_eq!(event.pid, std::process::id().cast_signed());
    assert!(!read.is_finished());
    layer.fill(&event.range);
    event.answer(Answer::Allow).unwrap();
    layer.assert_block(7, read);
}
