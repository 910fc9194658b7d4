//! Serves [`CriImages`] as a CRI image service, for kubelet and crictl.
//!
//! ```text
//! request -> from_request.rs -> CriImages -> to_response.rs
//!                                  '-------> to_status.rs (the code and text of an error)
//! ```
//!
//! [`services`] returns two tower services, which the owner of the socket routes by path; [`deadline_of`] and
//! [`within`] enforce a caller's deadline. Read `images.rs` first.
//!
//! Promises: a call that its caller abandons is dropped, which cancels it; no secret of a request reaches an error,
//! a log or a `Debug` text; a malformed request is an error for its caller only.

mod deadline;
mod from_request;
mod images;
mod runtime;
mod runtime_proxy;
mod to_response;
mod to_status;

use std::fmt;
use std::sync::Arc;

use larder::backend::{BackendError, Filesystems, Image, ImageDetails, ImageSpec, RuntimeInfo};
use larder::credentials::Credential;
use larder::pod::SandboxConfig;
use larder::pull::StatusIntent;
use larder::reference::ImageId;
use tonic::async_trait;

use crate::MAX_MESSAGE_BYTES;
use crate::proto::image_service_server::ImageServiceServer;
use crate::proto::runtime_service_server::RuntimeServiceServer;

pub use deadline::{deadline_of, within};
pub use runtime_proxy::{RuntimeProxy, known_method};

/// Name of the daemon over CRI. A runtime of this name is refused as a backend.
pub const NAME: &str = "larder";

/// The identity of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerVersion {
    /// Name of the program, such as `larder`.
    pub name: String,
    /// Its version, such as `0.1.0`.
    pub version: String,
}

/// The images that the server answers for: an image manager with the rules of its node.
#[async_trait]
pub trait CriImages: Send + Sync {
    /// Identity and conditions of the backend.
    async fn info(&self) -> Result<RuntimeInfo, BackendError>;

    /// All images that the caller may see.
    async fn list(&self) -> Result<Vec<Image>, BackendError>;

    /// The image; `None` when it is absent.
    async fn status(&self, image: &ImageSpec, intent: StatusIntent) -> Result<Option<Image>, BackendError>;

    /// The image with verbose details, which is to be used.
    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError>;

    /// Pulls an image and returns its ID. Dropping the future abandons the pull.
    async fn pull(
        &self,
        image: ImageSpec,
        credential: Option<Credential>,
        sandbox: Option<SandboxConfig>,
    ) -> Result<ImageId, BackendError>;

    /// Removes an image under all its names. Succeeds when it is already absent.
    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError>;

    /// The filesystems of images and containers, with their usage.
    async fn filesystems(&self) -> Result<Filesystems, BackendError>;
}

/// `runtime.v1.ImageService`, complete, and of `runtime.v1.RuntimeService` the calls that tools make first:
/// `Version` and `Status`. The other calls of the latter return `Unimplemented`; where the backend is a runtime, the
/// owner of the socket sends those that change nothing to a [`RuntimeProxy`] instead.
///
/// Messages may have [`MAX_MESSAGE_BYTES`] in either direction.
pub fn services(
    images: Arc<dyn CriImages>,
    about: ServerVersion,
) -> (ImageServiceServer<CriService>, RuntimeServiceServer<CriService>) {
    let service = CriService { images, about: Arc::new(about) };
    let image_server = ImageServiceServer::new(service.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let runtime_server = RuntimeServiceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    (image_server, runtime_server)
}

/// The handlers of both services. Made by [`services`].
#[derive(Clone)]
pub struct CriService {
    images: Arc<dyn CriImages>,
    about: Arc<ServerVersion>,
}

impl fmt::Debug for CriService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("about", &self.about).finish_non_exhaustive()
    }
}
