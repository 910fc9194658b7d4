//! A server in front of an image manager on some backend, on a socket in a directory of its own.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use larder::backend::{Backend, BackendError, Filesystems, Image, ImageDetails, ImageSpec, RuntimeInfo};
use larder::credentials::Credential;
use larder::pod::SandboxConfig;
use larder::pull::{ImageManager, PullConfig, StatusIntent};
use larder::reference::ImageId;
use larder::retention::RemovalGate;
use larder_cri::proto::image_service_server::ImageServiceServer;
use larder_cri::proto::runtime_service_server::RuntimeServiceServer;
use larder_cri::server::{CriImages, CriService, RuntimeProxy, ServerVersion, deadline_of, services, within};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::wire::RawConnection;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::{Request, Response};
use tonic::{Status, async_trait};

/// The services of a server.
#[derive(Clone)]
struct TestServices {
    images: ImageServiceServer<CriService>,
    runtime: RuntimeServiceServer<CriService>,
    proxy: Option<RuntimeProxy>,
}

/// A manager without settings of a node.
struct ManagedImages(ImageManager);

/// A manager that leases, and has no rate limit.
fn manager_of(backend: impl Backend + 'static) -> ImageManager {
    let config = PullConfig { registry_pull_qps: 0, ..PullConfig::default() };
    let (gate, lease) = (Arc::new(RemovalGate::default()), Duration::from_secs(60));
    ImageManager::new(Arc::new(backend)).with_config(&config).with_lease(gate, lease)
}

#[async_trait]
impl CriImages for ManagedImages {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.0.backend().info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.0.backend().list().await
    }

    async fn status(&self, image: &ImageSpec, intent: StatusIntent) -> Result<Option<Image>, BackendError> {
        self.0.status(image, intent).await
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.0.inspect(image).await
    }

    async fn pull(
        &self,
        image: ImageSpec,
        credential: Option<Credential>,
        sandbox: Option<SandboxConfig>,
    ) -> Result<ImageId, BackendError> {
        Ok(self.0.pull_directly(image, credential, sandbox).await?.image_ref)
    }

    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError> {
        self.0.remove(image).await.map(drop)
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.0.backend().filesystems().await
    }
}

pub(crate) struct CriTestServer {
    dir: tempfile::TempDir,
    serving: JoinHandle<()>,
}

impl CriTestServer {
    pub(crate) fn start(backend: impl Backend + 'static) -> CriTestServer {
        CriTestServer::start_with(manager_of(backend))
    }

    pub(crate) fn start_with(manager: ImageManager) -> CriTestServer {
        CriTestServer::serve(manager, None)
    }

    /// In front of the runtime at this socket.
    pub(crate) fn start_before(runtime: &Path) -> CriTestServer {
        let runtime = CriBackend::new(Endpoint::at(runtime), CriConfig::default());
        let proxy = RuntimeProxy::new(runtime.runtime_channel());
        CriTestServer::serve(manager_of(runtime), Some(proxy))
    }

    fn serve(manager: ImageManager, proxy: Option<RuntimeProxy>) -> CriTestServer {
        let dir = tempfile::Builder::new().prefix("larder-cri-").tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("larder.sock")).unwrap();
        let about = ServerVersion { name: "served".into(), version: "1.2.3".into() };
        let (images, runtime) = services(Arc::new(ManagedImages(manager)), about);
        let services = TestServices { images, runtime, proxy };
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let services = services.clone();
                let answer = service_fn(move |request| services.clone().answer(request));
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

    /// Connects a client with the containers of another runtime, as with kubelet.
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

impl TestServices {
    async fn answer(mut self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let limit = deadline_of(request.headers());
        let path = request.uri().path();
        if let Some(proxy) = self.proxy.filter(|_| RuntimeProxy::takes(path)) {
            return Ok(proxy.forward(request.map(Body::new)).await);
        }
        let service = path.split('/').nth(1).unwrap_or_default();
        Ok(match service {
            "runtime.v1.ImageService" => within(limit, self.images.call(request)).await,
            "runtime.v1.RuntimeService" => within(limit, self.runtime.call(request)).await,
            _ => Status::unimplemented("unknown service").into_http(),
        })
    }
}
