//! The images of one store in this process: what most programs that embed larder need.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder::backend::Image;
use larder::events::LogSink;
use larder::gc::{GcGoal, GcPolicy, GcReport};
use larder::pod::Pod;
use larder::pull::{EnsureError, EnsureRequest, EnsuredImage, PullPolicy};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::backend::{OpenMode, RuntimeRequirement};
use crate::client::EnsureCalls;
use crate::config::{self, SettingOrigin, SettingsSource, SettingsSources};
use crate::control;
use crate::environment::DefaultPaths;
use crate::error::Error;
use crate::node::{Node, NodeOptions, StateDirAccess};
use crate::serve::CommandServer;

/// The images of one store, opened with default settings: each image that was just ensured is leased, so that a
/// collection does not remove it, and space is counted by layers. No settings file is read. While the node is open,
/// commands such as `larder --root DIR images` work through it.
///
/// ```
/// # use larder_testkit::fault_registry::FaultRegistry;
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (registry, dir) = (FaultRegistry::start(), tempfile::tempdir()?);
/// # registry.put_image("tiny", "1", "application/vnd.oci.image.layer.v1.tar", &[vec![0; 1024]], &[]);
/// # let (root, name) = (dir.path(), registry.image("tiny:1"));
/// use larder::gc::{GcGoal, GcPolicy};
/// use larder_agent::LocalNode;
///
/// let node = LocalNode::open(root).await?;
/// let ensured = node.ensure(&name).await?;
/// assert_eq!(node.images().await?[0].id, ensured.image_ref);
///
/// let report = node.collect(&GcPolicy::default(), GcGoal::AllUnused).await?;
/// assert_eq!(report.removed().count(), 0, "an image that was just ensured is leased");
/// node.close().await;
/// # Ok(())
/// # }
/// ```
pub struct LocalNode {
    server: CommandServer,
    ensures: EnsureCalls,
}

impl LocalNode {
    /// Opens the store in this directory, and creates it if it does not exist. Fails if another process has it open.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// let node = larder_agent::LocalNode::open(dir.path().join("images")).await?;
    /// assert!(node.images().await?.is_empty());
    /// node.close().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open(root: impl Into<PathBuf>) -> Result<LocalNode, Error> {
        let root = root.into();
        let runtime = Handle::current();
        let opened = spawn_blocking(move || {
            let _context = runtime.enter();
            open_node(&root)
        });
        let node =
            opened.await.map_err(|error| Error::failed(format!("cannot open the store: {error}")))??;
        let server = CommandServer::start(node);
        let ensures = EnsureCalls::new(server.client(), None, Arc::new(LogSink), false);
        Ok(LocalNode { server, ensures })
    }

    /// Makes an image present: pulls it with the credentials of this user unless it is there. Kubelet's back-off and
    /// limits apply.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let node = larder_agent::LocalNode::open(dir.path()).await?;
    /// let failed = node.ensure("127.0.0.1:1/none:1").await.unwrap_err();
    /// assert!(failed.to_string().contains("127.0.0.1:1/none:1"), "{failed}");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ensure(&self, image: &str) -> Result<EnsuredImage, EnsureError> {
        self.ensure_for(&EnsureRequest::new(image, PullPolicy::IfNotPresent, Pod::default())).await
    }

    /// Makes an image present for a pod, with its pull policy and its secrets.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let node = larder_agent::LocalNode::open(dir.path()).await?;
    /// use larder::pod::Pod;
    /// use larder::pull::{EnsureRequest, PullPolicy};
    ///
    /// let request = EnsureRequest::new("127.0.0.1:1/none:1", PullPolicy::Never, Pod::default());
    /// assert!(node.ensure_for(&request).await.is_err(), "the policy forbids the pull");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ensure_for(&self, request: &EnsureRequest) -> Result<EnsuredImage, EnsureError> {
        self.ensures.ensure(request).await
    }

    /// The images that are present.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let node = larder_agent::LocalNode::open(dir.path()).await?;
    /// for image in node.images().await? {
    ///     println!("{} {} bytes", image.id, image.size);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn images(&self) -> Result<Vec<Image>, Error> {
        self.server.client().images().await
    }

    /// Removes images by this policy. With [`GcGoal::Thresholds`] nothing is removed unless a threshold of the policy is
    /// exceeded. Images that are in use or leased stay in any case.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let node = larder_agent::LocalNode::open(dir.path()).await?;
    /// use std::time::Duration;
    ///
    /// use larder::gc::{GcGoal, GcPolicy};
    ///
    /// let policy = GcPolicy { minimum_age: Duration::from_secs(600), ..GcPolicy::default() };
    /// let report = node.collect(&policy, GcGoal::AllUnused).await?;
    /// println!("removed {} images", report.removed().count());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn collect(&self, policy: &GcPolicy, goal: GcGoal) -> Result<GcReport, Error> {
        if let Some(problem) = policy.problems().first() {
            return Err(Error::bad_input(problem.to_string()));
        }
        let collector = self.server.node().collection.collector()?;
        match collector.round(goal, policy).await.into_result() {
            Ok(report) => Ok(report),
            Err(error) => Err(control::gc::failure_of(collector, error).await),
        }
    }

    /// Waits for commands that work through this node, and until all records are on disk. Dropping the node instead
    /// loses no image, but may lose the last use of one.
    pub async fn close(self) {
        self.server.close(|joined| tracing::info!("waiting for {joined} commands")).await;
    }
}

fn open_node(root: &Path) -> Result<Node, Error> {
    let Some(value) = root.to_str().map(str::to_owned) else {
        return Err(Error::bad_input(format!(
            "{}: not UTF-8; choose another directory for the store",
            root.display()
        )));
    };
    let root = SettingsSource::Given { by: SettingOrigin::Default, key: "root", value };
    let sources = SettingsSources { places: DefaultPaths::current(), layers: vec![root] };
    let settings = config::load(&sources).map_err(|errors| Error::bad_input(errors.to_string()))?;
    let options = NodeOptions {
        store: OpenMode::Create,
        runtime: RuntimeRequirement::Require,
        state: StateDirAccess::Exclusive,
        publishes: false,
        joins_cluster: false,
        logs_events: true,
        verbosity: tracing::Level::INFO,
    };
    Ok(Node::open(sources, settings, None, options)?)
}
