//! The listing of each image, stored separately: a list of 10,000 images must not read their full records.

use larder::backend;
use larder::reference::Digest;
use serde::{Deserialize, Serialize};

use super::db::{DbRead, DbResult, DbTransaction, IMAGES, LAYERS, LISTED};
use super::records::{ImageRecord, LayerRecord};

/// What lists show of an image. It follows from the image's record and those of its layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageListing {
    pub(crate) id: Digest,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    /// What it takes on disk, whatever else needs the same layers.
    pub(crate) bytes: u64,
    /// Of that, config and manifests.
    pub(crate) blob_bytes: u64,
    /// How many files those are.
    pub(crate) blobs: u64,
    pub(crate) user: String,
    pub(crate) pinned: bool,
    pub(crate) pulled_at: u64,
    pub(crate) complete: bool,
}

impl ImageListing {
    pub(crate) fn of(source: &impl DbRead, image: &ImageRecord) -> DbResult<ImageListing> {
        let mut bytes = image.blob_bytes;
        for key in image.keys() {
            let layer = source.get::<LayerRecord>(LAYERS, key.as_str())?;
            bytes = bytes.saturating_add(layer.map_or(0, |layer| layer.usage.bytes));
        }
        Ok(ImageListing {
            id: image.id.clone(),
            tags: image.tags.clone(),
            digests: image.digests.clone(),
            bytes,
            blob_bytes: image.blob_bytes,
            blobs: image.blobs().count() as u64,
            user: image.user.clone(),
            pinned: image.pinned,
            pulled_at: image.pulled_at,
            complete: image.complete,
        })
    }

    /// As a backend shows it.
    pub(crate) fn into_image(self) -> backend::Image {
        let (uid, username) = uid_and_name(&self.user);
        backend::Image {
            id: self.id.into(),
            uid,
            username: username.to_owned(),
            repo_tags: self.tags,
            repo_digests: self.digests,
            size: self.bytes,
            pinned: self.pinned,
            spec: None,
        }
    }
}

/// The user of a config as CRI reports it: a number, or else a name.
pub(crate) fn uid_and_name(user: &str) -> (Option<i64>, &str) {
    let user = user.split(':').next().unwrap_or_default();
    match user.parse() {
        Ok(uid) => (Some(uid), ""),
        Err(_) => (None, user),
    }
}

/// Writes an image's record, and what lists show of it.
pub(crate) fn put_image(writer: &DbTransaction, image: &ImageRecord) -> DbResult<()> {
    writer.put(IMAGES, image.id.as_str(), image)?;
    writer.put(LISTED, image.id.as_str(), &ImageListing::of(writer, image)?)
}

/// Deletes what [`put_image`] wrote.
pub(crate) fn delete_image(writer: &DbTransaction, image: &ImageRecord) -> DbResult<()> {
    writer.delete(IMAGES, image.id.as_str())?;
    writer.delete(LISTED, image.id.as_str())
}
