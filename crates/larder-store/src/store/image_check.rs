//! Checks the files of a layer that is an EROFS image.

use std::io;
use std::path::Path;

use larder::error_chain;
use rustix::fs::{Advice, fadvise};

use super::layer_file::{FILES, IMAGE, image_of, manifest_of, read_record};
use super::records::LayerRecord;
use crate::erofs::ErofsFile;
use crate::erofs::digest::{ImageCheck, check_image};
use crate::unpack::layer_manifest::check_manifest;

/// What is wrong with a layer at `path` that is an EROFS image, if anything: `image: content differs`. Its manifest decides
/// whether it fits other layers below, and has a checksum of its own, as its record has.
pub(crate) fn check_image_layer(
    layer: &LayerRecord,
    image: &ErofsFile,
    path: &Path,
    check: ImageCheck,
) -> io::Result<Option<String>> {
    let is_file = !path.is_dir();
    let (image_name, manifest_name) = if is_file { ("image", "manifest") } else { (IMAGE, FILES) };
    if let Some(damage) = check_image(&image_of(path), image, check)? {
        return Ok(Some(format!("{image_name}: {damage}")));
    }
    if let Some(error) = read_record(path).err().filter(|_| is_file) {
        return Ok(Some(format!("record: {error}")));
    }
    let manifest = manifest_of(path, Some(image));
    if !layer.facts.pending {
        return Ok(None);
    }
    if !manifest.path.exists() {
        return Ok(Some(format!("{manifest_name}: missing")));
    }
    if check == ImageCheck::Disk {
        fadvise(fs_err::File::open(&manifest.path)?.file(), 0, None, Advice::DontNeed)?;
    }
    let damage = check_manifest(&manifest).err();
    Ok(damage.map(|damage| format!("{manifest_name}: {}", error_chain(&damage))))
}
