//! The calls.

use std::sync::Arc;
use std::time::SystemTime;

use futures_util::stream::{self, Iter};
use larder::error_chain;
use larder::reference::Digest;
use larder_store::pull::{FetchedImage, FetchedLayer};
use larder_store::snapshots::{NewSnapshot, SnapshotError, SnapshotMount};
use larder_store::store::{SnapshotKind, SnapshotRecord, Store, StoreError};
use prost_types::Timestamp;
use tokio::time::{Instant, timeout};
use tonic::{Code, Request, Response, Status, async_trait};

use crate::fetch::{ImageFetches, LayerFetcher, WAIT};
use crate::filter::SnapshotFilters;
use crate::labels::{AnnouncedLayer, Labels, chain_of, check_labels, updated};
use crate::proto::snapshots_server::{self, Snapshots, SnapshotsServer};
use crate::proto::{
    CleanupRequest, CommitSnapshotRequest, Info, Kind, ListSnapshotsRequest, ListSnapshotsResponse, Mount,
    MountsRequest, MountsResponse, PrepareSnapshotRequest, PrepareSnapshotResponse, RemoveSnapshotRequest,
    StatSnapshotRequest, StatSnapshotResponse, UpdateSnapshotRequest, UpdateSnapshotResponse, UsageRequest,
    UsageResponse, ViewSnapshotRequest, ViewSnapshotResponse,
};

/// The name in the paths of calls.
pub const SERVICE_NAME: &str = snapshots_server::SERVICE_NAME;

/// The namespace in which kubelet's images are. In another one, a pull has not proved that its repository has the
/// layers of the store.
const NAMESPACE: &str = "k8s.io/";

/// Snapshots in one message of a list.
const PART: usize = 100;

/// The snapshot service of a store. `layers` fetches what it lacks; `None`: containerd does.
pub fn service(store: Store, layers: Option<Arc<dyn LayerFetcher>>) -> SnapshotsServer<SnapshotService> {
    SnapshotsServer::new(SnapshotService::new(store, layers))
}

/// The handlers.
#[derive(Clone)]
pub struct SnapshotService {
    store: Store,
    fetches: Option<Arc<ImageFetches>>,
}

impl SnapshotService {
    /// On this store. `layers` fetches what it lacks; `None`: containerd does.
    pub fn new(store: Store, layers: Option<Arc<dyn LayerFetcher>>) -> SnapshotService {
        SnapshotService { store, fetches: layers.map(|layers| Arc::new(ImageFetches::new(layers))) }
    }

    /// Makes a snapshot of the layer that containerd is about to unpack, if the store has it or can fetch it. Returns
    /// its key.
    async fn adopt(&self, new: &NewSnapshot) -> Result<Option<String>, Status> {
        let Some(chain) = chain_of(&new.labels) else { return Ok(None) };
        if self.may_reuse(&chain, &new.key).await? {
            if let Some(key) = self.adopt_present(&chain, new).await? {
                return Ok(Some(key));
            }
            if let Some(fetches) = &self.fetches
                && timeout(WAIT, fetches.fetcher().wait_for_layer(&chain)).await.unwrap_or(false)
                && let Some(key) = self.adopt_present(&chain, new).await?
            {
                return Ok(Some(key));
            }
        }
        self.fetch_and_adopt(&chain, new).await
    }

    /// Whether the namespace of this key may have a layer because the store has it.
    async fn may_reuse(&self, chain: &Digest, key: &str) -> Result<bool, Status> {
        if key.starts_with(NAMESPACE) {
            return Ok(true);
        }
        let Some(fetches) = &self.fetches else { return Ok(false) };
        let own = chain.clone();
        let images = self.blocking(move |store| store.images_with_chain(&own).map_err(failed)).await?;
        Ok(fetches.fetcher().is_one_accessible(&images).await)
    }

    async fn adopt_present(&self, chain: &Digest, new: &NewSnapshot) -> Result<Option<String>, Status> {
        let (chain, new) = (chain.clone(), new.clone());
        let adopt = move |store: &Store| store.adopt_layer(&chain, new, SystemTime::now());
        self.blocking(|store| adopt(store).map_err(|error| refused(&error))).await
    }

    async fn fetch_and_adopt(&self, chain: &Digest, new: &NewSnapshot) -> Result<Option<String>, Status> {
        let fetches = self.fetches.as_ref().filter(|fetches| fetches.fetcher().is_enabled());
        let (Some(fetches), Some(announced)) = (fetches, AnnouncedLayer::of(&new.labels)) else {
            return Ok(None);
        };
        // What would be refused is not worth a fetch.
        let wanted = new.clone();
        let is_valid = move |store: &Store| {
            let is_committed = |at: SnapshotRecord| at.kind == SnapshotKind::Committed;
            let has_parent = || store.snapshot(&wanted.parent).is_ok_and(is_committed);
            Ok(store.snapshot(&wanted.key).is_err() && (wanted.parent.is_empty() || has_parent()))
        };
        if !self.blocking(is_valid).await? {
            return Ok(None);
        }
        let Some((image, layer)) = fetches.layer(chain, &announced, Instant::now()).await else {
            return Ok(None);
        };
        let (new, is_last) = (new.clone(), image.layers.last() == Some(&layer));
        let adopted = self.blocking(move |store| Ok(adopt_fetched(store, &image, &layer, new))).await?;
        // The last layer has all others below it; a layer that was reclaimed is fetched again for the next pull.
        if is_last || adopted.is_none() {
            fetches.forget(&announced.image);
        }
        Ok(adopted)
    }

