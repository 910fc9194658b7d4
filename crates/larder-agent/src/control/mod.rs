//! The control service: larder's own API over one node. Commands reach images through it and in no other way: over the
//! daemon's socket, over that of another command, or in the same process.

pub(crate) mod caller;
mod ensure;
mod events;
mod explain;
mod export;
mod find;
pub(crate) mod gc;
mod history;
mod image_list;
mod images;
mod join;
mod limits;
mod load;
mod mounts;
mod plan_ensure;
mod remove;
mod report;
mod retention;
mod status;
#[cfg(test)]
mod tests;
mod usage;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use larder::gc::{GcGoal, GcPolicy};
use larder_api::v1 as api;
use larder_api::v1::control_server::{Control, ControlServer};
use larder_api::{MAX_MESSAGE_BYTES, convert};
use larder_store::mounts::MountOptions;
use larder_store::store::Store;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming};

use crate::error::Error;
use crate::image_name;
use crate::node::Node;
use crate::serve::connections::Connections;
use remove::RemovalParts;

pub use load::base_name;

/// Answers the calls. Clones share what they work on.
#[derive(Clone)]
pub struct ControlApi(Arc<ControlApiInner>);

struct ControlApiInner {
    node: Arc<Node>,
    /// Who runs the node.
    process: ServingProcess,
    connections: Connections,
    /// Signals that the process stops.
    stop: watch::Receiver<bool>,
    /// Slots of lists, until they are sent.
    lists: Arc<Semaphore>,
    /// Slots of loads.
    loads: Semaphore,
    /// Slots of exports.
    exports: Arc<Semaphore>,
}

/// The process that serves a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ServingProcess {
    /// A daemon, which listens here.
    Daemon(DaemonAddresses),
    /// A command, for as long as it runs.
    Command,
}

/// Where a daemon is reached.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct DaemonAddresses {
    /// `None` for a socket of systemd without a path.
    pub(crate) socket: Option<PathBuf>,
    /// URL of the dashboard, if it is served.
    pub(crate) dashboard: Option<String>,
}

/// The service, ready to be put behind its path.
pub(crate) fn service(api: ControlApi) -> ControlServer<ControlApi> {
    ControlServer::new(api)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

type ControlResult<T> = Result<Response<T>, Status>;

type ImageListParts = BoxStream<'static, Result<api::ImagesResponse, Status>>;

type EventStream = Pin<Box<dyn Stream<Item = Result<api::EventsResponse, Status>> + Send>>;

impl ControlApi {
    /// Builds the API of this process for a node.
    pub(crate) fn new(
        node: Arc<Node>,
        process: ServingProcess,
        connections: Connections,
        stop: watch::Receiver<bool>,
    ) -> ControlApi {
        let lists = Arc::new(Semaphore::new(image_list::AT_ONCE));
        let loads = Semaphore::new(load::AT_ONCE);
        let exports = Arc::new(Semaphore::new(export::AT_ONCE));
        ControlApi(Arc::new(ControlApiInner { node, process, connections, stop, lists, loads, exports }))
    }

    /// How many images were removed since the start: what was listed before has changed.
    #[cfg(feature = "dashboard")]
    pub(crate) fn removals(&self) -> u64 {
        self.node().observability.metrics().removals()
    }

    /// The images, in one list.
    pub(crate) async fn list_images(
        &self,
        request: &api::ImagesRequest,
    ) -> Result<api::ImagesResponse, Status> {
        let node = self.node();
        Ok(image_list::list(&node.storage, &node.collection, &node.pulls, request).await?)
    }

    /// Loads an archive that arrives in pieces.
    pub(crate) async fn load_pieces(
        &self,
        pieces: impl Stream<Item = Result<api::LoadRequest, Status>> + Unpin,
    ) -> Result<api::LoadResponse, Status> {
        load::load(self.node(), &self.0.loads, pieces).await
    }

    fn node(&self) -> &Node {
        &self.0.node
    }

    /// The policy of garbage collection with the limits of a request.
    fn policy(&self, request: &api::CollectRequest) -> Result<GcPolicy, Error> {
        let node = self.node();
        let config = node.settings.now();
        limits::policy(&node.collection.collector()?.policy(), request, |key| config.origin(key).to_string())
    }

    /// The policy and the goal of a request.
    fn policy_and_goal(&self, request: &api::CollectRequest) -> Result<(GcPolicy, GcGoal), Error> {
        let mut policy = self.policy(request)?;
        if request.minimum_age_milliseconds.is_none() && !gc::ended_leases(request)?.is_empty() {
            // What was pulled just now is young, too.
            policy.minimum_age = Duration::ZERO;
        }
        let goal = limits::goal(request, &policy);
        if goal == GcGoal::FailedPulls {
            self.node().storage.require_store()?;
        }
        Ok((policy, goal))
    }

    /// Calls larder's own store on a thread that may block.
    async fn store<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Store) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let store = self.node().storage.require_store()?.store().clone();
        let called = spawn_blocking(move || call(&store)).await;
        called.map_err(|error| unanswered("the store", &error))?
    }
}

