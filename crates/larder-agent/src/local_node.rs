//! The images of one store in this process: what most programs that embed larder need.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use larder::backend::Image;
use larder::credentials::{PullSecret, SecretCoordinates};
use larder::error_chain;
use larder::events::{EventSink, LogSink};
use larder::gc::{GcGoal, GcPolicy, GcReport};
use larder::pod::{ObjectRef, Pod};
use larder::pull::{EnsureError, EnsureRequest, EnsuredImage, PullPolicy, PullStatus};
use larder::retention::KeepRule;
use larder_api::convert;
use larder_api::v1 as api;
use larder_api::v1::{ExportFormat, removed};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use crate::backend::{OpenMode, RuntimeRequirement};
use crate::client::{ArchiveDownload, ArchiveUpload, Client, EnsureCalls};
use crate::config::{self, SettingOrigin, SettingsSource, SettingsSources};
use crate::control;
use crate::environment::DefaultPaths;
use crate::error::Error;
use crate::node::{Node, NodeOptions, StateDirAccess};
use crate::serve::{CommandServer, JoinedPulls};

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

/// How often the caller of an ensure hears of its progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// How a [`LocalNode`] reaches registries, and what takes its events. No file of settings is read in any case.
#[derive(Default)]
pub struct LocalNodeOptions {
    /// Absolute paths of directories with the mirrors and certificates of registries, in containerd's format: a private
    /// CA is `ca` in `HOST/hosts.toml`. Empty: those of this machine, as of containerd and Docker.
    pub certs_dirs: Vec<PathBuf>,
    /// Registries that are asked over plain HTTP: `HOST` or `HOST:PORT`.
    pub plain_http: Vec<String>,
    /// Credentials by registry or repository, as docker's `config.json` names them: user name and password. Those of
    /// this user's files are used as well.
    pub logins: BTreeMap<String, (String, String)>,
    /// Takes the events of pulls; without it they go to the log.
    pub events: Option<Arc<dyn EventSink>>,
}

impl fmt::Debug for LocalNodeOptions {
    /// Passwords are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalNodeOptions")
            .field("certs_dirs", &self.certs_dirs)
            .field("plain_http", &self.plain_http)
            .field("logins", &self.logins.keys())
            .finish_non_exhaustive()
    }
}

impl LocalNodeOptions {
    fn settings(&self) -> Result<Vec<SettingsSource>, Error> {
        let list = |key, values: Vec<String>| {
            (!values.is_empty()).then_some(SettingsSource::GivenList {
                by: SettingOrigin::Default,
                key,
                values,
            })
        };
        let dirs = self.certs_dirs.iter().map(|dir| utf8(dir)).collect::<Result<_, _>>()?;
        let given = [list("registry.certsDirs", dirs), list("registry.plainHTTP", self.plain_http.clone())];
        Ok(given.into_iter().flatten().collect())
    }

    /// The logins as a pull secret.
    fn secret(&self) -> Option<PullSecret> {
        if self.logins.is_empty() {
            return None;
        }
        let auth = |(user, password): &(String, String)| STANDARD.encode(format!("{user}:{password}"));
        let auths: serde_json::Map<_, _> = self
            .logins
            .iter()
            .map(|(place, login)| (place.clone(), serde_json::json!({ "auth": auth(login) })))
            .collect();
        let document = serde_json::json!({ "auths": auths }).to_string().into_bytes();
        Some(PullSecret {
            kind: "kubernetes.io/dockerconfigjson".to_owned(),
            coordinates: SecretCoordinates { name: "logins".to_owned(), ..SecretCoordinates::default() },
            data: BTreeMap::from([(".dockerconfigjson".to_owned(), document)]),
        })
    }
}

