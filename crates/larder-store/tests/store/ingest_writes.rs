//! Ingested blobs are deleted before the kernel writes them to the disk.

use std::sync::Arc;

use larder_store::store::Store;

use crate::help::*;
use crate::recording_disk::RecordingDisk;

/// ext4 writes a file that was cut to nothing when it is closed.
#[test]
fn a_new_file_is_not_cut_to_nothing() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), RecordingDisk::default());
    let store = Store::open_on(Arc::new(disk.clone()), &dir.path().join("store"), config()).unwrap();
    let lengths = || disk.take_steps("set_len");
    lengths();
    store.ingest(&blob_of("blob", 100)).unwrap().write_at(b"0123456789", 0).unwrap();
    assert_eq!(lengths(), ["set_len 4196"]);
    store.ingest(&blob_of("blob", 100)).unwrap();
    assert!(lengths().is_empty(), "it goes on");
    let name = format!("sha256-{}", blob_of("blob", 100).ingest_id().digest().hex());
    fs_err::write(store.root().join("ingest").join(name).join("data"), "short").unwrap();
    store.ingest(&blob_of("blob", 100)).unwrap();
    assert_eq!(lengths(), ["set_len 0", "set_len 4196"], "nothing in it is of use");
}

/// A file that replaces another is written to the disk at once.
#[test]
fn a_fetch_notes_each_mib_and_replaces_no_file() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), RecordingDisk::default());
    let store = Store::open_on(Arc::new(disk.clone()), &dir.path().join("store"), config()).unwrap();
    disk.take_steps("");
    let file = store.ingest(&blob_of("blob", 8 << 20)).unwrap();
    for number in 0..8 {
        file.write_at(&vec![7; 1 << 20], number << 20).unwrap();
    }
    assert_eq!(disk.take_steps("rename"), [""; 0]);
}

#[test]
fn a_discarded_blob_counts_as_no_space_until_it_is_deleted() {
    let scratch = TempStore::new();
    let file = scratch.store.ingest(&blob_of("blob", 100)).unwrap();
    file.write_at(&[7; 100], 0).unwrap();
    let name = format!("sha256-{}", blob_of("blob", 100).ingest_id().digest().hex());
    let data = fs_err::File::open(scratch.root().join("ingest").join(name).join("data")).unwrap();
    file.discard().unwrap();
    assert_eq!(entries(&scratch.root().join("trash")).len(), 1, "it was not emptied");
    assert_eq!(data.metadata().unwrap().len(), 0);
}
