//! Fetches the layers that containerd's snapshots lack into the store, with the node's credentials, and decides which
//! layers of the store every namespace of containerd may have.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::credentials::Credential;
use larder::error_chain;
use larder::pod::Pod;
use larder::records::ImagePulledRecord;
use larder::reference::{Digest, ImageId, ImageName, Reference};
use larder_snapshots::LayerFetcher;
use larder_store::backend::StoreBackend;
use larder_store::pull::{FetchedImage, PullError};
use larder_store::store::ImageRecord;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::node::pulls::Pulls;

/// containerd fetches an image by itself if its registry sends nothing for this time.
const IDLE: Duration = Duration::from_secs(60);

/// How long registries may take to say whether the images with a layer can be pulled.
const PROOF_WITHIN: Duration = Duration::from_secs(10);

/// How long such an answer counts.
const PROOF: Duration = Duration::from_secs(300);

/// The store, with the credentials of the node.
pub(crate) struct NodeLayerFetcher {
    store: StoreBackend,
    pulls: Arc<Pulls>,
    proofs: Mutex<AccessProofs>,
    is_enabled: bool,
}

impl NodeLayerFetcher {
    /// Into this store, with the node's credentials and pull records. `is_enabled`: layers are fetched for containerd.
    pub(crate) fn new(store: StoreBackend, pulls: Arc<Pulls>, is_enabled: bool) -> NodeLayerFetcher {
        NodeLayerFetcher { store, pulls, proofs: Mutex::default(), is_enabled }
    }

    /// No pod is known, so none of its secrets is used. None at all: anonymous.
    async fn credentials(&self, image: &Reference) -> Result<Vec<Option<Credential>>, String> {
        let name = ImageName::from(image.to_string());
        let found = self.pulls.manager().credentials().lookup(&name, &[], &Pod::default()).await;
        let found = found.map_err(|error| error_chain(&error))?;
        Ok(if found.is_empty() { vec![None] } else { found.into_iter().map(Some).collect() })
    }

    async fn fetch_with(
        &self,
        image: &Reference,
        credential: Option<&Credential>,
    ) -> Result<FetchedImage, PullError> {
        self.store.puller().fetch_layers(image, credential, IDLE).await
    }

    /// Whether a repository that has sent the layers of the image serves the image to the node.
    async fn is_served(&self, image: &ImageRecord) -> bool {
        for name in &image.digests {
            let Ok(name) = Reference::parse(name) else { continue };
            if !self.has_sent_layers(&name, image).await {
                continue;
            }
            for credential in self.credentials(&name).await.unwrap_or_default() {
                let session = self.store.puller().client().session(&name, credential.as_ref());
                let Ok(session) = session else { continue };
                if session.try_hosts().await.iter().any(|attempt| attempt.accepted) {
                    return true;
                }
            }
        }
        false
    }

    /// Whether this repository has sent each layer of the image: it may claim any image that it has not.
    async fn has_sent_layers(&self, name: &Reference, image: &ImageRecord) -> bool {
        let (store, name, image) = (self.store.store().clone(), name.clone(), image.clone());
        let sent = tokio::task::spawn_blocking(move || store.has_sent_layers(&name, &image)).await;
        match sent {
            Ok(Ok(sent)) => sent,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot determine which layers a repository has sent");
                false
            }
            Err(_) => false,
        }
    }

    /// Whether a registry serves one of these images to the node. All of them together get [`PROOF_WITHIN`]: those
    /// without an answer by then count as not served.
    async fn is_one_proved(&self, images: &[ImageRecord]) -> bool {
        let proofs = || self.proofs.lock();
        let mut unknown = Vec::new();
        for image in images {
            let id = ImageId::from(image.id.clone());
            match proofs().get(&id, Instant::now()) {
                Some(true) => return true,
                Some(false) => {}
                None => unknown.push((id, image)),
            }
        }
        let until = Instant::now() + PROOF_WITHIN;
        for (id, image) in unknown {
            let served = timeout_at(until, self.is_served(image)).await.unwrap_or(false);
            proofs().note(id, served, Instant::now());
            if served {
                return true;
            }
        }
        false
    }
}

#[async_trait]
impl LayerFetcher for NodeLayerFetcher {
    fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    async fn fetch(&self, image: &Reference) -> Result<FetchedImage, String> {
        let mut problem = String::new();
        for credential in self.credentials(image).await? {
            match self.fetch_with(image, credential.as_ref()).await {
                Err(error) if error.is_denied() => problem = error_chain(&error),
                fetched => return fetched.map_err(|error| error_chain(&error)),
            }
        }
        Err(problem)
    }

    async fn wait_for_layer(&self, chain: &Digest) -> bool {
        self.store.puller().wait_for_layer(chain, IDLE).await
    }

    async fn is_one_accessible(&self, images: &[ImageRecord]) -> bool {
        for image in images {
            if let Some(records) = self.pulls.records()
                && let Ok(Some(record)) = records.record(&ImageId::from(image.id.clone())).await
                && allows_every_pod(&record)
            {
                return true;
            }
        }
        self.is_enabled && self.is_one_proved(images).await
    }
}

/// Whether an image was pulled without a pod's credentials.
fn allows_every_pod(record: &ImagePulledRecord) -> bool {
    record.names.values().any(|credentials| credentials.node_pods)
}

