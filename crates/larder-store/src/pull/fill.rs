//! Fills a layer whose containers may run already: what reads wait for first, and its whole blob in the background.
//!
//! ```text
//! table of contents -> skeleton -> placed, guarded -> commit of the image -> LayerFill
//!                                        demand: ranges of the blob -> chunks, each verified -> the layer
//!                                        background: the blob, in order -> unpacked into the layer -> complete
//! ```

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder::backend::ProgressReporter;
use larder_registry::manifest::Descriptor;
use larder_registry::{FetchNotice, RepositorySession};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{self, Instant};

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{
    FetchObserver, FetchTarget, FetchedContent, LayerBytes, LayerFetch, LayerOrigin, StagedLayer,
};
use super::fill_sessions::{FillSessions, OfferedBlob};
use super::lowers::open_lowers;
use super::plan::PlannedLayer;
use super::pull_progress::PullProgress;
use super::pull_workers::{PullWorkers, blocking};
use super::read_ahead::{ReadAhead, batches, blob_range};
use super::soci_index::SociIndex;
use crate::disk::SpaceReserve;
use crate::erofs::ErofsFile;
use crate::lazy::FetchPurpose;
use crate::lazy::fill_activity::FillActivity;
use crate::lazy::partial_layer::PartialLayer;
use crate::lazy::skeleton::{MissingData, write_skeleton};
use crate::lazy::start_reads::START;
use crate::lazy::toc::{ChunkReader, TABLE_REQUESTS, TableOfContents, TocFormat, TocStep};
use crate::store::error::StoreErrorContext as _;
use crate::store::fetch_progress::FetchProgress;
use crate::store::{
    BlobSource, IngestFile, LAYER_FILE, LayerHandle, LayerKey, PartialSource, StoreError, TransferLogin,
};
use crate::unpack::{FinishedLayer, UnfilledLayer, UnpackProgress, UnpackedLayer};

/// Ranges that are fetched at once for reads that wait.
const RANGES_AT_ONCE: usize = 8;
/// Times between two attempts to fetch the whole blob: the first, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The action that fails when the disk has lost data of a layer, for its error.
const SYNC: &str = "sync a layer to disk";

/// A layer that is being filled.
pub(super) struct LayerFill {
    puller: StorePuller,
    sessions: Arc<FillSessions>,
    planned: PlannedLayer,
    /// The blob that is the table of contents, if there is one.
    table: Option<IngestFile>,
    ingest: IngestFile,
    key: LayerKey,
    layer: Arc<PartialLayer>,
    /// Whether the last attempt has unpacked all of a blob.
    is_unpacked: AtomicBool,
    activity: Arc<FillActivity>,
}

