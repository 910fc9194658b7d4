//! A bare gRPC client on a Unix socket. It sends what it is given and nothing else: deadlines, credentials and broken
//! messages are up to the test, and each response is that of the server.

use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use larder_cri::MAX_MESSAGE_BYTES;
use larder_cri::proto::image_service_client::ImageServiceClient;
use larder_cri::proto::runtime_service_client::RuntimeServiceClient;
use tokio::net::UnixStream;
use tonic::Request;
use tonic::body::Body;
use tonic::codegen::{Service, http};

/// One connection, which is not opened again.
#[derive(Clone, Debug)]
pub struct RawConnection(SendRequest<Body>);

impl RawConnection {
    /// Connects to a socket that is listened on.
    ///
    /// # Panics
    ///
    /// If the server does not speak HTTP/2.
    pub async fn connect(socket: &Path) -> RawConnection {
        let stream = UnixStream::connect(socket).await.expect("a listener");
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .max_header_list_size(1 << 20)
            .handshake(TokioIo::new(stream))
            .await
            .expect("HTTP/2 begins");
        tokio::spawn(connection);
        RawConnection(sender)
    }

    /// Calls `runtime.v1.ImageService`.
    pub fn images(&self) -> ImageServiceClient<RawConnection> {
        ImageServiceClient::with_origin(self.clone(), origin()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Calls `runtime.v1.RuntimeService`.
    pub fn runtime(&self) -> RuntimeServiceClient<RawConnection> {
        RuntimeServiceClient::with_origin(self.clone(), origin())
    }
}

fn origin() -> http::Uri {
    http::Uri::from_static("http://localhost")
}

/// A request whose caller says that it waits this long, such as `1m` for a millisecond. Nothing on this side enforces
/// it.
///
/// # Panics
///
/// If the text cannot be in a header.
pub fn with_deadline<T>(message: T, timeout: &str) -> Request<T> {
    let mut request = Request::new(message);
    let timeout = timeout.parse().expect("ASCII");
    request.metadata_mut().insert("grpc-timeout", timeout);
    request
}

impl Service<http::Request<Body>> for RawConnection {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
