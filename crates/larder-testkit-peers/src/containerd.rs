//! A private containerd: its own root, state, socket and registry settings. Pod sandboxes need the host's network.

pub mod pods;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use tonic::Request;
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

/// Differences from the usual private containerd.
#[derive(Debug, Clone, Default)]
pub struct ContainerdOptions {
    /// The directory below which its own is made. Default: the temporary directory.
    pub below: Option<PathBuf>,
    /// Another program than Debian's.
    pub program: Option<PathBuf>,
    /// Its `PATH`, where it looks for programs that inflate.
    pub path: Option<OsString>,
    /// Its sandbox image, instead of the default.
    pub sandbox_image: Option<String>,
    /// Socket of a snapshotter `larder`, which CRI then uses, too.
    pub snapshotter: Option<PathBuf>,
    /// Whether its CRI names the image of a layer to the snapshotter.
    pub announces_layers: bool,
}

/// A containerd process and its state. Dropping it ends the process and removes the state.
#[derive(Debug)]
pub struct Containerd {
    server: Option<ServerProcess>,
    dir: TempDir,
    program: PathBuf,
    path: Option<OsString>,
    has_overlay: bool,
}

impl Containerd {
    /// Starts a containerd with nothing in it, and waits until it serves CRI.
    pub fn start() -> PeerResult<Containerd> {
        Containerd::start_with(ContainerdOptions::default())
    }

    /// Starts a containerd with nothing in it that is not quite the usual one.
    pub fn start_with(options: ContainerdOptions) -> PeerResult<Containerd> {
        let below = options.below.clone().unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::Builder::new().prefix("larder-containerd-").tempdir_in(below)?;
        for below in ["root", "state", "certs.d", "cni/conf", "cni/bin", "tmp"] {
            fs_err::create_dir_all(dir.path().join(below))?;
        }
        let has_overlay = overlay_works(dir.path());
        let config = config(dir.path(), has_overlay, &options);
        fs_err::write(dir.path().join("config.toml"), config)?;
        let program = options.program.map_or_else(|| program(Package::Containerd), Ok)?;
        let mut containerd = Containerd { server: None, dir, program, path: options.path, has_overlay };
        containerd.start_again()?;
        Ok(containerd)
    }

