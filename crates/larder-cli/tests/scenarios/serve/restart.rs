//! A daemon that is replaced while a slow pull is in flight: clients of present images do not notice.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder::backend::{
    Backend as _, BackendError, CallErrorKind, EndpointFailure, ImageSpec, ProgressReporter,
};
use larder_testkit_peers::{HoldingProxy, ImageBuilder, RegistryOptions};
use rustix::process::Signal;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::systemd::on_passed;
use crate::served::{CriDaemon, client_of};
use crate::world::{LarderProcess, RuntimeFixture};

/// The longest that a client of a present image may wait.
const LONGEST: Duration = Duration::from_secs(1);
/// Time between two calls of the client.
const EVERY: Duration = Duration::from_millis(20);

/// Whether a failed call is repeated: one that did not reach a daemon or, where that was killed, was not answered.
fn is_repeated(error: &BackendError, was_killed: bool) -> bool {
    match error {
        BackendError::Unreachable { problem, .. } => {
            was_killed || matches!(problem, EndpointFailure::Missing | EndpointFailure::Refused)
        }
        error => was_killed && error.kind() == Some(CallErrorKind::Unavailable),
    }
}

/// A client that asks for the status of an image again and again, as kubelet does for each container.
struct SteadyClient {
    stop: Arc<AtomicBool>,
    asking: JoinHandle<Duration>,
}

impl SteadyClient {
    fn start(runtime: &Runtime, socket: PathBuf, image: String, is_killed: bool) -> SteadyClient {
        let stop = Arc::new(AtomicBool::new(false));
        let asking = runtime.spawn(ask(socket, image, is_killed, Arc::clone(&stop)));
        SteadyClient { stop, asking }
    }

    /// The longest time from a call to its answer, with all attempts to connect.
    fn longest(self, runtime: &Runtime) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        runtime.block_on(self.asking).unwrap()
    }
}

async fn ask(socket: PathBuf, image: String, is_killed: bool, stop: Arc<AtomicBool>) -> Duration {
    let (client, image) = (client_of(socket), ImageSpec::named(image));
    let mut longest = Duration::ZERO;
    let mut ticks = tokio::time::interval(EVERY);
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        loop {
            ticks.tick().await;
            match client.status(&image).await {
                Ok(found) => break assert!(found.is_some(), "it is present all the time"),
                Err(error) if is_repeated(&error, is_killed) => {}
                Err(error) => panic!("after {:?}: {error:?}", began.elapsed()),
            }
        }
        longest = longest.max(began.elapsed());
    }
    longest
}

/// Replaces a daemon, ended by this signal, while a pull of another image is held. Returns the longest time to an
/// answer.
fn replace(
    signal: Signal,
    start: impl Fn(&RuntimeFixture, &Path) -> LarderProcess,
    is_passed: bool,
) -> Option<Duration> {
    let world = RuntimeFixture::with_store(RegistryOptions::default())?;
    let gate: HoldingProxy = world.gate();
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    ImageBuilder::small(2, 500_000).push(&world.registry, "shop/slow:1").unwrap();
    let socket = PathBuf::from(world.path("larder.sock"));
    let web = world.registry.image("shop/web:1");
    let first = CriDaemon::at(socket.clone(), start(&world, &socket));
    first.pull(&web).unwrap();
    gate.hold_blobs_after(100_000);
    let slow = ImageSpec::named(gate.image("shop/slow:1"));
    let pull = |socket: PathBuf, slow: ImageSpec| async move {
        client_of(socket).pull(&slow, None, None, &ProgressReporter::unwatched()).await
    };
    let pulling = first.runtime.spawn(pull(socket.clone(), slow.clone()));
    gate.wait_until_held(1);
    let runtime = Runtime::new().unwrap();
    let client = SteadyClient::start(&runtime, socket.clone(), web.clone(), signal == Signal::KILL);
    first.status(&web).expect("it is present");

    first.running.signal(signal);
    let second = if is_passed {
        // As systemd does: one after the other.
        first.running.finish();
        start(&world, &socket)
    } else {
        let second = start(&world, &socket);
        first.running.finish();
        second
    };
    let interrupted = first.runtime.block_on(pulling).unwrap().unwrap_err().to_string();
    let second = CriDaemon::at(socket.clone(), second);
    second.status(&web).expect("it is present");
    let longest = client.longest(&runtime);
    eprintln!("{signal:?}, passed: {is_passed}: the longest wait was {longest:?}");
    if signal == Signal::TERM {
        // Where the socket stays, gRPC's clients for Go send it again, to the next process.
        let expected =
            if is_passed { "refused stream" } else { "the next pull of the image continues this one" };
        assert!(interrupted.contains(expected), "{interrupted}");
    }
    gate.open();
    runtime.block_on(pull(socket, slow)).unwrap();
    let run = second.stop().expect(0);
    assert!(!run.stderr.contains("canceled"), "{run:?}");
    Some(longest)
}

#[test]
fn an_upgrade_with_a_slow_pull_delays_no_present_image_by_more_than_a_second() {
    for signal in [Signal::TERM, Signal::KILL] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("passed.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let passed = |world: &RuntimeFixture, socket: &Path| {
            if !socket.exists() {
                std::os::unix::fs::symlink(&path, socket).unwrap();
            }
            on_passed(&listener, world, &[])
        };
        let Some(longest) = replace(signal, passed, true) else { return };
        assert!(longest < LONGEST, "{signal:?}: {longest:?}");
        let own = |world: &RuntimeFixture, socket: &Path| {
            world.start_larder(&["serve", "--socket", &socket.to_string_lossy()])
        };
        let longest = replace(signal, own, false).unwrap();
        assert!(longest < LONGEST, "{signal:?}, a socket of its own: {longest:?}");
    }
}
