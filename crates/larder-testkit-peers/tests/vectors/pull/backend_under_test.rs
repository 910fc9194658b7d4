//! The backend of a case: a fake that does as the case says, alone or with larder's own store behind it.
//!
//! With the store, the fake still says what is to happen: the registry in front of the store then has just that
//! image, or none. Whether an image is present, and whether a pull succeeds, is the store's answer. Only what a case
//! makes up is put in its place: ids, sizes and the texts of failures. Where the two do not agree, the store's own
//! answer is given, which no case expects.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec, ProgressReporter,
    RemoveOptions, Removed, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::pod::SandboxConfig;
use larder::reference::{ImageId, Reference};
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fake_backend::{FakeBackend, image};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Where a case is played.
pub(super) struct BackendUnderTest {
    /// Says what happens, and notes what was called.
    pub(super) script: FakeBackend,
    /// Backend of the manager.
    pub(super) backend: Arc<dyn Backend>,
    store: Option<Arc<ScriptedStore>>,
}

impl BackendUnderTest {
    pub(super) fn fake() -> BackendUnderTest {
        let script = FakeBackend::new();
        BackendUnderTest { backend: Arc::new(script.clone()), script, store: None }
    }

    pub(super) fn store() -> BackendUnderTest {
        let script = FakeBackend::new();
        let store = Arc::new(ScriptedStore::new(script.clone()));
        BackendUnderTest { script, backend: store.clone(), store: Some(store) }
    }

    /// Makes an image present before the case begins.
    pub(super) async fn add_present(&self, name: &str, id: &str) -> Result<(), String> {
        self.script.add_image(name, image(id, 1));
        let Some(store) = &self.store else { return Ok(()) };
        store.pull_as(&ImageSpec::named(name), Ok(id)).await.map(drop).map_err(|error| error.to_string())
    }
}

/// Whether a registry can have what the case pulls: no content has a digest that was made up.
pub(super) fn can_be_had(input: &Value) -> bool {
    let by_digest = |image: &Value| image.as_str().is_some_and(|image| image.contains('@'));
    let attempts = input["attempts"].as_array().into_iter().flatten();
    let mut pulled = attempts.filter(|attempt| attempt["pull"]["image_ref"].is_string());
    !pulled.any(|attempt| by_digest(&input["image"]) || by_digest(&attempt["image"]))
}

/// The store, doing what the script says.
struct ScriptedStore {
    script: FakeBackend,
    store: StoreBackend,
    registry: FaultRegistry,
    /// The id that a case gave to an image, by the true one.
    ids: Mutex<BTreeMap<String, String>>,
    /// The store's calls wait for a registry, in real time. The case's own clock does not advance during that.
    runtime: Option<Runtime>,
    _dir: TempDir,
}

impl ScriptedStore {
    fn new(script: FakeBackend) -> ScriptedStore {
        let (registry, dir) = (FaultRegistry::start(), tempfile::tempdir().expect("a directory"));
        let hosts = dir.path().join("certs.d/_default");
        fs_err::create_dir_all(&hosts).expect("a directory for hosts");
        // Whatever registry a name says, it is this one.
        fs_err::write(hosts.join("hosts.toml"), format!("server = \"{}\"\n", registry.url()))
            .expect("a file");
        let config =
            RegistryConfig { config_dirs: vec![dir.path().join("certs.d")], ..RegistryConfig::default() };
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).expect("a store");
        let store = StoreBackend::new(StorePuller::new(
            store,
            RegistryClient::new(config),
            StorePullConfig::default(),
        ));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = Some(runtime.expect("a runtime"));
        ScriptedStore { script, store, registry, ids: Mutex::default(), runtime, _dir: dir }
    }

    async fn run<T: Send + 'static>(&self, call: impl Future<Output = T> + Send + 'static) -> T {
        let runtime = self.runtime.as_ref().expect("it is there until the end");
        runtime.spawn(call).await.expect("the store does not panic")
    }

    /// The id that the case gave to what the store has.
    fn scripted_id(&self, id: &ImageId) -> Option<ImageId> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).get(id.as_str()).map(ImageId::from)
    }

    /// Pulls from a registry that has the image which the case calls `outcome`, or nothing.
    async fn pull_as(&self, spec: &ImageSpec, outcome: Result<&str, ()>) -> Result<ImageId, BackendError> {
        match outcome {
            Ok(id) => self.offer(spec.image.as_str(), id),
            Err(()) => self.registry.fault(FaultTrigger::path("/v2/"), ResponseFault::status(404)),
        }
        let (store, spec) = (self.store.clone(), spec.clone());
        let pulled = self
            .run(async move { store.pull(&spec, None, None, &ProgressReporter::unwatched()).await })
            .await;
        self.registry.clear_faults();
        pulled
    }

    fn offer(&self, name: &str, id: &str) {
        let Ok(name) = Reference::parse(name) else { return };
        let layer = TarBuilder::new().with(TarBuilderEntry::file("id", id)).finish();
        let media_type = "application/vnd.oci.image.layer.v1.tar";
        let (repository, tag) = (name.path(), name.tag().unwrap_or("latest"));
        let image = self.registry.put_image(repository, tag, media_type, &[layer], &[]);
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).insert(image.config, id.to_owned());
    }
}

impl Drop for ScriptedStore {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background(); // it is dropped where waiting is not allowed
        }
    }
}

#[async_trait]
impl Backend for ScriptedStore {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.store.info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.store.list().await
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        let scripted = self.script.status(image).await?;
        let (store, image) = (self.store.clone(), image.clone());
        let found = self.run(async move { store.status(&image).await }).await?;
        Ok(match (scripted, found) {
            (Some(scripted), Some(found)) if self.scripted_id(&found.id).as_ref() == Some(&scripted.id) => {
                Some(scripted)
            }
            (_, found) => found,
        })
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.store.inspect(image).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        let scripted = self.script.pull(image, credential, sandbox, progress).await;
        let pulled = self.pull_as(image, scripted.as_ref().map(ImageId::as_str).map_err(|_| ())).await;
        match (scripted, pulled) {
            (Ok(id), Ok(pulled)) if self.scripted_id(&pulled).as_ref() == Some(&id) => Ok(id),
            (Err(error), Err(_)) => Err(error),
            (_, pulled) => pulled,
        }
    }

    async fn remove(&self, image: &ImageSpec, options: &RemoveOptions) -> Result<Removed, BackendError> {
        self.store.remove(image, options).await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.store.filesystems().await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.store.container_inventory().await
    }
}
