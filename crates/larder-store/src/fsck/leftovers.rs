//! Finds files in the store that no record refers to.

use std::collections::HashSet;
use std::path::PathBuf;

use larder::reference::Digest;

use super::report::{FsckReport, RepairState, StoreDamage};
use crate::mounts::{is_extracted, key_of};
use crate::store::db::{DbRead as _, LAYERS, MOUNTS, USES};
use crate::store::error::StoreErrorContext as _;
use crate::store::layout::{digest_of_name, names_in};
use crate::store::references::ReferencedItem;
use crate::store::{LayerKey, OpenStore, StoreError};

impl OpenStore {
    pub(super) fn check_leftovers(&self, repair: bool, report: &mut FsckReport) -> Result<(), StoreError> {
        let doing = "find leftovers";
        // While nothing moves: this reads names only, no content.
        let _guard = self.lock_content();
        let mut leftovers = self.leftover_layers()?;
        leftovers.extend(self.leftover_blobs()?);
        leftovers.extend(self.leftover_indexes().context(doing)?);
        leftovers.extend(self.leftover_remnants()?);
        for name in names_in(&self.layout.ingests()).context(doing)? {
            if digest_of_name(&name).is_none() {
                leftovers.push(self.layout.ingests().join(name));
            }
        }
        leftovers.extend(self.leftover_snapshots()?);
        leftovers.extend(self.leftover_extractions()?);
        let mounts = self.db.read(doing, |reader| reader.endings(MOUNTS, ""))?;
        for name in names_in(&self.layout.mounts()).context(doing)? {
            if !mounts.contains(&name) {
                leftovers.push(self.layout.mounts().join(name));
            }
        }
        for path in leftovers {
            if repair {
                self.discard(&path).context("remove a leftover")?;
            }
            report.add(StoreDamage::Leftover { path }, RepairState::when(repair, RepairState::Repaired));
        }
        for name in names_in(&self.layout.lost_snapshots()).context(doing)? {
            let path = self.layout.lost_snapshots().join(name);
            report.add(StoreDamage::LostSnapshot { path }, RepairState::Open);
        }
        Ok(())
    }

    fn leftover_layers(&self) -> Result<Vec<PathBuf>, StoreError> {
        let doing = "find leftover layers";
        let known: HashSet<String> =
            self.db.read(doing, |reader| reader.endings(LAYERS, ""))?.into_iter().collect();
        let mut leftovers = Vec::new();
        for name in names_in(&self.layout.layers()).context(doing)? {
            let arriving = LayerKey::parse(&name).is_some_and(|key| self.uncommitted_layers.has(&key));
            if !known.contains(&name) && !arriving {
                leftovers.push(self.layout.layers().join(name));
            }
        }
        Ok(leftovers)
    }

    /// Extracted layers that no mount has, and those that are not complete: no mount uses these.
    fn leftover_extractions(&self) -> Result<Vec<PathBuf>, StoreError> {
        let used = self.layers_to_mount()?;
        let names = names_in(&self.layout.extracted()).context("find leftover extracted layers")?;
        let is_leftover = |name: &String| {
            let is_used = key_of(name).is_some_and(|key| used.contains(&key));
            !is_used || !is_extracted(&self.layout.extracted().join(name))
        };
        let leftovers = names.into_iter().filter(is_leftover);
        Ok(leftovers.map(|name| self.layout.extracted().join(name)).collect())
    }

    fn leftover_blobs(&self) -> Result<Vec<PathBuf>, StoreError> {
        let doing = "find leftover manifests";
        let used = self.db.read(doing, |reader| reader.endings(USES, "blob/"))?;
        let used: HashSet<&str> = used.iter().filter_map(|key| key.split('/').next()).collect();
        let mut leftovers = Vec::new();
        for algorithm in names_in(&self.layout.blobs()).context(doing)? {
            let dir = self.layout.blobs().join(&algorithm);
            if !dir.is_dir() {
                leftovers.push(dir);
                continue;
            }
            for hex in names_in(&dir).context(doing)? {
                let digest = format!("{algorithm}:{hex}");
                let held = Digest::parse(&digest)
                    .is_ok_and(|digest| self.references.has(&ReferencedItem::Blob(digest)));
                if !used.contains(digest.as_str()) && !held {
                    leftovers.push(dir.join(hex));
                }
            }
        }
        Ok(leftovers)
    }
}
