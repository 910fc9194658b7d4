//! The client: a [`Backend`] over CRI.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use larder::backend::{
    Backend, BackendError, ContainerInventory, EndpointFailure, Filesystems, Image, ImageDetails, ImageSpec,
    ProgressReporter, RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::pod::SandboxConfig;
use larder::reference::ImageId;
use parking_lot::Mutex;
use tonic::codegen::http::Uri;
use tonic::{Code, Request, Response, Status};

use crate::channel::{ConnectionCheck, CriChannel};
use crate::endpoint::Endpoint;
use crate::list_streaming::StreamSupport;
use crate::operations::{OperationObserver, Operations};
use crate::proto::image_service_client::ImageServiceClient;
use crate::proto::runtime_service_client::RuntimeServiceClient;
use crate::sandboxes::SandboxImages;
use crate::{MAX_MESSAGE_BYTES, convert, proto, server, status};

/// Added to the deadline that is sent to the runtime: larder's own clock decides, and words the error.
const DEADLINE_SLACK: Duration = Duration::from_secs(1);

/// The longest time limit of a call: a year. gRPC cannot express longer ones.
const LONGEST: Duration = Duration::from_secs(8760 * 3600);

/// Number of containers queried concurrently.
pub(crate) const STATUS_CALLS_AT_ONCE: usize = 8;

/// Settings of the connection to a runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "settings that are independent of each other")]
pub struct CriConfig {
    /// Time limit for opening a connection, the runtime's HTTP/2 preface included. Default 5 s.
    pub connect_timeout: Duration,
    /// Time limit of each method of [`Backend`] except a pull, once connected, whatever the number of its calls, as
    /// `runtimeRequestTimeout`. Default 2 min; at most a year.
    pub request_timeout: Duration,
    /// Endpoint of the image service, as `imageServiceEndpoint`. Default: that of the runtime service.
    pub image_endpoint: Option<Endpoint>,
    /// Request lists as streams, as the gate `CRIListStreaming`; falls back to whole lists for good if the runtime does
    /// not support streams. Default off.
    pub list_streaming: bool,
    /// Send and report runtime handlers of images, as the gate `RuntimeClassInImageCriApi`. Default off.
    pub runtime_class_in_image: bool,
    /// Determine which images are mounted as volumes. Costs one call for each container the first time it is seen,
    /// because lists of containers do not contain it. Default on.
    pub image_volumes: bool,
    /// Refuse each connection to another larder, before any other call. [`Backend::info`] refuses it in any case.
    /// Default off.
    pub refuse_larder: bool,
    /// Names of images to report as pinned, as patterns with `*`;
    /// [`CONFIGURED_SANDBOX_IMAGE`](crate::CONFIGURED_SANDBOX_IMAGE) is the one that the runtime's configuration names.
    /// Default none.
    pub sandbox_images: Vec<String>,
}

impl Default for CriConfig {
    fn default() -> Self {
        CriConfig {
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(120),
            image_endpoint: None,
            list_streaming: false,
            runtime_class_in_image: false,
            image_volumes: true,
            refuse_larder: false,
            sandbox_images: Vec::new(),
        }
    }
}

/// The images that a container mounts, or the runtime's error.
type ContainerMounts = Result<Vec<ImageId>, String>;

/// A container runtime behind its CRI socket.
///
/// Long-lived: it reconnects automatically. Needs a tokio runtime with time and network; one thread is enough.
pub struct CriBackend {
    config: CriConfig,
    runtime: CriChannel,
    images: CriChannel,
    stream_images: StreamSupport,
    stream_containers: StreamSupport,
    stream_sandboxes: StreamSupport,
    /// Images mounted by each known container; they do not change during its life.
    mounts: Mutex<HashMap<String, Vec<ImageId>>>,
    sandbox_images: SandboxImages,
    operations: Operations,
}

impl CriBackend {
    /// Creates a client of the runtime at this endpoint. Opens nothing before the first call.
    pub fn new(endpoint: Endpoint, mut config: CriConfig) -> CriBackend {
        config.request_timeout = config.request_timeout.min(LONGEST);
        let check = config.refuse_larder.then_some(is_larder as ConnectionCheck);
        let runtime = CriChannel::checked(endpoint, config.connect_timeout, check);
        let images = match &config.image_endpoint {
            Some(endpoint) if endpoint != runtime.endpoint() => {
                CriChannel::checked(endpoint.clone(), config.connect_timeout, check)
            }
            _ => runtime.clone(),
        };
        CriBackend {
            runtime,
            images,
            stream_images: StreamSupport::new(config.list_streaming),
            stream_containers: StreamSupport::new(config.list_streaming),
            stream_sandboxes: StreamSupport::new(config.list_streaming),
            mounts: Mutex::default(),
            sandbox_images: SandboxImages::default(),
            operations: Operations::default(),
            config,
        }
    }

