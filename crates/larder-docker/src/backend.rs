//! The client: a [`Backend`] over the API of Docker Engine.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, ByteProgress, CallErrorKind, Condition, Container, ContainerInventory,
    FilesystemUsage, Filesystems, Image, ImageDetails, ImageNames, ImageSpec, ProgressReporter,
    RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::gc::DiskSpace;
use larder::pod::SandboxConfig;
use larder::reference::{ImageId, Reference};
use parking_lot::Mutex;
use reqwest::Method;
use reqwest::header::HeaderMap;
use serde_json::Value;

use crate::activity::EngineActivityFeed;
use crate::api::{ContainerInspect, ContainerSummary, EngineInfo, ImageInspect, ImageSummary, PullMessage};
use crate::engine::{EngineClient, EngineConfig};
use crate::host::EngineHost;
use crate::inspect_cache::InspectCache;
use crate::layers::EngineLayers;
use crate::pull_messages::PullMessageTracker;
use crate::stream::JsonStreamBuffer;
use crate::tls::DockerTlsError;
use crate::usage::{self, EngineUsage};
use crate::{BuildCachePruner, convert, error, locality, names, remove};

/// How long a call waits for the measurement of layers.
const LAYERS_TIMEOUT: Duration = Duration::from_secs(20);

/// Labels that Kubernetes puts on containers.
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";

/// A Docker Engine.
///
/// Long-lived: it reconnects automatically. Needs a tokio runtime with time and network; one thread is enough.
pub struct DockerBackend {
    engine: Arc<EngineClient>,
    inspections: Arc<InspectCache>,
    layers: Arc<EngineLayers>,
}

impl DockerBackend {
    /// Creates a client of the engine at this address. Opens nothing before the first call; reads TLS files now.
    pub fn new(host: EngineHost, config: EngineConfig) -> Result<DockerBackend, DockerTlsError> {
        let engine = Arc::new(EngineClient::new(host, config)?);
        let inspections = Arc::new(InspectCache::new(engine.clone()));
        let layers = Arc::new(EngineLayers::new(inspections.clone()));
        Ok(DockerBackend { engine, inspections, layers })
    }

    /// The address of the engine.
    pub fn host(&self) -> &EngineHost {
        self.engine.host()
    }

    /// The disk usage of its layers.
    pub fn layers(&self) -> Arc<EngineLayers> {
        self.layers.clone()
    }

    /// Images added and used since the last query.
    pub fn feed(&self) -> EngineActivityFeed {
        EngineActivityFeed::new(self.inspections.clone())
    }

    /// The build cache of the engine.
    pub fn builder_cache(&self) -> BuildCachePruner {
        BuildCachePruner::new(self.engine.clone())
    }

    /// The engine's disk usage by kind, and the engine's own figures. The measurement has no time limit.
    pub async fn usage(&self) -> Result<EngineUsage, BackendError> {
        usage::usage(&self.inspections, &self.layers).await
    }

    /// Disk usage of images; `None` if it takes long to measure, as it may the first time.
    async fn used(&self, images: &[Image]) -> Result<Option<DiskSpace>, BackendError> {
        let timeout = LAYERS_TIMEOUT.min(self.engine.limit() / 2);
        match tokio::time::timeout(timeout, self.layers.look(images)).await {
            Ok(measured) => Ok(Some(measured?.dirs)),
            Err(_) => Ok(None),
        }
    }

    async fn pull_through(
        &self,
        name: &str,
        headers: HeaderMap,
        progress: &ProgressReporter,
    ) -> Result<(), BackendError> {
        let tag = names::tag_to_pull(name);
        let mut query = vec![("fromImage", name)];
        query.extend(tag.map(|tag| ("tag", tag)));
        let mut response = match self.engine.call(Method::POST, "/images/create", &query, headers).await {
            // The error may come before the stream or within it, with the same text.
            Err(BackendError::Call {
                message, kind: CallErrorKind::Other | CallErrorKind::NotFound, ..
            }) => {
                return Err(error::of_pull(name, &message));
            }
            response => response?,
        };
        let course = Arc::new(Mutex::new(PullMessageTracker::default()));
        let watched = course.clone();
        progress.describe_by(move || watched.lock().detail());
        let mut values = JsonStreamBuffer::default();
        while let Some(chunk) = response.chunk().await.map_err(|cause| error::broken(&cause))? {
            let messages: Vec<PullMessage> =
                values.push(&chunk).map_err(|why| error::unreadable("a pull", why))?;
            for message in messages {
                let reported = [message.error_detail.message.as_str(), message.error.as_str()];
                // The headers of the response had status 200 already.
                if let Some(problem) = reported.into_iter().find(|text| !text.is_empty()) {
                    return Err(error::of_pull(name, problem));
                }
                progress.set(bytes_after(&course, &message));
            }
        }
        values.end().map_err(|why| error::unreadable("a pull", why))
    }

    /// A container; one that mounts images is inspected.
    async fn container(&self, container: ContainerSummary) -> Result<Container, BackendError> {
        let mounted = if container.mounts.iter().any(|mount| mount.kind == "image") {
            self.mounted_images(&container.id).await?
        } else {
            Some(Vec::new())
        };
        let label = |name: &str| container.labels.get(name);
        let pod = label(POD_NAMESPACE).zip(label(POD_NAME)).map(|(space, name)| format!("{space}/{name}"));
        let name = container.names.first().map(|name| name.trim_start_matches('/').to_owned());
        Ok(Container {
            name: name.unwrap_or_default(),
            image_id: if container.image_id.is_empty() {
                container.image.as_str().into()
            } else {
                container.image_id
            },
            sandbox_id: String::new(),
            mounts_error: mounted.is_none().then(|| {
                format!("container {}: the engine does not report which images it mounts", container.id)
            }),
            mounted_images: mounted.unwrap_or_default(),
            running: matches!(container.state.as_str(), "running" | "paused" | "restarting"),
            pod: pod.unwrap_or_default(),
            is_mount: false,
            id: container.id,
        })
    }

