//! Access to images: a container runtime behind CRI, larder's own store, or a Docker engine.
//!
//! The trait is shaped like CRI's image service. Its contract is documented at each method and tested for every
//! implementation by `larder_testkit::backend_suite`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;

use crate::chain::error_chain;
use crate::credentials::Credential;
use crate::gc::DiskSpace;
use crate::go_format;
use crate::hint::Hint;
pub use crate::image_fill::{FillProblem, ImageFill};
use crate::pod::SandboxConfig;
pub use crate::progress::{
    ByteProgress, LayerPhase, LayerProgress, MinimumRate, ProgressReporter, PullDetail, PullStep, PullWait,
    RateWindow,
};
use crate::reference::{ImageId, ImageName, Reference, names_platform};

/// The image of a call, as in CRI's `ImageSpec`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ImageSpec {
    /// A name with tag or digest, exactly as the caller wrote it (`busybox:1.36` stays short), or an image id.
    pub image: ImageName,
    /// Annotations of the requesting pod.
    pub annotations: BTreeMap<String, String>,
    /// Runtime handler, empty unless `RuntimeClassInImageCriApi` is on.
    pub runtime_handler: String,
    /// The name as the user wrote it; set for image volumes only.
    pub user_specified_image: ImageName,
    /// Options of the pull.
    pub options: PullOptions,
}

/// Options of a pull that CRI does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PullOptions {
    /// Whether to accept any certificate, and plain HTTP where a registry does not speak TLS.
    pub skip_tls_verify: bool,
    /// Whether to pull an image that the registry has for one other platform only, under its name with that platform.
    pub accept_only_platform: bool,
    /// Whether the image is for a container: an artifact has no command, and is refused.
    pub refuse_artifact: bool,
    /// When the pull returns.
    pub until: PullUntil,
}

/// State of the image at which a pull returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PullUntil {
    /// As the settings say for this image: `Startable` or `Complete`.
    #[default]
    Configured,
    /// Containers of the image can start. Data comes later, where the backend can pull the image so.
    Startable,
    /// All of the image is there.
    Complete,
}

impl ImageSpec {
    /// A spec with only a name or an ID.
    pub fn named(image: impl Into<ImageName>) -> Self {
        ImageSpec { image: image.into(), ..ImageSpec::default() }
    }

    /// Whether the name has a platform, which no runtime knows. That of this machine is cut off before.
    pub fn is_for_other_platform(&self) -> bool {
        names_platform(self.image.as_str())
    }

    /// Fails if the pull needs what a runtime does not do: for backends whose runtime pulls by its own configuration.
    pub fn check_runtime_pull(&self) -> Result<(), BackendError> {
        let (message, hint) = if self.is_for_other_platform() {
            let hint = Hint::from("larder's own store takes images for all platforms: ");
            ("the container runtime pulls images for its own platform only", hint.setting("backend", "store"))
        } else if self.options.skip_tls_verify {
            let hint = "configure the registry in the runtime: certs.d/HOST/hosts.toml of containerd, \
                        insecure-registries of Docker";
            ("the container runtime pulls, and verifies TLS as it is configured", Hint::from(hint))
        } else {
            return Ok(());
        };
        Err(BackendError::call(CallErrorKind::Other, message).with_hint(hint))
    }
}

/// An image that is present.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Image {
    /// The id, usually the digest of the image's config: `sha256:...`.
    pub id: ImageId,
    /// The type of an artifact, such as a model; empty for an image.
    pub artifact_type: String,
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
    /// Whether the runtime has pinned it, as it does with its sandbox image.
    pub pinned: bool,
    /// The spec that the runtime reports, if it reports one.
    pub spec: Option<ImageSpec>,
    /// Data that is still to come; `None` for a complete image.
    pub fill: Option<ImageFill>,
}

