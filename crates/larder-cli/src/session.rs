//! The way of a command to its images: the control API of a daemon, of another command that has them open, or of a
//! node in this process.
//!
//! ```text
//! --daemon, LARDER_DAEMON -> settings -> who serves these images? -> connect, join, or open a node and serve it
//! ```

mod exclusive;
mod image_access;
mod opening;
mod settings;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder::go_format;
use larder::hint::Hint;
use larder_agent::NodeOpenError;
use larder_agent::backend::docker;
use larder_agent::backend::target::{CRI, DOCKER, PODMAN, STORE};
use larder_agent::client::{Client, ControlServerAddress, find_server, is_listening};
use larder_agent::environment::{DefaultPaths, variable};
use larder_agent::serve::CommandServer;
use larder_api::v1::StatusRequest;
use tokio::sync::Mutex;
use tokio::time::{self, Instant};

use crate::args::GlobalFlags;
use crate::args::settings::{BACKEND_VARIABLE, IMAGE_VARIABLE, RUNTIME_VARIABLE};
use crate::exit::CommandOutcome;
use crate::failure::{ErrorKind, ExitReport as _, Failure};
use crate::interrupt::{JoinedCommandCount, joined_calls};
use crate::printer::Printer;

pub(crate) use exclusive::StoreWait;
pub(crate) use image_access::{ImageAccess, LocalPullSettings};
use settings::{DaemonFlag, LocalNodeSettings};

/// One run of a command: what was typed, where to print, and the node that the command has open, if it has one.
pub(crate) struct CommandSession {
    connection: GlobalFlags,
    pub(crate) out: Arc<Printer>,
    server: Mutex<Option<CommandServer>>,
    /// Where to say how many other commands work through this one.
    others: OnceLock<JoinedCommandCount>,
    /// Whether warnings about the settings were logged.
    warned: AtomicBool,
    /// Whether it worked through another command.
    joined: AtomicBool,
    /// Whether files of settings count.
    reads_files: bool,
}

impl CommandSession {
    /// Nothing is looked for or opened yet.
    pub(crate) fn new(connection: GlobalFlags, out: Arc<Printer>) -> CommandSession {
        CommandSession {
            connection,
            out,
            server: Mutex::default(),
            others: OnceLock::new(),
            warned: AtomicBool::default(),
            joined: AtomicBool::default(),
            reads_files: true,
        }
    }

    /// The same, with default settings, so that the demo shows the same everywhere, and without leases on pulled images,
    /// so that it can collect them at once.
    pub(crate) fn with_default_settings(self) -> CommandSession {
        CommandSession { reads_files: false, ..self }
    }

    /// Reports to `others` how many commands use this one.
    pub(crate) fn warn_about_joined_commands(&self, others: JoinedCommandCount) {
        let _ = self.others.set(others); // once in a run
    }

    /// The client of a daemon, for commands that are about nothing else.
    pub(crate) async fn daemon(&self) -> Result<Client, Failure> {
        let mut message = "no daemon is running".to_owned();
        match self.find(&ImageAccess::read())? {
            (Some(client), _) => {
                log_daemon(&client);
                return Ok(client);
            }
            (None, Ok(LocalNodeSettings { command: Some(command), .. })) => {
                if let Some(holder) = self.holder(command).await {
                    message = format!("{message}: {holder} has the images open");
                }
            }
            (None, Ok(_)) => {}
            (None, Err(error)) => {
                let failure = Failure::from(error);
                if failure.kind() == ErrorKind::InvalidInput {
                    return Err(failure
                        .hint("a running daemon is selected with --daemon SOCKET, whatever the settings"));
                }
            }
        }
        Err(Failure::unreachable(message)
            .hint(Hint::from("start it with ").command(["serve"]))
            .hint("or select one with --daemon SOCKET, --root or --backend"))
    }

