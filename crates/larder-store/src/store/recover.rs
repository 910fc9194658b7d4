//! Cleans up after a process that died. Runs when the store is opened, before any other access.
//!
//! The database is authoritative. Files that it does not know are moved to the trash; recorded content without files is
//! marked as missing, so that a pull fetches it again. Only partially fetched blobs and resumable layers are retained.

use std::collections::HashSet;

use super::db::{DbRead as _, LAYERS, USES};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::OpenStore;
use super::layout::{digest_of_name, names_in};
use super::records::{LayerKey, LayerRecord};

impl OpenStore {
    pub(crate) fn recover(&self) -> Result<(), StoreError> {
        let doing = "recover the store";
        self.layout.skip_names_in_use().context(doing)?;
        self.recover_staging()?;
        self.recover_layers()?;
        self.sweep()?;
        self.recover_remnants()?;
        self.recover_indexes()?;
        self.recover_blobs()?;
        self.recover_names()?;
        self.note_missing_images()?;
        self.recover_ingests()?;
        self.recover_snapshots()?;
        self.recover_mounts()?;
        if !names_in(&self.layout.trash()).context(doing)?.is_empty() {
            self.trash.kick();
        }
        Ok(())
    }

    /// Instead of [`recover`](OpenStore::recover), where nothing is to be changed.
    pub(super) fn look(&self) -> Result<(), StoreError> {
        let doing = "look at the store";
        self.layout.skip_names_in_use().context(doing)?;
        let known = self.db.read(doing, |reader| reader.endings(LAYERS, ""))?;
        let leased = self.leased_ingests()?;
        for name in names_in(&self.layout.layers()).context(doing)? {
            if known.binary_search(&name).is_err() {
                self.keep_resumable_layer(&name, &leased);
            }
        }
        Ok(())
    }

    /// Layers that were being unpacked, and files that were being written.
    fn recover_staging(&self) -> Result<(), StoreError> {
        let doing = "clean up interrupted unpacks";
        let dir = self.layout.staging();
        for name in names_in(&dir).context(doing)? {
            self.discard(&dir.join(name)).context(doing)?;
        }
        for name in ["format.new", "larder.db.new", "larder.db.new-wal"] {
            self.disk.remove_file(&self.layout.root().join(name)).context(doing)?;
        }
        Ok(())
    }

    /// Layers that no commit named, and layers whose removal did not come to its end.
    fn recover_layers(&self) -> Result<(), StoreError> {
        let doing = "compare layers with the database";
        let known = self.db.read(doing, |reader| reader.endings(LAYERS, ""))?;
        let mut known: HashSet<String> = known.into_iter().collect();
        let leased = self.leased_ingests()?;
        for name in names_in(&self.layout.layers()).context(doing)? {
            if !known.remove(&name) && !self.keep_resumable_layer(&name, &leased) {
                self.discard(&self.layout.layers().join(name)).context(doing)?;
            }
        }
        let missing: Vec<LayerKey> = known.iter().filter_map(|key| LayerKey::parse(key)).collect();
        self.note_missing(&missing)
    }

    /// Indexes of layers that were removed.
    fn recover_indexes(&self) -> Result<(), StoreError> {
        let doing = "clean up indexes of layers";
        for path in self.leftover_indexes().context(doing)? {
            self.discard(&path).context(doing)?;
        }
        Ok(())
    }

    /// Notes that layers are not there, and that the images which need them are not whole.
    pub(crate) fn note_missing(&self, missing: &[LayerKey]) -> Result<(), StoreError> {
        if missing.is_empty() {
            return Ok(());
        }
        let incomplete = self.db.write("record missing layers", |writer| {
            let mut incomplete = Vec::new();
            for key in missing {
                let Some(mut layer) = writer.get::<LayerRecord>(LAYERS, key.as_str())? else { continue };
                if layer.present {
                    layer.present = false;
                    writer.put(LAYERS, key.as_str(), &layer)?;
                }
                incomplete.extend(self.recheck_images(writer, key)?);
            }
            Ok(incomplete)
        })?;
        self.note_images(incomplete.iter());
        Ok(())
    }

    /// Blobs of images that were not committed, or were removed.
    fn recover_blobs(&self) -> Result<(), StoreError> {
        let doing = "compare manifests and configs with the database";
        let used = self.db.read(doing, |reader| reader.endings(USES, "blob/"))?;
        let used: HashSet<&str> = used.iter().filter_map(|key| key.split('/').next()).collect();
        for algorithm in names_in(&self.layout.blobs()).context(doing)? {
            let dir = self.layout.blobs().join(&algorithm);
            if !dir.is_dir() {
                self.discard(&dir).context(doing)?;
                continue;
            }
            for hex in names_in(&dir).context(doing)? {
                if !used.contains(format!("{algorithm}:{hex}").as_str()) {
                    self.discard(&dir.join(hex)).context(doing)?;
                }
            }
        }
        Ok(())
    }

    /// Removes entries of the directory of half-fetched blobs that are none.
    fn recover_ingests(&self) -> Result<(), StoreError> {
        let doing = "clean up interrupted fetches";
        let dir = self.layout.ingests();
        for name in names_in(&dir).context(doing)? {
            if digest_of_name(&name).is_none() {
                self.discard(&dir.join(name)).context(doing)?;
            }
        }
        Ok(())
    }
}
