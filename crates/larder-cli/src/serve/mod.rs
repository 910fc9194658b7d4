//! `larder serve`: one process per node, one socket.
//!
//! ```text
//! parse -> build (bind, start nothing) -> say what is served where -> run -> drain -> stop
//! ```

mod build;
mod closing;
mod connections;
mod control;
mod doors;
mod event_log;
mod health;
mod intake;
mod metrics;
mod node;
mod note;
mod plain;
mod pods;
mod reload;
mod socket;
mod systemd;
#[cfg(test)]
mod testing;

use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use std::{io, net};

use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{self, Instant};

use crate::args::{Connection, ServeArgs};
use crate::config::{self, LogFormat, Mistakes};
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::log;
use crate::out::Out;
use connections::Connections;
use doors::Doors;
use node::Node;
use note::Note;
use plain::Plain;
use socket::{Listen, Socket};

pub(crate) use socket::group_id;

/// Threads that answer requests. What blocks has threads of its own.
const THREADS: usize = 2;
/// How long a thread that has nothing to block on stays. They take turns, so that a single question every now and then
/// keeps as many as fit into this time: after a rush they are to go.
const IDLE: Duration = Duration::from_secs(1);

/// Everything that is needed to run; nothing of it runs yet.
struct Daemon {
    node: Arc<Node>,
    socket: Socket,
    metrics: Option<net::TcpListener>,
    /// What tells the command line where to ask.
    note: Option<Note>,
    signals: Signals,
}

/// Where the daemon of this machine or user listens, if nobody says otherwise.
pub(crate) fn default_socket() -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    config::Places::of(is_root, |name| std::env::var(name).ok()).socket
}

/// Runs until a signal comes.
pub(crate) fn run(args: &ServeArgs, connection: &Connection, out: &Arc<Out>) -> Result<Outcome, Failure> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(THREADS).thread_keep_alive(IDLE).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("could not start: {error}")))?;
    let within = runtime.enter();
    let daemon = match Daemon::build(args, connection) {
        Ok(daemon) => daemon,
        Err(Refused::Settings(mistakes)) => return Ok(mistakes.print(out)),
        Err(Refused::Other(failure)) => return Err(failure),
    };
    daemon.announce(out);
    drop(within);
    let ended = runtime.block_on(daemon.run());
    // What still blocks has had its time.
    runtime.shutdown_timeout(Duration::from_millis(200));
    ended
}

impl Daemon {
    /// Reads the settings, opens what must be open and binds what is served; starts nothing.
    fn build(args: &ServeArgs, connection: &Connection) -> Result<Daemon, Refused> {
        let sources = args.flags.sources(connection);
        let config = config::load(&sources).map_err(Refused::Settings)?;
        let loud = log::verbosity_level(connection.verbose);
        log::change(config.log.level.max(loud), log::Format::of(config.log.format));
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        let config::Listen { socket, mode, group } = config.listen.clone();
        let metrics = build::metrics(&config)?;
        let node = build::node(sources, config, loud)?;
        // Who can reach the daemon may send it any of them.
        let signals = Signals::listen()?;
        let socket = Socket::open(&Listen { socket, mode, group })?;
        let left = Note::leave(&node, socket.path.as_deref())?;
        Ok(Daemon { node: Arc::new(node), socket, metrics, note: left, signals })
    }

    /// Says what is served where.
    fn announce(&self, out: &Out) {
        let socket = match &self.socket.path {
            Some(path) => path.display().to_string(),
            None => "the socket that systemd handed over".to_owned(),
        };
        let version = env!("CARGO_PKG_VERSION");
        let address = self.metrics.as_ref().and_then(|listener| listener.local_addr().ok());
        if self.node.settings.now().log.format == LogFormat::Json {
            // Who reads a log by program reads all of it so.
            let metrics = address.map(|address| address.to_string()).unwrap_or_default();
            tracing::info!(version, socket, metrics, "larder keeps {}", self.node.told);
            return;
        }
        out.note(format_args!("larder {version} keeps {}", self.node.told));
        out.note(format_args!("  CRI image service and larder's own API: {socket}"));
        if let Some(address) = address {
            out.note(format_args!("  metrics and health: http://{address}/metrics, /healthz, /readyz"));
        }
    }

