//! Options of a check, and the comparison of a layer with its manifest.

use std::error::Error;
use std::fmt;
use std::path::Path;

use crate::erofs::digest::ImageCheck;
use crate::store::image_check::check_image_layer;
use crate::store::{FILES, FS, LayerRecord};
use crate::unpack::{CheckDepth, verify};

/// How to check a store.
#[derive(Debug, Clone, Copy)]
pub struct FsckOptions<'a> {
    /// Read every byte of every file. When false only names, sizes, modes and the like are compared.
    pub contents: bool,
    /// Repair what can be repaired.
    pub repair: bool,
    /// Layers that are checked at once; at least 1.
    pub threads: usize,
    /// What compares a layer with its manifest.
    pub check: &'a dyn LayerChecker,
}

impl Default for FsckOptions<'static> {
    /// Everything is read, nothing is changed, on all cores up to four.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4));
        FsckOptions { contents: true, repair: false, threads, check: &ManifestLayerChecker }
    }
}

/// Compares a layer's directory with the manifest written when it was unpacked.
pub trait LayerChecker: fmt::Debug + Sync {
    /// Reports each mismatch to `found`: `usr/bin/tool: content differs`. An error means that the check could not be done.
    fn check(
        &self,
        layer: &Path,
        contents: bool,
        found: &mut dyn FnMut(String),
    ) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// Compares a layer with its digests, if it is an EROFS image, or else with its manifest.
pub(super) fn check_files(
    layer: &LayerRecord,
    path: &Path,
    directories: &dyn LayerChecker,
    contents: bool,
    found: &mut dyn FnMut(String),
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let Some(file) = &layer.erofs else { return directories.check(path, contents, found) };
    let depth = if contents { ImageCheck::Content } else { ImageCheck::Size };
    if let Some(damage) = check_image_layer(layer, file, path, depth)? {
        found(damage);
    }
    Ok(())
}

/// By the manifest that [`unpack`](crate::unpack) writes.
#[derive(Debug, Clone, Copy, Default)]
pub struct ManifestLayerChecker;

impl LayerChecker for ManifestLayerChecker {
    fn check(
        &self,
        layer: &Path,
        contents: bool,
        found: &mut dyn FnMut(String),
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let (fs, files) = (layer.join(FS), layer.join(FILES));
        for needed in [&fs, &files] {
            if !needed.exists() {
                found(format!("{}: missing", needed.strip_prefix(layer).unwrap_or(needed).display()));
                return Ok(());
            }
        }
        let depth = if contents { CheckDepth::Content } else { CheckDepth::Metadata };
        for damage in verify(&fs, &files, depth)? {
            let damage = damage?;
            found(format!("{}: {}", damage.path.display(), damage.kind));
        }
        Ok(())
    }
}