impl LayerFetch {
    /// Fetches the table of contents of the layer, and makes the layer without data. `None` if it must be pulled in
    /// full.
    pub(super) async fn fetch_skeleton(
        &self,
        session: &RepositorySession,
        soci: &SociIndex,
    ) -> Result<Option<StagedLayer>, PullError> {
        let is_archive = self.planned.files.is_empty();
        if self.into.is_some() || !is_archive || !self.puller.is_lazy(&self.planned) {
            return Ok(None);
        }
        let layer = match TocFormat::of(&self.planned.descriptor) {
            Some(_) => self.planned.descriptor.clone(),
            None => soci.annotated(session, &self.planned.descriptor).await,
        };
        let Some(format) = TocFormat::of(&layer) else { return Ok(None) };
        let (store, blob) = (self.puller.store.clone(), self.origin.blob(&self.planned));
        let table_blob = blob.table(&format);
        let keys = [LayerKey::from(&self.planned.diff_id), LayerKey::from(&self.planned.chain_id)];
        // A layer that has it proves nothing for this source. Or its table of contents has lied.
        let ingest = move || {
            if store.has_layer(&keys)? {
                return Ok(None);
            }
            let table = table_blob.map(|table| store.ingest(&table)).transpose()?;
            Ok::<_, StoreError>(Some((store.ingest(&blob)?, table)))
        };
        let Some((ingest, table_ingest)) = self.worker.blocking(ingest).await?? else { return Ok(None) };
        let source = TableSource::Registry;
        let (image, descriptor) = (session.image().clone(), self.planned.descriptor.clone());
        let sessions = FillSessions::new(&self.puller, image, descriptor, Some(session.clone()));
        let table = TableFetch {
            puller: &self.puller,
            sessions: &sessions,
            blob: format.blob().unwrap_or(&layer),
            ingest: table_ingest.as_ref().unwrap_or(&ingest),
            source,
        };
        let in_full = |reason: String| {
            let (image, digest) = (session.image(), &self.planned.descriptor.digest);
            tracing::info!(%image, %digest, reason, "pulling a layer in full");
            Ok(None)
        };
        let table = match table.read(&format).await {
            Ok(table) => table,
            Err(reason) => return in_full(reason),
        };
        let (store, planned, blob) =
            (self.puller.store.clone(), self.planned.clone(), self.origin.blob(&self.planned));
        let options = self.options();
        let staged = move || -> Result<Result<StagedLayer, String>, PullError> {
            let staging = store.begin_layer()?;
            let path = staging.dir().join(LAYER_FILE);
            let spans = Arc::clone(&table.spans);
            let (unpacked, file, chunks) = match write_skeleton(&table, &planned.expected(), &path, &options)
            {
                Ok(written) if written.0.lower_work.cross_layer_links == 0 => written,
                Ok(_) => return Ok(Err("it has hard links to files of other layers".into())),
                Err(error) => return Ok(Err(larder::error_chain(&error))),
            };
            let source = PartialSource {
                blob: blob.clone(),
                annotations: layer.annotations,
                chain_id: planned.chain_id,
            };
            let partial = Some((source, MissingData { chunks, spans }));
            let (bytes, table) = (LayerBytes::Ingest(ingest), table_ingest);
            Ok(Ok(StagedLayer { staging, unpacked, file, bytes, blob, partial, table }))
        };
        match self.worker.blocking(staged).await?? {
            Ok(staged) => Ok(Some(staged)),
            Err(reason) => in_full(reason),
        }
    }
}

/// Reads the table of contents of a layer.
pub(super) struct TableFetch<'a> {
    pub(super) puller: &'a StorePuller,
    pub(super) sessions: &'a FillSessions,
    /// The blob that has the table: that of the layer, or one beside it.
    pub(super) blob: &'a Descriptor,
    pub(super) ingest: &'a IngestFile,
    pub(super) source: TableSource,
}

/// Where a table of contents may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableSource {
    /// Bytes of the blob that came before.
    Ingest,
    /// The registry as well.
    Registry,
}

impl TableFetch<'_> {
    /// Reads the table, or says why that is not possible. What was fetched of the blob is kept in its ingest: the next
    /// process reads the table there.
    pub(super) async fn read(&self, format: &TocFormat) -> Result<TableOfContents, String> {
        let size = self.blob.size;
        let mut range = format.first_range(size).map_err(in_words)?;
        for _ in 0..TABLE_REQUESTS {
            let bytes = self.bytes(range.clone()).await?;
            let (format, limits, at) = (format.clone(), self.puller.config.limits.clone(), range);
            let read = blocking(move || format.read(at, &bytes, size, &limits)).await;
            match read.map_err(in_words)?.map_err(in_words)? {
                TocStep::Read(table) => return Ok(table),
                TocStep::Needs(needed) => range = needed,
            }
        }
        Err("its table of contents is not where it should be".into())
    }

    async fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>, String> {
        let (ingest, wanted) = (self.ingest.clone(), range.clone());
        let present = blocking(move || ingest.read_range(&wanted)).await.map_err(in_words)?;
        if let Some(bytes) = present.map_err(in_words)? {
            return Ok(bytes);
        }
        if self.source == TableSource::Ingest {
            return Err("its table of contents must be fetched again".into());
        }
        let bytes = self.sessions.fetch_range(self.blob, range.clone()).await;
        let (ingest, bytes) = (self.ingest.clone(), bytes.map_err(in_words)?);
        let write = move || {
            ingest.write_at(&bytes, range.start)?;
            ingest.note().map(|()| bytes)
        };
        blocking(write).await.map_err(in_words)?.map_err(in_words)
    }
}

