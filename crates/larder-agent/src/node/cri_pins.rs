//! The images that callers of CRI see as pinned and cannot remove: those that larder's own GC retains although no
//! container uses them. kubelet's GC and `crictl rmi --prune` skip pinned images.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image};
use larder::hint::Hint;
use larder::pull::{ImagePin, ImagePinSource};
use larder::reference::ImageId;
use larder::retention::{KeptBy, LeasePurpose, RetentionError, RetentionPurpose, SourceScope};

use tokio::time;

use super::Node;
use super::collection::Collection;
use super::settings::NodeSettings;
use crate::config::Config;

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

    /// The pin that an image has for this reason by the settings. A lease pins nothing unless `larder lease` took it:
    /// CRI's `PullImage` takes one for each image, and would block kubelet's own removal.
    fn pin(config: &Config, image: &ImageId, reason: &RetentionPurpose) -> Option<ImagePin> {
        let settings = &config.cri_pins;
        match reason {
            RetentionPurpose::Kept(kept) if settings.kept => Some(rule_pin(config, kept)),
            RetentionPurpose::Desired { by, is_pinned: true, .. } if settings.kept => Some(desired_pin(by)),
            RetentionPurpose::Mount { target, .. } if settings.mounted => Some(ImagePin {
                reason: format!("mounted at {target}"),
                hint: Hint::new().command(["umount".to_owned(), target.clone()]).text(" ends the mount"),
            }),
            RetentionPurpose::Lease(lease) if settings.leased && lease.purpose == LeasePurpose::Request => {
                let end = ["lease".to_owned(), image.to_string(), "0".to_owned()];
                let hint = Hint::new().command(end).text(" ends the lease");
                Some(ImagePin { reason: format!("in use by {lease}"), hint })
            }
            _ => None,
        }
    }
}

#[async_trait]
impl ImagePinSource for CriPins {
    async fn pins(&self, images: &[Image]) -> Result<HashMap<ImageId, ImagePin>, BackendError> {
        let config = self.settings.now();
        let settings = &config.cri_pins;
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
            let pin = reasons.iter().find_map(|reason| Self::pin(&config, &image, reason))?;
            Some((image, pin))
        };
        Ok(retentions.into_iter().filter_map(pin).collect())
    }
}

/// The pin of a desired image, over CRI and for `larder rm`.
pub(crate) fn desired_pin(owner: &str) -> ImagePin {
    ImagePin { reason: format!("pinned by {owner}"), hint: "remove it from there first".into() }
}

/// The pin of a keep rule; the rules of the settings come before those of `larder keep`.
fn rule_pin(config: &Config, kept: &KeptBy) -> ImagePin {
    let KeptBy { index, rule, .. } = kept;
    let number = index + 1;
    // The settings may have changed since the rule was matched.
    let hint = if config.gc.keep.get(*index) == Some(rule) {
        let place = config.origin_of_item("gc.keep", *index);
        Hint::from(format!("remove the rule from gc.keep ({place})"))
    } else {
        Hint::new().command(["unkeep".to_owned(), number.to_string()]).text(" removes the rule")
    };
    ImagePin { reason: kept.to_string(), hint }
}
