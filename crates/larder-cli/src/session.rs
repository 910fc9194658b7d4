//! A command's way to its images: the control API of a daemon, of another command that has them open, or of a node in
//! this process.
//!
//! ```text
//! ImageAccess -> CommandSession::open -> locate_server --> a daemon listens: its client
//!                                                     \--> another command serves these images: its client
//!                                                      \-> no process does: a node in this one, served to later commands
//! ```
//!
//! Two waits surround that. `open_images` waits, up to `--timeout`, for another process that has the images open and
//! does not serve them: it starts, or it ends. For a pull, `open` also waits, up to `--retry-for`, for a backend that
//! answers.

mod access;
mod exclusive;
mod failures;
mod wait_notes;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder::go_format;
use larder::retry::{RetryAdvice, RetryPolicy, retry};
use larder_agent::NodeOpenError;
use larder_agent::backend::{BackendTarget, RuntimeRequirement};
use larder_agent::client::{self, Client, ControlServerAddress, is_listening, socket_path};
use larder_agent::config::SettingOrigin;
use larder_agent::environment::{DefaultPaths, variable};
use larder_agent::node::{Node, NodeOptions, StateDirAccess};
use larder_agent::serve::{CommandServer, JoinedPulls};
use larder_agent::state::StateDir;
use tokio::sync::Mutex;

use crate::args::{GlobalFlags, verbosity_level};
use crate::credential_setup::usual_programs;
use crate::failure::{ErrorKind, Failure};
use crate::interrupt::{JoinedCommandCount, joined_calls};
use crate::printer::Printer;

pub(crate) use access::{DaemonUse, ImageAccess, ImageScope, PullSettings};
pub(crate) use exclusive::StoreWait;

use access::LocalSettings;
use wait_notes::WaitNotes;

/// Names the socket of a daemon, as `--daemon` does.
const DAEMON_VARIABLE: &str = "LARDER_DAEMON";
/// The value of both that excludes daemons.
const NO_DAEMON: &str = "none";

/// How long to wait for images that another process has open and does not serve: it starts, or it ends.
const OPEN_WITHIN: Duration = Duration::from_secs(120);
/// After how long to look whether it has: twice as long each time, up to the maximum.
const OPEN_RETRY: Duration = Duration::from_millis(20);
const OPEN_RETRY_MAX: Duration = Duration::from_millis(500);
/// After how long a note says what the command waits for.
const NOTE_WAIT_AFTER: Duration = Duration::from_secs(2);
/// How long to wait before a backend that does not answer is tried again.
const BACKEND_RETRY: Duration = Duration::from_secs(1);

/// One run of a command: what was typed, where to print, and the node that the command has open, if it has one.
pub(crate) struct CommandSession {
    connection: GlobalFlags,
    pub(crate) out: Arc<Printer>,
    /// The node in this process.
    server: Mutex<Option<CommandServer>>,
    /// Receives the function that counts the commands which work through this one.
    joined_commands: OnceLock<JoinedCommandCount>,
    /// Whether warnings about the settings were logged.
    warned: AtomicBool,
    /// True if the session worked through another command.
    joined: AtomicBool,
    /// True if a time limit has ended a pull of the command.
    timed_out: AtomicBool,
    /// Whether settings files are read.
    reads_files: bool,
}

/// The process that serves the images of a command.
enum ImageServer {
    /// A daemon at this socket, with settings of its own.
    Daemon(PathBuf),
    /// Another command at this socket, whose settings must agree with these.
    Command(PathBuf, LocalSettings),
    /// None: a node with these settings has to be opened.
    None(LocalSettings),
}

/// Why images could not be opened in one attempt.
enum OpenFailure {
    /// Another process has them open, and does not serve them now.
    Busy(Failure),
    /// Another attempt would fail in the same way.
    Failed(NodeOpenError),
}

impl From<NodeOpenError> for OpenFailure {
    fn from(error: NodeOpenError) -> Self {
        OpenFailure::Failed(error)
    }
}

impl From<Failure> for OpenFailure {
    fn from(failure: Failure) -> Self {
        OpenFailure::Failed(failure.into())
    }
}

/// The daemon that flags or variables select.
#[derive(PartialEq, Eq)]
enum DaemonChoice {
    /// The one that serves the images, if one does.
    Any,
    /// None, with `--daemon none`.
    None,
    /// The one that listens here.
    At(PathBuf),
}

impl CommandSession {
    /// Whether more is to be printed (`-v`).
    pub(crate) fn is_verbose(&self) -> bool {
        self.connection.verbose > 0
    }

