//! Fetches one layer and unpacks it into an EROFS file in a staging directory at the same time.
//!
//! The fetch writes parallel ranges into an ingest file; a thread reads the contiguous part of that file in order, and
//! verifies, decompresses and unpacks it. The bytes in the ingest file survive a failure, a drop and a restart.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::LayerPhase;
use larder::reference::Digest;
use larder::retry::{RetryAdvice, RetryPolicy, retry};
use larder::scheduler::{Callers, ScheduledWork};
use larder::trace_context;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::StorePuller;
use super::error::PullError;
use super::plan::PlannedLayer;
use super::pull_progress::PullProgress;
use super::pull_workers::PullWorker;
use super::soci_index::SociIndex;
use super::spans::{FetchSpanFields, layer_span, unpack_span};
use crate::disk::{DiskSpace, SpaceReserve};
use crate::lazy::skeleton::MissingData;
use crate::store::fetch_progress::FetchProgress;
use crate::store::import::{Import, ImportError};
use crate::store::{
    ARCHIVE_RECORD, BlobSource, ClaimRequest, IngestFile, LAYER_FILE, LayerHandle, LayerStaging,
    PartialSource, Store, StoreError, TransferLogin,
};
use crate::unpack::{
    FilePlace, LayerDownload, PendingLayer, UnfilledLayer, UnpackOptions, UnpackProgress, UnpackedLayer,
    unpack_file, unpack_layer,
};
use larder_registry::{BlobError, BlobSink, ByteRanges, FetchNotice, RepositorySession, fetch_blob};

/// Retry interval for a blob that another pull of this process downloads.
const BUSY_RETRY: Duration = Duration::from_millis(100);

/// Attempts for a blob whose bytes are wrong, each without the hosts that served them.
const WRONG_BYTES_ATTEMPTS: u32 = 2;

/// Error kind for a reader when no more bytes will follow. Not `Interrupted`: then it would read again, for ever.
const GIVEN_UP: io::ErrorKind = io::ErrorKind::ConnectionAborted;

/// Where the layers of an image come from.
#[derive(Clone)]
pub(super) enum LayerOrigin {
    /// A registry.
    Registry {
        session: RepositorySession,
        progress: Arc<PullProgress>,
        login: TransferLogin,
        soci: Arc<SociIndex>,
    },
    /// An archive or a layout.
    Import { import: Arc<Import>, progress: Arc<PullProgress> },
}

impl LayerOrigin {
    /// The progress of the pull or load.
    pub(super) fn progress(&self) -> &Arc<PullProgress> {
        let (LayerOrigin::Registry { progress, .. } | LayerOrigin::Import { progress, .. }) = self;
        progress
    }

    /// Name of the image that is pulled; `None` if it comes from an archive.
    pub(super) fn image(&self) -> Option<String> {
        match self {
            LayerOrigin::Registry { session, .. } => Some(session.image().to_string()),
            LayerOrigin::Import { .. } => None,
        }
    }

    /// The blob of a layer, as this origin has it.
    pub(super) fn blob(&self, planned: &PlannedLayer) -> BlobSource {
        let (digest, size) = (planned.descriptor.digest.clone(), planned.descriptor.size);
        match self {
            LayerOrigin::Registry { session, login, .. } => {
                BlobSource::registry(session.image(), login.clone(), digest, size)
            }
            LayerOrigin::Import { .. } => BlobSource::archive(digest, size),
        }
    }

    /// The claim of a layer that this origin has.
    pub(super) fn request(&self, planned: &PlannedLayer) -> ClaimRequest {
        ClaimRequest::new(self.blob(planned), planned.diff_id.clone(), &planned.chain_id)
    }

    /// The fetch of a layer for these callers, for the scheduler.
    fn work(&self, callers: &Callers) -> ScheduledWork {
        match self {
            LayerOrigin::Registry { session, .. } => {
                ScheduledWork::layer(callers, session.image().registry(), session.image().name())
            }
            LayerOrigin::Import { .. } => ScheduledWork::layer(callers, "", ""),
        }
    }

    /// Records what happens to a layer.
    pub(super) fn note(&self, planned: &PlannedLayer, phase: LayerPhase) {
        self.progress().set_phase(&planned.descriptor.digest, phase);
    }
}

/// A layer that is unpacked but not yet merged with the layers below it.
pub(super) struct StagedLayer {
    pub(super) staging: LayerStaging,
    pub(super) unpacked: UnpackedLayer,
    /// Its file, without the directories.
    pub(super) file: PendingLayer,
    /// Its compressed bytes.
    pub(super) bytes: LayerBytes,
    /// The blob that was read.
    pub(super) blob: BlobSource,
    /// Missing data and its source, if that comes later.
    pub(super) partial: Option<(PartialSource, MissingData)>,
    /// The blob that is the table of contents of that, if there is one.
    pub(super) table: Option<IngestFile>,
}