impl Image {
    /// Whether no name of the image is one of this machine's: it was pulled or loaded for other platforms.
    pub fn is_for_other_platforms(&self) -> bool {
        let mut names = self.repo_tags.iter().chain(&self.repo_digests).peekable();
        names.peek().is_some() && names.all(|name| names_platform(name))
    }
}

/// A present image with the runtime's verbose answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageDetails {
    /// The image.
    pub image: Image,
    /// The runtime's free-form answer: key to text, often JSON (containerd: `info`).
    pub info: BTreeMap<String, String>,
}

/// Disk usage of images or containers on one filesystem, as the runtime reports it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FilesystemUsage {
    /// A directory on that filesystem.
    pub mountpoint: PathBuf,
    /// When it was measured, in nanoseconds since 1970.
    pub timestamp_ns: i64,
    /// Bytes used; `None` when the runtime does not report it.
    pub used_bytes: Option<u64>,
    /// Inodes used; `None` when the runtime does not report it.
    pub inodes_used: Option<u64>,
}

/// The filesystems of images and containers, with their usage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filesystems {
    /// Filesystems of images.
    pub image: Vec<FilesystemUsage>,
    /// Filesystems of containers' writable layers; often the same.
    pub container: Vec<FilesystemUsage>,
}

/// A container, with the fields that concern images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Container {
    /// Id of the container.
    pub id: String,
    /// Name of the container within its pod.
    pub name: String,
    /// Id of the image that it runs. Runtimes before Kubernetes 1.30 may report a name.
    pub image_id: ImageId,
    /// Id of its pod sandbox.
    pub sandbox_id: String,
    /// Images mounted into it as volumes: their ids, or the names that the runtime reports.
    pub mounted_images: Vec<ImageId>,
    /// Why the runtime could not list its mounts this time, in its words: any image may be mounted into it.
    pub mounts_error: Option<String>,
    /// True while the container runs.
    pub running: bool,
    /// `NAMESPACE/NAME` of its pod, if labelled.
    pub pod: String,
    /// True for a mount of larder's own store; its name is the directory.
    pub is_mount: bool,
}

/// A pod sandbox, with the fields that concern images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sandbox {
    /// Id of the sandbox.
    pub id: String,
    /// `NAMESPACE/NAME` of its pod.
    pub pod: String,
    /// Runtime handler it was started with, empty for the default.
    pub runtime_handler: String,
    /// True if the sandbox is ready.
    pub ready: bool,
    /// The image that it runs: its id or a name; empty if the runtime does not report it.
    pub image: ImageId,
}

/// Containers and sandboxes, which use images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerInventory {
    /// All containers, running or not: a stopped container still needs its image.
    pub containers: Vec<Container>,
    /// All pod sandboxes.
    pub sandboxes: Vec<Sandbox>,
}

/// Identity and conditions of a backend.
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
    /// True if the condition holds.
    pub ok: bool,
    /// The reason, in CamelCase, if it is false.
    pub reason: String,
    /// The message, if it is false.
    pub message: String,
}

/// A backend that holds images.
///
/// Calls may overlap. Every call except [`pull`](Backend::pull) ends within a bounded time. Dropping a future abandons
/// the call and leaves no partial result visible.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Identifies the backend. The first call: it fails on a missing or foreign endpoint.
    async fn info(&self) -> Result<RuntimeInfo, BackendError>;

    /// All images, in no particular order, each once.
    async fn list(&self) -> Result<Vec<Image>, BackendError>;

    /// The image; `None` when it is absent, which is not an error.
    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError>;

    /// Like [`status`](Backend::status), but `None` also for an image that no container should start from, because the
    /// backend knows that its content is damaged: a pull replaces it.
    async fn usable_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.status(image).await
    }

    /// Like [`status`](Backend::status), with the backend's verbose details.
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

    /// The minimum rate of pulls; `None` if a pull that is canceled and begun again starts from the first byte.
    /// Otherwise it continues where it stopped, and the [manager](crate::pull::ImageManager) gives its slot to other
    /// pulls.
    fn minimum_rate(&self) -> Option<MinimumRate> {
        None
    }

    /// Removes an image, or names of it. Succeeds when it is already absent, so that a sweep can be repeated. Fails
    /// with [`FailedPrecondition`](CallErrorKind::FailedPrecondition) while a use that the options do not ignore
    /// retains the image.
    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError>;

    /// The filesystems of images and containers, with their usage.
    async fn filesystems(&self) -> Result<Filesystems, BackendError>;

    /// All containers and sandboxes, running or not.
    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError>;

    /// Changes of single names; `None` where an image is only removed under all its names, as over CRI.
    fn names(&self) -> Option<&dyn ImageNames> {
        None
    }

    /// Facts about the origin of images; `None` where the backend does not record them, as over CRI.
    fn origins(&self) -> Option<&dyn ImageOrigins> {
        None
    }
}