    /// `--timeout`, if it was given.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.connection.timeout
    }

    /// Nothing is looked for or opened yet.
    pub(crate) fn new(connection: GlobalFlags, out: Arc<Printer>) -> CommandSession {
        CommandSession {
            connection,
            out,
            server: Mutex::default(),
            joined_commands: OnceLock::new(),
            warned: AtomicBool::default(),
            joined: AtomicBool::default(),
            timed_out: AtomicBool::default(),
            reads_files: true,
        }
    }

    /// Uses default settings, so that the demo shows the same everywhere, without leases on pulled images, so that the
    /// demo can collect them at once.
    pub(crate) fn with_default_settings(self) -> CommandSession {
        CommandSession { reads_files: false, ..self }
    }

    /// Reports to `commands` how many other commands use this one.
    pub(crate) fn warn_about_joined_commands(&self, commands: JoinedCommandCount) {
        let _ = self.joined_commands.set(commands); // once in a run
    }

    /// Returns true when the command has worked through another one.
    pub(crate) fn has_joined(&self) -> bool {
        self.joined.load(Ordering::Relaxed)
    }

    /// Returns a client of the process that has the images open: a daemon, another command, or this one. Waits for a
    /// process that has them open without serving them, and for a backend as long as `access` says.
    pub(crate) async fn open(&self, access: &ImageAccess) -> Result<Client, NodeOpenError> {
        let Some(within) = access.backend_within else { return self.open_images(access).await };
        let text = |error: &NodeOpenError| {
            let (within, message) = (go_format::duration(within), error.error().message());
            format!("waiting up to {within} for the runtime: {message}")
        };
        let notes = WaitNotes::new(&self.out, Duration::ZERO, false, text);
        let advice = |error: &NodeOpenError| match error.error().kind() {
            ErrorKind::Unavailable if notes.elapsed() + BACKEND_RETRY <= within => RetryAdvice::Backoff,
            _ => RetryAdvice::GiveUp,
        };
        let policy = RetryPolicy::unlimited(BACKEND_RETRY, BACKEND_RETRY);
        let open_answering = || async {
            let client = self.open_images(access).await?;
            match &*self.server.lock().await {
                Some(server) => {
                    server.node().check_backend().await?;
                    // A backend that did not answer until now has its interrupted pulls resolved.
                    server.node().recover().await;
                }
                None => client.check_backend_health().await?,
            }
            Ok(client)
        };
        retry(&policy, &notes, advice, open_answering).await
    }

    /// Opens images to list them. Returns `None`, after a note, where nothing has been pulled yet into the default
    /// store.
    pub(crate) async fn open_to_list(&self, access: &ImageAccess) -> Result<Option<Client>, Failure> {
        let error = match self.open(access).await {
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

    /// Pulls of other commands no longer keep this one from ending: its own time is over.
    pub(crate) fn note_time_limit(&self) {
        self.timed_out.store(true, Ordering::Relaxed);
    }

    /// Closes the node in this process, after the calls of other commands that are in progress.
    pub(crate) async fn close(&self) {
        let Some(server) = self.server.lock().await.take() else { return };
        let pulls =
            if self.timed_out.load(Ordering::Relaxed) { JoinedPulls::HandOver } else { JoinedPulls::Finish };
        let waiting =
            |commands: usize| self.out.info(format_args!("note: waiting for {}", joined_calls(commands)));
        server.close(pulls, waiting).await;
    }

    /// Returns the socket of the daemon that serves these images, if one does.
    pub(crate) async fn daemon_socket(&self) -> Option<PathBuf> {
        match self.locate_server(&ImageAccess::daemon()).await {
            Ok(ImageServer::Daemon(socket)) => Some(socket),
            _ => None,
        }
    }

    /// Opens the images, and waits for a process that has them open without serving them.
    async fn open_images(&self, access: &ImageAccess) -> Result<Client, NodeOpenError> {
        let within = self.connection.timeout.unwrap_or(OPEN_WITHIN);
        let text = |failure: &OpenFailure| match failure {
            OpenFailure::Busy(busy) => format!("waiting: {}", busy.message()),
            OpenFailure::Failed(_) => String::new(), // is not retried
        };
        let notes = WaitNotes::new(&self.out, NOTE_WAIT_AFTER, false, text);
        let advice = |failure: &OpenFailure| match failure {
            OpenFailure::Busy(_) if notes.elapsed() <= within => RetryAdvice::Backoff,
            _ => RetryAdvice::GiveUp,
        };
        let policy = RetryPolicy::unlimited(OPEN_RETRY, OPEN_RETRY_MAX);
        let opened = retry(&policy, &notes, advice, || Box::pin(self.try_open(access))).await;
        opened.map_err(|failure| match failure {
            OpenFailure::Busy(busy) => {
                let waited = go_format::duration(within);
                NodeOpenError::InUse(busy.hint(format!("waited {waited}; --timeout changes that")))
            }
            OpenFailure::Failed(error) => error,
        })
    }

    async fn try_open(&self, access: &ImageAccess) -> Result<Client, OpenFailure> {
        if let Some(server) = &*self.server.lock().await {
            return Ok(server.client());
        }
        let server = self.locate_server(access).await.map_err(|error| match error {
            NodeOpenError::InUse(busy) => OpenFailure::Busy(busy),
            error => OpenFailure::Failed(error),
        })?;
        match server {
            ImageServer::Daemon(socket) => {
                tracing::info!("using the daemon at {}", socket.display());
                let client = self.client(ControlServerAddress::Daemon(socket));
                self.warn_of_ignored_settings(&client, access).await;
                Ok(client)
            }
            ImageServer::Command(socket, settings) => self.join(socket, settings, access).await,
            ImageServer::None(settings) => {
                tracing::info!("no daemon: opening the images in this process");
                self.open_here(settings, access).await
            }
        }
    }

    /// Finds the process that serves the images. Invalid settings matter only where no daemon does.
    async fn locate_server(&self, access: &ImageAccess) -> Result<ImageServer, NodeOpenError> {
        let choice = self.daemon_choice()?;
        if let DaemonChoice::At(socket) = choice {
            self.check_agreement(&socket).await?;
            return Ok(ImageServer::Daemon(socket));
        }
        let settings = self.local_settings(access);
        let target = settings.as_ref().ok().map(|settings| settings.target.clone());
        let found = match target.or_else(|| self.target_of_flags()) {
            Some(target) => self.server_of(&target),
            None => Ok(None),
        };
        let command = match found {
            Ok(Some(ControlServerAddress::Daemon(_))) | Err(_) if choice == DaemonChoice::None => None,
            Ok(Some(ControlServerAddress::Daemon(socket))) => return Ok(ImageServer::Daemon(socket)),
            Ok(Some(ControlServerAddress::Command(socket))) => Some(socket),
            Ok(None) => None,
            Err(error) => return Err(error.into()),
        };
        let names_images =
            self.flags_name_images() || settings.as_ref().is_ok_and(LocalSettings::name_images);
        let default = DefaultPaths::current().socket;
        let socket = match &settings {
            // The file may have been changed since the daemon was started.
            Ok(settings) if access.daemon == DaemonUse::Required && !self.flags_name_images() => {
                Some(settings.config.listen.socket.clone())
            }
            _ => default.filter(|_| !names_images),
        };
        if choice == DaemonChoice::Any
            && access.scope == ImageScope::Backend
            && let Some(socket) = socket
            && is_listening(&socket)?
        {
            return Ok(ImageServer::Daemon(socket));
        }
        if access.daemon == DaemonUse::Required {
            let target =
                settings.as_ref().ok().filter(|_| command.is_none()).map(|settings| &settings.target);
            let any = choice == DaemonChoice::Any;
            if let Some(process) = target.filter(|_| any).and_then(failures::unready_daemon) {
                let busy = format!("the daemon (process {process}) starts or stops");
                let busy = Failure::unreachable(busy).hint("if it runs, select it with --daemon SOCKET");
                return Err(NodeOpenError::InUse(busy));
            }
            if let Some(hidden) = target.and_then(failures::hidden_store) {
                return Err(hidden.into());
            }
            return Err(self.no_daemon(command, settings.err()).await.into());
        }
        let settings = settings?;
        // Listing the images of a runtime needs nothing that another command has.
        let lists_runtime =
            access.state == StateDirAccess::None && matches!(settings.target, BackendTarget::Runtime(_));
        Ok(match command.filter(|_| !lists_runtime) {
            Some(socket) => ImageServer::Command(socket, settings),
            None => ImageServer::None(settings),
        })
    }

    /// Works through a command that has the images open, if its settings agree.
    async fn join(
        &self,
        socket: PathBuf,
        settings: LocalSettings,
        access: &ImageAccess,
    ) -> Result<Client, OpenFailure> {
        let LocalSettings { config, target, .. } = settings;
        if access.state == StateDirAccess::Exclusive {
            StateDir::of(config.state.as_deref(), &target)?.without_root_state()?;
        }
        let client = self.client(ControlServerAddress::Command(socket));
        let programs = match &access.pulls {
            Some(pulls) => Some((pulls.credentials)().programs().await),
            None => None,
        };
        match client.join(&config, |key| access.depends_on(key), programs).await {
            Ok(()) => {
                tracing::info!("using another larder command");
                self.joined.store(true, Ordering::Relaxed);
                Ok(client)
            }
            // It has ended since it was found.
            Err(error) if error.kind() == ErrorKind::Unavailable => Err(OpenFailure::Busy(error)),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a node in this process, and serves it to commands that start later.
    async fn open_here(&self, settings: LocalSettings, access: &ImageAccess) -> Result<Client, OpenFailure> {
        let LocalSettings { sources, config, target } = settings;
        let options = NodeOptions {
            store: access.store,
            runtime: RuntimeRequirement::Require,
            state: access.state,
            publishes: false,
            joins_cluster: false,
            logs_events: false,
            verbosity: verbosity_level(self.connection.verbose),
        };
        // A command that does not pull has credentials for those that pull through it.
        let credentials = match &access.pulls {
            Some(pulls) => (pulls.credentials)(),
            None => usual_programs(config.credential_tokens),
        };
        match Node::open(sources, config, Some(credentials), options) {
            Ok(node) => {
                let server = CommandServer::start(node);
                if let Some(joined) = self.joined_commands.get() {
                    let _ = joined.set(Box::new(server.joined())); // one node is opened in a run
                }
                let client = server.client();
                *self.server.lock().await = Some(server);
                Ok(client)
            }
            // A daemon that `--daemon none` excludes does not end soon: waiting for it is useless.
            Err(NodeOpenError::InUse(error))
                if matches!(self.server_of(&target), Ok(Some(ControlServerAddress::Daemon(_))) | Err(_)) =>
            {
                Err(NodeOpenError::InUse(error).into())
            }
            Err(NodeOpenError::InUse(error)) => Err(OpenFailure::Busy(error)),
            Err(error) => Err(error.into()),
        }
    }

    fn client(&self, server: ControlServerAddress) -> Client {
        Client::of(server, self.connection.timeout)
    }

    /// Returns the process that serves the images of this backend, if one listens.
    fn server_of(&self, target: &BackendTarget) -> Result<Option<ControlServerAddress>, Failure> {
        client::find_server(target, self.connection.state.as_deref())
    }

    /// Warns of settings of this command that a daemon does not have.
    async fn warn_of_ignored_settings(&self, client: &Client, access: &ImageAccess) {
        // Invalid settings are ignored where a daemon does the work.
        let Ok((_, config)) = self.config(access) else { return };
        // Commands that pull warn of their flags themselves.
        let flags = access.pulls.as_ref().map(|pulls| pulls.flags.given()).unwrap_or_default();
        let is_flag = |key: &str| flags.iter().any(|(_, of_flag)| *of_flag == key);
        let ignored = client.ignored(&config, |key| access.depends_on(key) && !is_flag(key)).await;
        if let Some(ignored) = ignored {
            self.out.warning(ignored.message());
            ignored.next_steps().iter().for_each(|hint| self.out.hint(hint.clone()));
        }
    }

    fn daemon_choice(&self) -> Result<DaemonChoice, Failure> {
        let (text, by) = match (&self.connection.daemon, variable(DAEMON_VARIABLE)) {
            (Some(text), _) => (text.clone(), "--daemon"),
            (None, Some(text)) => (text, DAEMON_VARIABLE),
            (None, None) => return Ok(DaemonChoice::Any),
        };
        if text == NO_DAEMON {
            return Ok(DaemonChoice::None);
        }
        let socket = socket_path(&text).map_err(|error| {
            Failure::bad_input(format!("{by} {text}: {error}"))
                .hint("write unix:///path/to.sock, or none for no daemon")
        })?;
        Ok(DaemonChoice::At(socket))
    }

    /// Fails where a flag names images that the named daemon does not serve.
    async fn check_agreement(&self, socket: &Path) -> Result<(), Failure> {
        let place = match (&self.connection.root, &self.connection.backend) {
            (Some(root), _) => format!("{} {}", self.connection.root_origin(), root.display()),
            (None, Some(backend)) => format!("--backend {backend}"),
            (None, None) => return Ok(()),
        };
        // A daemon that does not answer is reported by the call.
        if !is_listening(socket).unwrap_or(false) {
            return Ok(());
        }
        let is_same = |a: &Path, b: &Path| {
            a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
        };
        let target = self.local_settings(&ImageAccess::read()).ok().map(|settings| settings.target);
        let server = target.as_ref().and_then(|target| self.server_of(target).ok().flatten());
        if matches!(server, Some(ControlServerAddress::Daemon(theirs)) if is_same(&theirs, socket)) {
            return Ok(());
        }
        // A daemon on a full disk may not have recorded its socket.
        let unrecorded = target.as_ref().and_then(failures::unready_daemon);
        if unrecorded.is_some() && unrecorded == self.daemon_process(socket.to_owned()).await.pid() {
            return Ok(());
        }
        Err(Failure::bad_input(format!("{place}: the daemon at {} serves other images", socket.display()))
            .hint("omit one of the two, or use --daemon none"))
    }
}
