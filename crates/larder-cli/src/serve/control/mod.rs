//! larder's own API, served on the daemon's socket beside CRI. Each call is answered by what the command of the same
//! name does without a daemon.

mod ensure;
mod events;
mod kept;
mod load;
mod status;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::Stream;
use larder::gc::GcPolicy;
use larder_control::MAX_MESSAGE_BYTES;
use larder_control::v1alpha1 as api;
use larder_control::v1alpha1::control_server::{Control, ControlServer};
use larder_store::backend::StoreBackend;
use larder_store::store::Store;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, spawn_blocking};
use tonic::{Request, Response, Status, Streaming};

use super::connections::Connections;
use super::node::Node;
use crate::collect;
use crate::commands::{df, explain, gc, history, inspect, mount, rm, runtime};
use crate::daemon::convert;
use crate::failure::Failure;
use crate::image_name;

pub(in crate::serve) use ensure::CallSink;

/// Answers the calls. Clones share what they work on.
#[derive(Clone)]
pub(in crate::serve) struct Service(Arc<Shared>);

struct Shared {
    node: Arc<Node>,
    connections: Connections,
    /// Where the daemon listens.
    socket: Option<PathBuf>,
    /// Says that the daemon is to stop.
    stop: watch::Receiver<bool>,
    /// Turns of loads.
    loads: Semaphore,
}

/// The service, ready to be put behind its path.
pub(in crate::serve) fn service(
    node: Arc<Node>,
    connections: Connections,
    socket: Option<PathBuf>,
    stop: watch::Receiver<bool>,
) -> ControlServer<Service> {
    let loads = Semaphore::new(load::AT_ONCE);
    let shared = Shared { node, connections, socket, stop, loads };
    ControlServer::new(Service(Arc::new(shared)))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

type Answer<T> = Result<Response<T>, Status>;

type Events = Pin<Box<dyn Stream<Item = Result<api::EventsResponse, Status>> + Send>>;

impl Service {
    fn node(&self) -> &Node {
        &self.0.node
    }

    /// The policy of collection with what a request changes of it.
    fn policy(&self, request: &api::CollectRequest) -> Result<GcPolicy, Failure> {
        collect::policy(&self.node().collector.policy(), request)
    }

    /// Asks larder's own store, on a thread where that may block.
    async fn store<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Store) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let store = own_store(self.node())?.store().clone();
        let asked = spawn_blocking(move || question(&store)).await;
        asked.map_err(|error| gave_no_answer("the store", &error))?
    }
}

/// A thread that may block has ended without an answer.
fn gave_no_answer(what: &str, error: &JoinError) -> Failure {
    Failure::failed(format!("{what} gave no answer: {error}"))
}

/// Larder's own store, for what only that can do.
fn own_store(node: &Node) -> Result<&StoreBackend, Failure> {
    node.store.as_ref().ok_or_else(|| {
        Failure::failed(format!("this daemon serves {}", node.told))
            .hint("only larder's own store can do this: serve without --backend")
    })
}

/// A name or id that an image can have.
fn named(image: &str) -> Result<&str, Failure> {
    match image_name::check_name_or_id(image) {
        Ok(()) => Ok(image),
        Err(bad) => Err(bad.hints.into_iter().fold(Failure::bad_input(bad.message), Failure::hint)),
    }
}

/// A path that means the same to the daemon as to its client.
fn absolute(target: &str) -> Result<PathBuf, Failure> {
    let path = PathBuf::from(target);
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Failure::bad_input(format!("{target:?}: no absolute path"))
        .hint("the daemon is in another folder; write the whole path"))
}

#[tonic::async_trait]
impl Control for Service {
    type EnsureStream = ensure::Updates;
    type EventsStream = Events;

    async fn ensure(&self, request: Request<api::EnsureRequest>) -> Answer<Self::EnsureStream> {
        Ok(Response::new(ensure::start(&self.0.node, request.into_inner())?))
    }

    async fn images(&self, _: Request<api::ImagesRequest>) -> Answer<api::ImagesResponse> {
        let images = self.node().backend.list().await.map_err(Failure::from)?;
        Ok(Response::new(api::ImagesResponse { images: images.iter().map(convert::image).collect() }))
    }

    async fn inspect(&self, request: Request<api::InspectRequest>) -> Answer<api::InspectResponse> {
        let request = request.into_inner();
        let found = inspect::inspect(named(&request.image)?, &*self.node().backend).await?;
        Ok(Response::new(api::InspectResponse {
            image: Some(convert::image(&found.image)),
            info: found.info,
        }))
    }

    async fn remove(&self, request: Request<api::RemoveRequest>) -> Answer<api::RemoveResponse> {
        let request = request.into_inner();
        for image in &request.images {
            named(image)?;
        }
        let Node { backend, store, gate, .. } = self.node();
        let mut answer = rm::remove(&request, backend, store.as_ref(), gate).await;
        if let Some(store) = store.as_ref().map(|store| store.store().clone()) {
            // Who removes an image wants the room when it is told that it is gone.
            if let Ok(Err(error)) = spawn_blocking(move || store.empty_trash()).await {
                answer.warnings.push(crate::failure::chain(&error));
            }
            for removed in &mut answer.results {
                (removed.pending_bytes, removed.pending_inodes) = (0, 0);
            }
        }
        Ok(Response::new(answer))
    }

