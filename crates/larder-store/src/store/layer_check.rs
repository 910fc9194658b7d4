//! Checks the file of a layer.

use std::io;
use std::path::Path;

use super::layer_file::read_record;
use super::records::LayerRecord;
use crate::erofs::digest::{LayerCheck, check_erofs_file, size_differs};

/// Returns the damage of a layer's file, if any: `EROFS: content differs`.
pub(crate) fn check_layer_file(
    layer: &LayerRecord,
    path: &Path,
    check: LayerCheck,
) -> io::Result<Option<String>> {
    if layer.partial.is_some() {
        // It has no digest yet, and its record is replaced when it becomes complete.
        let bytes = fs_err::metadata(path)?.len();
        let damage = (bytes < layer.erofs.bytes).then(|| size_differs(bytes, layer.erofs.bytes));
        return Ok(damage.map(|damage| format!("EROFS: {damage}")));
    }
    if let Some(damage) = check_erofs_file(path, &layer.erofs, check)? {
        return Ok(Some(format!("EROFS: {damage}")));
    }
    if let Err(error) = read_record(path) {
        return Ok(Some(format!("record: {error}")));
    }
    Ok(None)
}