    /// IDs of the images that a container mounts; empty if it is removed; `None` if they are unknown.
    async fn mounted_images(&self, container: &str) -> Result<Option<Vec<ImageId>>, BackendError> {
        let path = format!("/containers/{container}/json");
        let Some(found) = self.engine.get::<ContainerInspect>(&path, &[]).await? else {
            return Ok(Some(Vec::new()));
        };
        let mut ids = Vec::new();
        for mount in found.host_config.mounts.iter().filter(|mount| mount.kind == "image") {
            match self.engine.inspect::<ImageInspect>(&mount.source).await? {
                Some(image) => ids.push(image.id),
                None => return Ok(None),
            }
        }
        Ok(if ids.is_empty() { None } else { Some(ids) })
    }
}

#[async_trait]
impl Backend for DockerBackend {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.engine
            .within(async {
                let (version, api) = self.engine.version().await?;
                let podman = version.components.iter().any(|part| part.name.starts_with("Podman"));
                // An engine that responds is ready to serve images.
                let ready = Condition { kind: "RuntimeReady".into(), ok: true, ..Condition::default() };
                Ok(RuntimeInfo {
                    endpoint: self.host().to_string(),
                    name: if podman { "podman" } else { "docker" }.into(),
                    version: version.version,
                    api_version: api.to_string(),
                    conditions: vec![ready],
                })
            })
            .await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.engine
            .within(async {
                let listed: Vec<ImageSummary> = self.engine.get_required("/images/json", &[]).await?;
                Ok(listed.into_iter().map(convert::image_from_summary).collect())
            })
            .await
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        if image.is_for_other_platform() {
            return Ok(None);
        }
        let found = self.engine.within(self.engine.inspect::<ImageInspect>(image.image.as_str())).await?;
        Ok(found.map(|found| convert::image_from_inspect(&found)))
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        if image.is_for_other_platform() {
            return Ok(None);
        }
        let found = self.engine.within(self.engine.inspect::<Value>(image.image.as_str())).await?;
        found.map(convert::details).transpose()
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        _sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        image.check_runtime_pull()?;
        names::in_path(image.image.as_str())?;
        let mut headers = HeaderMap::new();
        if let Some(credential) = credential {
            headers.insert("X-Registry-Auth", convert::auth(credential, &image.image));
        }
        self.pull_through(image.image.as_str(), headers, progress).await?;
        match self.status(image).await? {
            Some(found) => Ok(found.id),
            None => Err(BackendError::Incomplete(format!(
                "{} not found after its pull: removed by another process",
                image.image
            ))),
        }
    }

    /// Docker removes no image of a container, forced or not.
    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        match &options.names {
            None => remove::remove(&self.engine, &image.image).await?,
            Some(names) if remove::remove_names(&self.engine, &image.image, names).await? => {
                return Ok(Removed::Names);
            }
            Some(_) => {}
        }
        Ok(Removed::Image { freed: None })
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.engine
            .within(async {
                let info: EngineInfo = self.engine.get_required("/info", &[]).await?;
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let usage = |mountpoint, used: Option<DiskSpace>| FilesystemUsage {
                    mountpoint,
                    timestamp_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
                    used_bytes: used.map(|used| used.bytes),
                    inodes_used: used.map(|used| used.inodes),
                };
                let listed = self.list().await?;
                let ids: Vec<&str> = listed.iter().map(|image| image.id.as_str()).collect();
                let is_here = locality::is_local(self.host(), &info, &ids).await;
                let root = info.docker_root_dir.clone().into();
                let reported = match self.layers.containerd(&info, &ids).await {
                    Some(containerd) => containerd.root().await,
                    None => None,
                };
                let image_root = reported.unwrap_or_else(|| convert::image_root(self.host(), &info, is_here));
                let image = usage(image_root, self.used(&listed).await?);
                let container = usage(locality::qualify_path(self.host(), &info, is_here, root), None);
                Ok(Filesystems { image: vec![image], container: vec![container] })
            })
            .await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.engine
            .within(async {
                let listed: Vec<ContainerSummary> =
                    self.engine.get_required("/containers/json", &[("all", "1")]).await?;
                let mut containers = Vec::with_capacity(listed.len());
                for container in listed {
                    containers.push(self.container(container).await?);
                }
                Ok(ContainerInventory { containers, sandboxes: Vec::new() })
            })
            .await
    }

    fn names(&self) -> Option<&dyn ImageNames> {
        Some(self)
    }
}

#[async_trait]
impl ImageNames for DockerBackend {
    async fn add_name(&self, id: &ImageId, name: &Reference) -> Result<bool, BackendError> {
        remove::add_name(&self.engine, id, name).await
    }
}

/// The bytes received so far, after this message.
fn bytes_after(course: &Mutex<PullMessageTracker>, message: &PullMessage) -> ByteProgress {
    let mut course = course.lock();
    course.note(message);
    course.bytes()
}