    /// The process that has the images open, and what it was started as; `None` if it has ended.
    async fn holder(&self, command: ControlServerAddress) -> Option<String> {
        let client = Client::of(command, self.connection.timeout);
        let status = client.ask(async |mut calls| calls.status(StatusRequest { look: false }).await);
        let process = status.await.ok()?.pid;
        let words = fs_err::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).trim_end_matches('\0').replace('\0', " ");
        Some(if words.is_empty() {
            format!("process {process}")
        } else {
            format!("process {process} ({words})")
        })
    }

    /// Whether the command has worked through another one.
    pub(crate) fn has_joined(&self) -> bool {
        self.joined.load(Ordering::Relaxed)
    }

    /// The daemon that serves these images, if one runs.
    pub(crate) fn running_daemon(&self) -> Option<Client> {
        self.find(&ImageAccess::read()).ok()?.0
    }

    /// The client of the daemon that does the work of this command; else what it takes to work on the images here, or
    /// why that is not possible.
    fn find(
        &self,
        need: &ImageAccess,
    ) -> Result<(Option<Client>, Result<LocalNodeSettings, NodeOpenError>), Failure> {
        let client = |socket| Client::of(ControlServerAddress::Daemon(socket), self.connection.timeout);
        let never = match self.named()? {
            DaemonFlag::At(socket) => {
                self.check_agreed(&socket)?;
                let unused = Failure::unreachable("a daemon was named");
                return Ok((Some(client(socket)), Err(unused.into())));
            }
            DaemonFlag::Never => true,
            DaemonFlag::Nothing => false,
        };
        let opening = self.local_settings(need);
        let mut command = None;
        let target = opening.as_ref().ok().map(|opening| opening.target.clone());
        if let Some(target) = target.or_else(|| self.target_of_flags()) {
            match find_server(&target, self.connection.state.as_deref()) {
                Ok(Some(ControlServerAddress::Daemon(_))) | Err(_) if never => {}
                Ok(Some(ControlServerAddress::Daemon(socket))) => {
                    return Ok((Some(client(socket)), opening_unused()));
                }
                command_or_none => command = command_or_none?,
            }
        }
        if !never
            && !need.store_only
            && !self.names_images()
            && !opening.as_ref().is_ok_and(LocalNodeSettings::is_named)
            && let Some(usual) = DefaultPaths::current().socket
            && is_listening(&usual)?
        {
            return Ok((Some(client(usual)), opening_unused()));
        }
        Ok((None, opening.map(|opening| LocalNodeSettings { command, ..opening })))
    }

    /// Closes the images, after the calls of other commands that are in progress.
    pub(crate) async fn close(&self) {
        let Some(server) = self.server.lock().await.take() else { return };
        let waiting =
            |commands: usize| self.out.info(format_args!("note: waiting for {}", joined_calls(commands)));
        server.close(waiting).await;
    }

    /// The failure, and which variable led to what cannot be reached.
    pub(crate) fn explain(&self, failure: Failure, of_store: bool) -> Failure {
        let connection = &self.connection;
        let named = variable(BACKEND_VARIABLE);
        if of_store {
            let by_default = connection.root.is_none() && connection.backend.is_none();
            return match named.filter(|named| by_default && named != STORE) {
                Some(named) => failure.hint(format!(
                    "{BACKEND_VARIABLE}={named} has no effect: this command requires larder's own store"
                )),
                None => failure,
            };
        }
        if failure.outcome() != CommandOutcome::Unreachable || connection.root.is_some() {
            return failure;
        }
        let (text, by_variable) = match (&connection.backend, named) {
            (Some(text), _) => (text.clone(), false),
            (None, Some(text)) => (text, true),
            (None, None) => return failure,
        };
        let name = match text.as_str() {
            STORE => None,
            CRI => {
                let set =
                    [RUNTIME_VARIABLE, IMAGE_VARIABLE].into_iter().find(|name| variable(name).is_some());
                set.map(str::to_owned)
            }
            DOCKER => docker::engine_variable(variable),
            PODMAN => variable(docker::PODMAN_HOST).map(|_| docker::PODMAN_HOST.to_owned()),
            _ if by_variable => Some(BACKEND_VARIABLE.to_owned()),
            _ => None,
        };
        match name {
            Some(name) => failure.hint(format!("the socket is set by {name}")),
            None => failure,
        }
    }

    /// A client whose backend answers. One that does not is tried again for as long as `patience`, since a runtime may
    /// start later than larder.
    pub(crate) async fn reach_within(
        &self,
        patience: Duration,
        need: impl Fn() -> ImageAccess,
    ) -> Result<Client, Failure> {
        let started = Instant::now();
        let mut printed = false;
        loop {
            let failure = match self.connect_to_daemon(need()).await {
                Err(failure) if failure.outcome() == CommandOutcome::Unreachable => failure,
                reached_or_never => return reached_or_never,
            };
            if started.elapsed() + RETRY_PERIOD > patience {
                return Err(failure);
            }
            if !printed {
                printed = true;
                let patience = go_format::duration(patience);
                self.out.info(format_args!(
                    "note: waiting up to {patience} for the runtime: {}",
                    failure.message()
                ));
            }
            time::sleep(RETRY_PERIOD).await;
        }
    }

    /// A client whose backend answers.
    pub(crate) async fn connect_to_daemon(&self, need: ImageAccess) -> Result<Client, Failure> {
        if self.server.lock().await.is_none() {
            let client = self.open(need).await?;
            if client.socket().is_some() {
                client.answered().await?;
                return Ok(client);
            }
        }
        match &*self.server.lock().await {
            Some(server) => {
                server.node().check_backend().await?;
                // A backend that does not answer has its pulls settled when it does.
                server.node().recover().await;
                Ok(server.client())
            }
            None => Err(Failure::unreachable("the images were closed")),
        }
    }
}

/// Logs which daemon does the work.
fn log_daemon(client: &Client) {
    tracing::info!("using the daemon at {}", client.socket().unwrap_or(Path::new("")).display());
}

/// How long to wait before a runtime that does not answer is tried again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

fn opening_unused() -> Result<LocalNodeSettings, NodeOpenError> {
    Err(Failure::unreachable("a daemon has the images").into())
}
