//! `larder serve`: one process per node, one socket.
//!
//! ```text
//! parse -> build (bind, start nothing) -> say what is served where -> run -> drain -> stop
//! ```

mod connections;
mod doors;
mod health;
mod metrics;
mod node;
mod plain;
mod socket;

use std::sync::Arc;
use std::time::Duration;

use larder::gc::GcPolicy;
use larder::pull::PullConfig;
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{self, Instant};

use crate::args::{Connection, ServeArgs};
use crate::collect::{KeepFile, Place};
use crate::connect;
use crate::exit::Outcome;
use crate::failure::Failure;
use crate::out::Out;
use connections::Connections;
use doors::Doors;
use node::{Backed, Node, Parts};
use plain::Plain;
use socket::{Listen, Socket};

/// Threads that answer requests. What blocks has threads of its own.
const THREADS: usize = 2;

/// Everything that is needed to run; nothing of it runs yet.
struct Daemon {
    node: Arc<Node>,
    socket: Socket,
    grace: Duration,
}

/// Runs until a signal comes.
pub(crate) fn run(args: &ServeArgs, connection: &Connection, out: &Arc<Out>) -> Result<Outcome, Failure> {
    let daemon = Daemon::build(args, connection)?;
    daemon.announce(out);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("could not start: {error}")))?;
    let ended = runtime.block_on(daemon.run());
    // What still blocks has had its time.
    runtime.shutdown_timeout(Duration::from_millis(200));
    ended
}

impl Daemon {
    fn build(args: &ServeArgs, connection: &Connection) -> Result<Daemon, Failure> {
        let chosen = connect::chosen(connection)?;
        let place = Place::of(connection, &chosen)?.locked()?;
        let socket = match &args.socket {
            Some(path) => path.clone(),
            None => socket::default_path(connection.root.as_deref())?,
        };
        let socket = Socket::open(&Listen { socket, mode: 0o660, group: None })?;
        let keep = KeepFile::at(&place).read()?;
        let policy = GcPolicy { keep, ..GcPolicy::default() };
        let node = Node::build(Parts {
            chosen: Backed::by(chosen, &policy),
            place,
            policy,
            pull: PullConfig::default(),
            events: 1000,
            name: host_name(),
        });
        Ok(Daemon { node: Arc::new(node), socket, grace: Duration::from_secs(30) })
    }

    /// Says what is served where.
    fn announce(&self, out: &Out) {
        let socket = match &self.socket.path {
            Some(path) => path.display().to_string(),
            None => "the socket that systemd handed over".to_owned(),
        };
        out.note(format_args!("larder {} serves {}", env!("CARGO_PKG_VERSION"), self.node.told));
        out.note(format_args!("  CRI image service and control API: {socket}"));
    }

    async fn run(self) -> Result<Outcome, Failure> {
        let Daemon { node, socket, grace } = self;
        let listener = socket.listener.try_clone().and_then(UnixListener::from_std);
        let listener =
            listener.map_err(|error| Failure::failed(format!("the socket cannot be used: {error}")))?;
        let (stop, stopped) = watch::channel(false);
        let connections = Connections::default();
        let plain = Plain { node: Arc::clone(&node), connections: connections.clone() };
        let mut serving = std::pin::pin!(connections.serve(listener, Doors { plain }, stopped));
        tell_systemd(&[NotifyState::Ready]);
        tokio::select! {
            () = serving.as_mut() => {}
            () = node.run() => {}
            () = watchdog() => {}
            ended = asked_to_stop() => ended?,
        }
        tell_systemd(&[NotifyState::Stopping]);
        tracing::info!("stopping: what is under way has {}", larder::gotext::duration(grace));
        stop.send_replace(true);
        drain(serving, &connections, grace).await;
        Ok(Outcome::Done)
    }
}

/// Lets what is under way end, within the time for it; then says who is late.
async fn drain(
    serving: std::pin::Pin<&mut impl Future<Output = ()>>,
    connections: &Connections,
    grace: Duration,
) {
    if time::timeout(grace, serving).await.is_ok() {
        return;
    }
    let now = Instant::now();
    for call in connections.calls() {
        let age = larder::gotext::duration(Duration::from_secs(now.duration_since(call.since).as_secs()));
        tracing::warn!("cut off after {age}: {}", call.path);
    }
}

/// Done at the first SIGTERM or SIGINT.
async fn asked_to_stop() -> Result<(), Failure> {
    let listen = |kind| signal(kind).map_err(|error| Failure::failed(format!("no signals: {error}")));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

fn tell_systemd(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("systemd was not told: {error}");
    }
}

/// Tells systemd that the daemon lives, twice as often as it wants to hear it.
async fn watchdog() {
    let Some(period) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut ticks = time::interval(period / 2);
    loop {
        ticks.tick().await;
        tell_systemd(&[NotifyState::Watchdog]);
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
