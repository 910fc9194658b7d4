//! The state directory of one backend: usage records, journal, keep rules, pull records, leases.
//!
//! One process at a time holds its lock. That process serves the control API, so that other processes work through it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder::hint::Hint;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::backend::BackendTarget;
use crate::environment::DefaultPaths;
use crate::error::{Error, NodeOpenError};

/// So many links of which one leads to the next are followed.
const LINKS: usize = 8;

/// The directory of one backend's state, and its lock once it is taken.
pub struct StateDir {
    path: PathBuf,
    lock: Option<fs_err::File>,
    roots: RootStateDir,
}

/// The state that root keeps of the same runtime, where this user is another one.
#[derive(Clone)]
enum RootStateDir {
    None,
    /// In this directory.
    Present(PathBuf),
    /// Unreadable for this user.
    Unknown(String),
}

impl StateDir {
    /// The state directory of a target: `state` if given, else its usual place. Creates nothing.
    pub fn of(state: Option<&Path>, target: &BackendTarget) -> Result<StateDir, Error> {
        match (state, target) {
            (Some(dir), _) => Ok(StateDir::at(dir.to_owned())),
            (None, BackendTarget::Store(root)) => Ok(StateDir::at(root.join("collect"))),
            (None, BackendTarget::Runtime(endpoint)) => {
                let machine = DefaultPaths::of(true, |_| None).root.unwrap_or_default();
                let own = DefaultPaths::current().root.ok_or_else(|| {
                    Error::bad_input("no state directory: neither XDG_DATA_HOME nor HOME is set")
                        .hint(named_state("name a directory: "))
                })?;
                Ok(StateDir::of_runtime(&own, &machine, endpoint))
            }
        }
    }

    fn of_runtime(root: &Path, root_of_root: &Path, endpoint: &str) -> StateDir {
        let name = file_name(&real(endpoint));
        let below = |root: &Path| root.join("collect/runtimes").join(&name);
        let roots =
            if root == root_of_root { RootStateDir::None } else { RootStateDir::in_dir(below(root_of_root)) };
        StateDir { roots, ..StateDir::at(below(root)) }
    }

    /// That in this directory.
    pub(crate) fn at(path: PathBuf) -> StateDir {
        StateDir { path, lock: None, roots: RootStateDir::None }
    }

    /// Root's, where this user is another one and root is known to collect here, too.
    pub(crate) fn of_root(&self) -> Option<StateDir> {
        match &self.roots {
            RootStateDir::Present(dir) => Some(StateDir::at(dir.clone())),
            RootStateDir::None | RootStateDir::Unknown(_) => None,
        }
    }

    /// Fails where root's records, rules and leases would not count.
    pub fn without_root_state(self) -> Result<StateDir, Error> {
        let problem = match &self.roots {
            RootStateDir::None => return Ok(self),
            RootStateDir::Present(dir) => format!(
                "root's larder also runs GC on this runtime: its keep rules and leases in {} are not readable",
                dir.display()
            ),
            RootStateDir::Unknown(problem) => {
                format!("cannot determine whether root's larder runs GC on this runtime: {problem}")
            }
        };
        Err(Error::failed(problem)
            .hint(
                Hint::from("run as root, or name root's daemon instead of the runtime: ")
                    .setting("daemon", "SOCKET"),
            )
            .hint(named_state("to ignore root's rules and records, use another state directory: ")))
    }

    /// Creates the directory and locks it until the value is dropped. Refuses where root keeps another one.
    pub(crate) fn lock(self) -> Result<StateDir, NodeOpenError> {
        self.without_root_state()?.lock_beside_root()
    }