    async fn plan(&self, request: Request<api::CollectRequest>) -> Answer<api::Collection> {
        let request = request.into_inner();
        let (policy, goal) = (self.policy(&request)?, collect::goal(&request));
        Ok(Response::new(gc::dry_run(&self.node().collector, &policy, goal).await?))
    }

    async fn collect(&self, request: Request<api::CollectRequest>) -> Answer<api::Collection> {
        let request = request.into_inner();
        let (policy, goal) = (self.policy(&request)?, collect::goal(&request));
        Ok(Response::new(gc::one_round(&self.node().collector, &policy, goal).await))
    }

    async fn explain(&self, request: Request<api::ExplainRequest>) -> Answer<api::Explanation> {
        let request = request.into_inner();
        let policy = self.policy(&request.limits.unwrap_or_default())?;
        let Node { backend, collector, records, .. } = self.node();
        let image = named(&request.image)?;
        let records = records.as_deref();
        Ok(Response::new(explain::explain(image, &**backend, collector, &policy, records).await?))
    }

    async fn history(&self, _: Request<api::HistoryRequest>) -> Answer<api::HistoryResponse> {
        let shared = Arc::clone(&self.0);
        let read = spawn_blocking(move || history::read(&shared.node.place)).await;
        Ok(Response::new(read.map_err(|error| gave_no_answer("the journal", &error))??))
    }

    async fn usage(&self, _: Request<api::UsageRequest>) -> Answer<api::UsageResponse> {
        let Node { backend, usage, collector, .. } = self.node();
        let policy = collect::looking_policy(&collector.policy());
        let usage = df::usage(Arc::clone(backend), usage, collector, &policy).await?;
        let document = serde_json::to_string(&usage)
            .map_err(|error| Failure::failed(format!("the answer cannot be written: {error}")))?;
        Ok(Response::new(api::UsageResponse { document }))
    }

    async fn runtime(&self, _: Request<api::RuntimeRequest>) -> Answer<api::RuntimeResponse> {
        Ok(Response::new(runtime::ask(&*self.node().backend).await?))
    }

    async fn events(&self, request: Request<api::EventsRequest>) -> Answer<Self::EventsStream> {
        let told = events::follow(&self.node().events, request.get_ref(), self.0.stop.clone());
        Ok(Response::new(Box::pin(told)))
    }

    async fn status(&self, request: Request<api::StatusRequest>) -> Answer<api::StatusResponse> {
        let Shared { node, connections, socket, .. } = &*self.0;
        if request.get_ref().look {
            node.look_now().await;
        }
        Ok(Response::new(status::now(node, connections, socket.as_deref())))
    }

    async fn keep(&self, request: Request<api::KeepRequest>) -> Answer<api::KeepResponse> {
        Ok(Response::new(kept::keep(&self.0.node, request.into_inner()).await?))
    }

    async fn lease(&self, request: Request<api::LeaseRequest>) -> Answer<api::LeaseResponse> {
        let request = request.into_inner();
        named(&request.image)?;
        Ok(Response::new(kept::lease(self.node(), &request).await?))
    }

    async fn load(&self, request: Request<Streaming<api::LoadRequest>>) -> Answer<api::LoadResponse> {
        let images = load::load(self.node(), &self.0.loads, request.into_inner()).await?;
        Ok(Response::new(api::LoadResponse { images }))
    }

    async fn mount(&self, request: Request<api::MountRequest>) -> Answer<api::MountResponse> {
        let api::MountRequest { image, target, writable } = request.into_inner();
        let target = absolute(&target)?;
        let mount = self.store(move |store| mount::mount_of(store, &image, &target, writable)).await?;
        Ok(Response::new(api::MountResponse { mount: Some(mount) }))
    }

    async fn unmount(&self, request: Request<api::UnmountRequest>) -> Answer<api::UnmountResponse> {
        let api::UnmountRequest { target, force } = request.into_inner();
        let target = absolute(&target)?;
        let mount = self.store(move |store| mount::umount_of(store, &target, force)).await?;
        Ok(Response::new(api::UnmountResponse { mount: Some(mount) }))
    }

    async fn mounts(&self, _: Request<api::MountsRequest>) -> Answer<api::MountsResponse> {
        Ok(Response::new(api::MountsResponse { mounts: self.store(mount::mounts_of).await? }))
    }

    async fn reload(&self, _: Request<api::ReloadRequest>) -> Answer<api::ReloadResponse> {
        let reloaded = self.node().reload().map_err(Failure::bad_input)?;
        let keys = |keys: Vec<&str>| keys.into_iter().map(str::to_owned).collect();
        Ok(Response::new(api::ReloadResponse {
            applied: keys(reloaded.applied),
            needs_restart: keys(reloaded.needs_restart),
        }))
    }
}
