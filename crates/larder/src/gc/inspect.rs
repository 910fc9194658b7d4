//! Reads image layers from the backend's verbose answer, as with runtimes behind CRI.
//!
//! An image's layers never change, so each image costs one call. Layer sizes come from another source if one is set;
//! otherwise they are estimated from image sizes, and the sweep measures what is really freed.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _};
use serde::Deserialize;
use tokio::sync::Mutex;

use super::disk_space::DiskSpace;
use super::layers::{LayerSource, LayerUsageIndex};
use crate::backend::{Backend, BackendError, Image, ImageDetails, ImageSpec};
use crate::reference::{ImageId, LayerId};

/// Number of concurrent calls. Each may have a config of some megabytes in memory.
const CALLS_AT_ONCE: usize = 4;

/// Calls [`Backend::inspect`] once for each image.
pub struct InspectLayerSource {
    backend: Arc<dyn Backend>,
    size_source: Option<Arc<dyn LayerSource>>,
    known: Mutex<HashMap<ImageId, Arc<VerboseImageSpec>>>,
}

/// The parts of an image's config that matter here.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
struct VerboseImageSpec {
    rootfs: VerboseRootFs,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
struct VerboseRootFs {
    diff_ids: Vec<LayerId>,
}

/// The form in which containerd and CRI-O wrap it.
#[derive(Deserialize)]
struct VerboseImageInfo {
    #[serde(rename = "imageSpec")]
    image_spec: VerboseImageSpec,
}

impl InspectLayerSource {
    /// Reads layers from this backend.
    pub fn new(backend: Arc<dyn Backend>) -> InspectLayerSource {
        InspectLayerSource { backend, size_source: None, known: Mutex::default() }
    }

    /// Reads layer sizes from this source first. If it fails or lacks an image, all sizes are estimated.
    #[must_use]
    pub fn with_sizes_from(mut self, source: Arc<dyn LayerSource>) -> InspectLayerSource {
        self.size_source = Some(source);
        self
    }

    async fn reported_sizes(&self, images: &[Image]) -> Option<LayerUsageIndex> {
        let layers = match self.size_source.as_ref()?.layers(images).await {
            Ok(layers) => layers,
            Err(error) => {
                tracing::debug!("estimating layer sizes: {error}");
                return None;
            }
        };
        let unknown = images.iter().find(|image| layers.layers_of(&image.id).is_none());
        if let Some(image) = unknown {
            tracing::debug!("estimating layer sizes: unknown image {}", image.id);
        }
        unknown.is_none().then_some(layers)
    }

    /// The runtime's total for all images.
    async fn used(&self) -> Option<DiskSpace> {
        let filesystems = self.backend.filesystems().await.ok()?;
        let [images] = filesystems.image.as_slice() else { return None };
        Some(DiskSpace { bytes: images.used_bytes?, inodes: images.inodes_used.unwrap_or(0) })
    }

    async fn ask(&self, image: &ImageId) -> Result<Option<VerboseImageSpec>, BackendError> {
        match self.backend.inspect(&ImageSpec::named(image)).await {
            Ok(details) => Ok(details.as_ref().and_then(config_of)),
            Err(error @ BackendError::Unreachable { .. }) => Err(error),
            // One damaged image must not prevent the removal of others.
            Err(error) => {
                tracing::debug!("cannot determine the layers of {image}: {error}");
                Ok(None)
            }
        }
    }
}

/// The image config in a verbose answer, wrapped as in containerd and CRI-O, or plain.
fn config_of(details: &ImageDetails) -> Option<VerboseImageSpec> {
    let wrapped =
        details.info.get("info").and_then(|text| serde_json::from_str::<VerboseImageInfo>(text).ok());
    let bare = || details.info.get("config").and_then(|text| serde_json::from_str(text).ok());
    wrapped.map(|wrapped| wrapped.image_spec).or_else(bare)
}

impl InspectLayerSource {
    /// The configs of these images, the known ones without a call. Images with an unreadable config are omitted.
    async fn configs<'a>(
        &self,
        images: &'a [Image],
    ) -> Result<Vec<(&'a Image, Arc<VerboseImageSpec>)>, BackendError> {
        let mut known = self.known.lock().await;
        let new: Vec<ImageId> = images
            .iter()
            .filter(|image| !known.contains_key(&image.id))
            .map(|image| image.id.clone())
            .collect();
        let calls = new.iter().map(|id| async move { (id.clone(), self.ask(id).await) });
        let mut answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
        while let Some((id, answer)) = answers.next().await {
            if let Some(config) = answer? {
                known.insert(id, Arc::new(config));
            }
        }
        let present: Vec<(&Image, Arc<VerboseImageSpec>)> =
            images.iter().filter_map(|image| Some((image, known.get(&image.id)?.clone()))).collect();
        *known = present.iter().map(|(image, config)| (image.id.clone(), Arc::clone(config))).collect();
        Ok(present)
    }
}

#[async_trait]
impl LayerSource for InspectLayerSource {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let present = self.configs(images).await?;
        if let Some(layers) = self.reported_sizes(images).await {
            return Ok(layers);
        }
        let stacks: Vec<(&Image, &[LayerId])> =
            present.iter().map(|(image, config)| (*image, config.rootfs.diff_ids.as_slice())).collect();
        Ok(LayerUsageIndex::estimated(&stacks, self.used().await))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn details(key: &str, text: &str) -> ImageDetails {
        let info = BTreeMap::from([(key.to_owned(), text.to_owned())]);
        ImageDetails { info, ..ImageDetails::default() }
    }

    #[test]
    fn layers_are_found_in_the_answers_of_runtimes_and_in_plain_configs() {
        let config = r#"{"config":{"User":"0"},"rootfs":{"type":"layers","diff_ids":["sha256:a"]}}"#;
        let wrapped = format!(r#"{{"chainID":"sha256:c","imageSpec":{config}}}"#);
        let found = config_of(&details("info", &wrapped)).unwrap();
        assert_eq!(found.rootfs.diff_ids, ["sha256:a"]);
        assert_eq!(config_of(&details("config", config)), Some(found));
        assert_eq!(config_of(&details("info", "{}")), None);
        assert_eq!(config_of(&ImageDetails::default()), None);
    }
}
