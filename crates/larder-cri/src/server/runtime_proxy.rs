//! Forwards the calls of `runtime.v1.RuntimeService` that change nothing, for tools such as crictl that know one
//! endpoint.
//!
//! Messages pass unread, so that no field is lost. Without a runtime, a call fails: an empty list would mean that no
//! container uses any image.

use std::fmt;

use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::{Request, Response, Uri};

use crate::channel::CriChannel;
use crate::proto::runtime_service_server::SERVICE_NAME;

/// Calls that read containers, sandboxes and their statistics.
const READ_ONLY: [&str; 13] = [
    "ListContainers",
    "StreamContainers",
    "ContainerStatus",
    "ContainerStats",
    "ListContainerStats",
    "StreamContainerStats",
    "ListPodSandbox",
    "StreamPodSandboxes",
    "PodSandboxStatus",
    "PodSandboxStats",
    "ListPodSandboxStats",
    "StreamPodSandboxStats",
    "RuntimeConfig",
];

/// The methods that [`services`](super::services) answers.
const OWN: [&str; 8] = [
    "ListImages",
    "StreamImages",
    "ImageStatus",
    "PullImage",
    "RemoveImage",
    "ImageFsInfo",
    "Version",
    "Status",
];

/// The method of a path, if it is one that is answered or forwarded.
pub fn known_method(path: &str) -> Option<&'static str> {
    let name = path.rsplit('/').next()?;
    OWN.into_iter().chain(READ_ONLY).find(|known| *known == name)
}

/// The runtime that answers calls about containers.
#[derive(Clone)]
pub struct RuntimeProxy(CriChannel);

impl RuntimeProxy {
    /// Forwards to the runtime of this connection.
    pub fn new(runtime: CriChannel) -> RuntimeProxy {
        RuntimeProxy(runtime)
    }

    /// Whether the method of this path is forwarded.
    pub fn takes(path: &str) -> bool {
        let method = path.strip_prefix('/').and_then(|path| path.strip_prefix(SERVICE_NAME));
        method.and_then(|method| method.strip_prefix('/')).is_some_and(|method| READ_ONLY.contains(&method))
    }

    /// The runtime's response, or the status of a runtime that cannot be reached.
    pub async fn forward(mut self, mut request: Request<Body>) -> Response<Body> {
        // The authority that a client sends is that of this server.
        let uri = Uri::builder().scheme("http").authority("localhost").path_and_query(request.uri().path());
        if let Ok(uri) = uri.build() {
            *request.uri_mut() = uri;
        }
        match self.0.call(request).await {
            Ok(response) => response.map(Body::new),
            Err(status) => status.into_http(),
        }
    }
}

impl fmt::Debug for RuntimeProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RuntimeProxy").field(self.0.endpoint()).finish()
    }
}
