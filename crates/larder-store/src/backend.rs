//! The store as a [`Backend`], in the role that containerd has for kubelet, without a daemon.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use larder::backend::{
    Backend, BackendError, CallErrorKind, Condition, Container, ContainerInventory, FilesystemUsage,
    Filesystems, Image, ImageDetails, ImageNames, ImageOrigins, ImageSpec, MinimumRate, ProgressReporter,
    PullOptions, PullUntil, RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::error_chain;
use larder::pod::SandboxConfig;
use larder::reference::{ImageId, ImageName, Reference, ReferenceError};

use crate::disk::DiskSpace;
use crate::inspect::image_details;
use crate::pull::{PullError, StorePuller};
use crate::store::{FORMAT, Store, StoreError};
use larder_registry::FetchErrorKind;
use larder_registry::manifest::ManifestError;

/// A runtime that has the images of the store as well, because it keeps its snapshots there.
#[async_trait]
pub trait AttachedRuntime: Send + Sync {
    /// Runs after an image was committed by this name. The image stays in the store if this fails; the call that
    /// committed it fails.
    async fn after_commit(&self, id: &ImageId, name: &Reference) -> Result<(), BackendError>;

    /// Runs a removal from the store, with what has to be done before it, and after it if something is left of the
    /// image.
    async fn around_removal(
        &self,
        image: &ImageName,
        options: &RemoveOptions,
        removal: BoxFuture<'_, Result<Removed, BackendError>>,
    ) -> Result<Removed, BackendError>;

    /// The containers and sandboxes of the runtime.
    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError>;
}

/// Pulls into a store and lists its images.
#[derive(Clone)]
pub struct StoreBackend {
    puller: Arc<StorePuller>,
    attached: Option<Arc<dyn AttachedRuntime>>,
}

impl StoreBackend {
    /// The backend of the puller's store.
    pub fn new(puller: StorePuller) -> Self {
        StoreBackend { puller: Arc::new(puller), attached: None }
    }

    /// The store with a runtime that has its images as well.
    #[must_use]
    pub fn with_attached_runtime(self, attached: Arc<dyn AttachedRuntime>) -> StoreBackend {
        StoreBackend { attached: Some(attached), ..self }
    }

    /// The store itself.
    pub fn store(&self) -> &Store {
        self.puller.store()
    }

    /// Returns the puller, which pulls and loads into the store.
    pub fn puller(&self) -> &StorePuller {
        &self.puller
    }

    /// Sizes that are estimates are not reported: the change of the filesystem is closer.
    async fn remove_from_store(
        &self,
        image: &ImageName,
        options: &RemoveOptions,
    ) -> Result<Removed, BackendError> {
        let (image, options) = (image.clone(), options.clone());
        let removed = self.ask(move |store| store.remove(image, &options)).await?;
        if removed.as_ref().is_some_and(|removed| removed.is_present) {
            return Ok(Removed::Names);
        }
        let freed = removed.map_or(DiskSpace::ZERO, |removed| removed.freed);
        Ok(Removed::Image { freed: Some(freed).filter(|_| !self.store().estimates_sizes()) })
    }

    /// Asks the store on a thread where it may block.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, BackendError> {
        let store = self.store().clone();
        match tokio::task::spawn_blocking(move || question(&store)).await {
            Ok(answer) => answer.map_err(backend_error),
            Err(error) => Err(BackendError::caused_by(CallErrorKind::Canceled, error)),
        }
    }
}

/// An error of the store, with its next step.
pub(crate) fn backend_error(error: StoreError) -> BackendError {
    let (kind, hint) = (kind_of(&error), error.hint());
    BackendError::caused_by(kind, error).with_hint(hint)
}

