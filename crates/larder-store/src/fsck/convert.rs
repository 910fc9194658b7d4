//! Converts layers that are directories into EROFS images.
//!
//! ```text
//! image in staging -> synced -> exchanged with the directory -> synced -> record -> directory to the trash
//! ```
//!
//! A power cut before the exchange leaves the directory, and one after it leaves an image that is durable: the next start
//! takes its record from the image's file. A layer that is in use stays as it is.

use std::io;

use crate::disk::{DiskSpace, SpaceReserve};
use crate::erofs::ErofsFile;
use crate::store::db::{DbRead as _, LAYERS, decode};
use crate::store::error::StoreErrorContext as _;
use crate::store::layer_file::read_record;
use crate::store::{FILES, FS, IMAGE, LayerKey, LayerRecord, LayerStaging, OpenStore, Store, StoreError};
use crate::unpack::layer_manifest::LayerManifestError;
use crate::unpack::{DirectoryImage, UnpackError, UnpackOptions, UnpackTarget};

/// What a conversion did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConversionReport {
    /// Layers that are images now.
    pub converted: u64,
    /// Layers that remain directories, and why.
    pub remaining: Vec<(LayerKey, String)>,
}

impl Store {
    /// Converts all undamaged layers that are directories, unless they are in use. Fails where EROFS images cannot be mounted,
    /// and where an image would use up the `reserve` of the filesystem.
    pub fn convert_layers(&self, reserve: DiskSpace) -> Result<ConversionReport, StoreError> {
        self.erofs_mount().context("mount EROFS images")?;
        let mut layers: Vec<LayerRecord> =
            self.0.db.read("find layers to convert", |reader| reader.all(LAYERS))?;
        layers.retain(|layer| layer.present && layer.erofs.is_none());
        let reserve = Some(SpaceReserve::new(self.root().to_owned(), reserve));
        let options = UnpackOptions { reserve, ..UnpackOptions::default() };
        let mut report = ConversionReport::default();
        for layer in layers {
            match self.convert_layer(&layer, &options)? {
                None => report.converted += 1,
                Some(reason) => report.remaining.push((layer.key, reason)),
            }
        }
        self.0.trash.kick();
        Ok(report)
    }

    /// Converts a layer; `Some` is why it remains a directory.
    fn convert_layer(
        &self,
        layer: &LayerRecord,
        options: &UnpackOptions,
    ) -> Result<Option<String>, StoreError> {
        if layer.damaged {
            return Ok(Some("damaged".to_owned()));
        }
        if self.0.is_used(&layer.key)? {
            return Ok(Some("in use".to_owned()));
        }
        let staging = self.begin_layer()?;
        match self.0.write_image(layer, &staging, options) {
            Ok(image) => self.0.replace_directory(layer, &staging, image),
            Err(error) => unsuitable(error).map(Some).context("convert a layer"),
        }
    }
}

/// Why a layer cannot become an image. An error of the filesystem says nothing about the layer, unless a file is missing.
fn unsuitable(error: UnpackError) -> io::Result<String> {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound, UnexpectedEof};
    let kind = match &error {
        UnpackError::File { cause, .. }
        | UnpackError::Manifest { cause: LayerManifestError::Io(cause), .. } => cause.kind(),
        _ => NotFound,
    };
    match kind {
        NotFound | UnexpectedEof | NotADirectory | IsADirectory => Ok(larder::error_chain(&error)),
        kind => Err(io::Error::new(kind, error)),
    }
}

impl OpenStore {
    fn write_image(
        &self,
        layer: &LayerRecord,
        staging: &LayerStaging,
        options: &UnpackOptions,
    ) -> Result<ErofsFile, UnpackError> {
        let path = self.layout.layer(&layer.key);
        let (root, files) = (path.join(FS), path.join(FILES));
        let from = UnpackTarget { root: &root, files: &files };
        let (image, manifest) = (staging.dir().join(IMAGE), staging.dir().join(FILES));
        let conversion = DirectoryImage { from, image: &image, manifest: &manifest };
        conversion.write(&layer.facts.diff_id, options)
    }

    fn replace_directory(
        &self,
        layer: &LayerRecord,
        staging: &LayerStaging,
        image: ErofsFile,
    ) -> Result<Option<String>, StoreError> {
        let doing = "convert a layer";
        let (file, record) = staging.complete_image(&layer.key, layer.facts.clone(), image)?;
        staging.sync().context(doing)?;
        let path = self.layout.layer(&layer.key);
        let _gate = self.gate();
        let present = self.db.read(doing, |reader| reader.get::<LayerRecord>(LAYERS, layer.key.as_str()))?;
        if present.as_ref() != Some(layer) || self.is_used(&layer.key)? {
            return Ok(Some("in use".to_owned()));
        }
        self.disk.exchange(&file, &path).context(doing)?;
        let written = self.disk.sync_dir(&self.layout.layers()).context(doing).and_then(|()| {
            self.db.write(doing, |writer| {
                writer.put(LAYERS, layer.key.as_str(), &record)?;
                Ok(self.recheck_images(writer, &layer.key)?)
            })
        });
        if written.is_err() {
            // If this fails too, the next start adopts the image.
            let _ = self.disk.exchange(&file, &path);
        }
        written.map(|()| None) // the directory is discarded with what was staged
    }

    /// Records images that took the place of a directory when the process or the machine ended.
    pub(crate) fn adopt_images(&self) -> Result<(), StoreError> {
        let doing = "compare layers with the database";
        let layers: Vec<LayerRecord> = self.db.read(doing, |reader| reader.all(LAYERS))?;
        for record in layers.iter().filter_map(|layer| self.image_instead_of(layer)) {
            self.db.write(doing, |writer| {
                writer.put(LAYERS, record.key.as_str(), &record)?;
                Ok(self.recheck_images(writer, &record.key)?)
            })?;
        }
        Ok(())
    }

    /// The record of the image that is where the database has a directory: the one behind the image.
    pub(super) fn image_instead_of(&self, layer: &LayerRecord) -> Option<LayerRecord> {
        let path = self.layout.layer(&layer.key);
        if !layer.present || layer.erofs.is_some() || !path.is_file() {
            return None;
        }
        let image: LayerRecord = decode(layer.key.as_str(), &read_record(&path).ok()?).ok()?;
        let is_its_own = image.key == layer.key && image.erofs.is_some();
        is_its_own.then_some(LayerRecord { damaged: layer.damaged, ..image })
    }
}
