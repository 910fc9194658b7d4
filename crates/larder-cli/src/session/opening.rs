//! Opens the images of a command: through a daemon, through another command that has them open, or in this process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use larder::go_format;
use larder_agent::NodeOpenError;
use larder_agent::backend::{BackendTarget, OpenMode, RuntimeRequirement};
use larder_agent::client::{Client, ControlServerAddress, find_server};
use larder_agent::config::{Config, SettingOrigin, SettingsSources};
use larder_agent::node::{Node, NodeOptions, StateDirAccess};
use larder_agent::serve::CommandServer;
use larder_agent::state::StateDir;
use tokio::time::{self, Instant};

use super::settings::LocalNodeSettings;
use super::{CommandSession, ImageAccess, log_daemon};
use crate::args::verbosity_level;
use crate::credential_setup::usual_programs;
use crate::failure::{ErrorKind, Failure};

/// How long to wait for images that another process has open and does not serve: it starts, or it ends.
pub(super) const OPEN_WITHIN: Duration = Duration::from_secs(120);
/// After how long to look whether it has: twice as long each time, up to the maximum.
pub(super) const OPEN_RETRY: Duration = Duration::from_millis(20);
pub(super) const OPEN_RETRY_MAX: Duration = Duration::from_millis(500);
/// After how long a note says what the command waits for.
const PATIENCE: Duration = Duration::from_secs(2);

impl CommandSession {
    /// A client of the node that has these images.
    pub(crate) async fn open(&self, need: ImageAccess) -> Result<Client, Failure> {
        self.connect(need).await.map_err(Failure::from)
    }