/// Facts that decide which pods may use an image. They are recorded, never inferred from what is absent.
#[async_trait]
pub trait ImageOrigins: Send + Sync {
    /// Whether an administrator loaded the image from an archive. Where the backend records no origins, an image
    /// without a pull record counts as preloaded.
    async fn is_preloaded(&self, id: &ImageId) -> Result<bool, BackendError>;

    /// The IDs of all images that the backend has a record of, also of those that are not listed because a layer is
    /// missing: a later pull may complete them.
    async fn recorded(&self) -> Result<Vec<ImageId>, BackendError>;

    /// Waits until no pull that has failed or was dropped can make an image present any more.
    async fn wait_for_ending_pulls(&self);
}

/// Changes of single names of present images. A backend that has them also removes single
/// [`names`](RemoveOptions::names).
#[async_trait]
pub trait ImageNames: Send + Sync {
    /// Adds a name with a tag to an image, and takes it from the image that has it. Returns whether the image is
    /// present.
    async fn add_name(&self, id: &ImageId, name: &Reference) -> Result<bool, BackendError>;
}

/// Conditions of a removal. By default an image is removed under all its names, unless it is in use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemoveOptions {
    /// Removes only these names, and the image if it has no other. Names that it does not have are ignored. Fails with
    /// [`Unimplemented`](CallErrorKind::Unimplemented) at a backend without [`ImageNames`].
    pub names: Option<Vec<String>>,
    /// Removes it even if it is mounted, where the backend can do that; its layers are retained until it is unmounted.
    pub force: bool,
}

impl RemoveOptions {
    /// Removes these names.
    pub fn of_names(names: Vec<String>) -> RemoveOptions {
        RemoveOptions { names: Some(names), ..RemoveOptions::default() }
    }

    /// Fails if single names are to be removed, for a backend without [`ImageNames`].
    pub fn require_all_names(&self) -> Result<(), BackendError> {
        if self.names.is_none() {
            return Ok(());
        }
        let message = "single names of an image cannot be removed here";
        Err(BackendError::call(CallErrorKind::Unimplemented, message))
    }
}

/// The effect of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    /// Only names were removed: the image has others.
    Names,
    /// The image is absent.
    Image {
        /// The disk space of the files that the call removed; `None` if the backend does not report it.
        freed: Option<DiskSpace>,
    },
}

impl Removed {
    /// The disk space of the files that the call removed, if the backend reports it.
    pub fn freed(self) -> Option<DiskSpace> {
        match self {
            Removed::Names => None,
            Removed::Image { freed } => freed,
        }
    }
}

