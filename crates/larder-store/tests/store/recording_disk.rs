//! The real disk, with a list of its steps. One of them waits if the test wants it.

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use larder_store::disk::{Disk, DiskFile, FileOpenMode, FilesystemSync, RealDisk};

/// The disk. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct RecordingDisk(Arc<Mutex<DiskSteps>>);

#[derive(Debug, Default)]
struct DiskSteps {
    done: Vec<String>,
    /// The beginning of the next step that waits.
    stall: Option<(&'static str, Sender<()>, Receiver<()>)>,
}

/// A step that waits until this is dropped.
pub(crate) struct DiskStall {
    reached: Receiver<()>,
    _go_on: Sender<()>,
}

impl DiskStall {
    /// Waits until the step has begun.
    pub(crate) fn wait(&self) {
        self.reached.recv().unwrap();
    }
}

#[derive(Debug)]
struct RecordedFile(Arc<dyn DiskFile>, RecordingDisk);

impl RecordingDisk {
    /// Takes the steps that begin with this word.
    pub(crate) fn take_steps(&self, word: &str) -> Vec<String> {
        let mut steps = std::mem::take(&mut self.0.lock().unwrap().done);
        steps.retain(|step| step.starts_with(word));
        steps
    }

    /// Lets the next step wait that begins with this text.
    pub(crate) fn stall(&self, step: &'static str) -> DiskStall {
        let ((begun, reached), (go_on, end)) = (channel(), channel());
        self.0.lock().unwrap().stall = Some((step, begun, end));
        DiskStall { reached, _go_on: go_on }
    }

    fn step(&self, step: String) {
        let mut steps = self.0.lock().unwrap();
        let stall = steps.stall.take_if(|(stalled, ..)| step.starts_with(*stalled));
        steps.done.push(step);
        drop(steps);
        if let Some((_, begun, end)) = stall {
            let _ = begun.send(());
            let _ = end.recv();
        }
    }
}

/// The last part of a path.
fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

impl Disk for RecordingDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step(format!("create_dir {}", name(path)));
        RealDisk.create_dir(path)
    }
    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        self.step(format!("open {}", name(path)));
        Ok(Arc::new(RecordedFile(RealDisk.open(path, how)?, self.clone())))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(format!("rename {}", name(from)));
        RealDisk.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step(format!("remove_file {}", name(path)));
        RealDisk.remove_file(path)
    }
    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        self.step(format!("remove_tree {}", name(path)));
        RealDisk.remove_tree(path, go_on)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step(format!("sync_dir {}", name(path)));
        RealDisk.sync_dir(path)
    }
    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        RealDisk.open_sync(path)
    }
    fn database_step(&self, file: &Path, step: &mut dyn FnMut()) -> io::Result<()> {
        self.step(format!("database {}", name(file)));
        step();
        Ok(())
    }
    fn boot_id(&self) -> String {
        RealDisk.boot_id()
    }
}

impl DiskFile for RecordedFile {
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
        self.1.step(format!("set_len {len}"));
        self.0.set_len(len)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.1.step("sync_data".to_owned());
        self.0.sync_data()
    }
}
