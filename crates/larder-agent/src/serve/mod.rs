//! The daemon: one process per node, one socket. And what a command serves to others while it has the images open.
//!
//! ```text
//! settings -> Daemon::build (bind, start nothing) -> Daemon::run -> drain -> stop
//! ```

mod command;
pub(crate) mod connections;
mod cri_calls;
pub(crate) mod http_handler;
mod listener;
mod observed_body;
pub(crate) mod request_memory;
pub(crate) mod responses;
pub(crate) mod router;
mod shutdown;
mod socket;
mod socket_file;
mod systemd;

use std::future;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use larder::threads::in_place;
use larder_api::v1::StatusRequest;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::{self, Handle, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{self, Instant};
use tracing::Level;

use crate::backend::{OpenMode, RuntimeRequirement, target_of};
use crate::client::{self, Client, ControlServerAddress};
use crate::config::{self, Config, ConfigErrors, ListenSettings, SettingsFiles, SettingsSources};
use crate::control::{self, ControlApi, DaemonAddresses, ServingProcess};
#[cfg(feature = "dashboard")]
use crate::dashboard::Dashboard;
use crate::error::{Error, ErrorKind, NodeOpenError};
use crate::log;
use crate::node::{Node, NodeOptions, StateDirAccess};
use crate::traces;
use connections::Connections;
use http_handler::HttpHandler;
use router::Router;
use socket::BoundSocket;
use socket_file::SocketPathFile;

pub use command::{CommandServer, JoinedPulls};
pub use socket::group_id;

/// Threads that answer requests. What blocks has threads of its own.
const THREADS: usize = 2;
/// How long a thread that has nothing to block on stays. They take turns, so that a single question every now and then
/// keeps as many as fit into this time: after a rush they are to go.
const IDLE: Duration = Duration::from_secs(1);

/// How long the last spans may take to be exported when the daemon stops.
const FLUSH_WITHIN: Duration = Duration::from_secs(3);

/// How long to wait at the start for a command that has the images open.
const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// How often to look whether it has ended.
const OPEN_RETRY: Duration = Duration::from_millis(50);
/// How long another daemon may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Everything that is needed to run; nothing of it runs yet.
pub struct Daemon {
    node: Arc<Node>,
    socket: BoundSocket,
    metrics: Option<StdTcpListener>,
    /// The file that names the daemon's socket for commands.
    note: Option<SocketPathFile>,
    signals: DaemonSignals,
}

/// The runtime that a daemon runs on.
pub fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_multi_thread().worker_threads(THREADS).thread_keep_alive(IDLE).enable_all().build()
}

impl Daemon {
    /// Reads the settings, opens what must be open and binds what is served; starts nothing. `verbosity` is the least
    /// severe level that is logged, whatever the settings say. Must be called within a [`runtime()`].
    pub fn build(sources: &SettingsSources, verbosity: Level) -> Result<Daemon, StartError> {
        let (config, files) = settings(sources)?;
        log::change(config.log.level.max(verbosity), log::LogLineFormat::of(config.log.format));
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        traces::start(&config)?;
        let ListenSettings { socket, mode, group } = config.listen.clone();
        let options = NodeOptions {
            store: OpenMode::Create,
            runtime: RuntimeRequirement::WaitForDefault,
            state: StateDirAccess::Exclusive,
            logs_events: true,
            publishes: true,
            joins_cluster: true,
            verbosity,
        };
        let node = open_node(sources.clone(), config, options)?;
        node.collection.collector()?;
        // Any client of the socket may send any of them.
        let signals = DaemonSignals::listen()?;
        let socket = BoundSocket::open(&socket::SocketOptions { socket, mode, group })?;
        // After all that can refuse to start: it may warn.
        let metrics = bind_metrics(&node.settings.now())?;
        let left = SocketPathFile::leave(&node, socket.path.as_deref())?;
        match files {
            Some(files) => config::last_good::save(sources, &files),
            None => node.report_degraded(),
        }
        Ok(Daemon { node: Arc::new(node), socket, metrics, note: left, signals })
    }