    /// Endpoint of the runtime service.
    pub fn endpoint(&self) -> &Endpoint {
        self.runtime.endpoint()
    }

    /// Endpoint of the image service.
    pub fn image_endpoint(&self) -> &Endpoint {
        self.images.endpoint()
    }

    /// Reports each call from now on. Only the first observer is used.
    pub fn observe_with(&self, observer: Arc<dyn OperationObserver>) {
        self.operations.observe_with(observer);
    }

    pub(crate) fn operations(&self) -> &Operations {
        &self.operations
    }

    /// Checks that an image service answers, as kubelet does when it starts.
    pub async fn validate_image_service(&self) -> Result<(), BackendError> {
        self.within_limit(&[&self.images], self.image_service_answers()).await
    }

    async fn image_service_answers(&self) -> Result<(), BackendError> {
        match self.image_filesystems().await {
            Ok(_) => Ok(()),
            Err(BackendError::Call { message, kind, hint, .. }) => {
                let endpoint = self.image_endpoint();
                let place = format!("validate CRI v1 image API for endpoint \"{endpoint}\"");
                let message = format!("validate service connection: {place}: {message}");
                Err(BackendError::call(kind, message).with_hint(hint))
            }
            Err(error) => Err(error),
        }
    }

    /// The connection to the runtime service, for other services on the same socket.
    pub fn runtime_channel(&self) -> CriChannel {
        self.runtime.clone()
    }

    /// The connection to the image service, for other services on the same socket.
    pub fn image_channel(&self) -> CriChannel {
        self.images.clone()
    }

    /// Time limit of each method except a pull.
    pub fn request_timeout(&self) -> Duration {
        self.config.request_timeout
    }

    pub(crate) fn runtime_connection(&self) -> &CriChannel {
        &self.runtime
    }

    pub(crate) fn config(&self) -> &CriConfig {
        &self.config
    }

    pub(crate) fn sandbox_images(&self) -> &SandboxImages {
        &self.sandbox_images
    }

