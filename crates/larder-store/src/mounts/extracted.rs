//! Layers that are extracted where they cannot be mounted: to `extracted/KEY/fs`, for as long as they would be mounted.
//!
//! A layer is extracted in `staging`, synced, and then renamed: what is at its place is complete and durable. The
//! directory around `fs` belongs to larder whatever the mode of the layer's root.

use std::io;
use std::path::{Path, PathBuf};

use super::MountError;
use super::overlay::in_user_namespace;
use crate::disk::{SpaceReserve, ensure_dir};
use crate::erofs::digest::LayerCheck;
use crate::store::layer_check::check_layer_file;
use crate::store::layout::FOR_USERS;
use crate::store::{LayerHandle, LayerKey, OpenStore};
use crate::unpack::{OverlayForm, UnpackError, extract_layer};

/// The files of an extracted layer, in its wrapper.
const FILES: &str = "fs";

/// The layer that a name in `extracted` is for.
pub(crate) fn key_of(name: &str) -> Option<LayerKey> {
    LayerKey::parse(name.strip_suffix(FOR_USERS).unwrap_or(name))
}

/// Returns true if a wrapper has the files of a layer: only a complete extraction is renamed to its place.
pub(crate) fn is_extracted(wrapper: &Path) -> bool {
    wrapper.join(FILES).is_dir()
}

impl OpenStore {
    /// The directory of an extracted layer; `None` if it is not extracted.
    pub(super) fn extracted_files(&self, key: &LayerKey) -> Option<PathBuf> {
        let wrapper = self.layout.extracted_layer(key, in_user_namespace());
        is_extracted(&wrapper).then(|| wrapper.join(FILES))
    }

    /// The directory of an extracted layer; extracts it, unless another thread did that first.
    pub(super) fn extract_once(&self, layer: &LayerHandle) -> Result<PathBuf, MountError> {
        let lock = self.extractions.of(layer.key());
        let _alone = lock.lock();
        if let Some(files) = self.extracted_files(layer.key()) {
            return Ok(files);
        }
        let wrapper = self.layout.extracted_layer(layer.key(), in_user_namespace());
        let failed = |cause| MountError::Extract { key: layer.key().clone(), cause };
        self.extract(layer, &wrapper).map_err(failed)?;
        Ok(wrapper.join(FILES))
    }

    fn extract(&self, layer: &LayerHandle, to: &Path) -> io::Result<()> {
        if let Some(damage) = check_layer_file(layer.record(), layer.path(), LayerCheck::Content)? {
            return Err(io::Error::new(io::ErrorKind::InvalidData, damage));
        }
        ensure_dir(&*self.disk, &self.layout.extracted())?;
        let staged = self.layout.new_staging();
        let files_dir = staged.join(FILES);
        self.disk.create_dir(&staged)?;
        let extracted = self.extract_to(layer, &files_dir).and_then(|()| {
            self.disk.rename(&staged, to)?;
            self.disk.sync_dir(&self.layout.extracted())
        });
        if extracted.is_err() {
            // If this fails too, it is removed when the store is opened.
            let _ = self.discard(&staged);
            self.trash.kick();
        }
        extracted
    }

    /// Extracts a layer to a new directory. Returns when it is durable.
    fn extract_to(&self, layer: &LayerHandle, files_dir: &Path) -> io::Result<()> {
        self.disk.create_dir(files_dir)?;
        let writes = self.disk.open_sync(self.layout.root())?;
        let overlay = if in_user_namespace() { OverlayForm::User } else { OverlayForm::Trusted };
        let reserve = SpaceReserve::new(self.layout.root().to_owned(), self.config.reserve);
        extract_layer(&layer.open()?, files_dir, overlay, reserve).map_err(UnpackError::into_io)?;
        writes.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_extracted_layers_have_the_key() {
        let name = "a".repeat(64);
        let key = LayerKey::parse(&name);
        assert!(key.is_some() && key_of(&name) == key && key_of(&format!("{name}.user")) == key);
        assert_eq!(key_of(&format!("{name}.other")), None);
    }
}
