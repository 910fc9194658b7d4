//! A layer that the store has becomes a committed snapshot, so that containerd neither fetches nor unpacks it.

use std::time::SystemTime;

use larder::reference::Digest;

use super::{NewSnapshot, SnapshotError, begin_record};
use crate::pull::{FetchedLayer, chain_id};
use crate::store::db::{DbError, DbRead as _, IMAGES};
use crate::store::snapshot_records::put_snapshot;
use crate::store::{ImageRecord, LayerHandle, LayerKey, SnapshotKind, Store, StoreError};

impl ImageRecord {
    /// The chain IDs of its layers, lowest first.
    pub fn chain_ids(&self) -> Vec<Digest> {
        let mut chain: Vec<Digest> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            chain.push(chain_id(chain.last(), &layer.diff_id));
        }
        chain
    }
}

impl Store {
    /// Makes a committed snapshot of the layer with this chain ID, and returns its key; `None` if the store does not
    /// have that layer. containerd finds the snapshot by its labels and its parent, which `new` has; the key in it is
    /// replaced.
    pub fn adopt_layer(
        &self,
        chain: &Digest,
        new: NewSnapshot,
        now: SystemTime,
    ) -> Result<Option<String>, SnapshotError> {
        self.adopt(chain, || self.layer_of_chain(chain), new, now)
    }

    /// Adopts a layer that was fetched for this snapshot; `None` if it has been reclaimed since.
    pub fn adopt_fetched(
        &self,
        fetched: &FetchedLayer,
        new: NewSnapshot,
        now: SystemTime,
    ) -> Result<Option<String>, SnapshotError> {
        self.adopt(&fetched.chain_id, || self.layer(&fetched.key), new, now)
    }

    fn adopt(
        &self,
        chain: &Digest,
        find: impl FnOnce() -> Result<Option<LayerHandle>, StoreError>,
        mut new: NewSnapshot,
        now: SystemTime,
    ) -> Result<Option<String>, SnapshotError> {
        // One chain on two parents is two snapshots: a parent that containerd unpacked differs in each namespace.
        new.key = format!("{chain} on {}", Digest::sha256(&new.parent).hex());
        if self.snapshot(&new.key).is_ok() {
            return Ok(Some(new.key));
        }
        // Held until the record protects it.
        let Some(layer) = find()?.filter(|layer| layer.record().is_mountable()) else { return Ok(None) };
        let key = new.key.clone();
        let adopted = self.0.change_snapshots("record a snapshot of a layer", |writer| {
            let mut snapshot = match begin_record(writer, new, SnapshotKind::Committed, now)? {
                Ok(snapshot) => snapshot,
                Err(refused) => return Ok(Err(refused)),
            };
            snapshot.usage = layer.record().usage;
            snapshot.layer = Some(layer.key().clone());
            put_snapshot(writer, &snapshot)?;
            Ok(Ok(snapshot))
        });
        match adopted {
            Ok(snapshot) => self.0.note_snapshot(&snapshot),
            // Another call made it.
            Err(SnapshotError::AlreadyExists { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(Some(key))
    }

    /// The layers that snapshots have, each with the chain ID that it was adopted for.
    pub fn layer_snapshots(&self) -> Result<Vec<(LayerKey, String)>, StoreError> {
        let all = self.snapshots()?.into_iter();
        // The name of an adopted snapshot begins with its chain ID.
        let chain = |name: &str| name.split(' ').next().unwrap_or_default().to_owned();
        Ok(all.filter_map(|snapshot| Some((snapshot.layer?, chain(&snapshot.key)))).collect())
    }

    /// The images that have a layer in the place of this chain ID.
    pub fn images_with_chain(&self, chain: &Digest) -> Result<Vec<ImageRecord>, StoreError> {
        let found = self.find_chain(chain)?;
        Ok(found.into_iter().map(|(image, _)| image).collect())
    }

    /// The layer that an image has in the place of this chain ID. What a layer shows may depend on those below it, so a
    /// layer of the same diff ID elsewhere does not do.
    fn layer_of_chain(&self, chain: &Digest) -> Result<Option<LayerHandle>, StoreError> {
        for (image, at) in self.find_chain(chain)? {
            let layer = image.layers.get(at).map_or(Ok(None), |layer| self.layer(&layer.key))?;
            if let Some(layer) = layer.filter(|layer| layer.record().is_mountable()) {
                return Ok(Some(layer));
            }
        }
        Ok(None)
    }

    fn find_chain(&self, chain: &Digest) -> Result<Vec<(ImageRecord, usize)>, StoreError> {
        self.0.db.read("find a layer by its chain ID", |reader| {
            let read = |id: &str| reader.get::<ImageRecord>(IMAGES, id);
            let chains = |id: &str| Ok::<_, DbError>(read(id)?.map(|image| image.chain_ids()));
            let images = reader.endings(IMAGES, "")?;
            let mut found = Vec::new();
            for (id, at) in self.0.chains.find(chain, &images, chains)? {
                found.extend(read(&id)?.map(|image| (image, at)));
            }
            Ok(found)
        })
    }
}