    pub(crate) fn runtime(&self) -> RuntimeServiceClient<CriChannel> {
        RuntimeServiceClient::with_origin(self.runtime.clone(), origin())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    fn images(&self) -> ImageServiceClient<CriChannel> {
        ImageServiceClient::with_origin(self.images.clone(), origin())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Runs all calls of one method of the trait within one time limit. The limit begins when the connections are open:
    /// opening has a limit of its own, so that a server without a preface is distinguished from one that does not
    /// answer a call.
    pub(crate) fn within_limit<'a, T>(
        &'a self,
        channels: &'a [&'a CriChannel],
        work: impl Future<Output = Result<T, BackendError>> + 'a,
    ) -> impl Future<Output = Result<T, BackendError>> + 'a {
        let work = Box::pin(work); // the futures of calls are large
        async move {
            for channel in channels {
                let opened = channel.open_now().await;
                opened.map_err(|status| status::call_error(channel.endpoint(), &status))?;
            }
            match tokio::time::timeout(self.config.request_timeout, work).await {
                Ok(done) => done,
                Err(_) => Err(status::timed_out(self.endpoint(), self.config.request_timeout)),
            }
        }
    }

    /// A request with the time after which its response is certainly no longer needed.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.config.request_timeout.saturating_add(DEADLINE_SLACK));
        request
    }

    /// Waits for a response of the runtime service.
    pub(crate) async fn ask_runtime<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, BackendError> {
        self.operations
            .observe(operation, call)
            .await
            .map_err(|status| status::call_error(self.endpoint(), &status))
    }

    /// Waits for a response of the image service.
    async fn ask_images<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, BackendError> {
        self.operations
            .observe(operation, call)
            .await
            .map_err(|status| status::call_error(self.image_endpoint(), &status))
    }

    async fn version(&self) -> Result<proto::VersionResponse, BackendError> {
        let request = self.request(proto::VersionRequest { version: "v1".into() });
        let reply = self.operations.observe("version", self.runtime().version(request)).await;
        match reply.map(Response::into_inner) {
            // One larder would see images only, no containers, and lease and collect what the other one keeps.
            Ok(reply) if reply.runtime_name == server::NAME => Err(BackendError::Unreachable {
                endpoint: self.endpoint().to_string(),
                problem: EndpointFailure::Larder,
            }),
            Ok(reply) => Ok(reply),
            Err(status) => Err(foreign(self.endpoint(), &status)
                .unwrap_or_else(|| status::call_error(self.endpoint(), &status))),
        }
    }

    /// The conditions; empty if the runtime does not report them.
    async fn runtime_status(&self) -> Result<Option<proto::RuntimeStatus>, BackendError> {
        let request = self.request(proto::StatusRequest { verbose: false });
        match self.operations.observe("status", self.runtime().status(request)).await {
            Ok(reply) => Ok(reply.into_inner().status),
            Err(status) if status.code() == Code::Unimplemented => Ok(None),
            Err(status) => Err(status::call_error(self.endpoint(), &status)),
        }
    }

    async fn image_status(
        &self,
        image: &ImageSpec,
        verbose: bool,
    ) -> Result<Option<ImageDetails>, BackendError> {
        if image.is_for_other_platform() {
            return Ok(None);
        }
        let message = proto::ImageStatusRequest { image: Some(self.spec(image)?), verbose };
        let mut images = self.images();
        let asked = self.ask_images("image_status", images.image_status(self.request(message)));
        let reply = self.within_limit(&[&self.images], asked).await?.into_inner();
        let mut found = convert::status_reply(&image.image, reply.image, self.config.runtime_class_in_image)?;
        if let Some(found) = &mut found {
            self.pin_sandbox_images(std::slice::from_mut(found)).await;
        }
        Ok(found.map(|image| ImageDetails { image, info: reply.info }))
    }

    /// A spec to send, which must name an image.
    fn spec(&self, image: &ImageSpec) -> Result<proto::ImageSpec, BackendError> {
        convert::spec_to_cri(image, self.config.runtime_class_in_image)
    }

    async fn image_filesystems(&self) -> Result<Filesystems, BackendError> {
        let request = self.request(proto::ImageFsInfoRequest {});
        let reply = self.ask_images("image_fs_info", self.images().image_fs_info(request)).await?;
        Ok(convert::filesystems(reply.into_inner()))
    }

    async fn listed_images(&self) -> Result<Vec<proto::Image>, BackendError> {
        self.ask_images("list_images", async {
            let mut images = self.images();
            let request = self.request(proto::StreamImagesRequest::default());
            let parts = self.stream_images.collect(images.stream_images(request), |part| part.images);
            if let Some(all) = parts.await? {
                return Ok(all);
            }
            let request = self.request(proto::ListImagesRequest::default());
            Ok(self.images().list_images(request).await?.into_inner().images)
        })
        .await
    }

    pub(crate) async fn containers(&self) -> Result<Vec<proto::Container>, BackendError> {
        self.ask_runtime("list_containers", async {
            let mut runtime = self.runtime();
            let request = self.request(proto::StreamContainersRequest::default());
            let parts =
                self.stream_containers.collect(runtime.stream_containers(request), |part| part.containers);
            if let Some(all) = parts.await? {
                return Ok(all);
            }
            let request = self.request(proto::ListContainersRequest::default());
            Ok(self.runtime().list_containers(request).await?.into_inner().containers)
        })
        .await
    }

    async fn sandboxes(&self) -> Result<Vec<proto::PodSandbox>, BackendError> {
        self.ask_runtime("list_podsandbox", async {
            let mut runtime = self.runtime();
            let request = self.request(proto::StreamPodSandboxesRequest::default());
            let parts = self
                .stream_sandboxes
                .collect(runtime.stream_pod_sandboxes(request), |part| part.pod_sandboxes);
            if let Some(all) = parts.await? {
                return Ok(all);
            }
            let request = self.request(proto::ListPodSandboxRequest::default());
            Ok(self.runtime().list_pod_sandbox(request).await?.into_inner().items)
        })
        .await
    }

    /// The images mounted by each of these containers. Only containers not seen before cost a call, some concurrently.
    async fn mounted_images(
        &self,
        containers: &[proto::Container],
    ) -> Result<HashMap<String, ContainerMounts>, BackendError> {
        if !self.config.image_volumes {
            return Ok(HashMap::new());
        }
        let mut mounts = HashMap::with_capacity(containers.len());
        let mut calls = Vec::new();
        for id in containers.iter().map(|container| container.id.clone()) {
            let known = self.mounts.lock().get(&id).cloned();
            match known {
                Some(images) => _ = mounts.insert(id, Ok(images)),
                None => calls.push(async move { self.mounts_of(&id).await.map(|images| (id, images)) }),
            }
        }
        let mut answers = stream::iter(calls).buffer_unordered(STATUS_CALLS_AT_ONCE);
        while let Some((id, images)) = answers.try_next().await? {
            mounts.insert(id, images);
        }
        // Those of vanished containers are forgotten.
        let known = mounts.iter().filter_map(|(id, images)| Some((id.clone(), images.clone().ok()?)));
        *self.mounts.lock() = known.collect();
        Ok(mounts)
    }

    /// The images that one container mounts; empty if it is removed already, or if the runtime cannot report them; or
    /// the runtime's error for this container: the next call retries. An unreachable runtime is an error of the call.
    async fn mounts_of(&self, container: &str) -> Result<ContainerMounts, BackendError> {
        let message = proto::ContainerStatusRequest { container_id: container.to_owned(), verbose: false };
        let mut runtime = self.runtime();
        let asked = runtime.container_status(self.request(message));
        match self.operations.observe("container_status", asked).await {
            Ok(reply) => Ok(Ok(reply.into_inner().status.map(convert::mounted_images).unwrap_or_default())),
            Err(status) => match status.code() {
                Code::NotFound | Code::Unimplemented => Ok(Ok(Vec::new())),
                Code::Unavailable => Err(status::call_error(self.endpoint(), &status)),
                _ => Ok(Err(status::call_error(self.endpoint(), &status).to_string())),
            },
        }
    }
}

