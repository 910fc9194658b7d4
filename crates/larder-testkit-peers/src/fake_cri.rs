//! A scripted container runtime, served over CRI on a Unix socket in a directory of its own.
//!
//! It runs on a thread of its own, with the wall clock: a test decides when a call continues with a [`CallHold`], not
//! with time. Stopping it is a crash: all connections break at once. It can start again on the same path, with
//! everything it knew.
//!
//! Without script, it is a small working runtime: pulls bring what is on [offer](FakeCri::offer).

mod services;

use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use larder_cri::proto::image_service_server::ImageServiceServer;
use larder_cri::proto::runtime_service_server::RuntimeServiceServer;
use larder_cri::{Endpoint, MAX_MESSAGE_BYTES, proto};
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Status};

/// The calls of CRI that are served. `Debug` prints CRI's name of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are CRI's")]
pub enum Rpc {
    Version,
    Status,
    PodSandboxStatus,
    ListPodSandbox,
    StreamPodSandboxes,
    ListContainers,
    StreamContainers,
    ContainerStatus,
    RemoveContainer,
    ListImages,
    StreamImages,
    ImageStatus,
    PullImage,
    RemoveImage,
    ImageFsInfo,
}

/// A call that arrived, with what it carried.
#[derive(Debug, Clone, PartialEq)]
pub struct ReceivedCall {
    /// The call.
    pub rpc: Rpc,
    /// Its image.
    pub image: Option<proto::ImageSpec>,
    /// Its credentials.
    pub auth: Option<proto::AuthConfig>,
    /// Its sandbox.
    pub sandbox: Option<proto::PodSandboxConfig>,
    /// True if the call requested all details.
    pub verbose: bool,
    /// The span of the caller; of pulls only.
    pub traceparent: Option<String>,
}

/// How many calls of one kind there are and were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCounts {
    /// Arrived.
    pub started: usize,
    /// Being served now.
    pub running: usize,
    /// Given up by the caller, or cut off by a crash.
    pub canceled: usize,
}

/// Lets one held call go on. Dropped unused, it leaves the call hanging for good.
#[derive(Debug)]
pub struct CallHold(oneshot::Sender<()>);

impl CallHold {
    /// Lets the call continue. No effect if its caller gave up.
    pub fn release(self) {
        let _ = self.0.send(());
    }
}

/// State that a runtime reports.
#[derive(Debug, Clone, Default)]
pub struct RuntimeContents {
    /// Reply to `Version`.
    pub version: proto::VersionResponse,
    /// Conditions in the reply to `Status`.
    pub conditions: Vec<proto::RuntimeCondition>,
    /// The images that are present.
    pub images: Vec<proto::Image>,
    /// Images of the pretended registry, by name.
    pub offers: HashMap<String, proto::Image>,
    /// The containers.
    pub containers: Vec<proto::Container>,
    /// Mounts of containers, by container id; for those in `containers` only.
    pub mounts: HashMap<String, Vec<proto::Mount>>,
    /// When containers exited, by container id, in nanoseconds since 1970.
    pub finished: HashMap<String, i64>,
    /// The pod sandboxes.
    pub sandboxes: Vec<proto::PodSandbox>,
    /// Images of sandboxes, by sandbox id.
    pub sandbox_images: HashMap<String, String>,
    /// Details in the reply to a verbose `Status`.
    pub status_info: HashMap<String, String>,
    /// Reply to `ImageFsInfo`.
    pub filesystems: proto::ImageFsInfoResponse,
    /// Whether streamed lists are known; otherwise they are unimplemented, as in older runtimes.
    pub streaming: bool,
    /// The parts of `StreamImages`; without, each image is a part.
    pub image_parts: Option<Vec<Vec<proto::Image>>>,
    /// Errors that end streamed lists after their parts, by the call.
    pub stream_errors: HashMap<Rpc, (Code, String)>,
}

/// Script of one call.
#[derive(Debug)]
struct CallScript {
    held: Option<oneshot::Receiver<()>>,
    then: ScriptedReply,
}

#[derive(Debug)]
enum ScriptedReply {
    Usual,
    Fail(Status),
    Pulled(String),
    Found(Option<Box<proto::Image>>),
}

#[derive(Default)]
struct RuntimeScript {
    contents: RuntimeContents,
    log: Vec<ReceivedCall>,
    scripts: HashMap<Rpc, VecDeque<CallScript>>,
    refused: HashMap<Rpc, (Code, String)>,
}

#[derive(Clone)]
struct SharedRuntimeScript {
    state: Arc<Mutex<RuntimeScript>>,
    calls: Arc<watch::Sender<HashMap<Rpc, CallCounts>>>,
}

