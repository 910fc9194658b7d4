//! The images in a node's status.

use crate::backend::{BackendError, Image};
use crate::reference::names_platform;

/// How many names of an image are reported.
const MOST_NAMES: usize = 5;

/// One image in a node's status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeImage {
    /// Its names, those with digests first, as the runtime orders them; at most five.
    pub names: Vec<String>,
    /// Size in bytes, as the runtime counts.
    pub size_bytes: u64,
}

/// The image list is unavailable; the status then shows no images.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("error getting image list: {0}")]
pub struct NodeStatusError(#[from] pub BackendError);

/// Images in the order of the list cache: largest first, equal ones by ID, descending.
pub(super) fn sorted_for_cache(mut images: Vec<Image>) -> Vec<Image> {
    images.sort_by(|a, b| b.size.cmp(&a.size).then_with(|| b.id.cmp(&a.id)));
    images
}

/// The largest `max_images` that pods of the node can use, or all when that is -1.
pub fn images_for_node_status(
    max_images: i32,
    listed: Result<Vec<Image>, BackendError>,
) -> Result<Vec<NodeImage>, NodeStatusError> {
    let most = if max_images == -1 { usize::MAX } else { usize::try_from(max_images).unwrap_or(0) };
    let reported = |image: Image| {
        let names = image.repo_digests.into_iter().chain(image.repo_tags);
        let names = names.filter(|name| !names_platform(name)).take(MOST_NAMES);
        NodeImage { names: names.collect(), size_bytes: image.size }
    };
    let images = sorted_for_cache(listed?).into_iter().filter(|image| !image.is_for_other_platforms());
    Ok(images.take(most).map(reported).collect())
}
