//! Layers of larder's own store whose data comes while containers read them.

use std::path::Path;
use std::sync::Arc;

use larder::error_chain;
use larder::events::{EventReason, EventType};
use larder_store::backend::StoreBackend;

use super::Node;
use crate::group_keeper;

impl Node {
    /// Lets containers read layers before they are complete, if images are selected for that or an earlier process has
    /// left some. `program` keeps the guard of their reads while no larder runs. Before anything is mounted.
    pub(crate) async fn guard_reads(&self, program: &Path) {
        let Some(store) = self.storage.store() else { return };
        let config = self.settings.now();
        let before = match has_incomplete(store).await {
            Ok(false) if config.lazy.images.is_empty() => return,
            Ok(_) => guard(store, program, config.lazy.read_timeout).await,
            Err(error) => Err(error),
        };
        match before {
            Ok(before) if before.lost.is_empty() => {}
            Ok(before) => {
                for image in before.lost {
                    let message = format!(
                        "Containers of {image} that were running may have read zeros instead of its files: the \
                         guard of its incomplete layers was killed. Restart them"
                    );
                    self.observability.record(EventType::Warning, EventReason::ImageWarning, message);
                }
            }
            Err(reason) => {
                tracing::warn!(
                    reason,
                    "layers cannot be read before they are complete: images are pulled in full"
                );
                self.storage.note_unguarded(reason);
            }
        }
    }

    /// Ends the guard of reads when the process ends, unless a layer is incomplete.
    pub(crate) async fn end_guard_of_reads(&self) {
        let Some(store) = self.storage.store().map(|store| store.store().clone()) else { return };
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || store.end_guard()).await {
            tracing::warn!("{}", error_chain(&error));
        }
    }
}

async fn has_incomplete(store: &StoreBackend) -> Result<bool, String> {
    let store = store.store().clone();
    let asked = tokio::task::spawn_blocking(move || store.has_incomplete_layers()).await;
    asked.map_err(|error| error.to_string())?.map_err(|error| error_chain(&error))
}

async fn guard(
    store: &StoreBackend,
    program: &Path,
    read_timeout: std::time::Duration,
) -> Result<larder_store::pull::GuardedBefore, String> {
    let keeper = group_keeper::choose(program, store.store().root()).map_err(|error| error.to_string())?;
    let guarded = store.puller().guard_reads(Arc::from(keeper), read_timeout).await;
    guarded.map_err(|error| error_chain(&error))
}
