//! Checks the file of a layer.

use std::io;
use std::path::Path;

use super::layer_file::read_record;
use super::records::LayerRecord;
use crate::erofs::digest::{ImageCheck, check_image};

/// Returns the damage of a layer's file, if any: `EROFS: content differs`.
pub(crate) fn check_layer_file(
    layer: &LayerRecord,
    path: &Path,
    check: ImageCheck,
) -> io::Result<Option<String>> {
    if let Some(damage) = check_image(path, &layer.erofs, check)? {
        return Ok(Some(format!("EROFS: {damage}")));
    }
    if let Err(error) = read_record(path) {
        return Ok(Some(format!("record: {error}")));
    }
    Ok(None)
}