    async fn run(self) -> Result<Outcome, Failure> {
        let Daemon { node, socket, metrics, note, mut signals } = self;
        let cannot = |error: io::Error| Failure::failed(format!("what was bound cannot be used: {error}"));
        // The file goes with the daemon; the listener goes when it stops, and then nobody waits in vain.
        let Socket { listener, path, own: _own } = socket;
        let listener = UnixListener::from_std(listener).map_err(cannot)?;
        let metrics = metrics.map(TcpListener::from_std).transpose().map_err(cannot)?;
        let (stop, stopped) = watch::channel(false);
        let connections = Connections::default();
        let plain = Plain { node: Arc::clone(&node), connections: connections.clone() };
        let control = control::service(node.clone(), connections.clone(), path, stopped.clone());
        let doors = Doors::beside(plain.clone(), control);
        let mut serving = pin!(connections.serve(listener, doors, stopped));
        systemd::ready();
        tokio::select! {
            () = serving.as_mut() => {}
            () = node.run() => {}
            () = plain.serve(metrics) => {}
            () = systemd::watchdog() => {}
            () = reload_when_asked(&node, &mut signals.hangup) => {}
            () = asked_to_stop(&mut signals.terminate, &mut signals.interrupt) => {}
        }
        let grace = node.settings.now().drain_grace_period;
        systemd::stopping(grace);
        tracing::info!("stopping: what is under way has {}", larder::gotext::duration(grace));
        stop.send_replace(true);
        tokio::select! {
            () = drain(serving, &connections, &node, grace) => {}
            () = asked_to_stop(&mut signals.terminate, &mut signals.interrupt) => {
                tracing::warn!("told to stop once more: what is under way is cut off");
            }
        }
        // While the state is this daemon's: the next one leaves a note of its own.
        drop(note);
        Ok(Outcome::Done)
    }
}

/// Why the daemon does not start.
enum Refused {
    /// The settings cannot be used.
    Settings(Mistakes),
    /// Something that they name cannot.
    Other(Failure),
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Refused {
        Refused::Other(failure)
    }
}

/// The signals that the daemon listens to.
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From now on none of them ends the process by itself.
    fn listen() -> Result<Signals, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::failed(format!("cannot listen to signals: {error}")))
        };
        Ok(Signals {
            hangup: listen(SignalKind::hangup())?,
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }
}

/// Reloads at each SIGHUP, until dropped.
async fn reload_when_asked(node: &Node, hangup: &mut Signal) {
    while hangup.recv().await.is_some() {
        systemd::reloading();
        // What is wrong with the settings was told.
        let _ = node.reload();
        systemd::ready();
    }
}

/// Lets what is under way end, within the time for it; then says who is late.
async fn drain(
    serving: Pin<&mut impl Future<Output = ()>>,
    connections: &Connections,
    node: &Node,
    grace: Duration,
) {
    if time::timeout(grace, serving).await.is_ok() {
        return;
    }
    let now = Instant::now();
    tracing::warn!("what is under way had {}, and is cut off", larder::gotext::duration(grace));
    for call in connections.calls() {
        let age = larder::gotext::duration(Duration::from_secs(now.duration_since(call.since).as_secs()));
        tracing::warn!("cut off, {age} after it began: {}", call.path);
    }
    for pull in node.manager.pulls() {
        let age = larder::gotext::duration(Duration::from_secs(now.duration_since(pull.since).as_secs()));
        tracing::warn!("cut off, {age} after it began: the pull of {}", pull.image);
    }
}

/// Done at the next SIGTERM or SIGINT.
async fn asked_to_stop(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