#[async_trait]
impl Backend for StoreBackend {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        // The first call tries a mount.
        let about = |store: &Store| Ok(format!("format {FORMAT}, layers: {}", store.describe_layers()));
        let ready = Condition { kind: "StoreReady".into(), ok: true, ..Condition::default() };
        Ok(RuntimeInfo {
            endpoint: self.store().root().display().to_string(),
            name: "larder".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            api_version: self.ask(about).await?,
            conditions: vec![ready],
        })
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.ask(Store::list).await
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        let name = image.image.clone();
        self.ask(move |store| store.image_summary(&name)).await
    }

    async fn usable_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        let name = image.image.clone();
        self.ask(move |store| store.usable_image_summary(&name)).await
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        let (name, puller) = (image.image.clone(), Arc::clone(&self.puller));
        self.ask(move |store| image_details(store, &puller, &name)).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        _sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        let invalid =
            |error: ReferenceError| BackendError::caused_by(CallErrorKind::Other, error.kind().clone());
        let name = image.image.reference().map_err(invalid)?;
        let PullOptions { skip_tls_verify, accept_only_platform, refuse_artifact, until } = image.options;
        let mut through = (*self.puller).clone();
        if skip_tls_verify {
            through = through.without_tls_verify();
        }
        if refuse_artifact {
            through = through.without_artifacts();
        }
        through = match until {
            PullUntil::Configured => through,
            PullUntil::Startable => through.lazily(),
            PullUntil::Complete => through.completely(),
        };
        let pulled = if accept_only_platform {
            through.pull_only_platform(name, credential, progress).await
        } else {
            through.pull(name, credential, progress).await
        };
        let id = pulled.map_err(pull_failed)?.id.into();
        if let Some(attached) = &self.attached {
            attached.after_commit(&id, name).await?;
            // That took a while.
            self.store().expect_start();
        }
        Ok(id)
    }

    fn minimum_rate(&self) -> Option<MinimumRate> {
        Some(self.puller.minimum_rate()).filter(|minimum| minimum.bytes_per_second > 0)
    }

    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        let removal = self.remove_from_store(&image.image, options);
        match &self.attached {
            Some(attached) => attached.around_removal(&image.image, options, Box::pin(removal)).await,
            None => removal.await,
        }
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        let mountpoint = self.store().root().to_owned();
        let used = self.ask(|store| store.usage().map(|usage| usage.total())).await?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let usage = FilesystemUsage {
            mountpoint,
            timestamp_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
            used_bytes: Some(used.bytes),
            inodes_used: Some(used.inodes),
        };
        Ok(Filesystems { image: vec![usage.clone()], container: vec![usage] })
    }

    /// A mount is reported as a container, because it uses its image like one.
    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        let mut inventory = match &self.attached {
            Some(attached) => attached.container_inventory().await?,
            None => ContainerInventory::default(),
        };
        let mounts = self.ask(Store::mounts).await?;
        let containers = mounts.into_iter().map(|mount| Container {
            id: mount.id,
            name: mount.target.display().to_string(),
            image_id: mount.image.into(),
            running: mount.mounted,
            is_mount: true,
            ..Container::default()
        });
        inventory.containers.extend(containers);
        Ok(inventory)
    }

    fn names(&self) -> Option<&dyn ImageNames> {
        Some(self)
    }

    fn origins(&self) -> Option<&dyn ImageOrigins> {
        Some(self)
    }
}

#[async_trait]
impl ImageOrigins for StoreBackend {
    async fn is_preloaded(&self, id: &ImageId) -> Result<bool, BackendError> {
        let Some(digest) = id.digest() else { return Ok(false) };
        self.ask(move |store| store.is_preloaded(&digest)).await
    }

    async fn recorded(&self) -> Result<Vec<ImageId>, BackendError> {
        let recorded = self.ask(Store::recorded_images).await?;
        Ok(recorded.into_iter().map(ImageId::from).collect())
    }

    async fn wait_for_ending_pulls(&self) {
        self.puller.wait_for_ending_pulls().await;
    }
}

#[async_trait]
impl ImageNames for StoreBackend {
    async fn add_name(&self, id: &ImageId, name: &Reference) -> Result<bool, BackendError> {
        let (Some(digest), added) = (id.digest(), name.clone()) else { return Ok(false) };
        let named = self.ask(move |store| store.add_name(&digest, &added)).await?;
        if let Some(attached) = &self.attached {
            attached.after_commit(id, name).await?;
        }
        Ok(named.is_some())
    }
}

fn kind_of(error: &StoreError) -> CallErrorKind {
    match error {
        StoreError::Mounted { .. } => CallErrorKind::FailedPrecondition,
        error if error.is_no_space() => CallErrorKind::InsufficientSpace { reclaim_bytes: None },
        _ => CallErrorKind::Other,
    }
}

/// A registry that could not be reached is named as runtimes do it: kubelet makes a reason of its own of that.
fn pull_failed(error: PullError) -> BackendError {
    let (kind, hint) = (kind_of_pull(&error), error.hint());
    let failed = match kind {
        CallErrorKind::RegistryUnavailable => {
            let message = format!("RegistryUnavailable: {}", error_chain(&error));
            BackendError::call(kind, message).with_cause(error)
        }
        _ => BackendError::caused_by(kind, error),
    };
    failed.with_hint(hint)
}

fn kind_of_pull(error: &PullError) -> CallErrorKind {
    if error.is_no_space() {
        return CallErrorKind::InsufficientSpace { reclaim_bytes: error.reclaim_bytes() };
    }
    match error.fetch_kind() {
        Some(FetchErrorKind::Unreachable(_)) => CallErrorKind::RegistryUnavailable,
        // As containerd answers for an image that its registry has for other platforms.
        Some(
            FetchErrorKind::NotFound { .. } | FetchErrorKind::Manifest(ManifestError::NoPlatform { .. }),
        ) => CallErrorKind::NotFound,
        _ if error.is_denied() => CallErrorKind::Denied,
        _ => CallErrorKind::Other,
    }
}