impl SharedRuntimeScript {
    fn state(&self) -> MutexGuard<'_, RuntimeScript> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A scripted runtime. See the [module](self).
pub struct FakeCri {
    _dir: tempfile::TempDir,
    socket: PathBuf,
    shared: SharedRuntimeScript,
    server: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl FakeCri {
    /// Starts a runtime without images, containers and offers.
    ///
    /// # Panics
    ///
    /// If there is no room for its socket.
    pub fn start() -> FakeCri {
        let dir = tempfile::Builder::new().prefix("fake-cri-").tempdir().expect("a directory for the socket");
        let contents = RuntimeContents {
            version: proto::VersionResponse {
                version: "0.1.0".into(),
                runtime_name: "fake".into(),
                runtime_version: "1.0.0".into(),
                runtime_api_version: "v1".into(),
            },
            ..RuntimeContents::default()
        };
        let state = RuntimeScript { contents, ..RuntimeScript::default() };
        let shared = SharedRuntimeScript {
            state: Arc::new(Mutex::new(state)),
            calls: Arc::new(watch::Sender::new(HashMap::new())),
        };
        let socket = dir.path().join("cri.sock");
        let mut fake = FakeCri { _dir: dir, socket, shared, server: None };
        fake.restart();
        fake
    }

    /// Path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where it is reached.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::at(&self.socket)
    }

    /// Crashes: every connection breaks, and the socket is gone.
    pub fn stop(&mut self) {
        if let Some((stop, thread)) = self.server.take() {
            let _ = stop.send(());
            let _ = thread.join();
            let _ = fs_err::remove_file(&self.socket);
        }
    }

    /// Starts again on the same path, after a crash if it still runs.
    ///
    /// # Panics
    ///
    /// If the socket cannot be bound.
    pub fn restart(&mut self) {
        self.stop();
        let listener = StdListener::bind(&self.socket).expect("the path is free");
        listener.set_nonblocking(true).expect("a socket can be made non-blocking");
        let shared = self.shared.clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || serve(listener, shared, stopped));
        self.server = Some((stop, thread));
    }

    /// Changes what the runtime knows and reports.
    pub fn change(&self, change: impl FnOnce(&mut RuntimeContents)) {
        change(&mut self.shared.state().contents);
    }

    /// Lets pulls of this name bring this image.
    pub fn offer(&self, name: &str, image: proto::Image) {
        self.change(|contents| _ = contents.offers.insert(name.to_owned(), image));
    }

    /// The next call of this kind fails.
    pub fn fail_next(&self, rpc: Rpc, code: Code, message: &str) {
        self.script(rpc, None, ScriptedReply::Fail(Status::new(code, message)));
    }

    /// Every call of this kind fails that has no script.
    pub fn refuse(&self, rpc: Rpc, code: Code, message: &str) {
        self.shared.state().refused.insert(rpc, (code, message.to_owned()));
    }

    /// The next call of this kind waits for the handle, and then does the usual.
    #[must_use = "a dropped handle leaves the call hanging; `hang_next` says so"]
    pub fn hold_next(&self, rpc: Rpc) -> CallHold {
        let (sender, receiver) = oneshot::channel();
        self.script(rpc, Some(receiver), ScriptedReply::Usual);
        CallHold(sender)
    }

    /// The next call of this kind never answers.
    pub fn hang_next(&self, rpc: Rpc) {
        drop(self.hold_next(rpc));
    }

    /// The next pull answers with this reference, whatever is on offer.
    pub fn answer_pull(&self, image_ref: &str) {
        self.script(Rpc::PullImage, None, ScriptedReply::Pulled(image_ref.to_owned()));
    }

    /// The next status call answers with this, whatever is present.
    pub fn answer_status(&self, image: Option<proto::Image>) {
        self.script(Rpc::ImageStatus, None, ScriptedReply::Found(image.map(Box::new)));
    }

    /// All calls so far, in order.
    pub fn received(&self) -> Vec<ReceivedCall> {
        self.shared.state().log.clone()
    }

    /// Takes the kinds of the calls since the last time, in order.
    pub fn take_rpcs(&self) -> Vec<Rpc> {
        self.shared.state().log.drain(..).map(|received| received.rpc).collect()
    }

    /// How many calls of this kind there are and were.
    pub fn calls(&self, rpc: Rpc) -> CallCounts {
        self.shared.calls.borrow().get(&rpc).copied().unwrap_or_default()
    }

    /// Waits until the calls of this kind are as wanted.
    pub async fn until(&self, rpc: Rpc, mut wanted: impl FnMut(CallCounts) -> bool) -> CallCounts {
        let mut calls = self.shared.calls.subscribe();
        let now = calls.wait_for(|calls| wanted(calls.get(&rpc).copied().unwrap_or_default())).await;
        match now {
            Ok(calls) => calls.get(&rpc).copied().unwrap_or_default(),
            Err(_closed) => unreachable!("the sender lives as long as this fake"),
        }
    }

    fn script(&self, rpc: Rpc, held: Option<oneshot::Receiver<()>>, then: ScriptedReply) {
        self.shared.state().scripts.entry(rpc).or_default().push_back(CallScript { held, then });
    }
}

impl Drop for FakeCri {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Serves until it is stopped; then everything that runs is dropped with the runtime.
fn serve(listener: StdListener, shared: SharedRuntimeScript, stopped: oneshot::Receiver<()>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        let listener = UnixListener::from_std(listener).expect("the listener is non-blocking");
        let images = ImageServiceServer::new(shared.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(2 * MAX_MESSAGE_BYTES); // so that a test can send too much
        let server = Server::builder()
            .add_service(images)
            .add_service(RuntimeServiceServer::new(shared).max_encoding_message_size(MAX_MESSAGE_BYTES))
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::select! {
            ended = server => ended.expect("the server runs until it is stopped"),
            _ = stopped => {}
        }
    });
}
