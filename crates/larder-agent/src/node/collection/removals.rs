//! Removals that clients request, as events, history and metrics.

use std::time::SystemTime;

use larder::backend::Image;
use larder::events::{EventReason, EventType};
use larder::gc::{DiskSpace, RemovalHistory as _, RemovalHistoryEntry, UnixMillis};
use larder::go_format;
use tokio::task::spawn_blocking;

use super::Collection;
use crate::node::peer::Peer;

/// The interface that a request came through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestApi {
    Cri,
    Control,
}

impl RequestApi {
    /// The word in metrics.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            RequestApi::Cri => "cri",
            RequestApi::Control => "control",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            RequestApi::Cri => "CRI",
            RequestApi::Control => "the control API",
        }
    }
}

impl Collection {
    /// Records a removal of names that leaves the image.
    pub(crate) fn record_untagged(&self, api: RequestApi, image: &Image, names: &[String]) {
        let names: Vec<String> = names.iter().map(|name| go_format::quote(name)).collect();
        let (by, names, id, api) = (Peer::current(), names.join(", "), &image.id, api.name());
        let message = format!("{by} removed {names} from image {id} over {api}");
        self.observability.record(EventType::Normal, EventReason::Untagged, message);
    }

    /// Records a removal: as an event, in the removal history, and by the end of its leases in their file. `pin` is
    /// what had pinned the image.
    pub(crate) async fn record_removal(
        &self,
        api: RequestApi,
        image: &Image,
        freed: Option<DiskSpace>,
        pin: Option<String>,
    ) {
        self.save_ended_leases().await;
        let by = Peer::current();
        self.observability.metrics().image_removed(api.word());
        if api == RequestApi::Cri {
            self.others.removed(by.command(), SystemTime::now());
            self.loops.removed_by_another();
        }
        let names: Vec<String> = image.repo_tags.iter().chain(&image.repo_digests).cloned().collect();
        let shown = names.first().map_or(image.id.as_str(), String::as_str);
        let bytes = freed.map_or_else(String::new, |freed| format!(", freed {} bytes", freed.bytes));
        let pin = pin.map_or_else(String::new, |pin| format!(", although it was {pin}"));
        let message = format!(
            "{by} removed image {} ({}) over {}{pin}{bytes}",
            go_format::quote(shown),
            image.id,
            api.name()
        );
        self.observability.record(EventType::Normal, EventReason::Removed, message);
        let Some(history) = self.history.clone() else { return };
        let entry = RemovalHistoryEntry {
            at: UnixMillis::from(SystemTime::now()),
            id: image.id.clone(),
            names,
            reason: "request".to_owned(),
            why: match api {
                RequestApi::Cri => format!("removed by {by} over CRI{pin}"),
                RequestApi::Control => format!("removed by {by}"),
            },
            promised: freed.unwrap_or(DiskSpace { bytes: image.size, inodes: 0 }),
            estimated: freed.is_none(),
            freed,
        };
        let written = spawn_blocking(move || history.record(&entry)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!("cannot write the removal history: {error}");
        }
    }

    /// Records a removal that failed or was refused.
    pub(crate) fn record_failed_removal(&self, api: RequestApi, image: &str, error: &str) {
        let (by, image, api) = (Peer::current(), go_format::quote(image), api.name());
        let message = format!("{by} failed to remove image {image} over {api}: {error}");
        self.observability.record(EventType::Warning, EventReason::RemovalFailed, message);
    }
}
