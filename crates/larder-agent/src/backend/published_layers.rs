//! The layers of a store whose images a containerd has as well: it may retain some of them when an image is removed,
//! and it may have copies of others.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use larder::backend::{BackendError, Image};
use larder::gc::{LayerSource, LayerUsageIndex, MeasuredLayer};
use larder::reference::{ImageId, LayerId};
use larder_containerd::{ContainerdShare, SharedSnapshots};
use larder_store::backend::StoreBackend;
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;

/// The layers of the store, with what containerd retains of them, and its own copies where these take space of the same
/// disk.
pub(crate) struct PublishedLayers {
    store: StoreBackend,
    shared: SharedSnapshots,
    /// Whether containerd's content and snapshots are on the filesystem of the store.
    is_same_filesystem: OnceCell<bool>,
    /// True once it was logged that containerd does not answer.
    warned: AtomicBool,
}

impl PublishedLayers {
    pub(crate) fn new(store: StoreBackend, shared: SharedSnapshots) -> PublishedLayers {
        PublishedLayers { store, shared, is_same_filesystem: OnceCell::new(), warned: AtomicBool::new(false) }
    }

    /// Returns what containerd has of the images; `None` if it does not answer: then it may retain everything.
    async fn share(&self, images: &[Image]) -> Option<ContainerdShare> {
        let share = self.shared.of(images).await;
        match &share {
            Ok(_) => self.warned.store(false, Ordering::Relaxed),
            Err(error) => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "cannot determine which layers containerd retains, counting none as freed: {error}"
                    );
                }
            }
        }
        share.ok()
    }

    /// Whether removing containerd's copies frees space for the store. Not if that is unknown.
    async fn is_same_filesystem(&self) -> bool {
        let determine = || async {
            let roots = self.shared.roots().await.map_err(|_| ())?;
            let store = self.store.store().root().to_owned();
            let device = |path: &Path| fs_err::metadata(path).map(|found| found.dev());
            let compare = move || {
                let own = device(&store)?;
                let others = roots.iter().map(|root| device(root.as_ref()));
                let others = others.collect::<std::io::Result<Vec<_>>>()?;
                Ok::<_, std::io::Error>(!others.is_empty() && others.iter().all(|other| *other == own))
            };
            spawn_blocking(compare).await.map_err(|_| ())?.map_err(|_| ())
        };
        self.is_same_filesystem.get_or_try_init(determine).await.is_ok_and(|same| *same)
    }
}

#[async_trait]
impl LayerSource for PublishedLayers {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let mut index = self.store.layers(images).await?;
        let share = self.share(images).await;
        for (layer, chain) in self.store.layer_snapshots().await? {
            let by = match &share {
                Some(share) => share.holders.get(&chain).map(String::as_str),
                None => Some("containerd, which does not answer"),
            };
            if let Some(by) = by {
                index.set_reference(&layer, by);
            }
        }
        if let Some(share) = &share
            && !share.copies.all().is_empty()
            && self.is_same_filesystem().await
        {
            add_copies(&mut index, images, &share.copies);
        }
        Ok(index)
    }
}

/// Adds containerd's copies of layers to the images of the store.
fn add_copies(index: &mut LayerUsageIndex, images: &[Image], copies: &LayerUsageIndex) {
    for image in images {
        let Some(own) = index.layers_of(&image.id).cloned() else { continue };
        let Some(added) = copies.layers_of(&image.id) else { continue };
        let new: Vec<&MeasuredLayer> =
            added.layers.iter().map(|&layer| &copies.all()[layer as usize]).collect();
        let own_ids = own.layers.iter().map(|&layer| index.all()[layer as usize].id.clone());
        let ids: Vec<LayerId> = own_ids.chain(new.iter().map(|layer| layer.id.clone())).collect();
        for layer in new {
            index.add(layer.clone());
        }
        index.add_image(image.id.clone(), &ids, own.own + added.own);
    }
}

/// Whether a layer is a copy of containerd: IDs of those have the name of their kind before a space.
pub(crate) fn is_copy(id: &LayerId) -> bool {
    id.as_str().contains(' ')
}

/// The bytes of the layers of images, or of one, that are containerd's copies.
pub(crate) fn bytes_in_containerd(layers: &LayerUsageIndex, image: Option<&ImageId>) -> u64 {
    let is_copy = |layer: &&MeasuredLayer| is_copy(&layer.id);
    let bytes = |layer: &MeasuredLayer| layer.amount.bytes;
    match image {
        None => layers.all().iter().filter(is_copy).map(bytes).sum(),
        Some(image) => {
            let known = layers.layers_of(image).map(|known| known.layers.as_slice()).unwrap_or_default();
            known.iter().map(|&layer| &layers.all()[layer as usize]).filter(is_copy).map(bytes).sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use larder::gc::DiskSpace;
    use larder_testkit::fake_backend::image;

    use super::*;

    #[test]
    fn a_copy_of_containerd_is_a_layer_of_its_image_beside_those_of_the_store() {
        let layer = |id: &str, bytes| MeasuredLayer {
            id: id.into(),
            amount: DiskSpace { bytes, inodes: 1 },
            estimated: false,
            referenced_by: None,
        };
        let (mut index, mut copies) = (LayerUsageIndex::unknown(), LayerUsageIndex::unknown());
        let own = DiskSpace { bytes: 10, inodes: 1 };
        for (id, bytes) in [("sha256:1", 100), ("sha256:2", 200)] {
            index.add(layer(id, bytes));
        }
        index.add_image("imported", ["sha256:1"], own);
        index.add_image("pulled", ["sha256:2"], own);
        copies.add(layer("archive sha256:a", 50));
        copies.add_image("imported", ["archive sha256:a"], own);
        let images = [image("imported", 1), image("pulled", 1)];
        add_copies(&mut index, &images, &copies);
        assert_eq!(index.size_of("imported"), Some(DiskSpace { bytes: 170, inodes: 4 }));
        assert_eq!(index.size_of("pulled"), Some(DiskSpace { bytes: 210, inodes: 2 }));
        assert_eq!(bytes_in_containerd(&index, None), 50);
        assert_eq!(bytes_in_containerd(&index, Some(&"imported".into())), 50);
        assert_eq!(bytes_in_containerd(&index, Some(&"pulled".into())), 0);
    }
}
