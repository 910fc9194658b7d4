//! Fetches one layer from the registry and unpacks it into a staging directory at the same time.
//!
//! The fetch writes parallel ranges into an ingest file; a thread reads the contiguous part of that file in order, and
//! verifies, decompresses and unpacks it. The bytes in the ingest file survive a failure, a drop and a restart.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use larder::reference::Digest;

use super::error::PullError;
use super::plan::PlannedLayer;
use super::pull_tasks::PullTaskHandle;
use super::spans::unpack_span;
use crate::disk::{DiskSpace, SpaceReserve};
use crate::store::fetch_progress::FetchProgress;
use crate::store::import::{Import, ImportError};
use crate::store::{ARCHIVE, IMAGE, IngestFile, LayerStaging, Store, StoreError};
use crate::unpack::{
    ExpectedLayer, LayerDownload, PendingLayer, UnpackError, UnpackOptions, UnpackProgress, UnpackedLayer,
    unpack_layer,
};
use larder_registry::{BlobSink, ByteRanges, FetchNotice, RepositorySession, fetch_blob};

/// What a reader gets when no more bytes will come. Not `Interrupted`: that means to read again, for ever.
const GIVEN_UP: io::ErrorKind = io::ErrorKind::ConnectionAborted;

/// A layer that is unpacked but not yet merged with the layers below it.
pub(super) struct StagedLayer {
    pub(super) staging: LayerStaging,
    pub(super) unpacked: UnpackedLayer,
    /// Its file, without the directories.
    pub(super) image: PendingLayer,
    /// Its compressed bytes.
    pub(super) source: LayerSource,
}

/// Compressed bytes of a layer on this machine.
#[derive(Clone)]
pub(super) enum LayerSource {
    /// Fetched from a registry.
    Ingest(IngestFile),
    /// In an archive or a layout.
    Import(Arc<Import>),
}

impl LayerSource {
    fn open(&self, layer: &Digest) -> Result<Box<dyn io::Read + Send>, ImportError> {
        match self {
            LayerSource::Ingest(ingest) => Ok(Box::new(ingest.reader())),
            LayerSource::Import(import) => import.open(layer),
        }
    }
}

/// Receives the notices of a layer's fetch.
pub(super) type FetchObserver = Arc<dyn Fn(FetchNotice) + Send + Sync>;

/// Records which hosts served content, and forwards the notices of the fetch.
fn noting_hosts(
    hosts: Arc<Mutex<Vec<String>>>,
    observer: FetchObserver,
) -> impl Fn(FetchNotice) + Send + Sync + 'static {
    move |notice| {
        if let FetchNotice::Host(host) = &notice {
            hosts.lock().unwrap_or_else(PoisonError::into_inner).push(host.clone());
        }
        observer(notice);
    }
}

/// Fetches and unpacks a layer. Bytes that turn out to be wrong are fetched once more, from another host if there is
/// one.
pub(super) async fn fetch_layer(
    store: Store,
    session: RepositorySession,
    wanted: PlannedLayer,
    options: UnpackOptions,
    (observer, progress): (FetchObserver, &FetchProgress),
    worker: &PullTaskHandle,
) -> Result<StagedLayer, PullError> {
    let ingest = ingest_of(&store, &wanted, worker).await?;
    if ingest.done() == wanted.descriptor.size {
        // An earlier pull fetched all of it, maybe from another repository. A partial blob is proved by its rest.
        session.check_blob(&wanted.descriptor).await?;
    }
    let mut session = session;
    let mut again = true;
    loop {
        // Bytes of an earlier pull count as come; those that were forgotten do not any more.
        observer(FetchNotice::Present(ingest.done()));
        let options = UnpackOptions { progress: Arc::default(), ..options.clone() };
        progress.set_unpacking(options.progress.clone());
        let served = Arc::new(Mutex::new(Vec::new()));
        let watched = session.with_watcher(noting_hosts(served.clone(), observer.clone()));
        match attempt(&store, &watched, &wanted, &ingest, options, worker).await {
            Err(PullError::Unpack { cause, .. }) if cause.is_wrong_bytes() && again => {
                again = false;
                let ingest = ingest.clone();
                worker.blocking(move || ingest.forget()).await??;
                session = without(session, &served);
            }
            Err(error) => {
                if matches!(&error, PullError::Unpack { cause, .. } if cause.is_wrong_bytes()) {
                    // The next pull must not begin with them.
                    worker.blocking(move || ingest.forget()).await??;
                }
                return Err(error);
            }
            Ok(staged) => {
                ingest.close();
                return Ok(staged);
            }
        }
    }
}

/// Without the hosts that served wrong bytes, unless no host would be left.
fn without(session: RepositorySession, served: &Mutex<Vec<String>>) -> RepositorySession {
    let lied = served.lock().unwrap_or_else(PoisonError::into_inner);
    let others = session.without_hosts(&lied);
    if others.hosts().is_empty() { session } else { others }
}

async fn ingest_of(
    store: &Store,
    wanted: &PlannedLayer,
    worker: &PullTaskHandle,
) -> Result<IngestFile, PullError> {
    let (store, digest, size) = (store.clone(), wanted.descriptor.digest.clone(), wanted.descriptor.size);
    Ok(worker.blocking(move || store.ingest(&digest, size)).await??)
}