fn in_words(error: impl std::error::Error) -> String {
    larder::error_chain(&error)
}

/// The blob of a layer that is in its place.
pub(super) struct LayerBlob<'a> {
    pub(super) session: &'a RepositorySession,
    pub(super) planned: &'a PlannedLayer,
    pub(super) ingest: &'a IngestFile,
    /// Layers below it, lowest first.
    pub(super) lowers: &'a [LayerKey],
    /// Admits what is written.
    pub(super) reserve: &'a SpaceReserve,
    /// Receives the notices of the fetch.
    pub(super) observer: FetchObserver,
}

/// A layer that is in its place, and what it is filled from.
pub(super) struct PlacedPartial {
    pub(super) key: LayerKey,
    pub(super) file: File,
    pub(super) erofs: ErofsFile,
    pub(super) missing: MissingData,
    pub(super) planned: PlannedLayer,
    /// The blob that is the table of contents, if there is one.
    pub(super) table: Option<IngestFile>,
    pub(super) ingest: IngestFile,
    /// Whether an earlier process has begun.
    pub(super) is_resumed: bool,
}

impl StorePuller {
    /// Whether a layer is pulled lazily, if it has a table of contents or is what is kept of a removed layer.
    pub(super) fn is_lazy(&self, planned: &PlannedLayer) -> bool {
        self.store.0.partials.reads().is_some()
            && self.lazy_minimum.is_some_and(|minimum| planned.descriptor.size >= minimum)
    }

    /// Guards the reads of a layer, and prepares its fill: it begins once an image has the layer. The file must have
    /// been opened without a guard. Within the runtime; blocks.
    pub(super) fn prepare_fill(
        &self,
        sessions: Arc<FillSessions>,
        placed: PlacedPartial,
    ) -> Result<(), PullError> {
        let PlacedPartial { key, file, erofs, missing, planned, table, ingest, is_resumed } = placed;
        let MissingData { chunks, spans } = missing;
        let (demand, demanded) = mpsc::unbounded_channel();
        let reads = Arc::clone(self.store.0.partials.demand());
        let filesystem_bytes = erofs.bytes - erofs.implied_bytes;
        let layer = PartialLayer::new(file, filesystem_bytes, chunks, demand, reads)
            .with_spans(spans)
            .with_inline_tails(erofs.has_inline_tails);
        let layer = Arc::new(if is_resumed { layer.started() } else { layer });
        self.layer_sessions.add(key.clone(), &sessions);
        let fill = LayerFill {
            puller: self.clone(),
            sessions,
            planned,
            table,
            ingest,
            is_unpacked: AtomicBool::new(false),
            activity: self.store.0.partials.activity(&key),
            key: key.clone(),
            layer: Arc::clone(&layer),
        };
        let runtime = Handle::current();
        let start = Box::new(move || drop(runtime.spawn(fill.run(demanded))));
        self.store.0.partials.begin(key, layer, start).context("guard the reads of a layer")?;
        Ok(())
    }
}

