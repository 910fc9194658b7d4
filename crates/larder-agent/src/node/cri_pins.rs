//! The images that callers of CRI see as pinned and cannot remove: those that larder's own GC retains although no
//! container uses them. kubelet's GC and `crictl rmi --prune` skip pinned images.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image};
use larder::gc::{ImageUse, ImageUseError, ImageUseSource as _, KeptBy};
use larder::hint::Hint;
use larder::pull::{ImagePin, ImagePinSource};
use larder::reference::ImageId;

use super::Node;
use super::pods::desired::DesiredKey;
use crate::config::Config;

/// The pins of a node, by its settings.
pub(crate) struct CriPins {
    node: Arc<Node>,
}

impl CriPins {
    pub(crate) fn of(node: Arc<Node>) -> CriPins {
        CriPins { node }
    }

    /// Images of keep rules, of the prefetch list, of static pods, and of image sets that pin theirs.
    async fn kept(&self, config: &Config, images: &[Image]) -> Result<Pins, BackendError> {
        // Without the rules it is unknown which images they keep.
        let unknown = |error| BackendError::caused_by(CallErrorKind::Other, error);
        let collector = self.node.collector().map_err(unknown)?;
        let mut pins = Pins::new();
        for (key, image) in self.node.desired_uses.pinned().await {
            pins.insert(image, desired_pin(&key));
        }
        for (image, kept) in collector.kept_images(images).await? {
            pins.insert(image, rule_pin(config, &kept));
        }
        Ok(pins)
    }

    /// Mounted images of larder's own store.
    async fn mounted(&self) -> Result<Pins, BackendError> {
        if self.node.store().is_none() {
            return Ok(Pins::new());
        }
        let mounts = self.node.backend.container_inventory().await?.containers;
        let pin = |target: String| ImagePin {
            reason: format!("mounted at {target}"),
            hint: Hint::new().command(["umount".to_owned(), target]).text(" ends the mount"),
        };
        Ok(mounts.into_iter().map(|mount| (mount.image_id, pin(mount.name))).collect())
    }

    /// Images with a requested lease in larder's own store.
    async fn leased(&self) -> Result<Pins, BackendError> {
        let Some(store) = self.node.store() else { return Ok(Pins::new()) };
        let leases = store.uses().await.map_err(ImageUseError::into_backend_error)?;
        let requested = leases.into_iter().filter(|lease| matches!(lease.by, ImageUse::Lease { .. }));
        let pins = requested.map(|lease| {
            let reason = format!("in use by {}", lease.by);
            let end = ["lease".to_owned(), lease.image.to_string(), "0".to_owned()];
            (lease.image, ImagePin { reason, hint: Hint::new().command(end).text(" ends the lease") })
        });
        Ok(pins.collect())
    }
}

type Pins = HashMap<ImageId, ImagePin>;

#[async_trait]
impl ImagePinSource for CriPins {
    async fn pins(&self, images: &[Image]) -> Result<Pins, BackendError> {
        let config = self.node.settings.now();
        let mut pins = Pins::new();
        if images.is_empty() {
            return Ok(pins);
        }
        if config.cri_pins.leased {
            pins.extend(self.leased().await?);
        }
        if config.cri_pins.kept {
            pins.extend(self.kept(&config, images).await?);
        }
        if config.cri_pins.mounted {
            pins.extend(self.mounted().await?);
        }
        Ok(pins)
    }
}

/// The pin of a desired image, over CRI and for `larder rm`.
pub(crate) fn desired_pin(key: &DesiredKey) -> ImagePin {
    ImagePin { reason: format!("pinned by {}", key.owner), hint: "remove it from there first".into() }
}

/// The pin of a keep rule; the rules of the settings come before those of `larder keep`.
fn rule_pin(config: &Config, kept: &KeptBy) -> ImagePin {
    let KeptBy { index, rule } = kept;
    let number = index + 1;
    // The settings may have changed since the rule was matched.
    let hint = if config.gc.keep.get(*index) == Some(rule) {
        let place = config.origin_of_item("gc.keep", *index);
        Hint::from(format!("remove the rule from gc.keep ({place})"))
    } else {
        Hint::new().command(["unkeep".to_owned(), number.to_string()]).text(" removes the rule")
    };
    ImagePin { reason: format!("kept by rule {number} ({rule})"), hint }
}
