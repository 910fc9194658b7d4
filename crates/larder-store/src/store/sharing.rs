//! Which image has which layers, and what each takes: what collection plans by.

use std::collections::HashMap;

use larder::gc::{Layer, Layers};
use larder::reference::LayerId;

use super::db::{LEASES, LISTED, MOUNTS, Source as _};
use super::error::StoreError;
use super::holds::Item;
use super::inner::Store;
use super::listing::Listed;
use super::records::{LayerKey, LeaseRecord, MountRecord};
use super::usage::{each_layers_users, layers};

impl Store {
    /// All images with their layers, those that lack one included, and what else holds a layer: leases, mounts, and pulls
    /// under way.
    pub fn sharing(&self) -> Result<Layers, StoreError> {
        self.0.db.read("look up which images share layers", |reader| {
            let mut sharing = Layers::unknown();
            let mut held: HashMap<LayerKey, String> = HashMap::new();
            reader.each(LEASES, |lease: LeaseRecord| {
                for key in lease.leased.layers {
                    held.insert(key, format!("lease {}", lease.id));
                }
            })?;
            reader.each(MOUNTS, |mount: MountRecord| {
                for key in mount.layers {
                    held.insert(key, format!("the mount {}", mount.target.display()));
                }
            })?;
            for layer in layers(reader)? {
                let pulled = || {
                    let pulling = self.0.holds.has(&Item::Layer(layer.key.clone()));
                    pulling.then(|| "a pull under way".to_owned())
                };
                let held_by = held.remove(&layer.key).or_else(pulled);
                let id = layer.key.as_str().into();
                sharing.add(Layer { id, amount: layer.usage, estimated: false, held_by });
            }
            let mut of: HashMap<String, Vec<LayerId>> = HashMap::new();
            each_layers_users(reader, |key, users| {
                for user in users {
                    of.entry(user.clone()).or_default().push(key.into());
                }
            })?;
            let own = self.0.own_files(reader)?;
            reader.each(LISTED, |image: Listed| {
                let own = own.get(image.id.as_str()).copied().unwrap_or_default();
                let keys = of.remove(image.id.as_str()).unwrap_or_default();
                sharing.add_image(&image.id, &keys, own, None);
            })?;
            Ok(sharing)
        })
    }
}
