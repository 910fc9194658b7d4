//! Checks layers: the bytes of each file against their digest.

use super::options::FsckOptions;
use super::report::{FsckReport, RepairState, StoreDamage};
use crate::erofs::digest::LayerCheck;
use crate::store::db::{DbRead as _, LAYERS, USES};
use crate::store::layer_check::check_layer_file;
use crate::store::snapshot_records::each_snapshot_layer;
use crate::store::{LayerKey, LayerRecord, OpenStore, StoreError};
use parking_lot::Mutex;

impl OpenStore {
    pub(super) fn check_layers(
        &self,
        options: &FsckOptions,
        report: &mut FsckReport,
    ) -> Result<(), StoreError> {
        let mut layers: Vec<LayerRecord> =
            self.db.read("find damaged layers", |reader| reader.all(LAYERS))?;
        layers.retain(|layer| layer.present); // those that are missing are in the list of what to fetch
        report.layers = layers.len() as u64;
        let found = Mutex::new(Vec::new());
        let queue = Mutex::new(layers.iter());
        let next = || queue.lock().next();
        std::thread::scope(|scope| {
            for _ in 0..options.threads.clamp(1, 64) {
                scope.spawn(|| {
                    while let Some(layer) = next() {
                        if let Some(damage) = self.check_layer(layer, options) {
                            found.lock().push((&layer.key, damage));
                        }
                    }
                });
            }
        });
        let mut found = found.into_inner();
        found.sort_by_key(|(key, _)| *key);
        if options.repair && options.contents {
            // It was replaced by a process that could not note it.
            for layer in layers.iter().filter(|layer| layer.damaged) {
                if !found.iter().any(|(key, _)| **key == layer.key) {
                    self.note_damaged(&layer.key, false)?;
                }
            }
        }
        for (key, damage) in found {
            self.judge_layer(key, damage, options.repair, report)?;
        }
        Ok(())
    }

    fn is_of_snapshots_only(&self, key: &LayerKey) -> Result<bool, StoreError> {
        self.db.read("look up the users of a damaged layer", |reader| {
            let mut is_of_snapshot = false;
            each_snapshot_layer(reader, |of| is_of_snapshot |= of == *key)?;
            Ok(is_of_snapshot && !reader.any(USES, &format!("layer/{key}/"))?)
        })
    }

    fn check_layer(&self, layer: &LayerRecord, options: &FsckOptions) -> Option<StoreDamage> {
        let (key, path) = (&layer.key, self.layout.layer(&layer.key));
        if !path.exists() {
            return Some(StoreDamage::LayerMissing { key: key.clone() });
        }
        let check = if options.contents { LayerCheck::Content } else { LayerCheck::Size };
        let key = key.clone();
        match check_layer_file(layer, &path, check) {
            Ok(damage) => damage.map(|damage| StoreDamage::LayerDamaged { key, damage }),
            Err(error) => Some(StoreDamage::LayerUnchecked { key, reason: error.to_string() }),
        }
    }

    /// Records that a layer is damaged or missing, unless it was removed or replaced since. A damaged layer is retained
    /// until a pull has fetched another: it is unknown whether one can.
    fn judge_layer(
        &self,
        key: &LayerKey,
        damage: StoreDamage,
        repair: bool,
        report: &mut FsckReport,
    ) -> Result<(), StoreError> {
        let doing = "recheck a damaged layer";
        let guard = self.lock_content();
        let record = self.db.read(doing, |reader| reader.get::<LayerRecord>(LAYERS, key.as_str()))?;
        if !record.is_some_and(|record| record.present) {
            return Ok(());
        }
        match damage {
            StoreDamage::LayerUnchecked { .. } => {
                report.add(damage, RepairState::Open);
                return Ok(());
            }
            StoreDamage::LayerMissing { .. } if self.layout.layer(key).exists() => return Ok(()),
            _ => {}
        }
        match damage {
            StoreDamage::LayerMissing { .. } if repair => self.note_missing(std::slice::from_ref(key))?,
            _ if repair => self.note_damaged(key, true)?,
            _ => {}
        }
        if self.is_of_snapshots_only(key)? {
            report.add(StoreDamage::SnapshotLayer { damage: Box::new(damage) }, RepairState::Open);
        } else {
            report.add(damage, RepairState::when(repair, RepairState::AwaitsPull));
        }
        drop(guard);
        Ok(())
    }
}