/// The answers of registries, until they expire.
#[derive(Default)]
struct AccessProofs(HashMap<ImageId, (bool, Instant)>);

impl AccessProofs {
    fn get(&mut self, image: &ImageId, now: Instant) -> Option<bool> {
        self.0.retain(|_, (_, until)| *until > now);
        self.0.get(image).map(|(served, _)| *served)
    }

    fn note(&mut self, image: ImageId, served: bool, now: Instant) {
        self.0.insert(image, (served, now + PROOF));
    }
}

#[cfg(test)]
mod tests {
    use larder::backend::{ImageSpec, ProgressReporter};
    use larder::credentials::{DockerConfig, DockerConfigEntry, NodeKeyring, Secret};
    use larder_registry::{Proxy, RegistryConfig};
    use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
    use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth};
    use tempfile::TempDir;

    use super::*;
    use crate::backend::{OpenMode, RuntimeRequirement};
    use crate::config::{self, SettingsSources};
    use crate::environment::DefaultPaths;
    use crate::node::{Node, NodeOptions, StateDirAccess};

    const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

    /// A registry with the image `app:1`, and a node with these credentials.
    struct FetcherFixture {
        registry: FaultRegistry,
        name: Reference,
        node: Node,
        _dir: TempDir,
    }

    impl FetcherFixture {
        fn new(keyring: impl FnOnce(&FaultRegistry) -> NodeKeyring) -> FetcherFixture {
            let registry = FaultRegistry::start();
            let layer = TarBuilder::new().with(TarBuilderEntry::file("a", vec![1; 20_000])).finish();
            registry.put_image("app", "1", PLAIN, &[layer], &[]);
            let dir = tempfile::tempdir().unwrap();
            let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers: Vec::new() };
            let mut config = config::load(&sources).unwrap();
            config.root = dir.path().join("store");
            config.state = Some(dir.path().join("state"));
            config.registry =
                RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
            let options = NodeOptions {
                store: OpenMode::Create,
                runtime: RuntimeRequirement::Require,
                state: StateDirAccess::CurrentUser,
                publishes: false,
                joins_cluster: false,
                logs_events: false,
                verbosity: tracing::Level::ERROR,
            };
            let node = Node::open(sources, config, Some(keyring(&registry)), options).unwrap();
            let name = Reference::parse(&registry.image("app:1")).unwrap();
            FetcherFixture { registry, name, node, _dir: dir }
        }

        fn fetcher(&self) -> NodeLayerFetcher {
            NodeLayerFetcher::new(
                self.node.storage.store().unwrap().clone(),
                Arc::clone(&self.node.pulls),
                true,
            )
        }

        fn require_login(&self) {
            let (user, password) = ("me".into(), "secret".into());
            self.registry.require(FaultRegistryAuth::Basic { user, password });
        }
    }

    fn login(registry: &FaultRegistry) -> NodeKeyring {
        let entry = DockerConfigEntry {
            username: "me".into(),
            password: Secret::new("secret"),
            ..DockerConfigEntry::default()
        };
        NodeKeyring::fixed(&DockerConfig::with_entry(registry.address(), entry))
    }

    /// As a pull with a pod's secret: the node may have another credential, or none.
    async fn pull_as_pod(fixture: &FetcherFixture) -> ImageRecord {
        fixture.require_login();
        let name = ImageName::from(fixture.name.to_string());
        let found = login(&fixture.registry).lookup(&name, &[], &Pod::default()).await.unwrap();
        let progress = ProgressReporter::unwatched();
        fixture
            .node
            .storage
            .store()
            .unwrap()
            .puller()
            .pull(&fixture.name, found.first(), &progress)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn an_image_that_the_node_cannot_pull_is_for_its_pods_only() {
        let fixture = FetcherFixture::new(|_| NodeKeyring::default());
        let image = pull_as_pod(&fixture).await;
        let fetcher = fixture.fetcher();
        assert!(!fetcher.is_one_accessible(std::slice::from_ref(&image)).await);
        fixture.registry.forget_requests();
        assert!(!fetcher.is_one_accessible(std::slice::from_ref(&image)).await);
        assert_eq!(fixture.registry.requests(), [], "the answer is remembered");
        let problem = fetcher.fetch(&fixture.name).await.unwrap_err();
        assert!(problem.contains("401"), "{problem}");
    }

    #[tokio::test]
    async fn an_image_that_the_node_can_pull_is_for_every_namespace() {
        let fixture = FetcherFixture::new(login);
        let image = pull_as_pod(&fixture).await;
        assert!(fixture.fetcher().is_one_accessible(&[image]).await);
        fixture.fetcher().fetch(&fixture.name).await.unwrap();
    }

    #[tokio::test]
    async fn an_image_that_was_pulled_anonymously_is_for_every_namespace() {
        let fixture = FetcherFixture::new(|_| NodeKeyring::default());
        let spec = ImageSpec::named(fixture.name.to_string());
        fixture.node.pulls.manager().pull_directly(spec, None, None).await.unwrap();
        let store = fixture.node.storage.store().unwrap().store().clone();
        let image = store.images().unwrap().pop().unwrap();
        fixture.registry.forget_requests();
        assert!(fixture.fetcher().is_one_accessible(&[image]).await);
        assert_eq!(fixture.registry.requests(), [], "its record is the proof");
    }
}
