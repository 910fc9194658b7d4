//! Layers of many empty files, all of which wait for their lowers, need little memory: that of the whole process, as
//! the kernel counts it. One test, since it is measured.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::fmt::Write as _;
use std::io::{self, Read};
use std::sync::Arc;

use larder::reference::Digest;
use larder_store::unpack::{
    ExpectedLayer, LayerMemory, MergedLayers, UnpackOptions, UnpackThreads, unpack_layer,
};
use sha2::{Digest as _, Sha256};

const LAYERS: usize = 24;
const FILES: u64 = 16_000;
/// Bytes that all layers share.
const SHARED: usize = 1 << 20;
/// One layer may need more; the rest is buffers, and what the allocator does not give back. Layers that all kept their
/// entries would need 12 MiB beside that.
const PEAK: u64 = 9 << 20;

/// An archive of empty files, made while it is read.
struct EmptyFiles {
    next: u64,
    header: [u8; 512],
    rest: usize,
}

impl EmptyFiles {
    fn new() -> EmptyFiles {
        EmptyFiles { next: 0, header: [0; 512], rest: 0 }
    }

    fn fill_header(&mut self) {
        self.header = [0; 512];
        self.rest = 512;
        if self.next >= FILES {
            return;
        }
        let name = format!("directory{}/file{}", self.next / 1000, self.next);
        self.header[..name.len()].copy_from_slice(name.as_bytes());
        for (at, field) in
            [(100, "0000644\0"), (108, "0000000\0"), (116, "0000000\0"), (124, "00000000000\0")]
        {
            self.header[at..at + field.len()].copy_from_slice(field.as_bytes());
        }
        self.header[136..148].copy_from_slice(b"00000000000\0");
        self.header[148..156].fill(b' ');
        self.header[156] = b'0';
        self.header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u32 = self.header.iter().map(|byte| u32::from(*byte)).sum();
        self.header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}

impl Read for EmptyFiles {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.rest == 0 {
            // Two blocks of zeros are the end.
            if self.next == FILES + 2 {
                return Ok(0);
            }
            self.fill_header();
            self.next += 1;
        }
        let start = 512 - self.rest;
        let length = into.len().min(self.rest);
        into[..length].copy_from_slice(&self.header[start..start + length]);
        self.rest -= length;
        Ok(length)
    }
}

/// Most memory that this process ever had, in bytes.
fn peak_memory() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn many_layers_of_many_empty_files_wait_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (mut hasher, mut archive, mut block) = (Sha256::new(), EmptyFiles::new(), [0; 512]);
    while archive.read(&mut block).unwrap() > 0 {
        hasher.update(block);
    }
    let mut hex = String::new();
    for byte in hasher.finalize() {
        write!(hex, "{byte:02x}").unwrap();
    }
    let diff_id = Digest::parse(&format!("sha256:{hex}")).unwrap();
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let memory = LayerMemory::new(SHARED);
    let options = UnpackOptions {
        layer_memory: memory.clone(),
        threads: UnpackThreads::One,
        ..UnpackOptions::default()
    };
    let before = peak_memory();
    let mut waiting = Vec::new();
    for number in 0..LAYERS {
        let path = dir.path().join(number.to_string());
        let (unpacked, pending) = unpack_layer(EmptyFiles::new(), &expected, &path, &options).unwrap();
        assert_eq!(unpacked.entries, FILES);
        assert!(memory.used() <= SHARED, "{} bytes", memory.used());
        waiting.push(pending);
    }
    let all_wait = peak_memory() - before;
    let mut files = waiting
        .into_iter()
        .map(|pending| pending.finish(&MergedLayers::default(), &Arc::default()).unwrap().file);
    let first = files.next().unwrap();
    assert!(files.all(|file| file == first));
    let finished = peak_memory() - before;
    eprintln!("{all_wait} bytes more while all layers wait, {finished} at the end");
    assert!(finished < PEAK, "{finished} bytes");
}
