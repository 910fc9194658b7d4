//! Goes on to fill the layers of an earlier process, whose containers may be running.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use larder::reference::Reference;
use larder_registry::manifest::ArtifactFile;
use tokio::time::Instant;

use super::StorePuller;
use super::error::PullError;
use super::fill::{PlacedPartial, TableFetch, TableSource};
use super::fill_sessions::FillSessions;
use super::plan::PlannedLayer;
use super::pull_workers::blocking;
use crate::lazy::group::open_without_events;
use crate::lazy::missing_pieces::missing_pieces;
use crate::lazy::skeleton::{MissingData, write_skeleton};
use crate::lazy::toc::TocFormat;
use crate::lazy::{GroupKeeper, GroupState};
use crate::store::db::{DbRead as _, SNAPSHOTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::snapshot_records::ancestors;
use crate::store::{
    ImageRecord, LAYER_FILE, LayerHandle, LayerKey, LayerRecord, PartialSource, SnapshotRecord, Store,
    StoreError,
};
use crate::unpack::{LayerReader, UnpackOptions, blob_files};

/// Time between two attempts to read the table of contents of a layer of an earlier process.
const RETRY: Duration = Duration::from_secs(5);
/// The action that fails when the file of a layer cannot be opened, for its error.
const OPEN: &str = "open an incomplete layer";

/// What an earlier process left of reads that it guarded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuardedBefore {
    /// Layers that go on to be filled.
    pub layers: usize,
    /// Images of which running containers may have read zeros: nothing held the guard of their reads for a while. What
    /// is mounted from now on has the right bytes.
    pub lost: Vec<ImageRecord>,
}

impl StorePuller {
    /// Guards the reads of incomplete layers from now on, and goes on to fill those of an earlier process. Until this
    /// returns, these cannot be mounted. `keeper` keeps the guard when this process ends; a read waits for
    /// `longest_wait`, then it fails.
    pub async fn guard_reads(
        &self,
        keeper: Arc<dyn GroupKeeper>,
        longest_wait: Duration,
    ) -> Result<GuardedBefore, PullError> {
        let store = self.store.clone();
        let opened = move || store.open_guard(keeper, longest_wait).map(|state| (state, store));
        let (state, store) = blocking(opened).await??;
        let before = self.guard_again(state, longest_wait).await;
        // Also if that has failed: a read that waits must end. What is not guarded again fails.
        store.begin_guard();
        before
    }

    /// Guards what an earlier process has guarded.
    async fn guard_again(
        &self,
        state: GroupState,
        longest_wait: Duration,
    ) -> Result<GuardedBefore, PullError> {
        let store = self.store.clone();
        let partial = blocking(move || store.partial_layers()).await??;
        let mut before = GuardedBefore { layers: partial.len(), lost: Vec::new() };
        if state == GroupState::Lost {
            let (store, partial) = (self.store.clone(), partial.clone());
            before.lost = blocking(move || store.drop_unguarded_mounts(&partial)).await??;
        }
        for record in partial {
            let Some(source) = &record.partial else { continue };
            let name = match Reference::parse(source.blob.repository()) {
                Ok(name) => name,
                Err(error) => {
                    let (store, key) = (self.store.clone(), record.key.clone());
                    let images =
                        blocking(move || store.0.names_of_images_with(&key)).await?.unwrap_or_default();
                    tracing::error!(layer = %record.key, ?images, %error, "cannot go on to fill a layer: remove its image");
                    continue;
                }
            };
            let sessions = Arc::new(FillSessions::new(self, name, source.descriptor(), None));
            // A pull may offer its credential from now on.
            self.layer_sessions.add(record.key.clone(), &sessions);
            // A registry that does not answer must not keep larder from serving.
            if let Err(error) = self.resume_fill(record.clone(), TableSource::Ingest, &sessions).await {
                let (key, error) = (&record.key, larder::error_chain(&error));
                if self.store.0.partials.is_warning_due(source.blob.repository(), Instant::now()) {
                    tracing::warn!(image = source.blob.repository(), layer = %key, error, "cannot go on to fill layers yet");
                }
                tokio::spawn(self.clone().resume_later(record, sessions));
            }
        }
        if self.config.verify_reads {
            self.verify_reads(longest_wait).await?;
        }
        Ok(before)
    }