impl StorePuller {
    /// Guards the reads of a layer that was just placed, and prepares its fill by this session. Within the runtime;
    /// blocks.
    pub(super) fn begin_fill(
        &self,
        session: &RepositorySession,
        layer: &LayerHandle,
        missing: MissingData,
        planned: PlannedLayer,
        ingest: IngestFile,
        table: Option<IngestFile>,
    ) -> Result<(), PullError> {
        // Before it is guarded: an open file asks for the data that it reads and writes, or never does.
        let file = fs_err::OpenOptions::new().read(true).write(true).open(layer.path());
        let file = file.context("open an incomplete layer")?.into_parts().0;
        let (image, blob) = (session.image().clone(), planned.descriptor.clone());
        let sessions = FillSessions::new(self, image, blob, Some(session.clone()));
        let (key, erofs) = (layer.key().clone(), layer.record().erofs.clone());
        let placed = PlacedPartial { key, file, erofs, missing, planned, table, ingest, is_resumed: false };
        self.prepare_fill(Arc::new(sessions), placed)
    }

    /// Fetches the blob of a layer, and unpacks it into the layer.
    pub(super) async fn unpack_into(
        &self,
        blob: LayerBlob<'_>,
        into: Arc<dyn UnfilledLayer>,
        workers: &PullWorkers,
    ) -> Result<(UnpackedLayer, FinishedLayer), PullError> {
        let progress = PullProgress::begin(&ProgressReporter::unwatched());
        let (session, planned, login) =
            (blob.session.clone(), blob.planned.clone(), TransferLogin::default());
        let origin = LayerOrigin::Registry { session, progress, login, soci: Arc::default() };
        let callers = origin.progress().callers().clone();
        let fetch = LayerFetch {
            puller: self.clone(),
            origin,
            planned: planned.clone(),
            progress: Arc::new(FetchProgress::new(self.config.minimum_rate, &callers, Instant::now())),
            worker: workers.worker(),
            into: Some(FetchTarget {
                layer: into,
                ingest: blob.ingest.clone(),
                reserve: blob.reserve.clone(),
                observer: blob.observer,
            }),
        };
        // A layer that takes its data is filled, and not repaired.
        let FetchedContent::Staged(staged) = fetch.run().await? else { return Err(PullError::Abandoned) };
        let StagedLayer { unpacked, file, staging, .. } = *staged;
        // They are not held before: what holds a layer keeps its space.
        let (store, lowers) = (self.store.clone(), blob.lowers.to_vec());
        let found = move || lowers.iter().map(|key| store.layer(key)).collect::<Result<Option<Vec<_>>, _>>();
        let lowers = blocking(found).await??.ok_or(PullError::Abandoned)?;
        let _permit = self.permit_lowers(&lowers).await?;
        let finish = move || -> Result<_, PullError> {
            let failed = |cause| PullError::Unpack { digest: planned.descriptor.digest.clone(), cause };
            let lowers = open_lowers(&lowers, lowers.len()).map_err(failed)?;
            let file = file.finish(&lowers, &Arc::<UnpackProgress>::default()).map_err(failed)?;
            drop(staging);
            Ok((unpacked, file))
        };
        workers.worker().blocking(finish).await?
    }
}

impl LayerFill {
    /// Fills the layer until it is complete, or is no longer wanted.
    async fn run(self, demanded: mpsc::UnboundedReceiver<usize>) {
        tokio::select! {
            () = self.complete() => {}
            () = self.serve(demanded) => {}
            () = self.given_up() => {}
            () = self.record_start() => {}
        }
    }

    /// Records what containers read when they start.
    async fn record_start(&self) {
        while !self.layer.has_started(Instant::now()) {
            time::sleep(START).await;
        }
        self.add_start_reads().await;
        std::future::pending::<()>().await;
    }

    async fn add_start_reads(&self) {
        let (store, image) = (self.puller.store.clone(), self.sessions.image().clone());
        let read = self.layer.take_start_reads();
        if read.is_empty() {
            return;
        }
        let added = blocking(move || store.add_start_reads(image.name(), &read)).await;
        if let Ok(Err(error)) = added {
            tracing::debug!(%error, "the next start of an image reads as slowly as this one");
        }
    }

