//! Brings a removed layer back by its remnant: its metadata is here, and its data follows, by its index.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_registry::RepositorySession;

use super::error::PullError;
use super::fetch_layer::LayerFetch;
use crate::disk::free_space;
use crate::lazy::skeleton::MissingData;
use crate::store::error::StoreErrorContext as _;
use crate::store::remnants::StagedRemnant;
use crate::store::{LAYER_FILE, LayerHandle, PartialSource};

/// The action that fails when the free space is unknown, for its error.
const MEASURE: &str = "measure the free space";

impl LayerFetch {
    /// Places what is kept of the layer, if it was removed and is pulled lazily, and guards its reads. `None` if it
    /// must be fetched in another way.
    pub(super) async fn restore(
        &self,
        session: &RepositorySession,
    ) -> Result<Option<LayerHandle>, PullError> {
        if self.into.is_some() || !self.puller.is_lazy(&self.planned) {
            return Ok(None);
        }
        let (puller, planned, session) = (self.puller.clone(), self.planned.clone(), session.clone());
        let (request, blob) = (self.origin.request(&self.planned), self.origin.blob(&self.planned));
        let restore = move || -> Result<Option<LayerHandle>, PullError> {
            let store = &puller.store;
            // A blob that is the layer comes beside it: twice, where a full pull needs it once.
            let needed =
                planned.descriptor.size.saturating_mul(2).saturating_add(store.0.config.reserve.bytes);
            if !planned.files.is_empty() && free_space(store.root()).context(MEASURE)?.bytes < needed {
                return Ok(None);
            }
            let Some(StagedRemnant { staging, layer, _hold }) = store.stage_remnant(&request)? else {
                return Ok(None);
            };
            let file =
                fs_err::File::open(staging.dir().join(LAYER_FILE)).context("open the remnant of a layer")?;
            let chunks = match store.missing_pieces(file.file(), &layer)? {
                Ok(chunks) => chunks,
                Err(error) => {
                    let reason = larder::error_chain(&error);
                    let (image, layer) = (session.image(), &layer.key);
                    tracing::info!(%image, %layer, reason, "a removed layer is fetched in another way");
                    return Ok(None);
                }
            };
            let ingest = store.ingest(&blob)?;
            let (annotations, chain_id) = (BTreeMap::new(), planned.chain_id.clone());
            let source = PartialSource { blob, annotations, chain_id };
            let placed = staging.finish_partial(&layer.key, layer.facts, layer.erofs, source.clone())?;
            // Another pull has placed the layer in between: it is not this one.
            if placed.record().partial != Some(source) {
                return Ok(None);
            }
            let missing = MissingData { chunks, spans: Arc::default() };
            puller.begin_fill(&session, &placed, missing, planned, ingest, None)?;
            Ok(Some(placed))
        };
        self.worker.blocking(restore).await?
    }
}