    /// Runs what blocks on a thread where it may.
    async fn blocking<T: Send + 'static>(
        &self,
        run: impl FnOnce(&Store) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let store = self.store.clone();
        let answer = tokio::task::spawn_blocking(move || run(&store)).await;
        answer.map_err(|error| Status::internal(error.to_string()))?
    }

    /// Runs a call on a thread where it may block.
    async fn run<T: Send + 'static>(
        &self,
        call: &'static str,
        run: impl FnOnce(&Store) -> Result<T, Status> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let answer = self.blocking(run).await;
        if let Err(status) = &answer {
            tracing::debug!(call, code = ?status.code(), "{}", status.message());
        }
        answer.map(Response::new)
    }
}

/// The status with containerd's code for an error.
fn refused(error: &SnapshotError) -> Status {
    let code = match error {
        SnapshotError::NotFound { .. } => Code::NotFound,
        SnapshotError::AlreadyExists { .. } => Code::AlreadyExists,
        SnapshotError::Precondition { .. } => Code::FailedPrecondition,
        SnapshotError::Invalid { .. } => Code::InvalidArgument,
        SnapshotError::Store(error) if error.is_no_space() => Code::ResourceExhausted,
        _ => Code::Unknown,
    };
    if code == Code::Unknown {
        tracing::warn!("{}", error_chain(error));
    }
    Status::new(code, error_chain(error))
}

fn failed(error: StoreError) -> Status {
    refused(&SnapshotError::from(error))
}

fn invalid(problem: String) -> Status {
    Status::invalid_argument(problem)
}

/// A snapshot that may be made.
fn new_snapshot(key: String, parent: String, labels: Labels) -> Result<NewSnapshot, Status> {
    if key.is_empty() {
        return Err(invalid("a snapshot needs a key".to_owned()));
    }
    check_labels(&labels).map_err(invalid)?;
    Ok(NewSnapshot { key, parent, labels })
}

/// Makes a snapshot of a layer that was fetched for it. What fails here is left to containerd.
fn adopt_fetched(
    store: &Store,
    image: &FetchedImage,
    layer: &FetchedLayer,
    new: NewSnapshot,
) -> Option<String> {
    let adopted = store.adopt_fetched(layer, new, SystemTime::now());
    let adopted = adopted.inspect_err(|error| tracing::warn!("{}", error_chain(error))).ok().flatten();
    if adopted.is_some() && image.layers.last() == Some(layer) {
        // Its snapshot retains it, and those below.
        if let Err(error) = store.end_lease(&image.lease) {
            tracing::warn!(
                "cannot end a lease of fetched layers, which ends by itself: {}",
                error_chain(&error)
            );
        }
    }
    adopted
}

fn mount(mount: SnapshotMount) -> Mount {
    Mount {
        r#type: mount.kind.to_owned(),
        source: mount.source,
        target: String::new(),
        options: mount.options,
    }
}

fn mounts(mounts: Vec<SnapshotMount>) -> Vec<Mount> {
    mounts.into_iter().map(mount).collect()
}

fn info(snapshot: SnapshotRecord) -> Info {
    let kind = match snapshot.kind {
        SnapshotKind::View => Kind::View,
        SnapshotKind::Active => Kind::Active,
        SnapshotKind::Committed => Kind::Committed,
    };
    Info {
        name: snapshot.key,
        parent: snapshot.parent,
        kind: kind.into(),
        created_at: Some(timestamp(snapshot.created_ns)),
        updated_at: Some(timestamp(snapshot.updated_ns)),
        labels: snapshot.labels,
    }
}

fn timestamp(ns: u64) -> Timestamp {
    const SECOND: u64 = 1_000_000_000;
    Timestamp {
        seconds: i64::try_from(ns / SECOND).unwrap_or(i64::MAX),
        nanos: i32::try_from(ns % SECOND).unwrap_or_default(),
    }
}

