//! Ingested blobs are deleted before the kernel writes them to the disk.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use larder_store::disk::{Disk, DiskFile, FileOpenMode, FilesystemSync, RealDisk};
use larder_store::store::Store;

use crate::help::*;

/// The real disk, with a list of the lengths that files were set to.
#[derive(Debug, Clone, Default)]
struct SetLenRecorder(Arc<Mutex<Vec<u64>>>);

#[derive(Debug)]
struct SetLenRecorderFile(Arc<dyn DiskFile>, SetLenRecorder);

impl SetLenRecorder {
    fn lengths(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Disk for SetLenRecorder {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.create_dir(path)
    }
    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(SetLenRecorderFile(RealDisk.open(path, how)?, self.clone())))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove_file(path)
    }
    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        RealDisk.remove_tree(path, go_on)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_dir(path)
    }
    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        RealDisk.open_sync(path)
    }
    fn boot_id(&self) -> String {
        RealDisk.boot_id()
    }
}

impl DiskFile for SetLenRecorderFile {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.1.0.lock().unwrap().push(len);
        self.0.set_len(len)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// ext4 writes a file that was cut to nothing when it is closed.
#[test]
fn a_new_file_is_not_cut_to_nothing() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), SetLenRecorder::default());
    let store = Store::open_on(Arc::new(disk.clone()), &dir.path().join("store"), config()).unwrap();
    disk.lengths();
    store.ingest(&digest("blob"), 100).unwrap().write_at(b"0123456789", 0).unwrap();
    assert_eq!(disk.lengths(), [100]);
    store.ingest(&digest("blob"), 100).unwrap();
    assert!(disk.lengths().is_empty(), "it goes on");
    let name = format!("sha256-{}", digest("blob").hex());
    fs_err::write(store.root().join("ingest").join(name).join("data"), "short").unwrap();
    store.ingest(&digest("blob"), 100).unwrap();
    assert_eq!(disk.lengths(), [0, 100], "nothing in it is of use");
}

#[test]
fn a_discarded_blob_counts_as_no_space_until_it_is_deleted() {
    let scratch = TempStore::new();
    let file = scratch.store.ingest(&digest("blob"), 100).unwrap();
    file.write_at(&[7; 100], 0).unwrap();
    let name = format!("sha256-{}", digest("blob").hex());
    let data = fs_err::File::open(scratch.root().join("ingest").join(name).join("data")).unwrap();
    file.discard().unwrap();
    assert_eq!(entries(&scratch.root().join("trash")).len(), 1, "it was not emptied");
    assert_eq!(data.metadata().unwrap().len(), 0);
}