/// A thread that may block has ended without an answer.
fn unanswered(what: &str, error: &JoinError) -> Error {
    Error::failed(format!("{what} gave no answer: {error}"))
}

/// A name or id that an image can have.
fn named(image: &str) -> Result<&str, Error> {
    match image_name::check_name_or_id(image) {
        Ok(()) => Ok(image),
        Err(bad) => Err(Error::bad_input(bad.message).hints(bad.hints)),
    }
}

/// A path that means the same in this process as in the client's.
fn absolute(target: &str) -> Result<PathBuf, Error> {
    let path = PathBuf::from(target);
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Error::bad_input(format!("{target:?}: no absolute path"))
        .hint("the process that has the images may be in another directory; write an absolute path"))
}

#[tonic::async_trait]
impl Control for ControlApi {
    type EnsureStream = ensure::EnsureUpdateStream;
    type EventsStream = EventStream;
    type ImagesStream = ImageListParts;
    type ExportStream = export::ExportStream;

    async fn ensure(&self, request: Request<api::EnsureRequest>) -> ControlResult<Self::EnsureStream> {
        let node = self.node();
        Ok(Response::new(ensure::start(&node.pulls, &node.observability, request.into_inner())?))
    }

    async fn plan_ensure(
        &self,
        request: Request<api::EnsureRequest>,
    ) -> ControlResult<api::PlanEnsureResponse> {
        Ok(Response::new(plan_ensure::plan(&self.node().pulls, request.into_inner()).await?))
    }

    async fn images(&self, request: Request<api::ImagesRequest>) -> ControlResult<ImageListParts> {
        // A caller that reads nothing delays the others, and no more.
        let slot = timeout(image_list::SLOT_WITHIN, Arc::clone(&self.0.lists).acquire_owned()).await;
        let list = self.list_images(request.get_ref()).await?;
        let parts = stream::iter(list.into_parts()).map(move |part| {
            let _until_all_is_sent = &slot;
            Ok(part)
        });
        Ok(Response::new(parts.boxed()))
    }

    async fn inspect(&self, request: Request<api::InspectRequest>) -> ControlResult<api::InspectResponse> {
        let request = request.into_inner();
        named(&request.image)?;
        let found = images::inspect(&request, &**self.node().storage.backend()).await?;
        Ok(Response::new(api::InspectResponse { image: Some(convert::image(found.image)), info: found.info }))
    }

    async fn remove(&self, request: Request<api::RemoveRequest>) -> ControlResult<api::RemoveResponse> {
        let request = request.into_inner();
        for image in &request.images {
            named(image)?;
        }
        let mut answer = remove::remove(&request, &RemovalParts::of(self.node())).await;
        let is_removed =
            |removed: &api::Removed| matches!(removed.result, Some(api::removed::Result::Removed(_)));
        // A daemon deletes the files in the background; a pull that lacks space waits for that. A command's process
        // ends.
        if self.0.process == ServingProcess::Command
            && answer.results.iter().any(is_removed)
            && let Some(store) = self.node().storage.store().map(|store| store.store().clone())
            && let Ok(Err(error)) = spawn_blocking(move || store.empty_trash()).await
        {
            answer.warnings.push(larder::error_chain(&error));
        }
        Ok(Response::new(answer))
    }