/// Why a backend call failed.
///
/// The text of [`Call`](BackendError::Call) and [`Incomplete`](BackendError::Incomplete) is kubelet's, word for word.
/// It includes the causes, which are therefore no [`source`](std::error::Error::source): see
/// [`cause`](BackendError::cause).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// No image service answered at the endpoint. Nothing was done; a later call may succeed.
    #[error("{endpoint}: {problem}")]
    Unreachable {
        /// The endpoint as given or discovered.
        endpoint: String,
        /// Failure found at the endpoint.
        problem: EndpointFailure,
    },
    /// The runtime answered with an error.
    #[error("{message}")]
    Call {
        /// Kubelet's text for it: the bare message, or `rpc error: code = CODE desc = MESSAGE`.
        message: String,
        /// The class of the error.
        kind: CallErrorKind,
        /// The next step, if the backend knows one. CRI has no such field.
        hint: Option<Hint>,
        /// Cause that the backend reported, if it reported more than the text.
        cause: Option<ErrorCause>,
    },
    /// The runtime's answer lacks a required field.
    #[error("{0}")]
    Incomplete(String),
}

/// The cause of a failed call, for callers that know its type. Two causes with one text are equal.
#[derive(Debug, Clone)]
pub struct ErrorCause(Arc<dyn Error + Send + Sync>);

impl PartialEq for ErrorCause {
    fn eq(&self, other: &ErrorCause) -> bool {
        error_chain(&*self.0) == error_chain(&*other.0)
    }
}

impl Eq for ErrorCause {}

impl BackendError {
    /// A call that failed, with its whole text.
    pub fn call(kind: CallErrorKind, message: impl Into<String>) -> BackendError {
        BackendError::Call { message: message.into(), kind, hint: None, cause: None }
    }

    /// A call that failed for this cause, with its text.
    pub fn caused_by(kind: CallErrorKind, cause: impl Error + Send + Sync + 'static) -> BackendError {
        BackendError::call(kind, error_chain(&cause)).with_cause(cause)
    }

    /// Adds the cause of a failed call, whose text the message includes. No effect on other errors.
    #[must_use]
    pub fn with_cause(mut self, reported: impl Error + Send + Sync + 'static) -> BackendError {
        if let BackendError::Call { cause, .. } = &mut self {
            *cause = Some(ErrorCause(Arc::new(reported)));
        }
        self
    }

    /// Sets the next step after a failed call. No effect on other errors.
    #[must_use]
    pub fn with_hint(mut self, next_step: impl Into<Option<Hint>>) -> BackendError {
        if let BackendError::Call { hint, .. } = &mut self {
            *hint = next_step.into();
        }
        self
    }

    /// The class of a failed call; `None` if the backend gave no valid answer.
    pub fn kind(&self) -> Option<CallErrorKind> {
        match self {
            BackendError::Call { kind, .. } => Some(*kind),
            BackendError::Unreachable { .. } | BackendError::Incomplete(_) => None,
        }
    }

    /// The cause of a failed call, if it has this type.
    pub fn cause<T: Error + 'static>(&self) -> Option<&T> {
        match self {
            BackendError::Call { cause: Some(ErrorCause(cause)), .. } => cause.downcast_ref(),
            _ => None,
        }
    }

    /// Returns the next step that the reader could try.
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
    /// The object does not exist.
    NotFound,
    /// The registry rejected the credential, or requires one. CRI has no such code.
    Denied,
    /// The registry could not be reached. CRI has no such code: the text starts with `RegistryUnavailable`.
    RegistryUnavailable,
    /// The signature is missing or not acceptable. CRI has no such code: the text starts with
    /// `SignatureValidationFailed`.
    SignatureInvalid,
    /// Not enough disk space. CRI has no such code.
    InsufficientSpace {
        /// Bytes that garbage collection has to free for the call to succeed; `None` if that is unknown or does not
        /// help.
        reclaim_bytes: Option<ReclaimBytes>,
    },
    /// The state of the image forbids the call, such as the removal of an image that is kept or mounted.
    FailedPrecondition,
    /// The runtime did not answer within the deadline of the call.
    DeadlineExceeded,
    /// The call was canceled.
    Canceled,
    /// The connection broke, or the runtime is shutting down.
    Unavailable,
    /// The runtime does not know this call.
    Unimplemented,
    /// Anything else.
    Other,
}