/// Whether a connection leads to another larder.
fn is_larder(channel: CriChannel) -> BoxFuture<'static, Option<EndpointFailure>> {
    Box::pin(async move {
        let request = proto::VersionRequest { version: "v1".into() };
        let reply = RuntimeServiceClient::with_origin(channel, origin()).version(request).await.ok()?;
        (reply.get_ref().runtime_name == server::NAME).then_some(EndpointFailure::Larder)
    })
}

/// The authority that runtimes expect over a Unix socket.
pub fn origin() -> Uri {
    Uri::from_static("http://localhost")
}

/// The failure of an endpoint that does not serve CRI v1, if the status of a first call says so.
fn foreign(endpoint: &Endpoint, status: &Status) -> Option<BackendError> {
    let detail = status.message().to_owned();
    let problem = match status.code() {
        // An HTTP server's error page has no gRPC status; the client makes one up and says so in its message.
        _ if detail.contains("grpc-status header missing") => EndpointFailure::NotGrpc { detail },
        Code::Unimplemented => EndpointFailure::NotCri { detail },
        _ => return None,
    };
    Some(BackendError::Unreachable { endpoint: endpoint.to_string(), problem })
}

#[async_trait]
impl Backend for CriBackend {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        let separate = self.image_endpoint() != self.endpoint();
        let channels = [&self.runtime, &self.images];
        self.within_limit(&channels[..=usize::from(separate)], async {
            let version = self.version().await?;
            let conditions = self.runtime_status().await?;
            if separate {
                self.image_service_answers().await?;
            }
            Ok(convert::runtime_info(self.endpoint().to_string(), version, conditions))
        })
        .await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        let listed = self.within_limit(&[&self.images], self.listed_images()).await?;
        let with_handler = self.config.runtime_class_in_image;
        let mut images: Vec<Image> =
            listed.into_iter().map(|image| convert::image(image, with_handler)).collect();
        self.pin_sandbox_images(&mut images).await;
        Ok(images)
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        Ok(self.image_status(image, false).await?.map(|found| found.image))
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.image_status(image, true).await
    }

    /// CRI does not report the progress of a pull.
    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        _progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        image.check_runtime_pull()?;
        let request = proto::PullImageRequest {
            image: Some(self.spec(image)?),
            auth: credential.map(convert::credential_to_cri),
            sandbox_config: sandbox.map(convert::sandbox_to_cri),
        };
        let reply = self.operations.observe("pull_image", self.images().pull_image(request)).await;
        match reply.map(Response::into_inner) {
            Ok(reply) => convert::pull_reply(&image.image, reply),
            Err(status) => Err(status::pull_error(self.image_endpoint(), &status)),
        }
    }

    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        options.require_all_names()?;
        let spec = convert::spec_to_cri(&ImageSpec::named(&image.image), false)?;
        let request = self.request(proto::RemoveImageRequest { image: Some(spec) });
        self.within_limit(&[&self.images], async {
            match self.operations.observe("remove_image", self.images().remove_image(request)).await {
                Err(status) if status.code() != Code::NotFound => {
                    Err(status::call_error(self.image_endpoint(), &status))
                }
                Ok(_) | Err(_) => Ok(Removed::Image { freed: None }),
            }
        })
        .await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.within_limit(&[&self.images], self.image_filesystems()).await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        let (containers, sandboxes, mut mounts, mut images) = self
            .within_limit(&[&self.runtime], async {
                let (containers, sandboxes) = tokio::try_join!(self.containers(), self.sandboxes())?;
                let mounts = self.mounted_images(&containers).await?;
                let images = self.images_of_sandboxes(&sandboxes).await?;
                Ok((containers, sandboxes, mounts, images))
            })
            .await?;
        let with_mounts = |container: proto::Container| {
            // Without requests for image volumes, none are known.
            let images = mounts.remove(&container.id).unwrap_or(Ok(Vec::new()));
            convert::container(container, images)
        };
        let with_image = |sandbox: proto::PodSandbox| {
            let image = images.remove(&sandbox.id).unwrap_or_default();
            convert::sandbox(sandbox, image)
        };
        Ok(ContainerInventory {
            containers: containers.into_iter().map(with_mounts).collect(),
            sandboxes: sandboxes.into_iter().map(with_image).collect(),
        })
    }
}