fn number(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

type SnapshotParts = Iter<std::vec::IntoIter<Result<ListSnapshotsResponse, Status>>>;

#[async_trait]
impl Snapshots for SnapshotService {
    type ListStream = SnapshotParts;

    async fn prepare(
        &self,
        request: Request<PrepareSnapshotRequest>,
    ) -> Result<Response<PrepareSnapshotResponse>, Status> {
        let PrepareSnapshotRequest { key, parent, labels, .. } = request.into_inner();
        let new = new_snapshot(key, parent, labels)?;
        // containerd looks it up then, and fetches nothing.
        if let Some(key) = self.adopt(&new).await? {
            return Err(refused(&SnapshotError::AlreadyExists { key }));
        }
        self.run("Prepare", |store| {
            let made = store.create_snapshot(new, true, SystemTime::now());
            made.map(|all| PrepareSnapshotResponse { mounts: mounts(all) }).map_err(|error| refused(&error))
        })
        .await
    }

    async fn view(
        &self,
        request: Request<ViewSnapshotRequest>,
    ) -> Result<Response<ViewSnapshotResponse>, Status> {
        let ViewSnapshotRequest { key, parent, labels, .. } = request.into_inner();
        let new = new_snapshot(key, parent, labels)?;
        self.run("View", |store| {
            let made = store.create_snapshot(new, false, SystemTime::now());
            made.map(|all| ViewSnapshotResponse { mounts: mounts(all) }).map_err(|error| refused(&error))
        })
        .await
    }

    async fn mounts(&self, request: Request<MountsRequest>) -> Result<Response<MountsResponse>, Status> {
        let key = request.into_inner().key;
        self.run("Mounts", move |store| {
            let found = store.snapshot_mounts(&key);
            found.map(|all| MountsResponse { mounts: mounts(all) }).map_err(|error| refused(&error))
        })
        .await
    }

    async fn commit(&self, request: Request<CommitSnapshotRequest>) -> Result<Response<()>, Status> {
        let CommitSnapshotRequest { name, key, labels, parent, .. } = request.into_inner();
        let new = new_snapshot(name, parent, labels)?;
        self.run("Commit", move |store| {
            store.commit_snapshot(&key, new, SystemTime::now()).map_err(|error| refused(&error))
        })
        .await
    }

    async fn remove(&self, request: Request<RemoveSnapshotRequest>) -> Result<Response<()>, Status> {
        let key = request.into_inner().key;
        self.run("Remove", move |store| store.remove_snapshot(&key).map_err(|error| refused(&error))).await
    }

    async fn stat(
        &self,
        request: Request<StatSnapshotRequest>,
    ) -> Result<Response<StatSnapshotResponse>, Status> {
        let key = request.into_inner().key;
        self.run("Stat", move |store| {
            let found = store.snapshot(&key).map_err(|error| refused(&error))?;
            Ok(StatSnapshotResponse { info: Some(info(found)) })
        })
        .await
    }

    async fn update(
        &self,
        request: Request<UpdateSnapshotRequest>,
    ) -> Result<Response<UpdateSnapshotResponse>, Status> {
        let UpdateSnapshotRequest { info: new, update_mask, .. } = request.into_inner();
        let new = new.ok_or_else(|| invalid("an update needs the snapshot".to_owned()))?;
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        check_labels(&new.labels).map_err(invalid)?;
        self.run("Update", move |store| {
            let key = new.name.clone();
            // The paths do not depend on the labels there are.
            updated(Labels::new(), new.labels.clone(), &paths).map_err(invalid)?;
            let change = |labels: &mut Labels| {
                if let Ok(changed) = updated(std::mem::take(labels), new.labels, &paths) {
                    *labels = changed;
                }
            };
            let changed = store.label_snapshot(&key, change, SystemTime::now());
            let changed = changed.map_err(|error| refused(&error))?;
            Ok(UpdateSnapshotResponse { info: Some(info(changed)) })
        })
        .await
    }

    async fn list(&self, request: Request<ListSnapshotsRequest>) -> Result<Response<SnapshotParts>, Status> {
        let filters = SnapshotFilters::parse(&request.into_inner().filters).map_err(invalid)?;
        self.run("List", move |store| {
            let mut found = store.snapshots().map_err(failed)?;
            found.retain(|snapshot| filters.has(snapshot));
            let infos: Vec<Info> = found.into_iter().map(info).collect();
            let parts: Vec<_> =
                infos.chunks(PART).map(|part| Ok(ListSnapshotsResponse { info: part.to_vec() })).collect();
            Ok(stream::iter(parts))
        })
        .await
    }

    async fn usage(&self, request: Request<UsageRequest>) -> Result<Response<UsageResponse>, Status> {
        let key = request.into_inner().key;
        self.run("Usage", move |store| {
            let usage = store.snapshot_usage(&key).map_err(|error| refused(&error))?;
            Ok(UsageResponse { size: number(usage.bytes), inodes: number(usage.inodes) })
        })
        .await
    }

    async fn cleanup(&self, _: Request<CleanupRequest>) -> Result<Response<()>, Status> {
        self.run("Cleanup", |store| store.clean_snapshots().map_err(failed)).await
    }
}