async fn attempt(
    store: &Store,
    session: &RepositorySession,
    wanted: &PlannedLayer,
    ingest: &IngestFile,
    options: UnpackOptions,
    worker: &PullTaskHandle,
) -> Result<StagedLayer, PullError> {
    ingest.resume();
    let _stop = StopIngestOnDrop { ingest: ingest.clone(), progress: options.progress.clone() };
    let reserve = options.reserve.clone();
    let download = ingest.clone();
    let download = Some(LayerDownload::new(move || download.wait_until_complete()));
    let options = UnpackOptions { download, ..options };
    let unpacking = start_unpacking(store.clone(), ingest, wanted, options, worker);
    tokio::pin!(unpacking);
    let present: ByteRanges = ingest.present().into_iter().collect();
    let sink = IngestSink { ingest: ingest.clone(), reserve, _worker: worker.clone() };
    let fetching = fetch_blob(session, &wanted.descriptor, &present, Arc::new(sink));
    tokio::pin!(fetching);
    let fetched = tokio::select! {
        // The unpacking ends first only when it fails, or when all the bytes were here already.
        unpacked = &mut unpacking => return outcome(unpacked, &wanted.descriptor.digest),
        fetched = &mut fetching => fetched,
    };
    match fetched {
        Ok(_) => outcome(unpacking.await, &wanted.descriptor.digest),
        Err(error) => {
            ingest.stop(GIVEN_UP, "the fetch failed");
            let _ = unpacking.await; // it ends at once and removes its directory
            Err(error.into())
        }
    }
}

/// Why the unpacking thread gave up.
enum UnpackThreadError {
    Store(StoreError),
    Import(ImportError),
    Unpack(UnpackError),
}

fn start_unpacking(
    store: Store,
    ingest: &IngestFile,
    wanted: &PlannedLayer,
    options: UnpackOptions,
    worker: &PullTaskHandle,
) -> impl Future<Output = UnpackThreadResult> + use<> {
    let (source, wanted) = (LayerSource::Ingest(ingest.clone()), wanted.clone());
    let span = unpack_span(&wanted);
    span.in_scope(|| worker.blocking(move || unpack(&store, source, &wanted, &options)))
}

/// How an unpacking ended.
type UnpackThreadResult = Result<Result<StagedLayer, UnpackThreadError>, PullError>;

/// Unpacks a layer into a new staging directory. The directory belongs to the unpacking thread: it is
/// removed only after the last file was written, even if the pull was dropped.
fn unpack(
    store: &Store,
    source: LayerSource,
    wanted: &PlannedLayer,
    options: &UnpackOptions,
) -> Result<StagedLayer, UnpackThreadError> {
    let staging = store.begin_layer().map_err(UnpackThreadError::Store)?;
    // What it takes to write the archive again becomes a part of the layer's file.
    let archive_record = Some(staging.dir().join(ARCHIVE));
    let options = UnpackOptions { archive_record, ..options.clone() };
    let compressed = source.open(&wanted.descriptor.digest).map_err(UnpackThreadError::Import)?;
    let (unpacked, image) = unpack_layer(compressed, &expected(wanted), &staging.dir().join(IMAGE), &options)
        .map_err(UnpackThreadError::Unpack)?;
    Ok(StagedLayer { staging, unpacked, image, source })
}

fn expected(wanted: &PlannedLayer) -> ExpectedLayer<'_> {
    ExpectedLayer {
        digest: Some(&wanted.descriptor.digest),
        size: Some(wanted.descriptor.size),
        diff_id: &wanted.diff_id,
    }
}

/// Unpacks a layer out of an archive or a layout.
pub(super) async fn take(
    store: Store,
    import: Arc<Import>,
    wanted: PlannedLayer,
    options: UnpackOptions,
    worker: &PullTaskHandle,
) -> Result<StagedLayer, PullError> {
    let digest = wanted.descriptor.digest.clone();
    let progress = CancelUnpackOnDrop(options.progress.clone());
    let unpacking = worker.blocking(move || unpack(&store, LayerSource::Import(import), &wanted, &options));
    let staged = outcome(unpacking.await, &digest)?;
    drop(progress);
    Ok(staged)
}

/// Cancels the unpacking when the pull is dropped.
struct CancelUnpackOnDrop(Arc<UnpackProgress>);

impl Drop for CancelUnpackOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

fn outcome(ended: UnpackThreadResult, digest: &Digest) -> Result<StagedLayer, PullError> {
    ended?.map_err(|failed| match failed {
        UnpackThreadError::Store(error) => error.into(),
        UnpackThreadError::Import(error) => error.into(),
        UnpackThreadError::Unpack(cause) => PullError::Unpack { digest: digest.clone(), cause },
    })
}

/// Ends the unpacking thread when the pull is dropped: it may wait for bytes that are no longer fetched.
struct StopIngestOnDrop {
    ingest: IngestFile,
    progress: Arc<UnpackProgress>,
}

impl Drop for StopIngestOnDrop {
    fn drop(&mut self) {
        self.progress.cancel();
        self.ingest.stop(GIVEN_UP, "the pull was canceled");
    }
}

/// The fetch has a sink for a moment after it was dropped.
struct IngestSink {
    ingest: IngestFile,
    reserve: Option<SpaceReserve>,
    _worker: PullTaskHandle,
}

impl BlobSink for IngestSink {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Some(reserve) = &self.reserve {
            reserve.admit(DiskSpace { bytes: data.len() as u64, inodes: 0 })?;
        }
        self.ingest.write_at(data, offset).map_err(io::Error::other)
    }
}