    /// Reads of an earlier start from the same repository, as far as this layer has their data; without one, what the
    /// layer's landmark says.
    async fn earlier_start(&self) -> ReadAhead {
        let (store, image) = (self.puller.store.clone(), self.sessions.image().clone());
        let layer = Arc::clone(&self.layer);
        let found = blocking(move || {
            let read = store.start_reads(image.name()).unwrap_or_default();
            if read.is_empty() { ReadAhead::of_landmark(&layer) } else { ReadAhead::of_start(&layer, &read) }
        });
        found.await.unwrap_or_default()
    }

    /// Ends when the layer was removed.
    async fn given_up(&self) {
        if self.layer.ended().await {
            std::future::pending::<()>().await;
        }
        self.add_start_reads().await;
    }

    async fn complete(&self) {
        let mut wait = RETRY.0;
        let began = Instant::now();
        loop {
            let error = match self.attempt(self.sessions.take_blob()).await {
                Ok(()) => {
                    let seconds = began.elapsed().as_secs_f64();
                    let image = self.sessions.image();
                    return tracing::info!(layer = %self.key, %image, seconds, "completed a layer");
                }
                Err(PullError::Abandoned) if self.sessions.has_blob() => continue,
                Err(error) => error,
            };
            if self.layer.has_ended() {
                return;
            }
            let is_final = matches!(&error, PullError::Unpack { cause, .. } if cause.is_final());
            let error = larder::error_chain(&error);
            if is_final {
                return self.fail(&error).await;
            }
            self.warn("cannot complete an image yet", &error);
            self.activity.note_failure(error, Instant::now() + wait);
            tokio::select! {
                () = time::sleep(wait) => wait = RETRY.1.min(wait * 2),
                () = self.sessions.offered() => wait = RETRY.0,
            }
        }
    }

    /// Logs a failure, once in a while for all layers of the image.
    fn warn(&self, failed: &str, error: &str) {
        let (image, layer) = (self.sessions.image(), &self.key);
        if self.puller.store.0.partials.is_warning_due(&image.to_string(), Instant::now()) {
            tracing::warn!(%image, %layer, error, "{failed}");
        } else {
            tracing::debug!(%image, %layer, error, "{failed}");
        }
    }

    /// The blob is that of the manifest, and not the layer that was made of its table of contents.
    async fn fail(&self, error: &str) {
        let image = self.sessions.image();
        tracing::error!(layer = %self.key, %image, error, "a layer is damaged; the next pull replaces it");
        let (store, key) = (self.puller.store.clone(), self.key.clone());
        if let Ok(Err(error)) = blocking(move || store.fail_layer(&key)).await {
            tracing::error!(layer = %self.key, %image, %error, "cannot record a damaged layer");
        }
    }

    /// Fetches the blob, unless a pull has offered it, and unpacks it into the layer.
    async fn attempt(&self, offered: Option<OfferedBlob>) -> Result<(), PullError> {
        let workers = PullWorkers::new(self.puller.syncer.begin(), &self.puller.fills);
        let LayerFill { planned, ingest, .. } = self;
        let fetch = |session| self.attempt_with(session, planned, ingest, None, &workers);
        let done = if let Some(OfferedBlob { session, planned, ingest, source, .. }) = &offered {
            Box::pin(self.attempt_with(session.clone(), planned, ingest, Some(source), &workers)).await
        } else {
            self.is_unpacked.store(false, Ordering::Release);
            tokio::select! {
                done = Box::pin(self.sessions.request(fetch)) => done,
                () = self.offered_in_time() => Err(PullError::Abandoned),
            }
        };
        let (write_behind, layer) = (workers.worker().write_behind().clone(), Arc::clone(&self.layer));
        // The disk reports an error once: the next attempt would not learn of it.
        let lost = blocking(move || write_behind.finish().inspect_err(|_| layer.forget_filled()));
        let lost = lost.await.map(|finished| finished.context(SYNC));
        workers.end().await;
        done.and_then(|()| Ok(lost??))
    }

