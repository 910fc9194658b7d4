//! The door to wherever images live: a container runtime behind CRI, an embedded store, a Docker engine.
//!
//! The trait is shaped like CRI's image service. Its contract is written at each method and checked for every
//! implementation by `larder_testkit::backend_suite`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use async_trait::async_trait;

use crate::credentials::Credential;
use crate::hint::Hint;
use crate::pod::SandboxConfig;
pub use crate::progress::{
    ByteProgress, LayerPhase, LayerProgress, ProgressReporter, PullDetail, PullStep, PullWait,
};
use crate::reference::{ImageId, ImageName};

/// Which image is meant, in the runtime's words.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ImageSpec {
    /// A name with tag or digest, exactly as the caller wrote it (`busybox:1.36` stays short), or an image id.
    pub image: ImageName,
    /// Annotations of the pod that wants it.
    pub annotations: BTreeMap<String, String>,
    /// Runtime handler, empty unless `RuntimeClassInImageCriApi` is on.
    pub runtime_handler: String,
    /// The name as the user wrote it; set for image volumes only.
    pub user_specified_image: ImageName,
}

impl ImageSpec {
    /// A spec that is nothing but a name or an id.
    pub fn named(image: impl Into<ImageName>) -> Self {
        ImageSpec { image: image.into(), ..ImageSpec::default() }
    }
}

/// An image that is present.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// The id, usually the digest of the image's config: `sha256:...`.
    pub id: ImageId,
    /// Names with tags, such as `docker.io/library/busybox:1.36`.
    pub repo_tags: Vec<String>,
    /// Names with digests, such as `docker.io/library/busybox@sha256:...`.
    pub repo_digests: Vec<String>,
    /// Bytes, as the runtime counts them (containerd: compressed; CRI-O: unpacked).
    pub size: u64,
    /// User id that the image's config names, if it is a number.
    pub uid: Option<i64>,
    /// User name that the image's config names, if it is not a number.
    pub username: String,
    /// The runtime asks not to collect this image (its sandbox image, for one).
    pub pinned: bool,
    /// The spec that the runtime reports, if it reports one.
    pub spec: Option<ImageSpec>,
}

/// A present image with what the runtime tells only when asked for everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageDetails {
    /// The image.
    pub image: Image,
    /// The runtime's free-form answer: key to text, often JSON (containerd: `info`).
    pub info: BTreeMap<String, String>,
}

/// Space taken by images or containers on one file system, as the runtime reports it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FilesystemUsage {
    /// A directory on that file system.
    pub mountpoint: PathBuf,
    /// When it was measured, in nanoseconds since 1970.
    pub timestamp_ns: i64,
    /// Bytes used; `None` when the runtime does not say.
    pub used_bytes: Option<u64>,
    /// Inodes used; `None` when the runtime does not say.
    pub inodes_used: Option<u64>,
}

/// The answer to "where do images and containers live, and how much do they take".
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filesystems {
    /// Where images live.
    pub image: Vec<FilesystemUsage>,
    /// Where containers' writable layers live; often the same.
    pub container: Vec<FilesystemUsage>,
}

/// A container, as far as it concerns images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Container {
    /// Id of the container.
    pub id: String,
    /// Name of the container within its pod.
    pub name: String,
    /// Id of the image that it runs. From runtimes before Kubernetes 1.30, whatever name they report.
    pub image_id: ImageId,
    /// Id of its pod sandbox.
    pub sandbox_id: String,
    /// Images mounted into it as volumes: their ids, or the names that the runtime reports.
    pub mounted_images: Vec<ImageId>,
    /// The runtime could not tell its mounts this time: any image may be mounted into it.
    pub mounts_unknown: bool,
    /// Whether it is running now.
    pub running: bool,
    /// `NAMESPACE/NAME` of its pod, if labelled.
    pub pod: String,
}

/// A pod sandbox, as far as it concerns images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sandbox {
    /// Id of the sandbox.
    pub id: String,
    /// `NAMESPACE/NAME` of its pod.
    pub pod: String,
    /// Runtime handler it was started with, empty for the default.
    pub runtime_handler: String,
    /// Whether it is ready.
    pub ready: bool,
}

/// What uses images right now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerInventory {
    /// All containers, running or not: a stopped container still needs its image.
    pub containers: Vec<Container>,
    /// All pod sandboxes.
    pub sandboxes: Vec<Sandbox>,
}

/// What larder talks to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuntimeInfo {
    /// Where it was reached, such as `unix:///run/containerd/containerd.sock`.
    pub endpoint: String,
    /// `containerd`, `cri-o`, ...
    pub name: String,
    /// Its version.
    pub version: String,
    /// Version of the API it speaks, such as `v1`.
    pub api_version: String,
    /// Its conditions, such as `RuntimeReady`.
    pub conditions: Vec<Condition>,
}

/// One condition of a runtime.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Condition {
    /// Such as `RuntimeReady` or `NetworkReady`.
    pub kind: String,
    /// Whether it holds.
    pub ok: bool,
    /// Why not, in a word.
    pub reason: String,
    /// Why not, in a sentence.
    pub message: String,
}

/// A place where images live.
///
/// Calls may overlap. Every call but [`pull`](Backend::pull) ends within a bounded time, with an error if need be.
/// Dropping a future abandons the call and leaves nothing half visible.
#[async_trait]
pub trait Backend: Send + Sync {
    /// What this is. The first call to make: it tells a missing or foreign endpoint from a working one.
    async fn info(&self) -> Result<RuntimeInfo, BackendError>;

    /// All images, in no particular order, each once.
    async fn list(&self) -> Result<Vec<Image>, BackendError>;