    /// The same; `None` where the store does not exist.
    pub(crate) async fn open_if_exists(&self, need: ImageAccess) -> Result<Option<Client>, Failure> {
        match self.connect(need).await {
            Ok(client) => Ok(Some(client)),
            Err(NodeOpenError::NoStore(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The same; `None`, after a note, where nothing has been pulled yet into the usual store.
    pub(crate) async fn open_to_list(&self, need: ImageAccess) -> Result<Option<Client>, Failure> {
        let error = match self.connect(need).await {
            Ok(client) => return Ok(Some(client)),
            Err(error) => error,
        };
        if matches!(error, NodeOpenError::NoStore(_)) {
            let (_, config) = self.config(&ImageAccess::read().of_store())?;
            if *config.origin("root") == SettingOrigin::Default {
                let root = config.root.display();
                self.out.info(format_args!("note: no images pulled yet: no image store in {root}"));
                return Ok(None);
            }
        }
        Err(error.into())
    }

    /// The same, with the use of images where the state directory can be had, and without it elsewhere.
    pub(crate) async fn open_to_list_use(&self) -> Result<Option<Client>, Failure> {
        match self.connect(ImageAccess::list()).await {
            Ok(client) => return Ok(Some(client)),
            Err(NodeOpenError::InUse(error)) => {
                tracing::info!("listing without the use of images: {}", error.message());
            }
            Err(NodeOpenError::Failed(error)) if error.kind() != ErrorKind::Unavailable => {
                tracing::info!("listing without the use of images: {}", error.message());
            }
            Err(NodeOpenError::NoStore(_)) => {}
            Err(error) => return Err(error.into()),
        }
        self.open_to_list(ImageAccess::read()).await
    }

    async fn connect(&self, mut need: ImageAccess) -> Result<Client, NodeOpenError> {
        let started = Instant::now();
        let (mut printed, mut wait) = (false, OPEN_RETRY);
        loop {
            let busy = match self.find(&need)? {
                (Some(client), _) => {
                    log_daemon(&client);
                    Box::pin(self.warn_of_ignored(&client, &need)).await;
                    return Ok(client);
                }
                (None, opening) => match Box::pin(self.join_or_open(opening?, &mut need)).await? {
                    Ok(client) => return Ok(client),
                    Err(busy) => busy,
                },
            };
            let within = self.connection.timeout.unwrap_or(OPEN_WITHIN);
            if started.elapsed() > within {
                let waited = go_format::duration(within);
                return Err(NodeOpenError::InUse(
                    busy.hint(format!("waited {waited}; --timeout changes that")),
                ));
            }
            if !printed && started.elapsed() > PATIENCE {
                printed = true;
                self.out.info(format_args!("note: waiting: {}", busy.message()));
            }
            time::sleep(wait).await;
            wait = (wait * 2).min(OPEN_RETRY_MAX);
        }
    }

    /// Warns of settings of this command that a daemon does not have.
    async fn warn_of_ignored(&self, client: &Client, need: &ImageAccess) {
        // Invalid settings are ignored where a daemon does the work.
        let Ok((_, config)) = self.config(need) else { return };
        let given = need.pulling.iter().flat_map(|pulling| &pulling.given);
        let warned: Vec<&str> = given.map(|(_, key)| *key).collect(); // the command itself warns of them
        let ignored = client.ignored(&config, |key| need.depends_on(key) && !warned.contains(&key)).await;
        if let Some(ignored) = ignored {
            self.out.warning(ignored.message());
            ignored.next_steps().iter().for_each(|hint| self.out.hint(hint.clone()));
        }
    }

    /// Works through a command that has the images open, or opens them. The inner error says that another process has
    /// them open and does not serve them now.
    async fn join_or_open(
        &self,
        opening: LocalNodeSettings,
        need: &mut ImageAccess,
    ) -> Result<Result<Client, Failure>, NodeOpenError> {
        let LocalNodeSettings { sources, config, target, command } = opening;
        let listed = need.state == Some(StateDirAccess::None) && matches!(target, BackendTarget::Runtime(_));
        if let Some(command) = command.filter(|_| !listed) {
            if need.state == Some(StateDirAccess::Exclusive) {
                StateDir::of(config.state.as_deref(), &target)?.without_root_state()?;
            }
            let client = Client::of(command, self.connection.timeout);
            let programs = match &need.pulling {
                Some(pulling) => Some((pulling.credentials)().programs().await),
                None => None,
            };
            return match client.join(&config, |key| need.depends_on(key), programs).await {
                Ok(()) => {
                    tracing::info!("using another larder command");
                    self.joined.store(true, Ordering::Relaxed);
                    Ok(Ok(client))
                }
                // It has ended since it was found.
                Err(error) if error.kind() == ErrorKind::Unavailable => Ok(Err(error)),
                Err(error) => Err(error.into()),
            };
        }
        tracing::info!("no daemon: opening the images in this process");
        self.open_here(sources, config, &target, need).await
    }

    /// Opens the images in this process, and serves them to commands that start later. The inner error is as above.
    async fn open_here(
        &self,
        sources: SettingsSources,
        config: Config,
        target: &BackendTarget,
        need: &mut ImageAccess,
    ) -> Result<Result<Client, Failure>, NodeOpenError> {
        let options = NodeOptions {
            store: if need.creates { OpenMode::Create } else { OpenMode::Existing },
            runtime: RuntimeRequirement::Require,
            state: need.state.unwrap_or(StateDirAccess::None),
            publishes: false,
            joins_cluster: false,
            logs_events: false,
            verbosity: verbosity_level(self.connection.verbose),
        };
        // Also where this command does not pull: another one may, through it.
        let credentials = match &need.pulling {
            Some(pulling) => (pulling.credentials)(),
            None => usual_programs(config.credential_tokens),
        };
        match Node::open(sources, config, Some(credentials), options) {
            Ok(node) => {
                let server = CommandServer::start(node);
                if let Some(others) = self.others.get() {
                    let _ = others.set(Box::new(server.joined())); // one node is opened in a run
                }
                let client = server.client();
                *self.server.lock().await = Some(server);
                Ok(Ok(client))
            }
            Err(NodeOpenError::InUse(error)) if self.daemon_has(target) => Err(NodeOpenError::InUse(error)),
            Err(NodeOpenError::InUse(error)) => Ok(Err(error)),
            Err(error) => Err(error),
        }
    }

    /// Whether the images are open in a daemon that `--daemon none` excludes: waiting for it is useless.
    fn daemon_has(&self, target: &BackendTarget) -> bool {
        matches!(
            find_server(target, self.connection.state.as_deref()),
            Ok(Some(ControlServerAddress::Daemon(_))) | Err(_)
        )
    }
}