    /// Waits until a pull offers a blob while the layer can be filled from it: nothing else may come into the layer at
    /// its end.
    async fn offered_in_time(&self) {
        self.sessions.blob_offered().await;
        if self.is_unpacked.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
    }

    /// Unpacks a blob into the layer. `source` has all of it; unset, it is the layer's own.
    async fn attempt_with(
        &self,
        session: RepositorySession,
        planned: &PlannedLayer,
        ingest: &IngestFile,
        source: Option<&BlobSource>,
        workers: &PullWorkers,
    ) -> Result<(), PullError> {
        let (store, key) = (self.puller.store.clone(), self.key.clone());
        let lowers = blocking(move || store.layers_below(&key)).await??;
        let (lowers, observer) = (&lowers, self.observer());
        let reserve = &self.puller.fill_reserve;
        let blob = LayerBlob { session: &session, planned, ingest, lowers, reserve, observer };
        let into = Arc::clone(&self.layer) as Arc<dyn UnfilledLayer>;
        let (unpacked, file) = self.puller.unpack_into(blob, into, workers).await?;
        self.is_unpacked.store(true, Ordering::Release);
        let facts = planned.metadata(&unpacked);
        let (key, store, layer) = (self.key.clone(), self.puller.store.clone(), Arc::clone(&self.layer));
        let (index, puller) = (planned.index(unpacked, &file), self.puller.clone());
        self.add_start_reads().await;
        let (write_behind, source) = (workers.worker().write_behind().clone(), source.cloned());
        let complete = move || {
            // Until the layer is complete, its index is that of its own blob.
            if source.is_none() {
                puller.keep_index(&key, &index);
            }
            let synced = write_behind.finish().context(SYNC);
            let completed =
                synced.and_then(|()| store.complete_layer(&key, &layer, &facts, &file.file, source));
            // What was written may be lost, though memory still has it.
            completed.inspect_err(|_| layer.forget_filled())
        };
        workers.worker().blocking(complete).await??;
        let (ingest, table) = (self.ingest.clone(), self.table.clone());
        let discard = move || {
            ingest.discard()?;
            table.map_or(Ok(()), |table| table.discard())
        };
        workers.worker().blocking(discard).await??;
        Ok(())
    }

    /// Counts what the fetch of the blob does.
    fn observer(&self) -> FetchObserver {
        let (activity, demand) =
            (Arc::clone(&self.activity), Arc::clone(self.puller.store.0.partials.demand()));
        Arc::new(move |notice| {
            match &notice {
                FetchNotice::Host(_) => demand.note_request(FetchPurpose::Fill),
                FetchNotice::Bytes(bytes) => demand.note_bytes(FetchPurpose::Fill, *bytes),
                _ => {}
            }
            activity.note(&notice);
        })
    }

    /// Fetches the chunks that reads wait for, and then those that are likely read next.
    async fn serve(&self, mut demanded: mpsc::UnboundedReceiver<usize>) {
        let (mut ahead, mut fetches) = (self.earlier_start().await, FuturesUnordered::new());
        // Those that wait for their next attempt take no place of others.
        let mut retries = FuturesUnordered::new();
        let (mut for_reads, mut for_later) = (0, 0);
        loop {
            while for_later < ahead.at_once()
                && let Some(chunks) = ahead.next(&self.layer)
            {
                for_later += 1;
                fetches.push(self.fetch(chunks, FetchPurpose::ReadAhead));
            }
            tokio::select! {
                Some((why, retry)) = fetches.next() => {
                    match why {
                        FetchPurpose::Read => for_reads -= 1,
                        FetchPurpose::ReadAhead | FetchPurpose::Fill => for_later -= 1,
                    }
                    if let Some((chunks, wait)) = retry {
                        retries.push(async move { time::sleep(wait).await; chunks });
                    }
                }
                Some(chunks) = retries.next() => chunks.for_each(|chunk| self.layer.retry(chunk)),
                first = demanded.recv(), if for_reads < RANGES_AT_ONCE => {
                    let Some(first) = first else { return };
                    let mut wanted = BTreeSet::from([first]);
                    while let Ok(next) = demanded.try_recv() {
                        wanted.insert(next);
                    }
                    for chunks in batches(&self.layer, &wanted) {
                        for_reads += 1;
                        ahead.note_read(&self.layer, chunks.end);
                        fetches.push(self.fetch(chunks, FetchPurpose::Read));
                    }
                }
            }
        }
    }