    /// `None` when the image is absent: absence is an answer, not an error.
    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError>;

    /// The same answer for who lists images, and is not about to use one: it promises nothing.
    async fn peek_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.status(image).await
    }

    /// Like [`status`](Backend::status), with everything the backend can tell.
    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError>;

    /// Makes an image present and returns its id. Anonymous without a credential; no fallback to anonymous with one.
    /// Has no time limit of its own: dropping the future cancels the pull.
    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError>;

    /// Removes an image under all its names. Succeeds when it is already gone, so that a sweep can be repeated.
    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError>;

    /// Which file systems hold images and containers, and what they take there.
    async fn filesystems(&self) -> Result<Filesystems, BackendError>;

    /// Which containers and sandboxes exist, running or not.
    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError>;
}

/// Why a backend did not answer as asked. The text of [`Call`](BackendError::Call) and
/// [`Incomplete`](BackendError::Incomplete) is kubelet's, word for word: people grep for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Nothing that can serve images answered at the endpoint. Nothing was done; a later call may find it back.
    #[error("{endpoint}: {problem}")]
    Unreachable {
        /// The endpoint as given or discovered.
        endpoint: String,
        /// What was found there instead.
        problem: EndpointFailure,
    },
    /// The runtime answered with an error.
    #[error("{message}")]
    Call {
        /// Kubelet's text for it: the bare message, or `rpc error: code = CODE desc = MESSAGE`.
        message: String,
        /// What the error means, for those who decide by it.
        kind: CallErrorKind,
        /// What the reader could try next, where the backend itself knows. CRI has no such field.
        hint: Option<Hint>,
    },
    /// The runtime's answer lacks something that every answer must have.
    #[error("{0}")]
    Incomplete(String),
}

impl BackendError {
    /// What the reader could try next.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            BackendError::Unreachable { problem, .. } => Some(problem.hint()),
            BackendError::Call { hint, .. } => hint.clone(),
            BackendError::Incomplete(_) => None,
        }
    }
}

/// The class of an error that a runtime answered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallErrorKind {
    /// The thing asked for does not exist.
    NotFound,
    /// The registry did not accept the credential, or its absence. CRI has no such code.
    Denied,
    /// The disk has no room for it. CRI has no such code.
    InsufficientSpace,
    /// The runtime did not answer within the deadline of the call.
    DeadlineExceeded,
    /// The call was given up.
    Canceled,
    /// The connection broke, or the runtime is shutting down.
    Unavailable,
    /// The runtime does not know this call.
    Unimplemented,
    /// Anything else.
    Other,
}

/// What was found at an endpoint instead of a working image service.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndpointFailure {
    /// There is no such socket.
    Missing,
    /// The path exists and is not a socket.
    NotASocket,
    /// A socket is there, and nobody listens on it.
    Refused,
    /// This user may not open the socket.
    Denied,
    /// Something accepted the connection and did not answer in time.
    Silent {
        /// How long larder waited.
        after: std::time::Duration,
    },
    /// Something answered, and it does not speak gRPC.
    NotGrpc {
        /// What the transport reported.
        detail: String,
    },
    /// A gRPC server answered, and it does not serve CRI v1.
    NotCri {
        /// What the server reported.
        detail: String,
    },
    /// What is wrong in the words of another kind of backend, and what could be tried next.
    Reported {
        /// What is wrong.
        problem: String,
        /// What the reader could try next.
        hint: Hint,
    },
    /// Any other trouble with the connection.
    ConnectionLost {
        /// What the system reported.
        detail: String,
    },
}

impl EndpointFailure {
    fn hint(&self) -> Hint {
        const SOCKET: &str = "unix:///path/to.sock";
        let text = match self {
            EndpointFailure::Missing => {
                return Hint::from("start the runtime, or set its socket with ").setting("backend", SOCKET);
            }
            EndpointFailure::NotASocket => {
                return Hint::from("set the runtime's socket with ").setting("backend", SOCKET);
            }
            EndpointFailure::NotGrpc { .. } => {
                return Hint::from("another service owns this socket; set the runtime's socket with ")
                    .setting("backend", "");
            }
            EndpointFailure::Reported { hint, .. } => return hint.clone(),
            EndpointFailure::Refused => "the runtime is stopped or starting; see the log of its service",
            EndpointFailure::Denied => "run as root or as a member of the group that owns the socket",
            EndpointFailure::Silent { .. } => "the runtime does not respond; see its log or restart it",
            EndpointFailure::NotCri { .. } => {
                "enable the CRI plugin (containerd: remove \"cri\" from disabled_plugins), or set another socket"
            }
            EndpointFailure::ConnectionLost { .. } => "see the runtime's log",
        };
        text.into()
    }
}

impl fmt::Display for EndpointFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EndpointFailure::Missing => f.write_str("socket not found"),
            EndpointFailure::NotASocket => f.write_str("not a socket"),
            EndpointFailure::Refused => f.write_str("connection refused: no process listens on this socket"),
            EndpointFailure::Denied => f.write_str("permission denied"),
            EndpointFailure::Silent { after } => {
                write!(f, "no answer within {}", crate::go_format::duration(*after))
            }
            EndpointFailure::NotGrpc { detail } => write!(f, "the server does not speak gRPC ({detail})"),
            EndpointFailure::NotCri { detail } => write!(f, "the server does not offer CRI v1 ({detail})"),
            EndpointFailure::Reported { problem, .. } => f.write_str(problem),
            EndpointFailure::ConnectionLost { detail } => f.write_str(detail),
        }
    }
}