    /// Returns the served node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Where it listens; `None` for a socket of systemd without a path.
    pub fn socket(&self) -> Option<&Path> {
        self.socket.path.as_deref()
    }

    /// Where metrics and health are served over TCP.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// URL of the dashboard, if it is served.
    pub fn dashboard(&self) -> Option<String> {
        let address = self.metrics_address().filter(|_| self.config().serves_dashboard())?;
        let host = if address.ip().is_unspecified() {
            format!("localhost:{}", address.port())
        } else {
            address.to_string()
        };
        Some(format!("http://{host}/dashboard/"))
    }

    /// The settings in force.
    pub fn config(&self) -> Arc<Config> {
        self.node.settings.now()
    }

    /// Runs until SIGTERM or SIGINT, and then until calls under way have ended or their grace period is over. Pulls end
    /// at once: the next process continues them.
    pub async fn run(self) -> Result<(), Error> {
        let dashboard = self.dashboard();
        let Daemon { node, socket, metrics, mut note, mut signals } = self;
        let program = std::env::current_exe().unwrap_or_default();
        node.guard_reads(&program).await;
        let cannot = |error: io::Error| Error::failed(format!("cannot use the bound sockets: {error}"));
        let BoundSocket { listener, path, own } = socket;
        let listener = UnixListener::from_std(listener).map_err(cannot)?;
        let metrics = metrics.map(TcpListener::from_std).transpose().map_err(cannot)?;
        let (stop, stopped) = watch::channel(false);
        let connections = Connections::default();
        let process = ServingProcess::Daemon(DaemonAddresses { socket: path, dashboard });
        let control = ControlApi::new(node.clone(), process, connections.clone(), stopped.clone());
        let plain = HttpHandler::new(Arc::clone(&node), connections.clone());
        #[cfg(feature = "dashboard")]
        let plain = plain.with_dashboard(Dashboard::of(&node.settings.now(), &control));
        let router = Router::new(&node, plain.clone(), control::service(control));
        let mut serving = pin!(connections.serve(listener, own, router, stopped));
        systemd::ready();
        tokio::select! {
            () = serving.as_mut() => {}
            () = node.run() => {}
            () = plain.serve(metrics) => {}
            () = systemd::watchdog() => {}
            () = record_socket(&mut note) => {}
            () = reload_when_asked(&node, &mut signals.hangup) => {}
            () = asked_to_stop(&mut signals.terminate, &mut signals.interrupt) => {}
        }
        let grace = node.settings.now().drain_grace_period;
        systemd::stopping(grace);
        tracing::info!(
            "stopping: pulls end now, other in-flight calls may continue for {}",
            larder::go_format::duration(grace)
        );
        let began = Instant::now();
        // While the state is this daemon's: the next one waits for it, and leaves a note of its own.
        drop(note);
        stop.send_replace(true);
        node.pulls.manager().stop();
        node.end_guard_of_reads().await;
        tokio::select! {
            () = drain(serving, &connections, grace) => {}
            () = asked_to_stop(&mut signals.terminate, &mut signals.interrupt) => {
                tracing::warn!("second signal: canceling in-flight calls");
            }
        }
        if let Some(cluster) = node.workloads.cluster() {
            cluster.wait_released().await;
        }
        let took = Duration::from_secs(began.elapsed().as_secs());
        tracing::info!("stopped after {}", larder::go_format::duration(took));
        traces::flush(FLUSH_WITHIN).await;
        Ok(())
    }
}

/// The settings with their files; without files, those that the last daemon ran with, if the present ones are invalid.
fn settings(sources: &SettingsSources) -> Result<(Config, Option<SettingsFiles>), StartError> {
    match config::load_with_files(sources) {
        Ok((config, files)) => Ok((config, Some(files))),
        Err(errors) => match config::last_good::load(sources, &errors) {
            Some(config) => Ok((config, None)),
            None => Err(StartError::Settings(errors)),
        },
    }
}

/// Asks the daemon at this address, and returns true if it answers. One that was killed may listen for a moment longer,
/// and systemd listens for one that does not run.
fn is_answered(server: ControlServerAddress) -> bool {
    let client = Client::of(server, Some(ANSWER_WITHIN));
    let status = client.ask(async |mut calls| calls.status(StatusRequest { look: false }).await);
    let answer = in_place(|| Handle::current().block_on(status));
    answer.map_or_else(|error| error.kind() != ErrorKind::Unavailable, |_| true)
}