/// Result of the fetch of a layer.
pub(super) enum FetchedContent {
    /// All of it was unpacked.
    Staged(Box<StagedLayer>),
    /// It is in its place: it was damaged, and is whole now, or it was removed, and data follows what was kept.
    Placed(LayerHandle),
}

/// Compressed bytes of a layer on this machine.
pub(super) enum LayerBytes {
    /// Fetched from a registry.
    Ingest(IngestFile),
    /// In an archive or a layout.
    Import(Arc<Import>),
}

impl LayerBytes {
    fn open(&self, layer: &Digest) -> Result<Box<dyn io::Read + Send>, ImportError> {
        match self {
            LayerBytes::Ingest(ingest) => Ok(Box::new(ingest.reader())),
            LayerBytes::Import(import) => import.open(layer),
        }
    }
}

/// The fetch of one layer by one pull.
pub(super) struct LayerFetch {
    pub(super) puller: StorePuller,
    pub(super) origin: LayerOrigin,
    pub(super) planned: PlannedLayer,
    pub(super) progress: Arc<FetchProgress>,
    pub(super) worker: PullWorker,
    /// The layer that takes the data. `None` for a new one.
    pub(super) into: Option<FetchTarget>,
}

/// A layer in its place that takes the data of a fetch.
pub(super) struct FetchTarget {
    pub(super) layer: Arc<dyn UnfilledLayer>,
    /// Ingest of its blob.
    pub(super) ingest: IngestFile,
    /// Admits what is written.
    pub(super) reserve: SpaceReserve,
    /// Receives the notices of the fetch.
    pub(super) observer: FetchObserver,
}

/// Why a fetch stopped.
enum FetchStop {
    /// Another layer needs its slot.
    GaveWay,
    Failed(PullError),
}

impl FetchStop {
    fn advice(&self) -> RetryAdvice {
        match self {
            FetchStop::GaveWay => RetryAdvice::After(Duration::ZERO),
            // Another fetch has the download of these bytes.
            FetchStop::Failed(PullError::Store(StoreError::Busy { .. })) => RetryAdvice::Backoff,
            FetchStop::Failed(_) => RetryAdvice::GiveUp,
        }
    }
}

impl LayerFetch {
    /// Fetches and unpacks the layer within the bounds of the scheduler. It gives its slot to other layers that need it
    /// more, and continues behind them.
    pub(super) async fn run(self) -> Result<FetchedContent, PullError> {
        let span = layer_span(&self.planned);
        let work = self.origin.work(self.progress.callers());
        let policy = RetryPolicy::unlimited(BUSY_RETRY, BUSY_RETRY);
        let fetch = retry(&policy, &(), FetchStop::advice, || self.fetch_in_slot(&work));
        let fetched = Box::pin(fetch).instrument(span.clone()).await.map_err(|stop| match stop {
            FetchStop::Failed(error) => error,
            FetchStop::GaveWay => PullError::Abandoned, // it is always retried
        });
        if let Err(error) = &fetched {
            trace_context::fail(&span, "fetch", error);
        }
        fetched
    }

    async fn fetch_in_slot(&self, work: &ScheduledWork) -> Result<FetchedContent, FetchStop> {
        let config = &self.puller.config;
        let wait = tracing::trace_span!("pull.Wait", larder.wait.reason = "layer slot");
        self.progress.set_queued(true, Instant::now());
        let slot = config.scheduler.acquire(work).instrument(wait).await;
        self.progress.set_queued(false, Instant::now());
        tokio::select! {
            fetched = self.fetch() => fetched.map_err(FetchStop::Failed),
            () = slot.gives_way(config.minimum_rate, |now| self.progress.rate(now)) => {
                let (image, digest) = (self.origin.image(), &self.planned.descriptor.digest);
                tracing::info!(image, %digest, "a fetch gives way to layers that wait for its slot");
                self.origin.note(&self.planned, LayerPhase::Queued);
                Err(FetchStop::GaveWay)
            }
        }
    }

    async fn fetch(&self) -> Result<FetchedContent, PullError> {
        let staged = match &self.origin {
            LayerOrigin::Registry { session, soci, .. } => {
                self.origin.note(&self.planned, LayerPhase::Fetching);
                if let Some(layer) = self.repair(session).await? {
                    return Ok(FetchedContent::Placed(layer));
                }
                if let Some(layer) = self.restore(session).await? {
                    return Ok(FetchedContent::Placed(layer));
                }
                match self.fetch_skeleton(session, soci).await? {
                    Some(staged) => staged,
                    None => self.fetch_verified(session).await?,
                }
            }
            LayerOrigin::Import { import, .. } => {
                self.origin.note(&self.planned, LayerPhase::Unpacking);
                let options = self.options();
                self.progress.begin_unpacking(Arc::clone(&options.progress));
                let _cancel = CancelUnpackOnDrop(Arc::clone(&options.progress));
                self.start_unpacking(LayerBytes::Import(Arc::clone(import)), options).await?
            }
        };
        self.origin.note(&self.planned, LayerPhase::Unpacked);
        tracing::debug!(digest = %self.planned.descriptor.digest, "unpacked a layer");
        Ok(FetchedContent::Staged(Box::new(staged)))
    }