    async fn resume_later(self, record: LayerRecord, sessions: Arc<FillSessions>) {
        loop {
            let is_same = |found: LayerHandle| found.record().partial == record.partial;
            let (store, key) = (self.store.clone(), record.key.clone());
            match blocking(move || store.layer(&key)).await {
                Ok(Ok(Some(found))) if is_same(found.clone()) => {}
                _ => return,
            }
            match self.resume_fill(record.clone(), TableSource::Registry, &sessions).await {
                Ok(()) => return,
                Err(error) => {
                    let activity = self.store.0.partials.activity(&record.key);
                    activity.note_failure(larder::error_chain(&error), Instant::now() + RETRY);
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Guards a layer again, and starts to fill it.
    async fn resume_fill(
        &self,
        record: LayerRecord,
        source: TableSource,
        sessions: &Arc<FillSessions>,
    ) -> Result<(), PullError> {
        let Some(partial) = record.partial.clone() else { return Ok(()) };
        let descriptor = partial.descriptor();
        let PartialSource { blob, chain_id, .. } = partial;
        let format = TocFormat::of(&descriptor);
        let diff_id = record.facts.diff_id.clone();
        let (store, key, format_of_table) = (self.store.clone(), record.key.clone(), format.clone());
        let ingests = move || {
            // A layer with a table of contents is made of an archive, whose record comes with the data.
            let files = if format_of_table.is_none() { store.blob_files_of(&key)? } else { Vec::new() };
            let table = format_of_table.and_then(|format| blob.table(&format));
            let table = table.map(|table| store.ingest(&table)).transpose()?;
            Ok::<_, StoreError>((store.ingest(&blob)?, table, files))
        };
        let (ingest, table_ingest, files) = blocking(ingests).await??;
        let planned = PlannedLayer { descriptor, diff_id, chain_id, files };
        let missing = match &format {
            Some(format) => {
                let table = TableFetch {
                    puller: self,
                    sessions,
                    blob: format.blob().unwrap_or(&planned.descriptor),
                    ingest: table_ingest.as_ref().unwrap_or(&ingest),
                    source,
                };
                self.missing_by_table(table, format, &planned).await?
            }
            None => self.missing_by_index(&record).await?,
        };
        let (puller, sessions) = (self.clone(), Arc::clone(sessions));
        let resume = move || -> Result<(), PullError> {
            let store = &puller.store;
            let file = open_without_events(&store.layer_path(&record.key)).context(OPEN)?;
            let (key, erofs, table) = (record.key.clone(), record.erofs, table_ingest);
            let placed = PlacedPartial {
                key,
                file: file.into(),
                erofs,
                missing,
                planned,
                table,
                ingest,
                is_resumed: true,
            };
            puller.prepare_fill(sessions, placed)?;
            store.0.partials.resume(&record.key);
            Ok(())
        };
        blocking(resume).await?
    }

    /// Finds the missing data of a layer by its table of contents.
    async fn missing_by_table(
        &self,
        table: TableFetch<'_>,
        format: &TocFormat,
        planned: &PlannedLayer,
    ) -> Result<MissingData, PullError> {
        let digest = planned.descriptor.digest.clone();
        let table = table.read(format).await;
        let table = table.map_err(|reason| PullError::Incomplete { digest: digest.clone(), reason })?;
        let (store, planned, limits) = (self.store.clone(), planned.clone(), self.config.limits.clone());
        let missing = move || -> Result<MissingData, PullError> {
            let staging = store.begin_layer()?;
            let options = UnpackOptions { limits, ..UnpackOptions::default() };
            let written =
                write_skeleton(&table, &planned.expected(), &staging.dir().join(LAYER_FILE), &options);
            let (_, _, chunks) = written.map_err(|cause| PullError::Unpack { digest, cause })?;
            Ok(MissingData { chunks, spans: table.spans })
        };
        blocking(missing).await?
    }

    /// Finds the missing data of a layer by its own index.
    async fn missing_by_index(&self, record: &LayerRecord) -> Result<MissingData, PullError> {
        let (store, record) = (self.store.clone(), record.clone());
        let missing = move || -> Result<MissingData, PullError> {
            let file = open_without_events(&store.layer_path(&record.key)).context(OPEN)?;
            let file = file.into();
            let missing = store.missing_pieces(&file, &record)?.or_else(|error| {
                let reason = larder::error_chain(&error);
                let images = store.0.names_of_images_with(&record.key).unwrap_or_default();
                tracing::warn!(layer = %record.key, ?images, reason, "reads of a layer wait for its whole blob");
                missing_pieces(&file, &record.erofs, &[])
            });
            let missing = missing.map(|chunks| MissingData { chunks, spans: Arc::default() });
            let (digest, reason) = (record.facts.digest, |error| larder::error_chain(&error));
            missing.map_err(|error| PullError::Incomplete { digest, reason: reason(error) })
        };
        blocking(missing).await?
    }
}

impl Store {
    /// The names of the blob that a layer is made of; none if it is made of an archive, whose record it must have.
    pub(super) fn blob_files_of(&self, key: &LayerKey) -> Result<Vec<ArtifactFile>, StoreError> {
        let file = open_without_events(&self.layer_path(key)).context(OPEN)?;
        let layer = LayerReader::open(file.into()).map_err(io::Error::from).context(OPEN)?;
        blob_files(&layer).context(OPEN)
    }

    /// The layers below one, the lowest first: in an image, or in a snapshot or mount that has outlived it.
    pub(super) fn layers_below(&self, key: &LayerKey) -> Result<Vec<LayerKey>, StoreError> {
        let stack = self.stack_with(key)?.unwrap_or_default();
        Ok(stack.into_iter().take_while(|layer| layer != key).collect())
    }

    /// Layers with this one among them, as they lie on each other, the lowest first.
    fn stack_with(&self, key: &LayerKey) -> Result<Option<Vec<LayerKey>>, StoreError> {
        let keys = |image: ImageRecord| image.layers.into_iter().map(|layer| layer.key).collect();
        let images = self.images()?.into_iter().map(keys);
        let mut stacks = images.chain(self.mounts()?.into_iter().map(|mount| mount.layers));
        if let Some(found) = stacks.find(|stack: &Vec<LayerKey>| stack.contains(key)) {
            return Ok(Some(found));
        }
        self.0.db.read("find the layers below one", |reader| {
            let snapshots: Vec<SnapshotRecord> = reader.all(SNAPSHOTS)?;
            let Some(found) = snapshots.iter().find(|snapshot| snapshot.layer.as_ref() == Some(key)) else {
                return Ok(None);
            };
            let mut stack: Vec<LayerKey> =
                ancestors(reader, found)?.into_iter().filter_map(|below| below.layer).collect();
            stack.reverse();
            stack.push(key.clone());
            Ok(Some(stack))
        })
    }
}