fn utf8(path: &Path) -> Result<String, Error> {
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::bad_input(format!("{}: not UTF-8; choose another path", path.display())))
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
        LocalNode::open_with(root, LocalNodeOptions::default()).await
    }

    /// Opens the store in this directory with other certificates, mirrors, logins, or a sink for events.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// use larder_agent::{LocalNode, LocalNodeOptions};
    ///
    /// let options = LocalNodeOptions { plain_http: vec!["10.0.0.7:5000".into()], ..Default::default() };
    /// let node = LocalNode::open_with(dir.path(), options).await?;
    /// node.close().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open_with(root: impl Into<PathBuf>, options: LocalNodeOptions) -> Result<LocalNode, Error> {
        let root = root.into();
        let (settings, own) = (options.settings()?, options.secret());
        let runtime = Handle::current();
        let opened = spawn_blocking(move || {
            let _context = runtime.enter();
            open_node(&root, settings)
        });
        let node =
            opened.await.map_err(|error| Error::failed(format!("cannot open the store: {error}")))??;
        let server = CommandServer::start(node);
        let events = options.events.unwrap_or_else(|| Arc::new(LogSink));
        let ensures = EnsureCalls::new(server.client(), own, events, true);
        Ok(LocalNode { server, ensures })
    }

    fn client(&self) -> Client {
        self.server.client()
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
        self.ensures.ensure(&with_target(request)).await
    }

    /// As [`ensure_for`](LocalNode::ensure_for). Until it ends, `progress` is called with all pulls that this node
    /// makes, ten times a second: their bytes, and what they wait for.
    pub async fn ensure_with_progress(
        &self,
        request: &EnsureRequest,
        mut progress: impl FnMut(&[PullStatus]),
    ) -> Result<EnsuredImage, EnsureError> {
        let request = with_target(request);
        let mut ensuring = std::pin::pin!(self.ensures.ensure(&request));
        let mut ticks = interval(PROGRESS_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                ended = &mut ensuring => return ended,
                _ = ticks.tick() => progress(&self.ensures.pulls()),
            }
        }
    }

    /// Removes a name, and the image with its last name; or an image by its ID, which needs `force` if it has several
    /// names. Names are exact: one without a tag means `latest`.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let node = larder_agent::LocalNode::open(dir.path()).await?;
    /// let absent = node.remove("127.0.0.1:1/none:1", false).await.unwrap_err();
    /// assert_eq!(absent.kind(), larder_agent::ErrorKind::NotFound);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn remove(&self, image: &str, force: bool) -> Result<(), Error> {
        let request = api::RemoveRequest { images: vec![image.to_owned()], force, ..Default::default() };
        let answer = self.client().wait(async |mut calls| calls.remove(request).await).await?;
        if let Some(error) = answer.error {
            return Err(error.into());
        }
        match answer.results.into_iter().next().and_then(|removed| removed.result) {
            Some(removed::Result::Refused(refused)) => Err(refused.into()),
            _ => Ok(()),
        }
    }

    /// Gives an image another name, which the image that has it loses.
    pub async fn tag(&self, source: &str, target: &str) -> Result<(), Error> {
        let request = api::TagRequest { source: source.to_owned(), target: target.to_owned() };
        self.client().wait(async |mut calls| calls.tag(request).await).await.map(drop)
    }

    /// Mounts the root file system of an image at an existing directory, read-only. Requires root. The image is in use
    /// until [`unmount`](LocalNode::unmount), also after this process has ended.
    pub async fn mount(&self, image: &str, dir: &Path) -> Result<(), Error> {
        let request =
            api::MountRequest { image: image.to_owned(), target: absolute(dir)?, ..Default::default() };
        self.client().wait(async |mut calls| calls.mount(request).await).await.map(drop)
    }

    /// Unmounts a directory that [`mount`](LocalNode::mount) mounted at.
    pub async fn unmount(&self, dir: &Path) -> Result<(), Error> {
        let request = api::UnmountRequest { target: absolute(dir)?, force: false };
        self.client().wait(async |mut calls| calls.unmount(request).await).await.map(drop)
    }

    /// Retains an image for a time from now; zero ends the lease.
    pub async fn lease(&self, image: &str, time: Duration) -> Result<(), Error> {
        // A part of a second is one: zero would end the lease.
        let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
        let request = api::LeaseRequest { image: image.to_owned(), seconds };
        self.client().wait(async |mut calls| calls.lease(request).await).await.map(drop)
    }

    /// Adds a keep rule, which is there for every process that opens the store.
    pub async fn keep(&self, rule: &KeepRule) -> Result<(), Error> {
        let request = api::KeepRequest { add: vec![convert::keep_rule(rule)], ..Default::default() };
        self.client().wait(async |mut calls| calls.keep(request).await).await.map(drop)
    }

    /// Why a collection would retain or remove an image now, and what its removal frees.
    pub async fn explain(&self, image: &str) -> Result<api::Explanation, Error> {
        let request = api::ExplainRequest { image: image.to_owned(), ..Default::default() };
        self.client().wait(async |mut calls| calls.explain(request).await).await
    }

    /// Loads the images of an archive or an OCI layout; their IDs.
    pub async fn load(&self, from: &Path) -> Result<Vec<String>, Error> {
        let (upload, read_error) = ArchiveUpload::of(from, api::LoadRequest::default());
        let answer = self.client().wait(async |mut calls| calls.load(upload).await).await;
        if let Some(error) = read_error.take() {
            return Err(Error::bad_input(format!("{}: cannot read: {error}", from.display())));
        }
        let api::LoadResponse { images, error, .. } = answer?;
        match error {
            Some(error) => Err(error.into()),
            None => Ok(images.into_iter().map(|image| image.id).collect()),
        }
    }

    /// Writes images to an archive of an OCI layout, from which [`load`](LocalNode::load) and other tools make them
    /// again.
    pub async fn save(&self, images: &[&str], to: impl Write + Send + 'static) -> Result<(), Error> {
        self.write(images, ExportFormat::Oci, to).await
    }

    /// Writes the files of an image, as a container would see them, as a tar archive.
    pub async fn export(&self, image: &str, to: impl Write + Send + 'static) -> Result<(), Error> {
        self.write(&[image], ExportFormat::Files, to).await
    }

    async fn write(
        &self,
        images: &[&str],
        format: ExportFormat,
        mut to: impl Write + Send + 'static,
    ) -> Result<(), Error> {
        let images = images.iter().map(|&image| image.to_owned()).collect();
        let request = api::ExportRequest { images, format: format.into(), sparse: false };
        let download = ArchiveDownload::begin(&self.client(), request).await?;
        let copy = move |mut archive: &mut dyn io::Read| {
            io::copy(&mut archive, &mut to)?;
            to.flush()
        };
        let written = download.read_with(std::future::pending(), copy).await?;
        written
            .transpose()
            .map(drop)
            .map_err(|error| Error::failed(format!("cannot write the archive: {}", error_chain(&error))))
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

    /// Removes images by this policy. With [`GcGoal::Thresholds`] nothing is removed unless a threshold of the policy
    /// is exceeded. Images that are in use or leased stay in any case.
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
        self.server
            .close(JoinedPulls::Finish, |joined| tracing::info!("waiting for {joined} commands"))
            .await;
    }
}

/// The request with an object for its events: without one they would not reach the sink.
fn with_target(request: &EnsureRequest) -> EnsureRequest {
    let target = request.target.clone().or_else(|| Some(ObjectRef::new(&request.pod, "")));
    EnsureRequest { target, ..request.clone() }
}

fn absolute(dir: &Path) -> Result<String, Error> {
    let dir =
        std::path::absolute(dir).map_err(|error| Error::bad_input(format!("{}: {error}", dir.display())))?;
    utf8(&dir)
}

fn open_node(root: &Path, settings: Vec<SettingsSource>) -> Result<Node, Error> {
    let root = SettingsSource::Given { by: SettingOrigin::Default, key: "root", value: utf8(root)? };
    let layers = [root].into_iter().chain(settings).collect();
    let sources = SettingsSources { places: DefaultPaths::current(), layers };
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
