//! A private containerd: its own root, state, socket and registry settings; images only, no containers are run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;

use super::packages::{Package, program};
use super::process::ServerProcess;
use super::registry::RegistryProcess;
use super::{PeerError, PeerResult};

/// Plugins that tests do not need; each would inspect the machine or write outside of the private directory.
const DISABLED: &[&str] = &[
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.restart",
    "io.containerd.internal.v1.tracing",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.monitor.v1.cgroups",
];

/// What may differ from the usual private containerd.
#[derive(Debug, Clone, Default)]
pub struct ContainerdOptions {
    /// The directory below which its own is made. Default: the temporary directory.
    pub below: Option<PathBuf>,
    /// Another program than Debian's.
    pub program: Option<PathBuf>,
    /// Its `PATH`, where it looks for programs that inflate.
    pub path: Option<OsString>,
}

/// A containerd process and its state. Dropping it ends the process and removes the state.
#[derive(Debug)]
pub struct Containerd {
    server: Option<ServerProcess>,
    dir: TempDir,
    program: PathBuf,
    path: Option<OsString>,
}

impl Containerd {
    /// Starts a containerd with nothing in it, and waits until it serves CRI.
    pub fn start() -> PeerResult<Containerd> {
        Containerd::start_with(ContainerdOptions::default())
    }

    /// Starts a containerd with nothing in it that is not quite the usual one.
    pub fn start_with(options: ContainerdOptions) -> PeerResult<Containerd> {
        let below = options.below.unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::Builder::new().prefix("larder-containerd-").tempdir_in(below)?;
        for below in ["root", "state", "certs.d", "cni/conf", "cni/bin", "tmp"] {
            fs_err::create_dir_all(dir.path().join(below))?;
        }
        fs_err::write(dir.path().join("config.toml"), config(dir.path()))?;
        let program = options.program.map_or_else(|| program(Package::Containerd), Ok)?;
        let mut containerd = Containerd { server: None, dir, program, path: options.path };
        containerd.start_again()?;
        Ok(containerd)
    }

    /// Starts the process again on the same state and socket. Does nothing while it runs.
    pub fn start_again(&mut self) -> PeerResult<()> {
        if self.server.is_some() {
            return Ok(());
        }
        let dir = self.dir.path();
        let log = dir.join("containerd.log");
        let mut server = ServerProcess::start(
            "containerd",
            &self.program,
            |command| {
                command.arg("--config").arg(dir.join("config.toml")).env("TMPDIR", dir.join("tmp"));
                if let Some(path) = &self.path {
                    command.env("PATH", path);
                }
            },
            &log,
            &log,
        )?;
        let endpoint = self.endpoint();
        server.wait_ready(|| serves_cri(&endpoint))?;
        self.server = Some(server);
        Ok(())
    }

    /// Ends the process and keeps state, configuration and the socket file, as after a crash.
    pub fn stop(&mut self) {
        self.server = None;
        unmount_below(self.dir.path());
    }

    /// Process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(ServerProcess::pid)
    }

    /// Where it serves, such as `unix:///tmp/larder-containerd-x/containerd.sock`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("containerd.sock")
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs_err::read_to_string(self.dir.path().join("containerd.log")).unwrap_or_default()
    }

    /// Configures access to a registry: plain HTTP, or TLS with the registry's own CA. Takes effect at once.
    pub fn add_registry(&self, registry: &RegistryProcess) -> PeerResult<()> {
        self.knows_at(&registry.address(), registry.scheme(), registry.ca())
    }

    /// Like [`add_registry`](Self::add_registry), for anything that serves at `address` (`127.0.0.1:PORT`), such as a gate.
    pub fn knows_at(&self, address: &str, scheme: &str, ca: Option<&Path>) -> PeerResult<()> {
        // Named as the server and not as a mirror of itself: containerd would try it twice. The empty table is for
        // containerd 1.6, which ignores a file without it.
        let ca = ca.map_or_else(String::new, |ca| format!("ca = \"{}\"\n", ca.display()));
        let hosts = format!(
            "server = \"{scheme}://{address}\"\ncapabilities = [\"pull\", \"resolve\"]\n{ca}\n[host]\n"
        );
        let dir = self.dir.path().join("certs.d").join(address);
        fs_err::create_dir_all(&dir)?;
        fs_err::write(dir.join("hosts.toml"), hosts)?;
        Ok(())
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.stop();
    }
}

fn config(dir: &Path) -> String {
    let dir_text = dir.display();
    let snapshotter = if overlay_works(dir) { "overlayfs" } else { "native" };
    format!(
        r#"version = 2
root = "{dir_text}/root"
state = "{dir_text}/state"
disabled_plugins = {DISABLED:?}

[grpc]
  address = "{dir_text}/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
  disable_tcp_service = true
  restrict_oom_score_adj = true
  # Sizes of snapshots are measured this often, in seconds.
  stats_collect_period = 1
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{dir_text}/cni/bin"
    conf_dir = "{dir_text}/cni/conf"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{dir_text}/certs.d"
"#
    )
}

/// Whether an overlay can be mounted below `directory`: not on top of another overlay, as inside many containers.
fn overlay_works(dir: &Path) -> bool {
    let probe = dir.join("probe");
    let parts = ["lower", "upper", "work", "merged"].map(|part| probe.join(part));
    if parts.iter().any(|part| fs_err::create_dir_all(part).is_err()) {
        return false;
    }
    let [lower, upper, work, merged] = &parts;
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let options = std::ffi::CString::new(options).unwrap_or_default();
    let works = mount("overlay", merged, "overlay", MountFlags::empty(), options.as_c_str()).is_ok();
    if works {
        let _ = unmount(merged, UnmountFlags::DETACH);
    }
    let _ = fs_err::remove_dir_all(&probe);
    works
}

/// Whether a CRI image service answers at the endpoint. Which answer it gives is not looked at.
fn serves_cri(endpoint: &str) -> bool {
    // In a thread of its own: the caller may be inside a runtime already.
    std::thread::scope(|scope| scope.spawn(|| ask_cri(endpoint).is_ok()).join().unwrap_or(false))
}

fn ask_cri(endpoint: &str) -> PeerResult<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let failed = |error: &dyn std::error::Error| PeerError::new("ask for images", error);
        let endpoint = Endpoint::from_shared(endpoint.to_owned()).map_err(|error| failed(&error))?;
        let channel = endpoint.connect().await.map_err(|error| failed(&error))?;
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.map_err(|error| failed(&error))?;
        let path = PathAndQuery::from_static("/runtime.v1.ImageService/ListImages");
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        client.unary(tonic::Request::new(()), path, codec).await.map_err(|error| failed(&error))?;
        Ok(())
    })
}

/// Unmounts what a stopped containerd left mounted (a snapshot being unpacked), the deepest first.
pub(super) fn unmount_below(dir: &Path) {
    let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut points: Vec<PathBuf> = mounts
        .lines()
        .filter_map(|line| line.split_whitespace().nth(1))
        .map(PathBuf::from)
        .filter(|point| point.starts_with(dir))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    for point in points {
        if let Err(error) = unmount(&point, UnmountFlags::DETACH) {
            eprintln!("cannot unmount {}: {error}", point.display());
        }
    }
}
