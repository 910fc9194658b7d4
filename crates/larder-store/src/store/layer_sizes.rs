//! Measures layers when their size is final, and those that an earlier version measured too early.

use std::collections::HashMap;
use std::io;

use super::db::{DbRead as _, LAYERS};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layers::LayerHandle;
use super::records::{LayerKey, LayerRecord};
use crate::disk::{DiskSpace, SizeAccuracy, measure};

impl Store {
    /// Whether layer sizes are estimates on this filesystem.
    pub fn estimates_sizes(&self) -> bool {
        self.0.sizes == SizeAccuracy::Estimated
    }

    /// Measures the layers that an earlier version of larder measured before they were synced. Does nothing once that is
    /// done. Interrupted, it starts over. If it fails, as on a full disk, the sizes remain as they were recorded.
    pub fn settle_layer_sizes(&self) {
        if let Err(error) = self.measure_unsettled_layers() {
            tracing::warn!("{}", larder::error_chain(&error));
        }
    }

    fn measure_unsettled_layers(&self) -> Result<(), StoreError> {
        let doing = "measure layers";
        let mut layers: Vec<LayerRecord> = self.0.db.read(doing, |reader| reader.all(LAYERS))?;
        layers.retain(|layer| layer.present && !layer.settled);
        if layers.is_empty() {
            return Ok(());
        }
        let mut measured = HashMap::new();
        for layer in layers {
            let usage = measure(&self.0.layout.layer(&layer.key)).context(doing)?;
            measured.insert(layer.key, usage);
        }
        // No layer is replaced or removed in between.
        let _gate = self.0.gate();
        self.0.db.write(doing, |writer| {
            for (key, usage) in &measured {
                let found = writer.get::<LayerRecord>(LAYERS, key.as_str())?;
                if let Some(layer) = found.filter(|layer| layer.present && !layer.settled) {
                    writer.put(
                        LAYERS,
                        key.as_str(),
                        &LayerRecord { usage: *usage, settled: true, ..layer },
                    )?;
                }
            }
            Ok(())
        })
    }
}

impl OpenStore {
    /// The records of the fresh ones of these layers, with their sizes. They must be synced.
    pub(super) fn settled_records(
        &self,
        layers: &[LayerHandle],
    ) -> Result<HashMap<LayerKey, LayerRecord>, StoreError> {
        let mut records = HashMap::new();
        for layer in layers.iter().filter(|layer| layer.is_fresh()) {
            let usage = self.settled_usage(layer).context("measure a layer")?;
            records
                .insert(layer.key().clone(), LayerRecord { usage, settled: true, ..layer.record().clone() });
        }
        Ok(records)
    }

    fn settled_usage(&self, layer: &LayerHandle) -> io::Result<DiskSpace> {
        match self.sizes {
            SizeAccuracy::WhileWritten => Ok(layer.record().usage),
            SizeAccuracy::AfterSync | SizeAccuracy::Estimated => measure(layer.path()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{FS, LayerMetadata, StoreConfig};
    use larder::reference::Digest;

    fn record(store: &Store, key: &LayerKey) -> LayerRecord {
        let get = |reader: &crate::store::db::DbSnapshot| reader.get::<LayerRecord>(LAYERS, key.as_str());
        store.0.db.read("look up a layer", get).unwrap().unwrap()
    }

    #[test]
    fn layers_of_an_earlier_version_are_measured_once() {
        let dir = tempfile::tempdir().unwrap();
        let config = StoreConfig { background_deletion: false, ..StoreConfig::default() };
        let store = Store::open(&dir.path().join("store"), config).unwrap();
        let staging = store.begin_layer().unwrap();
        fs_err::create_dir(staging.dir().join(FS)).unwrap();
        fs_err::write(staging.dir().join(FS).join("file"), vec![1; 100_000]).unwrap();
        let digest = Digest::sha256("layer");
        let (key, diff_id) = (LayerKey::from(&digest), digest.clone());
        let facts =
            LayerMetadata { diff_id, digest, compressed_bytes: 1, plain_bytes: 1, files: 1, pending: false };
        let layer = staging.finish(&key, facts, None).unwrap();
        store.commit_layers(std::slice::from_ref(&layer), None).unwrap();
        let settled = record(&store, &key);
        assert!(settled.settled && settled.usage == measure(layer.path()).unwrap());

        let early =
            LayerRecord { usage: DiskSpace { bytes: 1 << 30, inodes: 1 }, settled: false, ..settled.clone() };
        let put = |record: &LayerRecord| {
            let write =
                |writer: &crate::store::db::DbTransaction| Ok(writer.put(LAYERS, key.as_str(), record)?);
            store.0.db.write("record a layer", write).unwrap();
        };
        put(&early);
        store.measure_unsettled_layers().unwrap();
        assert_eq!(record(&store, &key), settled);
        let (usage, missing) = (DiskSpace { bytes: 7, inodes: 7 }, false);
        for kept in [
            LayerRecord { usage, ..settled.clone() },
            LayerRecord { usage, settled: false, present: missing, ..settled },
        ] {
            put(&kept);
            store.measure_unsettled_layers().unwrap();
            assert_eq!(record(&store, &key), kept, "measured already, or not there");
        }
    }
}