    /// Returns true if it unpacks with the snapshotter `overlayfs`, and not with `native`.
    pub fn has_overlay(&self) -> bool {
        self.has_overlay
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

    /// Returns its log so far.
    pub fn log(&self) -> String {
        fs_err::read_to_string(self.dir.path().join("containerd.log")).unwrap_or_default()
    }

    /// Runs `ctr` in a namespace and returns what it prints.
    pub fn ctr(&self, namespace: &str, arguments: &[&str]) -> PeerResult<String> {
        let mut command = Command::new("ctr");
        let output = command.arg("-a").arg(self.socket()).args(["-n", namespace]).args(arguments).output()?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(PeerError::new(format_args!("run ctr {}", arguments.join(" ")), text))
    }

    /// Adds a resource to a lease of a namespace, which `ctr` cannot: `content` and a digest, or
    /// `snapshots/SNAPSHOTTER` and a key.
    pub fn add_to_lease(&self, namespace: &str, lease: &str, kind: &str, id: &str) -> PeerResult<()> {
        let resource = LeaseResource { id: id.to_owned(), kind: kind.to_owned() };
        let mut request =
            Request::new(AddLeaseResource { lease: lease.to_owned(), resource: Some(resource) });
        let namespace = namespace.parse().map_err(|error| PeerError::new("name a namespace", error))?;
        request.metadata_mut().insert("containerd-namespace", namespace);
        call(&self.endpoint(), "/containerd.services.leases.v1.Leases/AddResource", request)
    }

    /// Prepares a snapshot for unpacking a layer, as containerd's own client does before it fetches that. Fails if
    /// there is nothing to unpack.
    pub fn prepare_layer(
        &self,
        namespace: &str,
        snapshotter: &str,
        parent: &str,
        chain: &str,
    ) -> PeerResult<()> {
        let labels = [("containerd.io/snapshot.ref".to_owned(), chain.to_owned())].into();
        let message = PrepareSnapshot {
            snapshotter: snapshotter.to_owned(),
            key: format!("extract {chain}"),
            parent: parent.to_owned(),
            labels,
        };
        let mut request = Request::new(message);
        let namespace = namespace.parse().map_err(|error| PeerError::new("name a namespace", error))?;
        request.metadata_mut().insert("containerd-namespace", namespace);
        call(&self.endpoint(), "/containerd.services.snapshots.v1.Snapshots/Prepare", request)
    }

    /// Configures access to a registry: plain HTTP, or TLS with the registry's own CA. Takes effect at once.
    pub fn add_registry(&self, registry: &RegistryProcess) -> PeerResult<()> {
        self.knows_at(&registry.address(), registry.scheme(), registry.ca())
    }

    /// Like [`add_registry`](Self::add_registry), for anything that serves at `address` (`127.0.0.1:PORT`), such as a
    /// gate.
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

fn config(dir: &Path, has_overlay: bool, options: &ContainerdOptions) -> String {
    let sandbox_image = options
        .sandbox_image
        .as_ref()
        .map_or_else(String::new, |image| format!("  sandbox_image = \"{image}\"\n"));
    let dir_text = dir.display();
    let (snapshotter, plugin) = match &options.snapshotter {
        Some(socket) => {
            let address = socket.display();
            ("larder", format!("[proxy_plugins.larder]\n  type = \"snapshot\"\n  address = \"{address}\"\n"))
        }
        None if has_overlay => ("overlayfs", String::new()),
        None => ("native", String::new()),
    };
    let is_silent = !options.announces_layers;
    format!(
        r#"version = 2
root = "{dir_text}/root"
state = "{dir_text}/state"
disabled_plugins = {DISABLED:?}

[grpc]
  address = "{dir_text}/containerd.sock"

{plugin}
[plugins."io.containerd.grpc.v1.cri"]
  disable_tcp_service = true
  restrict_oom_score_adj = true
  # Sizes of snapshots are measured this often, in seconds.
  stats_collect_period = 1
{sandbox_image}  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{dir_text}/cni/bin"
    conf_dir = "{dir_text}/cni/conf"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    disable_snapshot_annotations = {is_silent}
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

/// `AddResourceRequest` of containerd's lease service.
#[derive(Clone, PartialEq, prost::Message)]
struct AddLeaseResource {
    #[prost(string, tag = "1")]
    lease: String,
    #[prost(message, optional, tag = "2")]
    resource: Option<LeaseResource>,
}

/// `PrepareSnapshotRequest` of containerd's snapshot service.
#[derive(Clone, PartialEq, prost::Message)]
struct PrepareSnapshot {
    #[prost(string, tag = "1")]
    snapshotter: String,
    #[prost(string, tag = "2")]
    key: String,
    #[prost(string, tag = "3")]
    parent: String,
    #[prost(map = "string, string", tag = "4")]
    labels: std::collections::HashMap<String, String>,
}

/// `Resource` of containerd's lease service.
#[derive(Clone, PartialEq, prost::Message)]
struct LeaseResource {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// Whether a CRI image service answers at the endpoint. Which answer it gives is not looked at.
fn serves_cri(endpoint: &str) -> bool {
    call(endpoint, "/runtime.v1.ImageService/ListImages", Request::new(())).is_ok()
}

/// One call, whose answer is not looked at.
fn call<M: prost::Message + 'static>(
    endpoint: &str,
    method: &'static str,
    request: Request<M>,
) -> PeerResult<()> {
    ask::<M, ()>(endpoint, method, request)
}

/// One call. In a thread of its own: the caller may be inside a runtime already.
fn ask<M: prost::Message + 'static, A: prost::Message + Default + 'static>(
    endpoint: &str,
    method: &'static str,
    request: Request<M>,
) -> PeerResult<A> {
    let called = std::thread::scope(|scope| scope.spawn(|| ask_here(endpoint, method, request)).join());
    called.map_err(|_| PeerError::new(method, "the call panicked"))?
}

fn ask_here<M: prost::Message + 'static, A: prost::Message + Default + 'static>(
    endpoint: &str,
    method: &'static str,
    request: Request<M>,
) -> PeerResult<A> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let failed = |error: &dyn std::error::Error| PeerError::new(method, error);
        let endpoint = Endpoint::from_shared(endpoint.to_owned()).map_err(|error| failed(&error))?;
        let channel = endpoint.connect().await.map_err(|error| failed(&error))?;
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.map_err(|error| failed(&error))?;
        let codec = tonic_prost::ProstCodec::<M, A>::default();
        let path = PathAndQuery::from_static(method);
        Ok(client.unary(request, path, codec).await.map_err(|error| failed(&error))?.into_inner())
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