    /// Locks the directory also where root keeps a state directory of the same runtime.
    pub(crate) fn lock_beside_root(self) -> Result<StateDir, NodeOpenError> {
        if let Some(roots) = self.of_root() {
            let dir = roots.path().display();
            tracing::warn!(
                "root's larder also runs GC on this runtime, and does not know these leases: {dir}"
            );
        }
        let mut dir = self;
        let open = || -> std::io::Result<fs_err::File> {
            larder::trusted_path::create_dir(&dir.path)?;
            let path = dir.path.join("lock");
            fs_err::OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
        };
        let lock = open().map_err(|error| {
            let other = named_state(match error.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free disk space, or name another: ",
                ErrorKind::ReadOnlyFilesystem => "name one that can be written: ",
                _ => "run as the owner of the directory, or name another: ",
            });
            NodeOpenError::Failed(
                Error::failed(format!("cannot open the state directory: {error}")).hint(other),
            )
        })?;
        let shown = dir.path.display();
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(NodeOpenError::InUse(
                    Error::failed(format!("the state directory {shown} is in use by another larder process"))
                        .hint("wait for the command to end, or stop the daemon")
                        .hint(named_state("or name another directory: ")),
                ));
            }
            Err(error) => {
                return Err(NodeOpenError::Failed(
                    Error::failed(format!("cannot lock the state directory {shown}: {error}"))
                        .hint(named_state("name a directory on a filesystem that supports locks: ")),
                ));
            }
        }
        dir.lock = Some(lock);
        Ok(dir)
    }

    /// Whether this process holds the lock.
    pub(crate) fn is_locked(&self) -> bool {
        self.lock.is_some()
    }

    /// The records of use.
    pub(crate) fn records(&self) -> PathBuf {
        self.path.join("records.json")
    }

    /// The journal of removals.
    pub(crate) fn history(&self) -> PathBuf {
        self.path.join("history.jsonl")
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where a daemon leaves the path of its socket, unless its backend is larder's own store.
    pub(crate) fn daemon(&self) -> PathBuf {
        self.path.join("daemon")
    }

    /// The directory of the pull records, in kubelet's layout.
    pub(crate) fn pull_records(&self) -> PathBuf {
        self.path.join("image_manager")
    }

    /// The leases on images.
    pub(crate) fn leases(&self) -> PathBuf {
        self.path.join("leases.json")
    }

    /// The images that are hidden from kubelet.
    pub(crate) fn hidden(&self) -> PathBuf {
        self.path.join("hidden.json")
    }

    /// Returns the path of the images that image sets of the cluster retain.
    pub(crate) fn image_sets(&self) -> PathBuf {
        self.path.join("image-sets.json")
    }

    /// The keep rules.
    pub(crate) fn keep(&self) -> PathBuf {
        self.path.join("keep.json")
    }
}

impl RootStateDir {
    fn in_dir(dir: PathBuf) -> RootStateDir {
        match fs_err::metadata(dir.join("lock")) {
            Ok(_) => RootStateDir::Present(dir),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                RootStateDir::None
            }
            Err(error) => RootStateDir::Unknown(format!("{}: {}", dir.display(), error.kind())),
        }
    }
}

/// An endpoint by its real path: `/run` and `/var/run` are mostly the same directory.
fn real(endpoint: &str) -> String {
    let path = endpoint.strip_prefix("unix://").map(Path::new);
    path.map_or_else(|| endpoint.to_owned(), |path| format!("unix://{}", real_path(path, LINKS).display()))
}

/// The runtime may be down, and its socket gone, or a link to nothing: the same path has to come of it.
fn real_path(path: &Path, links: usize) -> PathBuf {
    if let Ok(real) = path.canonicalize() {
        return real;
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path.to_owned() };
    match std::fs::read_link(path) {
        Ok(target) if links > 0 => real_path(&parent.join(target), links - 1),
        _ => real_path(parent, links).join(name),
    }
}

/// A socket as the name of a directory: `unix:///run/x/y.sock` is `run-x-y.sock`.
fn file_name(endpoint: &str) -> String {
    let path = endpoint.split_once("://").map_or(endpoint, |(_, path)| path).trim_matches('/');
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    path.chars().map(plain).collect()
}

