//! Images from files: an OCI layout in a directory or an archive, the output of `docker save`, or a directory of
//! skopeo; and an OCI layout whose blobs another program has.
//!
//! ```text
//! directory | file | stream | blobs -> entries by name -> images: manifests, configs, where each layer's bytes are
//! ```
//!
//! Read [`Store::read_import`] first. It reads small documents and does not read layers; the caller that unpacks them
//! gets their bytes from [`Import::open`]. A stream or a compressed file cannot be read twice: its content is spooled
//! in the store's `staging` directory, except layers that the store already has. Those are referenced while the import
//! lasts.
//!
//! Guarantees: no document is larger in memory than [`larder_registry::manifest::MAX_BYTES`], no archive has more than
//! 100,000 entries; entry names are only ever looked up among those of the archive, or below the given directory;
//! manifests and configs have their digests. Layers are verified by the code that unpacks them.

mod archive;
mod docker;
mod entries;
mod error;
mod found_images;
mod image;
mod naming;
mod oci;
mod spool;

use std::io::Read;
use std::sync::Arc;

use larder::reference::{Digest, Reference};

pub use entries::{BlobReader, ImportSource, files_of};
pub use error::ImportError;
pub use found_images::LeftOutManifest;
pub use image::ImportImage;
pub(crate) use oci::PULLED_AS;

use self::entries::{ImportEntries, PresentLayers};
use super::handle::Store;
use crate::disk::DiskSpace;
use larder_registry::manifest::PlatformMatcher;

/// Images that were found, and their layers' bytes.
#[derive(Debug)]
pub struct Import {
    /// The images, in the order in which they were written.
    pub images: Vec<ImportImage>,
    /// Manifests beside them that are not loaded.
    pub left_out: Vec<LeftOutManifest>,
    entries: Arc<ImportEntries>,
}

impl Store {
    /// Finds the images in `from`, but for those that are for other platforms than `platform`. Where no index declares
    /// the platform of an image, its config decides. Of an image for several platforms the best one is taken. An image
    /// whose names are but tags, as OCI layouts may have, or that has none, is one of the repository `base_name`; with
    /// a tag, it is the name itself. What has to be kept of a stream leaves `reserve` free on the disk.
    pub fn read_import(
        &self,
        from: ImportSource,
        platform: &PlatformMatcher,
        base_name: Option<&Reference>,
        reserve: DiskSpace,
    ) -> Result<Import, ImportError> {
        let known = PresentLayers::of(self)?;
        let mut entries = ImportEntries::read(self, from, &known, reserve)?;
        let found = if entries.has("index.json") {
            oci::images(&entries, platform)?
        } else if entries.has(docker::MANIFEST) {
            let manifest = entries.document(docker::MANIFEST)?;
            if manifest.trim_ascii_start().starts_with(b"{") {
                oci::images_of_directory(&mut entries, &manifest, platform)?
            } else {
                docker::images(&entries, platform)?
            }
        } else {
            let entry = entries.root_file().cloned();
            return Err(entry.map_or(ImportError::NoImages, |entry| ImportError::Files { entry }));
        };
        let (mut images, left_out) = found.finish(platform)?;
        naming::name(&mut images, base_name)?;
        Ok(Import { images, left_out, entries: Arc::new(entries) })
    }
}

impl Import {
    /// The bytes of a layer, by the digest that its manifest gives it. Can be asked for several times.
    pub fn open(&self, layer: &Digest) -> Result<Box<dyn Read + Send>, ImportError> {
        self.entries.open_layer(layer)
    }
}
