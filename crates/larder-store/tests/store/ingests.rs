//! Blobs being fetched.

use std::io::{ErrorKind, Read as _};
use std::time::{Duration, SystemTime};

use larder_store::store::{LeaseRecord, LeaseResources, Store, StoreError};

use crate::help::*;

const MIB: u64 = 1 << 20;

#[test]
fn a_fetch_resumes_where_a_dead_process_stopped() {
    let scratch = TempStore::new();
    let file = scratch.store.ingest(&blob_of("blob", 10 * MIB)).unwrap();
    let chunk = vec![7; 1 << 20];
    file.write_at(&chunk, 0).unwrap();
    file.write_at(&chunk, 5 * MIB).unwrap();
    file.write_at(b"lost", 8 * MIB).unwrap();
    // Killed: nothing is dropped. The lock of this process has to be let go of by hand.
    let copy = scratch.dir.path().join("copy");
    copy_tree(&scratch.root(), &copy);
    let store = open(&copy);
    let file = store.ingest(&blob_of("blob", 10 * MIB)).unwrap();
    assert_eq!(file.present(), [0..MIB, 5 * MIB..6 * MIB]);
    let mut read = vec![0; 100];
    file.reader().read_exact(&mut read).unwrap();
    assert_eq!(read, [7; 100]);
}

fn copy_tree(from: &std::path::Path, to: &std::path::Path) {
    let copied = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

#[test]
fn a_failed_fetch_notes_every_byte() {
    let scratch = TempStore::new();
    let file = scratch.store.ingest(&blob_of("blob", 100)).unwrap();
    file.write_at(b"0123456789", 0).unwrap();
    drop(file);
    let scratch = scratch.reopen();
    let file = scratch.store.ingest(&blob_of("blob", 100)).unwrap();
    assert_eq!(file.done(), 10);
    file.forget().unwrap();
    assert_eq!(file.done(), 0);
    drop(file);
    assert_eq!(scratch.store.ingest(&blob_of("blob", 100)).unwrap().done(), 0);
}

#[test]
fn a_blob_of_another_size_restarts_at_byte_0() {
    let scratch = TempStore::new();
    scratch.store.ingest(&blob_of("blob", 100)).unwrap().write_at(b"0123456789", 0).unwrap();
    assert_eq!(scratch.store.ingest(&blob_of("blob", 50)).unwrap().done(), 0);
}

#[test]
fn notes_that_cannot_be_true_are_not_believed() {
    let scratch = TempStore::new();
    let dir = scratch
        .root()
        .join("ingest")
        .join(format!("sha256-{}", blob_of("blob", 100).ingest_id().digest().hex()));
    for damage in ["", "{}", r#"{"boot":"x","size":100,"durable":[],"present":[[0,101]]}"#] {
        scratch.store.ingest(&blob_of("blob", 100)).unwrap().write_at(b"0123456789", 0).unwrap();
        for record in ["extents", "extents.latest"] {
            fs_err::write(dir.join(record), damage).unwrap();
        }
        assert_eq!(scratch.store.ingest(&blob_of("blob", 100)).unwrap().done(), 0, "{damage:?}");
    }
    scratch.store.ingest(&blob_of("blob", 100)).unwrap().write_at(b"0123456789", 0).unwrap();
    fs_err::write(dir.join("data"), "short").unwrap();
    assert_eq!(scratch.store.ingest(&blob_of("blob", 100)).unwrap().done(), 0, "a cut file");
}

#[test]
fn one_process_fetches_a_blob_once_at_a_time() {
    let scratch = TempStore::new();
    let first = scratch.store.ingest(&blob_of("blob", 100)).unwrap();
    let error = scratch.store.ingest(&blob_of("blob", 100)).expect_err("it is being fetched");
    assert!(matches!(&error, StoreError::Busy { digest: blob } if *blob == digest("blob")), "{error}");
    drop(first);
    scratch.store.ingest(&blob_of("blob", 100)).expect("free again");
}

#[test]
fn more_bytes_than_declared_are_refused() {
    let scratch = TempStore::new();
    let file = scratch.store.ingest(&blob_of("blob", 4)).unwrap();
    let error = file.write_at(b"12345", 0).expect_err("it ends at byte 4");
    assert!(matches!(&error, StoreError::TooLong { digest: blob, .. } if *blob == digest("blob")), "{error}");
    assert!(matches!(file.write_at(b"1", u64::MAX), Err(StoreError::TooLong { .. })));
    file.write_at(b"1234", 0).unwrap();
    assert_eq!(file.done(), 4);
}

#[test]
fn a_reader_follows_the_bytes_as_they_are_written() {
    let scratch = TempStore::new();
    let content: Vec<u8> = (0..200_000_u32).map(|number| (number % 251) as u8).collect();
    let file = scratch.store.ingest(&blob_of("blob", content.len() as u64)).unwrap();
    let reader = {
        let mut reader = file.reader();
        std::thread::spawn(move || {
            let mut read = Vec::new();
            reader.read_to_end(&mut read).map(|_| read)
        })
    };
    // Two connections, the second half first.
    for (number, chunk) in content.chunks(1000).enumerate().rev() {
        file.write_at(chunk, number as u64 * 1000).unwrap();
    }
    assert_eq!(reader.join().unwrap().unwrap(), content);
}

#[test]
fn a_reader_gets_the_end_of_the_stream() {
    let scratch = TempStore::new();
    let file = scratch.store.ingest(&blob_of("blob", 100)).unwrap();
    file.write_at(b"0123456789", 0).unwrap();
    file.stop(ErrorKind::ConnectionReset, "the registry hung up");
    let mut read = Vec::new();
    let error = file.reader().read_to_end(&mut read).expect_err("bytes are missing");
    assert_eq!((error.kind(), read.as_slice()), (ErrorKind::ConnectionReset, &b"0123456789"[..]));
    assert_eq!(error.to_string(), "the registry hung up");
    file.resume();
    file.write_at(&[0; 90], 10).unwrap();
    file.reader().read_to_end(&mut Vec::new()).expect("all bytes came after all");
}

#[test]
fn fetched_blobs_are_removed_by_the_commit() {
    let scratch = TempStore::new();
    let layers = [layer(&scratch.store, "a")];
    let file = scratch.store.ingest(&blob(&facts("a"))).unwrap();
    file.write_at(&[0; 1000], 0).unwrap();
    drop(file);
    scratch.store.commit(&image(&["app"], &layers), noon()).unwrap();
    assert!(entries(&scratch.root().join("ingest")).is_empty());
}

#[test]
fn unused_partial_blobs_are_removed() {
    let scratch = TempStore::new();
    for blob in ["wanted", "forgotten", "open"] {
        scratch.store.ingest(&blob_of(blob, 100)).unwrap().write_at(b"x", 0).unwrap();
    }
    let leased =
        LeaseResources { ingests: vec![blob_of("wanted", 100).ingest_id()], ..LeaseResources::default() };
    let lease = LeaseRecord::granted("pull/1", leased, Duration::MAX, &noon().into());
    scratch.store.lease(&lease).unwrap();
    let open = scratch.store.ingest(&blob_of("open", 100)).unwrap();
    scratch.store.sweep(&SystemTime::now().into()).unwrap();
    assert_eq!(kept(&scratch.store), 3, "all are young");
    scratch.store.sweep(&(SystemTime::now() + Duration::from_secs(25 * 3600)).into()).unwrap();
    assert_eq!(kept(&scratch.store), 2);
    drop(open);
}

fn kept(store: &Store) -> usize {
    entries(&store.root().join("ingest")).len()
}