/// A hint that ends in the setting of the state directory.
fn named_state(text: &'static str) -> Hint {
    Hint::from(text).setting("state", "DIR")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_runtime_has_a_directory_of_its_own() {
        assert_eq!(file_name("unix:///run/containerd/containerd.sock"), "run-containerd-containerd.sock");
        assert_eq!(file_name("unix:///run/crio/crio.sock"), "run-crio-crio.sock");
    }

    #[test]
    fn one_socket_has_one_directory_whatever_link_leads_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs_err::create_dir(path("run")).unwrap();
        std::os::unix::fs::symlink("run", path("var-run")).unwrap();
        let named = |name: &str| real(&format!("unix://{}", path(name).display()));
        assert_eq!(named("var-run/d.sock"), named("run/d.sock"));
        assert_ne!(named("run/e.sock"), named("run/d.sock"));
        let before = named("var-run/crio/crio.sock");
        std::os::unix::fs::symlink("../run/crio/crio.sock", path("run/link.sock")).unwrap();
        assert_eq!(named("var-run/link.sock"), before, "it leads to nothing yet");
        fs_err::create_dir(path("run/crio")).unwrap();
        fs_err::write(path("run/crio/crio.sock"), "").unwrap();
        for name in ["var-run/crio/crio.sock", "run/crio/crio.sock", "var-run/link.sock"] {
            assert_eq!(named(name), before, "{name}");
        }
        assert_eq!(real("tcp://h:1"), "tcp://h:1");
        assert_eq!(real("unix:///nowhere/d.sock"), "unix:///nowhere/d.sock");
    }

    /// A link to itself stands for a directory that this user may not look into: root may look into any.
    #[test]
    fn a_user_without_access_to_roots_state_does_not_collect() {
        let dir = tempfile::tempdir().unwrap();
        let (own, root) = (dir.path().join("own"), dir.path().join("root"));
        std::os::unix::fs::symlink("root", &root).unwrap();
        let place = StateDir::of_runtime(&own, &root, "unix:///nowhere/d.sock");
        assert!(place.of_root().is_none());
        let refused = place.without_root_state().err().unwrap();
        assert!(refused.message().contains("cannot determine whether"), "{}", refused.message());
    }

    #[test]
    fn an_unprivileged_user_does_not_collect_while_root_does() {
        let dir = tempfile::tempdir().unwrap();
        let (own, root) = (dir.path().join("own"), dir.path().join("root"));
        let place = |root_of_this: &Path| StateDir::of_runtime(root_of_this, &root, "unix:///nowhere/d.sock");
        assert!(place(&own).without_root_state().is_ok(), "root does not");
        drop(place(&root).lock().ok().unwrap());
        assert!(place(&root).without_root_state().is_ok());
        let refused = Error::from(place(&own).lock().err().unwrap());
        assert!(refused.message().contains("root/collect/runtimes/nowhere-d.sock"), "{}", refused.message());
        assert_eq!(place(&own).of_root().unwrap().path(), place(&root).path());
    }

    #[test]
    fn a_directory_that_others_prepared_or_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |text: &str| {
            let refused = Error::from(StateDir::at(dir.path().join("collect")).lock().err().unwrap());
            assert!(refused.message().contains(text), "{}", refused.message());
        };
        let path = dir.path().join("collect");
        drop(StateDir::at(path.clone()).lock().ok().unwrap());
        let mode = |mode| fs_err::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode));
        mode(0o757).unwrap();
        refused("collect is writable by users other than root and this user (mode 757");
        mode(0o755).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path.join("records.json")).unwrap();
        refused("records.json is a symbolic link");
    }

    #[test]
    fn one_process_at_a_time_has_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let place = || StateDir::at(dir.path().join("collect"));
        let first = place().lock().ok().unwrap();
        let refused = Error::from(place().lock().err().unwrap());
        assert!(refused.message().ends_with("is in use by another larder process"), "{}", refused.message());
        assert!(
            refused.next_steps()[0].to_string().contains("stop the daemon"),
            "{:?}",
            refused.next_steps()
        );
        drop(first);
        assert!(place().lock().is_ok());
    }
}
