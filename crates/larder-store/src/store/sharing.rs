//! Which images use which layers, and the size of each: the input of GC.

use std::collections::HashMap;

use larder::gc::{LayerUsageIndex, MeasuredLayer};
use larder::reference::{ImageId, LayerId};

use super::db::{DbRead as _, IMAGES};
use super::error::StoreError;
use super::handle::Store;
use super::references::ReferencedItem;
use super::usage::{each_layers_users, layer_users_beside_images, layers};
use crate::disk::DiskSpace;

/// What references the part of a layer that stays when the layer is removed.
const NEXT_PULL: &str = "the next pull of the layer";

/// ID of the part of a layer that stays when the layer is removed.
fn kept_part(key: &str) -> LayerId {
    format!("{key}/kept").into()
}

impl Store {
    /// All images with their layers, those that lack one included, and what else references a layer: leases, mounts,
    /// and pulls under way.
    pub fn layer_usage_index(&self) -> Result<LayerUsageIndex, StoreError> {
        self.0.db.read("look up which images share layers", |reader| {
            let mut sharing = LayerUsageIndex::unknown();
            let mut others = layer_users_beside_images(reader)?;
            for layer in layers(reader)? {
                let pulled = || {
                    let pulling = self.0.references.has(&ReferencedItem::Layer(layer.key.clone()));
                    pulling.then(|| "an in-flight pull".to_owned())
                };
                let referenced_by = others.remove(&layer.key).or_else(pulled);
                let (freed, kept) = self.0.freed_and_kept(&layer);
                let estimated = self.estimates_sizes();
                let id = layer.key.as_str().into();
                sharing.add(MeasuredLayer { id, amount: freed, estimated, referenced_by });
                if kept != DiskSpace::ZERO {
                    let (id, referenced_by) = (kept_part(layer.key.as_str()), Some(NEXT_PULL.to_owned()));
                    sharing.add(MeasuredLayer { id, amount: kept, estimated, referenced_by });
                }
            }
            let mut of: HashMap<String, Vec<LayerId>> = HashMap::new();
            each_layers_users(reader, |key, users| {
                let parts = [key.into(), kept_part(key)].into_iter().filter(|part| sharing.contains(part));
                let parts: Vec<LayerId> = parts.collect();
                for user in users {
                    of.entry(user.clone()).or_default().extend(parts.iter().cloned());
                }
            })?;
            let own = self.0.own_files(reader)?;
            for id in reader.endings(IMAGES, "")? {
                let own = own.get(&id).copied().unwrap_or_default();
                let keys = of.remove(&id).unwrap_or_default();
                sharing.add_image(ImageId::from(id), &keys, own);
            }
            Ok(sharing)
        })
    }
}