    async fn tag(&self, request: Request<api::TagRequest>) -> ControlResult<api::TagResponse> {
        named(&request.get_ref().source)?;
        Ok(Response::new(
            images::tag(request.get_ref(), &self.node().storage, self.node().collection.gate()).await?,
        ))
    }

    async fn plan(&self, request: Request<api::CollectRequest>) -> ControlResult<api::Collection> {
        let request = request.into_inner();
        let (policy, goal) = self.policy_and_goal(&request)?;
        let ended = gc::ended_leases(&request)?;
        Ok(Response::new(gc::dry_run(self.node().collection.collector()?, &policy, goal, ended).await?))
    }

    async fn collect(&self, request: Request<api::CollectRequest>) -> ControlResult<api::Collection> {
        let request = request.into_inner();
        let (policy, goal) = self.policy_and_goal(&request)?;
        if goal != GcGoal::FailedPulls {
            self.node().settings.require_gc()?;
            self.node().storage.require_publisher()?;
        }
        let ended = gc::ended_leases(&request)?;
        if !ended.is_empty() {
            let mut images = self.node().storage.backend().list().await.map_err(Error::from)?;
            images.retain(|image| goal != GcGoal::Dangling || image.repo_tags.is_empty());
            let leased: Vec<_> = self.node().collection.leases(&images).await?.into_keys().collect();
            self.node().collection.gate().end_leases(&leased, ended);
        }
        let collector = self.node().collection.collector()?;
        let round = Arc::new(collector.round(goal, &policy).await);
        // After the round: on a full disk, nothing can be written before images are removed.
        if !ended.is_empty() {
            self.node().collection.save_ended_leases().await;
        }
        self.node().collection.note_requested(Arc::clone(&round));
        Ok(Response::new(gc::report(collector, &policy, goal, &round).await))
    }

    async fn explain(&self, request: Request<api::ExplainRequest>) -> ControlResult<api::Explanation> {
        let request = request.into_inner();
        let policy = self.policy(&request.limits.unwrap_or_default())?;
        let Node { storage, collection, pulls, .. } = self.node();
        let image = named(&request.image)?;
        let explained = explain::explain(image, storage, collection.collector()?, pulls, &policy);
        let mut answer = explained.await?;
        if storage.store().is_some()
            && let Some(decision) = &answer.decision
        {
            let mut mounts = self.store(mounts::mounts_of).await?;
            mounts.retain(|mount| mount.image_id == decision.id);
            answer.mounts = mounts;
        }
        Ok(Response::new(answer))
    }

    async fn history(&self, request: Request<api::HistoryRequest>) -> ControlResult<api::HistoryResponse> {
        let journal = self.node().collection.require_state_dir()?.history();
        let newest = request.into_inner().newest;
        let read = spawn_blocking(move || history::read(&journal, newest)).await;
        Ok(Response::new(read.map_err(|error| unanswered("the journal", &error))??))
    }

    async fn usage(&self, _: Request<api::UsageRequest>) -> ControlResult<api::UsageResponse> {
        let policy = self.node().collection.collector()?.policy();
        Ok(Response::new(usage::usage(&self.node().storage, &self.node().collection, &policy).await?))
    }

    async fn runtime(&self, _: Request<api::RuntimeRequest>) -> ControlResult<api::RuntimeResponse> {
        Ok(Response::new(images::runtime(&**self.node().storage.backend()).await?))
    }

    async fn events(&self, request: Request<api::EventsRequest>) -> ControlResult<Self::EventsStream> {
        let stream =
            events::follow(self.node().observability.journal(), request.get_ref(), self.0.stop.clone());
        Ok(Response::new(Box::pin(stream)))
    }

    async fn status(&self, request: Request<api::StatusRequest>) -> ControlResult<api::StatusResponse> {
        let ControlApiInner { node, process, connections, .. } = &*self.0;
        if request.get_ref().look {
            node.storage.health().check().await;
        }
        Ok(Response::new(status::now(node, connections, process).await))
    }

