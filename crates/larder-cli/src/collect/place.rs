//! Where collection keeps its state.

use fs_err::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::args::Connection;
use crate::connect::{Chosen, Target};
use crate::failure::Failure;
use crate::store;

/// The folder of one backend's state, and its lock once it is taken.
pub(crate) struct Place {
    folder: PathBuf,
    lock: Option<fs_err::File>,
}

impl Place {
    /// That of this backend; nothing is made yet.
    pub(crate) fn of(connection: &Connection, chosen: &Chosen) -> Result<Place, Failure> {
        Place::configured(connection.state.as_deref(), chosen)
    }

    /// That of this backend, if it is in no other folder.
    pub(crate) fn configured(state: Option<&Path>, chosen: &Chosen) -> Result<Place, Failure> {
        Place::of_target(state, &chosen.target())
    }

    /// That of what is here; nothing is made or opened yet.
    pub(crate) fn of_target(state: Option<&Path>, target: &Target) -> Result<Place, Failure> {
        let folder = match (state, target) {
            (Some(folder), _) => folder.to_owned(),
            (None, Target::Store(root)) => root.join("collect"),
            (None, Target::Runtime(endpoint)) => {
                store::default_root()?.join("collect/runtimes").join(file_name(endpoint))
            }
        };
        Ok(Place { folder, lock: None })
    }

    /// That in this folder.
    #[cfg(test)]
    pub(crate) fn at(folder: PathBuf) -> Place {
        Place { folder, lock: None }
    }

    /// Whether anybody has collected here.
    pub(crate) fn exists(&self) -> bool {
        self.folder.join("lock").is_file()
    }

    /// The same, made and locked until it is dropped.
    pub(crate) fn locked(mut self) -> Result<Place, Failure> {
        let open = || -> std::io::Result<fs_err::File> {
            fs_err::create_dir_all(&self.folder)?;
            let path = self.folder.join("lock");
            fs_err::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
        };
        let lock = open().map_err(|error| {
            Failure::failed(format!("no place for the state of collection: {error}"))
                .hint("run as the owner of the folder, or name another with --state DIR")
        })?;
        if let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            let folder = self.folder.display();
            return Err(Failure::failed(format!("{folder} is in use by another larder: {error}"))
                .hint("wait until it is done; one process collects at a time"));
        }
        self.lock = Some(lock);
        Ok(self)
    }

    /// The records of use.
    pub(crate) fn records(&self) -> PathBuf {
        self.folder.join("records.json")
    }

    /// The journal of removals.
    pub(crate) fn history(&self) -> PathBuf {
        self.folder.join("history.jsonl")
    }

    /// The folder itself.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the daemon says that it runs, unless it works on larder's own store.
    pub(crate) fn daemon(&self) -> PathBuf {
        self.folder.join("daemon")
    }

    /// The folder of the pull records, in kubelet's layout.
    pub(crate) fn pull_records(&self) -> PathBuf {
        self.folder.join("image_manager")
    }

    /// What commands made present without a daemon.
    pub(super) fn ensured(&self) -> PathBuf {
        self.folder.join("ensured.json")
    }

    /// The keep rules.
    pub(crate) fn keep(&self) -> PathBuf {
        self.folder.join("keep.json")
    }
}

/// A socket as the name of a folder: `unix:///run/x/y.sock` is `run-x-y.sock`.
fn file_name(endpoint: &str) -> String {
    let path = endpoint.split_once("://").map_or(endpoint, |(_, path)| path).trim_matches('/');
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    path.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_runtime_has_a_folder_of_its_own() {
        assert_eq!(file_name("unix:///run/containerd/containerd.sock"), "run-containerd-containerd.sock");
        assert_eq!(file_name("unix:///run/crio/crio.sock"), "run-crio-crio.sock");
    }

    #[test]
    fn one_process_at_a_time_has_the_place() {
        let folder = tempfile::tempdir().unwrap();
        let place = || Place { folder: folder.path().join("collect"), lock: None };
        let first = place().locked().ok().unwrap();
        assert!(place().locked().is_err());
        drop(first);
        assert!(place().locked().is_ok());
    }
}
