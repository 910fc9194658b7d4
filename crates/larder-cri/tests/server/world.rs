//! A server in front of some backend, on a socket in a directory of its own.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use larder::backend::Backend;
use larder_cri::proto::image_service_server::ImageServiceServer;
use larder_cri::proto::runtime_service_server::RuntimeServiceServer;
use larder_cri::server::{CriService, ServerVersion, deadline_of, services, within};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::wire::RawConnection;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::{Request, Response};

pub(crate) struct CriTestServer {
    dir: tempfile::TempDir,
    serving: JoinHandle<()>,
}

impl CriTestServer {
    pub(crate) fn start(backend: impl Backend + 'static) -> CriTestServer {
        let dir = tempfile::Builder::new().prefix("larder-cri-").tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("larder.sock")).unwrap();
        let about = ServerVersion { name: "larder".into(), version: "1.2.3".into() };
        let (images, runtime) = services(Arc::new(backend), about);
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (images, runtime) = (images.clone(), runtime.clone());
                let answer = service_fn(move |request| answer(request, images.clone(), runtime.clone()));
                let http2 = http2::Builder::new(TokioExecutor::new());
                tokio::spawn(http2.serve_connection(TokioIo::new(stream), answer));
            }
        });
        CriTestServer { dir, serving }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("larder.sock")
    }

    pub(crate) async fn wire(&self) -> RawConnection {
        RawConnection::connect(&self.socket()).await
    }

    /// larder's own client, for the images of this server.
    pub(crate) fn client(&self) -> CriBackend {
        CriBackend::new(Endpoint::at(self.socket()), CriConfig::default())
    }

    /// The same for containers of another runtime, as with kubelet.
    pub(crate) fn client_beside(&self, runtime: &Path) -> CriBackend {
        let image_endpoint = Some(Endpoint::at(self.socket()));
        let config = CriConfig { image_endpoint, list_streaming: true, ..CriConfig::default() };
        CriBackend::new(Endpoint::at(runtime), config)
    }
}

impl Drop for CriTestServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(
    request: Request<Incoming>,
    mut images: ImageServiceServer<CriService>,
    mut runtime: RuntimeServiceServer<CriService>,
) -> Result<Response<Body>, Infallible> {
    let limit = deadline_of(request.headers());
    let service = request.uri().path().split('/').nth(1).unwrap_or_default();
    Ok(match service {
        "runtime.v1.ImageService" => within(limit, images.call(request)).await,
        "runtime.v1.RuntimeService" => within(limit, runtime.call(request)).await,
        _ => Status::unimplemented("unknown service").into_http(),
    })
}
