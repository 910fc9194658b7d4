//! Checks the files of a layer that is an EROFS image.

use std::io;
use std::path::Path;

use larder::error_chain;
use rustix::fs::{Advice, fadvise};

use super::layers::{FILES, IMAGE};
use super::records::LayerRecord;
use crate::erofs::ErofsFile;
use crate::erofs::digest::{ImageCheck, check_image};
use crate::unpack::layer_manifest::check_manifest;

/// What is wrong with a layer in `dir` that is an EROFS image, if anything: `layer.erofs: missing`. Its manifest decides
/// whether it fits other layers below, and has a checksum of its own.
pub(crate) fn check_image_layer(
    layer: &LayerRecord,
    image: &ErofsFile,
    dir: &Path,
    check: ImageCheck,
) -> io::Result<Option<String>> {
    if let Some(damage) = check_image(&dir.join(IMAGE), image, check)? {
        return Ok(Some(format!("{IMAGE}: {damage}")));
    }
    let manifest = dir.join(FILES);
    if !layer.facts.pending {
        return Ok(None);
    }
    if !manifest.exists() {
        return Ok(Some(format!("{FILES}: missing")));
    }
    if check == ImageCheck::Disk {
        fadvise(fs_err::File::open(&manifest)?.file(), 0, None, Advice::DontNeed)?;
    }
    let damage = check_manifest(&manifest).err();
    Ok(damage.map(|damage| format!("{FILES}: {}", error_chain(&damage))))
}