    async fn keep(&self, request: Request<api::KeepRequest>) -> ControlResult<api::KeepResponse> {
        let Node { settings, storage, collection, .. } = self.node();
        Ok(Response::new(retention::keep(settings, storage, collection, request.into_inner()).await?))
    }

    async fn lease(&self, request: Request<api::LeaseRequest>) -> ControlResult<api::LeaseResponse> {
        let request = request.into_inner();
        named(&request.image)?;
        let node = self.node();
        Ok(Response::new(retention::lease(&node.storage, &node.collection, &request).await?))
    }

    async fn leases(&self, _: Request<api::LeasesRequest>) -> ControlResult<api::LeasesResponse> {
        Ok(Response::new(retention::leases(&self.node().storage, &self.node().collection).await?))
    }

    async fn load(&self, request: Request<Streaming<api::LoadRequest>>) -> ControlResult<api::LoadResponse> {
        self.load_pieces(request.into_inner()).await.map(Response::new)
    }

    async fn export(&self, request: Request<api::ExportRequest>) -> ControlResult<Self::ExportStream> {
        let exports = Arc::clone(&self.0.exports);
        Ok(Response::new(export::start(&self.node().storage, exports, request.into_inner()).await?))
    }

    async fn mount(&self, request: Request<api::MountRequest>) -> ControlResult<api::MountResponse> {
        let api::MountRequest { image, target, writable, suid, dev } = request.into_inner();
        let options = MountOptions { writable, suid, dev };
        let target = absolute(&target)?;
        self.node().storage.require_store()?;
        let found = find::find(named(&image)?, &**self.node().storage.backend()).await?;
        let image = found.key().to_owned();
        let mount = self.store(move |store| mounts::mount_of(store, &image, &target, options)).await?;
        Ok(Response::new(api::MountResponse { mount: Some(mount) }))
    }

    async fn unmount(&self, request: Request<api::UnmountRequest>) -> ControlResult<api::UnmountResponse> {
        let api::UnmountRequest { target, force } = request.into_inner();
        let target = absolute(&target)?;
        let mount = self.store(move |store| mounts::umount_of(store, &target, force)).await?;
        Ok(Response::new(api::UnmountResponse { mount: Some(mount) }))
    }

    async fn mounts(&self, _: Request<api::MountsRequest>) -> ControlResult<api::MountsResponse> {
        Ok(Response::new(api::MountsResponse { mounts: self.store(mounts::mounts_of).await? }))
    }

    async fn reload(&self, _: Request<api::ReloadRequest>) -> ControlResult<api::ReloadResponse> {
        let ControlApiInner { node, process, .. } = &*self.0;
        if *process == ServingProcess::Command {
            return Err(Error::failed("a command keeps its settings for as long as it runs")
                .hint("rerun the command to use other settings")
                .into());
        }
        let node = Arc::clone(node);
        let reloaded = spawn_blocking(move || node.reload()).await;
        let reloaded = reloaded.map_err(|error| unanswered("the settings", &error))?.map_err(Error::from)?;
        let keys = |keys: Vec<&str>| keys.into_iter().map(str::to_owned).collect();
        Ok(Response::new(api::ReloadResponse {
            applied: keys(reloaded.applied),
            needs_restart: keys(reloaded.needs_restart),
            held: keys(reloaded.held),
        }))
    }

    async fn join(&self, request: Request<api::JoinRequest>) -> ControlResult<api::JoinResponse> {
        let ControlApiInner { node, process, .. } = &*self.0;
        join::check(&node.settings.now(), process, &request.get_ref().settings)?;
        if *process == ServingProcess::Command {
            if let Some(theirs) = &request.get_ref().credential_programs {
                join::check_programs(&node.pulls.manager().credentials().programs().await, &theirs.programs)?;
            }
            // The command itself pulls nothing, perhaps.
            node.pulls.recover().await;
        }
        Ok(Response::new(api::JoinResponse {}))
    }
}
