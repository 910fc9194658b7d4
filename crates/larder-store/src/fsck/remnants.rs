//! Checks remnants of removed layers, and indexes of layers: every byte, against their digests.
//!
//! Both are caches. One that is damaged is removed by a repair, and nothing else is lost: the next pull of a removed
//! layer is one in full, and a damaged layer is repaired by its whole blob.

use super::options::FsckOptions;
use super::report::{FsckReport, RepairState, StoreDamage};
use crate::erofs::digest::LayerCheck;
use crate::store::db::{DbRead as _, LAYERS, REMNANTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::layer_index::IndexFile;
use crate::store::layout::names_in;
use crate::store::remnants::RemnantRecord;
use crate::store::{LayerKey, LayerRecord, OpenStore, StoreError};

impl OpenStore {
    pub(super) fn check_remnants(
        &self,
        options: &FsckOptions,
        report: &mut FsckReport,
    ) -> Result<(), StoreError> {
        let doing = "check remnants of layers";
        let remnants: Vec<RemnantRecord> = self.db.read(doing, |reader| reader.all(REMNANTS))?;
        report.remnants = remnants.len() as u64;
        let check = if options.contents { LayerCheck::Content } else { LayerCheck::Size };
        for remnant in remnants {
            let Some(damage) = self.check_remnant(&remnant, check)? else { continue };
            let get = |key: &LayerKey| {
                self.db.read(doing, |reader| reader.get::<RemnantRecord>(REMNANTS, key.as_str()))
            };
            let key = remnant.layer.key.clone();
            let is_same = {
                let _guard = self.lock_content();
                get(&key)?.as_ref() == Some(&remnant) && self.check_remnant(&remnant, check)?.is_some()
            };
            if !is_same {
                continue; // it was removed or replaced since
            }
            if options.repair {
                self.discard_remnants(&[remnant])?;
            }
            let is_removed = options.repair && get(&key)?.is_none();
            report.add(
                StoreDamage::RemnantDamaged { key, damage },
                RepairState::when(is_removed, RepairState::Repaired),
            );
        }
        Ok(())
    }

    /// Checks the indexes of layers that are here; that of a removed layer is a part of its remnant.
    pub(super) fn check_indexes(&self, repair: bool, report: &mut FsckReport) -> Result<(), StoreError> {
        let doing = "check indexes of layers";
        for key in
            names_in(&self.layout.indexes()).context(doing)?.iter().filter_map(|name| LayerKey::parse(name))
        {
            if self.read_index(&key)? != IndexFile::Damaged {
                continue;
            }
            let _guard = self.lock_content();
            if !self.layout.layer(&key).exists() || self.read_index(&key)? != IndexFile::Damaged {
                continue;
            }
            if repair {
                self.discard_index(&key)?;
            }
            report.add(StoreDamage::IndexDamaged { key }, RepairState::when(repair, RepairState::Repaired));
        }
        Ok(())
    }

    /// Removes the index of a layer that is here. While content is locked.
    fn discard_index(&self, key: &LayerKey) -> Result<(), StoreError> {
        let doing = "remove the damaged index of a layer";
        let index = self.index_space(key);
        self.disk.remove_file(&self.layout.index(key)).context(doing)?;
        self.db.write(doing, |writer| {
            let Some(mut layer) = writer.get::<LayerRecord>(LAYERS, key.as_str())? else { return Ok(()) };
            layer.forget_index(index);
            writer.put(LAYERS, key.as_str(), &layer)?;
            self.recheck_images(writer, key)?;
            Ok(())
        })
    }
}