/// Opens the node. A command that has the images open ends soon, mostly: it is waited for, for a moment; a daemon is
/// not.
#[expect(
    clippy::disallowed_methods,
    reason = "another process holds a lock, and nothing runs in this one yet"
)]
fn open_node(sources: SettingsSources, config: Config, options: NodeOptions) -> Result<Node, Error> {
    let started = Instant::now();
    let mut logged = false;
    while started.elapsed() < OPEN_WITHIN {
        let busy = match Node::open(sources.clone(), config.clone(), None, options) {
            Err(NodeOpenError::InUse(busy)) => busy,
            opened => return Ok(opened?),
        };
        let server = client::find_server(&target_of(&config)?, config.state.as_deref());
        if let Ok(Some(server @ ControlServerAddress::Daemon(_))) = server
            && is_answered(server)
        {
            return Err(busy);
        }
        if !logged {
            logged = true;
            tracing::info!("waiting up to {}: {}", larder::go_format::duration(OPEN_WITHIN), busy.message());
        }
        thread::sleep(OPEN_RETRY);
    }
    Ok(Node::open(sources, config, None, options)?)
}

/// Why a daemon does not start.
#[derive(Debug)]
pub enum StartError {
    /// The settings cannot be used.
    Settings(ConfigErrors),
    /// Something that they name cannot.
    Failed(Error),
}

impl From<Error> for StartError {
    fn from(error: Error) -> StartError {
        StartError::Failed(error)
    }
}

/// The signals that the daemon listens to.
struct DaemonSignals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl DaemonSignals {
    /// From now on, none of them has its default effect of ending the process.
    fn listen() -> Result<DaemonSignals, Error> {
        let listen =
            |kind| signal(kind).map_err(|error| Error::failed(format!("cannot handle signals: {error}")));
        Ok(DaemonSignals {
            hangup: listen(SignalKind::hangup())?,
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }
}

/// Reloads at each SIGHUP, until dropped.
async fn reload_when_asked(node: &Arc<Node>, hangup: &mut Signal) {
    while hangup.recv().await.is_some() {
        systemd::reloading();
        let node = Arc::clone(node);
        // The reload has logged the errors.
        let _ = spawn_blocking(move || node.reload()).await;
        systemd::ready();
    }
}

/// Writes the file of the socket when there is disk space for it; never done.
async fn record_socket(note: &mut Option<SocketPathFile>) {
    if let Some(note) = note {
        note.write_when_possible().await;
    }
    future::pending::<()>().await;
}

/// Lets what is under way end, within the time for it; then reports calls that did not.
async fn drain(serving: Pin<&mut impl Future<Output = ()>>, connections: &Connections, grace: Duration) {
    if time::timeout(grace, serving).await.is_ok() {
        return;
    }
    let now = Instant::now();
    tracing::warn!(
        "in-flight calls did not end within {}: canceling them",
        larder::go_format::duration(grace)
    );
    for call in connections.calls() {
        let age = larder::go_format::duration(Duration::from_secs(now.duration_since(call.since).as_secs()));
        tracing::warn!("canceled call after {age}: {}", call.path);
    }
}

/// Done at the next SIGTERM or SIGINT.
async fn asked_to_stop(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Where metrics are served over TCP. If the default address is in use, it is skipped; one that was set
/// must be had.
fn bind_metrics(config: &Config) -> Result<Option<StdTcpListener>, Error> {
    let Some(address) = config.metrics.address else { return Ok(None) };
    let bound = StdTcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    match bound {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if matches!(config.origin("metrics.address"), config::SettingOrigin::Default) => {
            tracing::warn!(
                "cannot listen for metrics on {address}, serving them on the socket only: {error}"
            );
            Ok(None)
        }
        Err(error) => Err(Error::failed(format!("cannot serve metrics on {address}: {error}"))
            .hint("name another address with metrics.address, or \"\" for none")),
    }
}
