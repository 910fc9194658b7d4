//! Which images use which layers, and the size of each: the input of GC.

use std::collections::HashMap;

use larder::gc::{LayerUsageIndex, MeasuredLayer};
use larder::reference::{ImageId, LayerId};

use super::db::{DbRead as _, IMAGES};
use super::error::StoreError;
use super::handle::Store;
use super::references::ReferencedItem;
use super::usage::{each_layers_users, layer_users_beside_images, layers};

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
                let id = layer.key.as_str().into();
                sharing.add(MeasuredLayer {
                    id,
                    amount: layer.usage,
                    estimated: self.estimates_sizes(),
                    referenced_by,
                });
            }
            let mut of: HashMap<String, Vec<LayerId>> = HashMap::new();
            each_layers_users(reader, |key, users| {
                for user in users {
                    of.entry(user.clone()).or_default().push(key.into());
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
