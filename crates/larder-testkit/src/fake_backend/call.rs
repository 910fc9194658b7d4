//! Calls of the fake.

use larder::backend::ImageSpec;
use larder::credentials::Credential;
use larder::pod::SandboxConfig;

/// One call that reached the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendCall {
    /// [`Backend::info`](larder::backend::Backend::info).
    Info,
    /// [`Backend::list`](larder::backend::Backend::list).
    List,
    /// [`Backend::status`](larder::backend::Backend::status).
    Status {
        /// The requested name or id.
        image: String,
    },
    /// [`Backend::inspect`](larder::backend::Backend::inspect).
    Inspect {
        /// The requested name or id.
        image: String,
    },
    /// [`Backend::pull`](larder::backend::Backend::pull), noted when it begins.
    Pull {
        /// The requested name.
        image: String,
        /// User name of the credential; `None` for an anonymous pull.
        username: Option<String>,
    },
    /// [`Backend::remove`](larder::backend::Backend::remove).
    Remove {
        /// The name or id to remove.
        image: String,
    },
    /// [`Backend::filesystems`](larder::backend::Backend::filesystems).
    Filesystems,
    /// [`Backend::container_inventory`](larder::backend::Backend::container_inventory).
    InUse,
}

/// The calls a backend has, without their arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendOp {
    /// [`Backend::info`](larder::backend::Backend::info).
    Info,
    /// [`Backend::list`](larder::backend::Backend::list).
    List,
    /// [`Backend::status`](larder::backend::Backend::status).
    Status,
    /// [`Backend::inspect`](larder::backend::Backend::inspect).
    Inspect,
    /// [`Backend::pull`](larder::backend::Backend::pull).
    Pull,
    /// [`Backend::remove`](larder::backend::Backend::remove).
    Remove,
    /// [`Backend::filesystems`](larder::backend::Backend::filesystems).
    Filesystems,
    /// [`Backend::container_inventory`](larder::backend::Backend::container_inventory).
    InUse,
}

/// All that a call carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedCall {
    /// The call.
    pub call: BackendCall,
    /// The spec it carried, if any.
    pub spec: Option<ImageSpec>,
    /// The credential of a pull, if any.
    pub credential: Option<Credential>,
    /// The sandbox configuration of a pull, if any.
    pub sandbox: Option<SandboxConfig>,
}
