//! The images that callers of CRI see as pinned: those that larder's own GC retains although no container uses them.
//! kubelet's GC and `crictl rmi --prune` skip pinned images.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image};
use larder::pull::ImagePinSource;
use larder::reference::ImageId;
use larder::retention::{LeasePurpose, RetentionError, RetentionPurpose, SourceScope};

use tokio::time;

use super::Node;
use super::collection::Collection;
use super::settings::NodeSettings;
use crate::config::CriPinSettings;

/// How long CRI waits for what retains images. Its callers start containers.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// The pins of a node, by its settings.
pub(crate) struct CriPins {
    collection: Arc<Collection>,
    settings: Arc<NodeSettings>,
    /// Only larder's own store has mounts.
    is_store: bool,
}

impl CriPins {
    pub(crate) fn of(node: &Node) -> CriPins {
        CriPins {
            collection: Arc::clone(&node.collection),
            settings: Arc::clone(&node.settings),
            is_store: node.storage.store().is_some(),
        }
    }

    /// Why an image with this retention is pinned by the settings. A lease of an ensure pins nothing: CRI's `PullImage`
    /// takes one for each image, and would keep it from kubelet's own collection.
    fn pin(settings: CriPinSettings, reason: &RetentionPurpose) -> Option<String> {
        match reason {
            RetentionPurpose::Kept(kept) if settings.kept => Some(kept.to_string()),
            RetentionPurpose::Desired { by, is_pinned: true, .. } if settings.kept => {
                Some(format!("pinned by {by}"))
            }
            RetentionPurpose::Pinned if settings.kept => Some("pinned in containerd".to_owned()),
            RetentionPurpose::Mount { target, .. } if settings.mounted => {
                Some(format!("mounted at {target}"))
            }
            RetentionPurpose::Lease(lease) if settings.leased && lease.purpose != LeasePurpose::Ensure => {
                Some(format!("in use by {lease}"))
            }
            _ => None,
        }
    }
}

#[async_trait]
impl ImagePinSource for CriPins {
    async fn pins(&self, images: &[Image]) -> Result<HashMap<ImageId, String>, BackendError> {
        let config = self.settings.now();
        let settings = config.cri_pins;
        if !settings.leased && !settings.kept && !settings.mounted {
            return Ok(HashMap::new());
        }
        // Without the collector it is unknown which images are retained.
        let unknown = |error| BackendError::caused_by(CallErrorKind::Other, error);
        let collector = self.collection.collector().map_err(unknown)?;
        let scope =
            if settings.mounted && self.is_store { SourceScope::Backend } else { SourceScope::Larder };
        let retentions = time::timeout(ANSWERS_WITHIN, collector.retentions(images, scope)).await;
        let retentions = retentions.map_err(|_| {
            let message = "cannot determine pinned images: what retains images did not answer within 2 s";
            BackendError::call(CallErrorKind::Unavailable, message)
        })?;
        let retentions = retentions.map_err(RetentionError::into_backend_error)?;
        let pin = |(image, reasons): (ImageId, Vec<RetentionPurpose>)| {
            let pin = reasons.iter().find_map(|reason| Self::pin(settings, reason))?;
            Some((image, pin))
        };
        Ok(retentions.into_iter().filter_map(pin).collect())
    }
}