    /// Fetches and unpacks the layer. Bytes that turn out to be wrong are fetched once more, without the hosts that
    /// served them if there are others.
    async fn fetch_verified(&self, session: &RepositorySession) -> Result<StagedLayer, PullError> {
        let ingest = if let Some(FetchTarget { ingest, .. }) = &self.into {
            ingest.clone()
        } else {
            let (store, blob) = (self.puller.store.clone(), self.origin.blob(&self.planned));
            self.worker.blocking(move || store.ingest(&blob)).await??
        };
        let observer = self.observer();
        let unreliable_hosts = Arc::<Mutex<Vec<String>>>::default();
        let attempt = || async {
            let session = session_without(session, &unreliable_hosts.lock());
            let session =
                session.with_watcher(noting_hosts(Arc::clone(&unreliable_hosts), Arc::clone(&observer)));
            // Bytes of an earlier pull count as received; those that were forgotten do not any more.
            observer(FetchNotice::Present(ingest.done()));
            let fetched = self.fetch_and_unpack(&session, &ingest).await;
            if fetched.as_ref().is_err_and(PullError::is_wrong_bytes) {
                // No later attempt, also of another pull, must begin with them.
                let ingest = ingest.clone();
                self.worker.blocking(move || ingest.forget()).await??;
            }
            fetched
        };
        let advice = |error: &PullError| {
            if error.is_wrong_bytes() { RetryAdvice::After(Duration::ZERO) } else { RetryAdvice::GiveUp }
        };
        let policy = RetryPolicy::fixed(WRONG_BYTES_ATTEMPTS, Duration::ZERO);
        let becomes_layer = !self.planned.files.is_empty() && self.into.is_none();
        if becomes_layer {
            let ingest = ingest.clone();
            self.worker.blocking(move || ingest.begin_layer()).await??;
        }
        let staged = retry(&policy, &(), advice, attempt).await?;
        if becomes_layer {
            self.worker.blocking(move || ingest.end_layer()).await??;
        } else {
            ingest.close();
        }
        Ok(staged)
    }

    /// Fetches what is missing of the blob and unpacks it.
    async fn fetch_and_unpack(
        &self,
        session: &RepositorySession,
        ingest: &IngestFile,
    ) -> Result<StagedLayer, PullError> {
        let options = self.options();
        let unpack_progress = Arc::clone(&options.progress);
        self.progress.begin_receiving();
        ingest.resume();
        let _stop = StopIngestOnDrop { ingest: ingest.clone(), progress: Arc::clone(&unpack_progress) };
        let download = ingest.clone();
        let download = Some(LayerDownload::new(move || download.wait_until_complete()));
        let reserve = options.reserve.clone();
        let unpacking = unpack_span(&self.planned).in_scope(|| {
            self.start_unpacking(LayerBytes::Ingest(ingest.clone()), UnpackOptions { download, ..options })
        });
        let sink = IngestSink { ingest: ingest.clone(), reserve, _worker: self.worker.clone() };
        let fetching = self.fetch_missing(session, Arc::new(sink));
        tokio::pin!(unpacking, fetching);
        let fetched = tokio::select! {
            // The unpacking ends first only when it fails, or when all the bytes were here already.
            unpacked = &mut unpacking => return unpacked,
            fetched = &mut fetching => fetched,
        };
        match fetched {
            Ok(()) => {
                self.progress.begin_unpacking(unpack_progress);
                unpacking.await
            }
            Err(error) => {
                ingest.stop(GIVEN_UP, "the fetch failed");
                let _ = unpacking.await; // it ends at once and removes its directory
                Err(error.into())
            }
        }
    }

    /// Fetches what is missing of the blob. The fetch of a layer that is in use already gives way to reads that wait
    /// for data: its connections close, since what is under way there would come first.
    async fn fetch_missing(
        &self,
        session: &RepositorySession,
        sink: Arc<IngestSink>,
    ) -> Result<(), BlobError> {
        let demand = self.puller.store.0.partials.demand();
        loop {
            if self.into.is_some() {
                self.progress.set_queued(true, Instant::now());
                demand.quiet().await;
                self.progress.set_queued(false, Instant::now());
            }
            let present: ByteRanges = sink.ingest.present().into_iter().collect();
            let fetch = fetch_blob(session, &self.planned.descriptor, &present, Arc::clone(&sink) as _);
            tokio::select! {
                fetched = fetch => return fetched,
                () = demand.wanted(), if self.into.is_some() => {}
            }
        }
    }