    /// Fetches successive chunks. Returns those that did not come, and the time until they are to be requested again.
    async fn fetch(
        &self,
        chunks: Range<usize>,
        why: FetchPurpose,
    ) -> (FetchPurpose, Option<(Range<usize>, Duration)>) {
        // What is fetched ahead saves reads from waiting, so the background gives way to it too.
        let _demanded = self.puller.store.0.partials.demand().begin();
        let began = Instant::now();
        let fetched = self.try_fetch(chunks.clone(), why).await;
        tracing::debug!(layer = %self.key, ?chunks, ?why, elapsed = ?began.elapsed(), "fetched");
        let Err(reason) = fetched else { return (why, None) };
        self.warn("cannot fetch what a container reads", &reason);
        let wait = self.layer.note_failure(chunks.clone());
        self.activity.note_failure(reason, Instant::now() + wait);
        (why, Some((chunks, wait)))
    }

    async fn try_fetch(&self, chunks: Range<usize>, why: FetchPurpose) -> Result<(), String> {
        let (layer, wanted) = (Arc::clone(&self.layer), chunks.clone());
        let found = blocking(move || layer.find_filled(wanted)).await.map_err(in_words)?;
        let chunks = chunks.start + found.map_err(|error| error.to_string())?..chunks.end;
        let Some(range) = blob_range(&self.layer, chunks.clone()) else { return Ok(()) };
        // Bytes that came for the background before are not verified: others may be right.
        let (ingest, wanted) = (self.ingest.clone(), range.clone());
        let present = blocking(move || ingest.read_range(&wanted)).await.map_err(in_words)?;
        if let Ok(Some(bytes)) = present
            && self.write_chunks(chunks.clone(), range.start, Arc::new(bytes)).await.is_ok()
        {
            return Ok(());
        }
        let demand = self.puller.store.0.partials.demand();
        demand.note_request(why);
        let bytes = self.sessions.fetch_range(&self.planned.descriptor, range.clone()).await;
        let bytes = Arc::new(bytes.map_err(in_words)?);
        demand.note_bytes(why, bytes.len() as u64);
        self.activity.note_data();
        self.write_chunks(chunks, range.start, Arc::clone(&bytes)).await?;
        let ingest = self.ingest.clone();
        // The background does not fetch them again, if it has not ended.
        let kept = blocking(move || ingest.write_at(&bytes, range.start)).await.map_err(in_words)?;
        if let Err(error) = kept {
            tracing::debug!(%error, "bytes of a layer are fetched twice");
        }
        Ok(())
    }

    /// Decompresses successive chunks from bytes of the blob, and writes them.
    async fn write_chunks(
        &self,
        chunks: Range<usize>,
        start: u64,
        bytes: Arc<Vec<u8>>,
    ) -> Result<(), String> {
        let layer = Arc::clone(&self.layer);
        let write = move || -> Result<(), String> {
            let mut reader = ChunkReader::default();
            for number in chunks {
                let chunk = &layer.chunk(number).chunk;
                let Some(blob) = chunk.content.blob() else { continue };
                let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
                let plain = reader.read(chunk, &bytes[at(blob.start)..at(blob.end)]).map_err(in_words)?;
                layer.write_chunk(number, &plain).map_err(in_words)?;
            }
            Ok(())
        };
        blocking(write).await.map_err(in_words)?
    }
}
