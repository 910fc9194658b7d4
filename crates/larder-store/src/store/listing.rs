//! The part of an image's record that lists need: a list of 10,000 images must not build their full records.

use larder::backend;
use larder::reference::Digest;
use serde::Deserialize;

use super::db::{DbRead, DbResult, DbTransaction, IMAGES, LAYERS, encode};
use super::records::{ImageRecord, LayerKey, LayerRecord};

/// Bytes of a block of the filesystem, as nearly all have them.
const BLOCK: u64 = 4096;

/// Fields of an [`ImageRecord`] that lists show.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ImageListing {
    pub(crate) id: Digest,
    #[serde(default)]
    pub(crate) artifact_type: String,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    pub(crate) disk_bytes: u64,
    pub(crate) user: String,
    pub(crate) pinned: bool,
    pub(crate) pulled_at: u64,
    pub(crate) complete: bool,
}

impl From<&ImageRecord> for ImageListing {
    fn from(image: &ImageRecord) -> ImageListing {
        ImageListing {
            id: image.id.clone(),
            artifact_type: image.artifact_type.clone(),
            tags: image.tags.clone(),
            digests: image.digests.clone(),
            disk_bytes: image.disk_bytes,
            user: image.user.clone(),
            pinned: image.pinned,
            pulled_at: image.pulled_at,
            complete: image.complete,
        }
    }
}

impl ImageListing {
    /// One of its names, or its ID.
    pub(crate) fn name(&self) -> &str {
        self.tags.iter().chain(&self.digests).next().map_or(self.id.as_str(), String::as_str)
    }

    /// As a backend shows it.
    pub(crate) fn into_image(self) -> backend::Image {
        let (uid, username) = uid_and_name(&self.user);
        backend::Image {
            id: self.id.into(),
            artifact_type: self.artifact_type,
            uid,
            username: username.to_owned(),
            repo_tags: self.tags,
            repo_digests: self.digests,
            size: self.disk_bytes,
            pinned: self.pinned,
            spec: None,
            fill: None,
        }
    }
}

/// The layers of an [`ImageRecord`].
#[derive(Deserialize)]
struct ListedLayers {
    layers: Vec<ListedLayer>,
}

#[derive(Deserialize)]
struct ListedLayer {
    key: LayerKey,
}

/// Whether a layer is damaged, of its [`LayerRecord`].
#[derive(Deserialize)]
struct LayerDamage {
    damaged: bool,
}

/// Returns true when `fsck` has marked a layer of this image as damaged.
pub(crate) fn has_damaged_layer(source: &impl DbRead, id: &str) -> DbResult<bool> {
    let Some(ListedLayers { layers }) = source.get(IMAGES, id)? else { return Ok(false) };
    for layer in &layers {
        let found = source.get::<LayerDamage>(LAYERS, layer.key.as_str())?;
        if found.is_some_and(|layer| layer.damaged) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The user of a config as CRI reports it: a number, or else a name.
pub(crate) fn uid_and_name(user: &str) -> (Option<i64>, &str) {
    let user = user.split(':').next().unwrap_or_default();
    match user.parse() {
        Ok(uid) => (Some(uid), ""),
        Err(_) => (None, user),
    }
}

/// Returns the disk usage of an image, whatever else needs the same files. It is that of `image_usages`, which measures
/// the copy of the record: here it may not be written yet.
pub(crate) fn disk_bytes(source: &impl DbRead, image: &ImageRecord) -> DbResult<u64> {
    let copy = encode(image.id.as_str(), &ImageRecord { disk_bytes: 0, ..image.clone() })?.len() as u64;
    let mut bytes = image.blob_bytes.saturating_add(copy.next_multiple_of(BLOCK));
    for key in image.keys() {
        let layer = source.get::<LayerRecord>(LAYERS, key.as_str())?;
        bytes = bytes.saturating_add(layer.map_or(0, |layer| layer.usage.bytes));
    }
    Ok(bytes)
}

/// Writes an image's record, with the present sizes of its layers.
pub(crate) fn put_image(writer: &DbTransaction, image: &mut ImageRecord) -> DbResult<()> {
    image.disk_bytes = disk_bytes(writer, image)?;
    writer.put(IMAGES, image.id.as_str(), image)
}
