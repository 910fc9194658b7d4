//! Writes images of the store: as an archive of an OCI layout, or the files that a container would see.
//!
//! ```text
//! file of a layer                   -> its blob, byte for byte    -> OCI layout
//! files of all layers               -> what an overlay shows      -> one tar archive
//! ```
//!
//! Read [`Store::begin_export`] first. Methods block on the disk.

mod error;
mod oci;

use std::io::{self, Write};

use larder::reference::{Digest, ImageName, Reference};

pub use error::ExportError;

use crate::store::error::StoreErrorContext as _;
use crate::store::{ImageRecord, LayerHandle, Store, StoreError};
use crate::unpack::{HoleEncoding, MergedLayers, rebuild_archive, rebuild_file, write_merged_files};
use larder_registry::manifest::ArtifactFile;

/// An image to export.
#[derive(Debug, Clone)]
pub struct ExportRequest {
    /// A name or ID that selects it.
    pub image: ImageName,
    /// The name that it has in the archive, in full, with a tag or a digest, and with the platform of an image for
    /// other machines; `None` for an image that was selected by its ID.
    pub name: Option<Reference>,
}

/// Images that are being exported. Their layers remain while this exists, even if the images are removed.
#[derive(Debug)]
pub struct ImageExport {
    store: Store,
    images: Vec<ExportedImage>,
}

/// An image with all that the archive needs of it.
#[derive(Debug)]
struct ExportedImage {
    record: ImageRecord,
    names: Vec<Reference>,
    config: Vec<u8>,
    /// The indexes and manifests that it was pulled with, as the record has them.
    manifests: Vec<(Digest, Vec<u8>)>,
    /// The own config of an artifact, if it is kept.
    artifact_config: Option<Vec<u8>>,
    layers: Vec<LayerHandle>,
}

impl Store {
    /// Finds images, and keeps their layers. Nothing is written yet.
    pub fn begin_export(&self, requests: &[ExportRequest]) -> Result<ImageExport, ExportError> {
        let mut images: Vec<ExportedImage> = Vec::new();
        for ExportRequest { image, name } in requests {
            let Some(record) = self.image(image)? else {
                return Err(StoreError::NoImage { image: image.clone() }.into());
            };
            let known = images.iter_mut().find(|known| known.record.id == record.id);
            let exported = if let Some(known) = known {
                known
            } else {
                images.push(self.open_export(record)?);
                let last = images.len() - 1;
                &mut images[last]
            };
            exported.names.extend(name.clone().filter(|name| !exported.names.contains(name)));
        }
        Ok(ImageExport { store: self.clone(), images })
    }

    fn open_export(&self, record: ImageRecord) -> Result<ExportedImage, ExportError> {
        let mut layers = Vec::with_capacity(record.layers.len());
        for layer in &record.layers {
            let found = self.layer(&layer.key)?;
            let found = found.ok_or_else(|| StoreError::NoLayer { key: layer.key.clone() })?;
            if found.record().damaged {
                let (image, layer) = (record.name().to_owned(), layer.diff_id.clone());
                return Err(ExportError::Damaged { image, layer });
            }
            if found.record().partial.is_some() {
                let (image, layer) = (record.name().to_owned(), layer.diff_id.clone());
                return Err(ExportError::Incomplete { image, layer });
            }
            layers.push(found);
        }
        let config = self.blob(&record.id)?;
        let config = config.ok_or_else(|| ExportError::Blob { digest: record.id.clone() })?;
        let mut manifests = Vec::new();
        for digest in &record.manifests {
            manifests.extend(self.blob(digest)?.map(|blob| (digest.clone(), blob)));
        }
        let artifact_config = record.artifact_config.as_ref().map(|digest| self.blob(digest));
        let artifact_config = artifact_config.transpose()?.flatten();
        Ok(ExportedImage { record, names: Vec::new(), config, manifests, artifact_config, layers })
    }
}

impl ImageExport {
    /// IDs of the images, each once.
    pub fn ids(&self) -> impl Iterator<Item = &Digest> {
        self.images.iter().map(|image| &image.record.id)
    }

    /// Writes an archive of an OCI layout with all images. Layers are uncompressed and have their diff IDs, so the
    /// manifests that other programs see are new; `docker load` takes it as well. The documents as they were pulled are
    /// there too: a load gives the images the digests that they have in their repositories. An artifact has its own
    /// manifest, config and blobs.
    pub fn write_oci(&self, out: &mut dyn Write) -> Result<(), ExportError> {
        oci::write(&self.images, out).map_err(|error| self.damage_or(error))
    }

    /// Writes the files of the first image as a tar archive, as a container would see them.
    pub fn write_files(&self, holes: HoleEncoding, out: &mut dyn Write) -> Result<(), ExportError> {
        let Some(image) = self.images.first() else { return Ok(()) };
        let layers = image.layers.iter().rev().map(LayerHandle::open);
        let layers = layers.collect::<io::Result<_>>().and_then(MergedLayers::new).context("open a layer")?;
        write_merged_files(&layers, holes, out).map_err(|error| self.damage_or(ExportError::from(error)))
    }

    /// The damage that may be the reason of a failure.
    fn damage_or(&self, error: ExportError) -> ExportError {
        if !error.may_be_damage() {
            return error;
        }
        let damaged = self.store.0.find_damage(self.images.iter().flat_map(|image| &image.layers));
        let Some(damaged) = damaged.first() else { return error };
        let has_it = |image: &&ExportedImage| image.record.has_layer(damaged.key());
        let image = self.images.iter().find(has_it).map_or("", |image| image.record.name()).to_owned();
        ExportError::Damaged { image, layer: damaged.record().facts.diff_id.clone() }
    }
}

/// The bytes of a layer in an archive.
struct LayerBlob<'a> {
    layer: &'a LayerHandle,
    digest: Digest,
    size: u64,
    /// The file that the layer of an artifact is; `None` for the plain archive of its files.
    file: Option<ArtifactFile>,
}

impl<'a> LayerBlob<'a> {
    /// The plain archive of a layer.
    fn archive(layer: &'a LayerHandle) -> LayerBlob<'a> {
        let facts = &layer.record().facts;
        LayerBlob { layer, digest: facts.diff_id.clone(), size: facts.plain_bytes, file: None }
    }

    /// Writes the blob, byte for byte as it was pulled. It has its size: the layout was written with that.
    fn write(&self, out: &mut dyn Write) -> Result<(), ExportError> {
        let diff_id = &self.layer.record().facts.diff_id;
        let mut out = CountedOutput { out, bytes: 0 };
        let rebuilt = match &self.file {
            Some(file) => rebuild_file(self.layer.path(), file, &self.digest, &mut out),
            None => rebuild_archive(self.layer.path(), diff_id, &mut out),
        };
        rebuilt.map_err(|cause| ExportError::layer(diff_id, cause))?;
        if out.bytes == self.size {
            return Ok(());
        }
        Err(ExportError::LayerSize { layer: diff_id.clone(), recorded: self.size, written: out.bytes })
    }
}

/// Counts what it passes on.
struct CountedOutput<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for CountedOutput<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
