//! Serves any [`Backend`] as a CRI image service, for kubelet and crictl.
//!
//! ```text
//! request -> from_request.rs -> Backend -> to_response.rs
//!                                  '----> to_status.rs (the code and text of an error)
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

use larder::backend::Backend;

use crate::MAX_MESSAGE_BYTES;
use crate::proto::image_service_server::ImageServiceServer;
use crate::proto::runtime_service_server::RuntimeServiceServer;

pub use deadline::{deadline_of, within};
pub use runtime_proxy::{RuntimeProxy, known_method};

/// What the daemon calls itself over CRI. A runtime of this name is refused as a backend.
pub const NAME: &str = "larder";

/// The identity of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerVersion {
    /// Name of the program, such as `larder`.
    pub name: String,
    /// Its version, such as `0.1.0`.
    pub version: String,
}

/// `runtime.v1.ImageService`, complete, and of `runtime.v1.RuntimeService` the calls that tools make first:
/// `Version` and `Status`. The other calls of the latter return `Unimplemented`; where the backend is a runtime, the owner
/// of the socket sends those that change nothing to a [`RuntimeProxy`] instead.
///
/// Messages may have [`MAX_MESSAGE_BYTES`] in either direction.
pub fn services(
    backend: Arc<dyn Backend>,
    about: ServerVersion,
) -> (ImageServiceServer<CriService>, RuntimeServiceServer<CriService>) {
    let service = CriService { backend, about: Arc::new(about) };
    let images = ImageServiceServer::new(service.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let runtime = RuntimeServiceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    (images, runtime)
}

/// The handlers of both services. Made by [`services`].
#[derive(Clone)]
pub struct CriService {
    backend: Arc<dyn Backend>,
    about: Arc<ServerVersion>,
}

impl fmt::Debug for CriService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("about", &self.about).finish_non_exhaustive()
    }
}