/// The bytes that garbage collection has to free for a call. What an image takes on the disk is known when it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimBytes {
    /// The call may succeed with this much.
    pub least: u64,
    /// It probably succeeds with this much; never less than the least.
    pub likely: u64,
}

impl ReclaimBytes {
    /// Exactly this much.
    pub fn exactly(bytes: u64) -> ReclaimBytes {
        ReclaimBytes { least: bytes, likely: bytes }
    }

    /// What two calls need together.
    #[must_use]
    pub fn plus(self, other: ReclaimBytes) -> ReclaimBytes {
        ReclaimBytes {
            least: self.least.saturating_add(other.least),
            likely: self.likely.saturating_add(other.likely),
        }
    }
}

impl CallErrorKind {
    /// Returns the bytes that garbage collection has to free for the call to succeed; `None` where it does not help.
    pub fn reclaim_bytes(self) -> Option<ReclaimBytes> {
        match self {
            CallErrorKind::InsufficientSpace { reclaim_bytes } => reclaim_bytes,
            _ => None,
        }
    }
}

/// Why an endpoint is not a working image service.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndpointFailure {
    /// The socket does not exist.
    Missing,
    /// The path exists and is not a socket.
    NotASocket,
    /// No process listens on the socket.
    Refused,
    /// This user may not open the socket.
    Denied,
    /// The server accepted the connection and did not answer in time.
    Silent {
        /// How long larder waited.
        after: std::time::Duration,
    },
    /// The server does not speak gRPC.
    NotGrpc {
        /// Report of the transport.
        detail: String,
    },
    /// The gRPC server does not serve CRI v1.
    NotCri {
        /// Report of the server.
        detail: String,
    },
    /// Another larder serves this socket: it has the images of a runtime, or its own store, and is neither.
    Larder,
    /// An error of another kind of backend, with its own text and hint.
    Reported {
        /// Reason why it is invalid.
        problem: String,
        /// Next step that the reader could try.
        hint: Hint,
    },
    /// Any other connection error.
    ConnectionLost {
        /// Report of the system.
        detail: String,
    },
}

impl EndpointFailure {
    fn hint(&self) -> Hint {
        const SOCKET: &str = "unix:///path/to.sock";
        let text = match self {
            EndpointFailure::Missing => {
                return Hint::from("start the runtime, or name its socket with ").setting("backend", SOCKET);
            }
            EndpointFailure::Larder => {
                return Hint::from("use that daemon with ")
                    .setting("daemon", "PATH")
                    .text(", or name the runtime's socket with ")
                    .setting("backend", SOCKET);
            }
            EndpointFailure::NotASocket => {
                return Hint::from("name the runtime's socket with ").setting("backend", SOCKET);
            }
            EndpointFailure::NotGrpc { .. } => {
                return Hint::from("another service owns this socket; name the runtime's socket with ")
                    .setting("backend", "");
            }
            EndpointFailure::Reported { hint, .. } => return hint.clone(),
            EndpointFailure::Refused => "the runtime is stopped or starting; see the log of its service",
            EndpointFailure::Denied => "run as root or as a member of the group that owns the socket",
            EndpointFailure::Silent { .. } => "the runtime does not respond; see its log or restart it",
            EndpointFailure::NotCri { .. } => {
                "enable the CRI plugin (containerd: remove \"cri\" from disabled_plugins), or name another socket"
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
                write!(f, "no answer within {}", go_format::duration(*after))
            }
            EndpointFailure::NotGrpc { detail } => write!(f, "the server does not speak gRPC ({detail})"),
            EndpointFailure::NotCri { detail } => write!(f, "the server does not offer CRI v1 ({detail})"),
            EndpointFailure::Larder => f.write_str("served by larder itself, not by a container runtime"),
            EndpointFailure::Reported { problem, .. } => f.write_str(problem),
            EndpointFailure::ConnectionLost { detail } => f.write_str(detail),
        }
    }
}
