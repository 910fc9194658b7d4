//! The number of threads changes how fast a layer is unpacked, and nothing else.

use larder_store::unpack::{UnpackOptions, UnpackThreads};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::support::{UnpackDir, gzip};

const ALL: [UnpackThreads; 3] = [UnpackThreads::One, UnpackThreads::Two, UnpackThreads::Many];

#[test]
fn a_file_that_replaces_a_link_on_the_way_is_in_the_way() {
    for threads in ALL {
        let plain = TarBuilder::new()
            .with(TarBuilderEntry::symlink("link", "."))
            .with(TarBuilderEntry::file("link/link", "a file"))
            .with(TarBuilderEntry::file("link/b", "b"))
            .finish();
        let layer = UnpackDir::new();
        let error = layer
            .unpack_with(&plain, &plain, &UnpackOptions { threads, ..UnpackOptions::default() })
            .unwrap_err();
        assert!(error.to_string().contains("link/b"), "{threads:?}: {error}");
        assert!(!layer.root().join("b").exists(), "{threads:?}");
    }
}

/// Peak memory of this process so far, in KiB.
fn peak_kib() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Unpacks on many threads and says by how many KiB the peak grew.
fn growth(archive: TarBuilder) -> u64 {
    let plain = archive.finish();
    let packed = gzip(&plain);
    let before = peak_kib();
    let layer = UnpackDir::new();
    layer
        .unpack_with(
            &packed,
            &plain,
            &UnpackOptions { threads: UnpackThreads::Many, ..UnpackOptions::default() },
        )
        .unwrap();
    peak_kib() - before
}

#[test]
fn memory_does_not_depend_on_the_archive() {
    // cargo test runs all tests in one process, whose peak memory they share.
    if std::env::var_os("NEXTEST").is_none() {
        eprintln!("SKIPPED: memory is measured where each test has a process, with cargo nextest");
        return;
    }
    // A file that is not made yet holds back the records of all that follows.
    let target = "t/".repeat(2000);
    let links =
        |archive: TarBuilder, at| archive.with(TarBuilderEntry::symlink(format!("l{at}"), target.as_bytes()));
    let links = (0..10_000).fold(TarBuilder::new().with(TarBuilderEntry::file("first", "x")), links);
    let large = vec![b'x'; 900 << 10];
    let file = |at| {
        TarBuilderEntry::file(format!("d{}/f{at}", at % 7), "x").xattr("trusted.overlay.big", large.clone())
    };
    let files = (0..100).fold(TarBuilder::new(), |archive, at| archive.with(file(at)));
    for (what, archive) in [("links", links), ("attributes", files)] {
        let growth = growth(archive);
        assert!(growth < 16 << 10, "{what}: {growth} KiB more");
    }
}