    /// Unpacks a layer into a new staging directory, which belongs to the unpacking thread: it is removed only after
    /// the last file was written, even if the pull was dropped. The thread has started when this returns.
    fn start_unpacking(
        &self,
        bytes: LayerBytes,
        options: UnpackOptions,
    ) -> impl Future<Output = Result<StagedLayer, PullError>> + use<> {
        let (store, planned) = (self.puller.store.clone(), self.planned.clone());
        let blob = self.origin.blob(&planned);
        let unpacking = move || unpack_into_staging(&store, bytes, blob, &planned, options);
        let unpacking = self.worker.blocking(unpacking);
        async { unpacking.await? }
    }

    /// The options of an attempt to unpack the layer, which the progress of the pull follows.
    pub(super) fn options(&self) -> UnpackOptions {
        let options = self.puller.options(self.planned.descriptor.size, &self.worker);
        let into = self.into.as_ref().map(|into| Arc::clone(&into.layer));
        let reserve = self.into.as_ref().map_or(&self.puller.reserve, |into| &into.reserve);
        let options = UnpackOptions { into, reserve: Some(reserve.clone()), ..options };
        self.origin.progress().set_unpacking(&self.planned.descriptor.digest, Arc::clone(&options.progress));
        options
    }

    fn observer(&self) -> FetchObserver {
        let (fetch_progress, pull_progress) =
            (Arc::clone(&self.progress), Arc::clone(self.origin.progress()));
        let (span, digest) = (FetchSpanFields::of_current_span(), self.planned.descriptor.digest.clone());
        let into = self.into.as_ref().map(|into| Arc::clone(&into.observer));
        Arc::new(move |notice| {
            span.note(&notice);
            if let Some(observer) = &into {
                observer(notice.clone());
            }
            if let FetchNotice::Bytes(count) = notice {
                fetch_progress.add_received(count, Instant::now());
            }
            pull_progress.notice_of(&digest, &notice);
        })
    }
}

fn unpack_into_staging(
    store: &Store,
    bytes: LayerBytes,
    blob: BlobSource,
    planned: &PlannedLayer,
    options: UnpackOptions,
) -> Result<StagedLayer, PullError> {
    let staging = store.begin_layer()?;
    // The record from which the archive can be rebuilt becomes a part of the layer's file.
    let options = UnpackOptions { archive_record: Some(staging.dir().join(ARCHIVE_RECORD)), ..options };
    let (digest, expected) = (&planned.descriptor.digest, planned.expected());
    let (blob_bytes, path) = (bytes.open(digest)?, staging.dir().join(LAYER_FILE));
    let blob_bytes = match &options.into {
        Some(layer) => layer.verified(blob_bytes),
        None => blob_bytes,
    };
    let unpacked = match (&planned.files[..], &bytes) {
        ([], _) => unpack_layer(blob_bytes, &expected, &path, &options),
        (files, LayerBytes::Ingest(ingest)) if options.into.is_none() => {
            unpack_file(blob_bytes, &expected, files, &FilePlace::Around(&ingest.path()), &options)
        }
        (files, _) => unpack_file(blob_bytes, &expected, files, &FilePlace::New(&path), &options),
    };
    let (unpacked, file) = unpacked.map_err(|cause| PullError::Unpack { digest: digest.clone(), cause })?;
    Ok(StagedLayer { staging, unpacked, file, bytes, blob, partial: None, table: None })
}

/// Receives the notices of a layer's fetch.
pub(super) type FetchObserver = Arc<dyn Fn(FetchNotice) + Send + Sync>;

/// Records which hosts serve content, and forwards the notices of the fetch.
fn noting_hosts(
    hosts: Arc<Mutex<Vec<String>>>,
    observer: FetchObserver,
) -> impl Fn(FetchNotice) + Send + Sync + 'static {
    move |notice| {
        if let FetchNotice::Host(host) = &notice {
            hosts.lock().push(host.clone());
        }
        observer(notice);
    }
}

/// The session without these hosts, unless no host would be left.
fn session_without(session: &RepositorySession, hosts: &[String]) -> RepositorySession {
    let others = session.without_hosts(hosts);
    if others.hosts().is_empty() { session.clone() } else { others }
}

/// Cancels the unpacking when the pull is dropped.
pub(super) struct CancelUnpackOnDrop(pub(super) Arc<UnpackProgress>);

impl Drop for CancelUnpackOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
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
    _worker: PullWorker,
}

impl BlobSink for IngestSink {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if let Some(reserve) = &self.reserve {
            reserve.admit(DiskSpace { bytes: data.len() as u64, inodes: 0 })?;
        }
        self.ingest.write_at(data, offset).map_err(io::Error::other)
    }
}
