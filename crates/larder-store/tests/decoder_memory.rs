//! The memory of zstd decoders: a process of its own, since it is the process's that is measured.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use larder::reference::Digest;
use larder_store::unpack::{ExpectedLayer, UnpackOptions, UnpackThreads, unpack_layer};
use sha2::{Digest as _, Sha256};

/// Bytes of the largest window that is allowed by default.
const WINDOW: usize = 128 << 20;

const BLOCK: usize = 128 << 10;

/// An empty archive of a whole window of zeros, as a zstd frame (RFC 8878) of few bytes.
fn frame() -> Vec<u8> {
    // No checksum and no size; a window of 2^(10 + 17).
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3];
    let blocks = WINDOW / BLOCK;
    for number in 1..=blocks {
        // One byte that is repeated.
        let header = u32::try_from(BLOCK << 3 | 1 << 1 | usize::from(number == blocks)).unwrap();
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.push(0);
    }
    frame
}

/// The most memory that this process had at a time, in bytes, since it was last reset.
fn peak() -> usize {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn four_layers_with_the_largest_window_take_the_memory_of_one() {
    let (frame, dir) = (frame(), tempfile::tempdir().unwrap());
    let mut hasher = Sha256::new();
    let block = vec![0; BLOCK];
    (0..WINDOW / BLOCK).for_each(|_| hasher.update(&block));
    let hash = hasher.finalize().iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    let diff_id = Digest::parse(&format!("sha256:{hash}")).unwrap();
    fs_err::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (frame, diff_id, dir) = (&frame, &diff_id, dir.path());
            scope.spawn(move || {
                let layer = dir.join(format!("{number}"));
                let expected = ExpectedLayer { digest: None, size: None, diff_id };
                let options = UnpackOptions { threads: UnpackThreads::One, ..UnpackOptions::default() };
                let unpacked = unpack_layer(&frame[..], &expected, &layer, &options).unwrap().0;
                assert_eq!(unpacked.plain_bytes, WINDOW as u64);
            });
        }
    });
    let taken = peak() - before;
    assert!(taken > WINDOW / 2 && taken < WINDOW * 3 / 2, "{taken} bytes for windows of {WINDOW}");
}
