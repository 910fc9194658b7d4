//! Credentials of fills that outlast those of the pull.

use larder::credentials::{Credential, DockerConfig, DockerConfigEntry, NodeKeyring, Secret};
use larder::pod::Pod;
use larder::reference::ImageName;
use larder_testkit::fault_registry::FaultRegistryAuth;

use super::*;

fn basic(password: &str) -> FaultRegistryAuth {
    FaultRegistryAuth::Basic { user: "node".into(), password: password.into() }
}

/// A keyring with this password for the registry.
pub(super) fn keyring(registry: &FaultRegistry, password: &str) -> Arc<NodeKeyring> {
    let (username, password) = ("node".into(), Secret::new(password));
    let entry = DockerConfigEntry { username, password, ..DockerConfigEntry::default() };
    Arc::new(NodeKeyring::fixed(&DockerConfig::with_entry(registry.address(), entry)))
}

pub(super) async fn credential(image: &Reference, keyring: &NodeKeyring) -> Credential {
    let name = ImageName::from(image.to_string());
    keyring.lookup(&name, &[], &Pod::default()).await.unwrap().remove(0)
}

impl LazyNode {
    pub(super) async fn pull_with(&self, image: &Reference, credential: &Credential) -> ImageRecord {
        self.puller.pull(image, Some(credential), &ProgressReporter::unwatched()).await.unwrap()
    }

    /// All layers are complete.
    async fn wait_until_filled(&self) {
        wait_until(|| self.store().filling_layers().is_empty()).await;
    }
}

async fn wait_until(is_done: impl Fn() -> bool) {
    let done = async {
        while !is_done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, done).await.unwrap();
}

/// The next process, with these credentials of the node.
fn restart(
    runtime: &tokio::runtime::Runtime,
    dir: TempDir,
    keeper: Arc<KeepHere>,
    credentials: Arc<NodeKeyring>,
) -> (LazyNode, GuardedBefore) {
    let puller = LazyNode::puller(dir.path(), false);
    puller.use_node_keyring(credentials);
    runtime.block_on(LazyNode::of(puller, dir, keeper, LONGEST_WAIT)).unwrap()
}

/// A lazily pulled image of a registry that requires the password `first`, without most of its data.
async fn pull_private(
    node: &LazyNode,
    registry: &FaultRegistry,
    fixture: &Fixture,
) -> (Reference, ImageRecord) {
    registry.require(basic("first"));
    let image = fixture.put(registry);
    hold_background(registry, fixture);
    let of_pod = credential(&image, &keyring(registry, "first")).await;
    let pulled = node.pull_with(&image, &of_pod).await;
    assert!(node.is_partial(&pulled));
    (image, pulled)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_that_ends_is_replaced_by_one_of_the_node() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    node.puller.use_node_keyring(keyring(&registry, "second"));
    let (_, pulled) = pull_private(&node, &registry, &fixture).await;
    let mounted = node.mount(&pulled, "app");
    registry.require(basic("second"));
    let (path, content) = fixture.files().remove(0);
    assert!(mounted.read(&path).await.unwrap() == content, "a read, while the background waits");
    registry.clear_faults();
    node.wait_until_filled().await;
    assert!(!node.is_partial(&pulled));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_of_a_pull_that_is_refused_for_a_while_is_used_again() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    node.puller.use_node_keyring(keyring(&registry, "wrong"));
    let (_, pulled) = pull_private(&node, &registry, &fixture).await;
    registry.require(basic("meanwhile"));
    registry.clear_faults();
    wait_until(|| !node.puller.refused_fills().is_empty()).await;
    registry.require(basic("first"));
    node.wait_until_filled().await;
    assert!(!node.is_partial(&pulled));
}

#[test]
fn a_fill_goes_on_after_a_restart_with_a_credential_of_the_node() {
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let keeper = Arc::<KeepHere>::default();
    let Some((runtime, node)) = LazyNode::start(&keeper) else { return };
    let (_, pulled) = runtime.block_on(pull_private(&node, &registry, &fixture));
    let dir = node.stop(runtime);

    registry.clear_faults();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, before) = restart(&runtime, dir, keeper, keyring(&registry, "first"));
    assert_eq!(before.layers, 1);
    runtime.block_on(node.wait_until_filled());
    assert!(!node.is_partial(&pulled));
    assert_eq!(node.puller.refused_fills(), [""; 0]);
}

#[test]
fn a_fill_without_a_credential_waits_for_a_pull_and_says_so() {
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let keeper = Arc::<KeepHere>::default();
    let Some((runtime, node)) = LazyNode::start(&keeper) else { return };
    let (image, pulled) = runtime.block_on(pull_private(&node, &registry, &fixture));
    let dir = node.stop(runtime);

    registry.clear_faults();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, _) = restart(&runtime, dir, keeper, keyring(&registry, "wrong"));
    runtime.block_on(wait_until(|| !node.puller.refused_fills().is_empty()));
    assert_eq!(node.puller.refused_fills(), [image.name()]);
    assert!(node.is_partial(&pulled));

    let of_pod = runtime.block_on(credential(&image, &keyring(&registry, "first")));
    runtime.block_on(node.pull_with(&image, &of_pod));
    runtime.block_on(node.wait_until_filled());
    assert!(!node.is_partial(&pulled));
    assert_eq!(node.puller.refused_fills(), [""; 0]);
}
