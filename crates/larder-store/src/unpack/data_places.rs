//! Finds the data of a layer's file in the layer's archive.

use std::ops::Range;
use std::path::Path;

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::merged_layers::{MergedLayers, open_layer};
use super::rebuild_archive::{RebuildError, find_file, open};
use super::stream::TarStream;
use super::{UnpackError, UnpackOptions};

/// Data of a file, in the layer's file and in its archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataPlace {
    /// Offset in the layer's file.
    pub(crate) offset: u64,
    /// Where it is among the plain bytes of the archive.
    pub(crate) archive: Range<u64>,
}

/// Where the archive of the layer in this file has the data of these ranges of the file, in the order of the archive;
/// a later place counts. Metadata, and data that is not the archive's, has no place.
///
/// The record of the archive and the metadata must not be damaged, or the places are wrong.
pub(crate) fn data_places(file: &Path, ranges: &[Range<u64>]) -> Result<Vec<DataPlace>, RebuildError> {
    let unreadable = |error| RebuildError::Record(UnpackError::Read(error));
    let layer = MergedLayers::new(vec![open_layer(file).map_err(unreadable)?]).map_err(unreadable)?;
    let options = UnpackOptions::for_accepted_layer();
    let mut feed = open(&layer)?;
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, None, &options), &options);
    let (mut places, mut contents) = (Vec::new(), 0);
    while let Some(entry) = archive.next().map_err(RebuildError::Record)? {
        // The record leaves out the contents before it.
        let start = archive.position() + contents;
        let content = archive.content_elsewhere();
        contents += content;
        let Some(file) = find_file(&layer, &entry.path).ok().filter(|file| file.size == entry.size) else {
            continue;
        };
        if content == 0 {
            continue;
        }
        let extents = layer.layer(0).extents(&file).collect::<Result<Vec<_>, _>>();
        let Ok(extents) = extents else { continue };
        let mut start = start;
        let mut next = 0;
        for part in parts_of(&entry) {
            while extents.get(next).is_some_and(|extent| extent.offset + extent.length <= part.start) {
                next += 1;
            }
            for extent in extents[next..].iter().take_while(|extent| extent.offset < part.end) {
                let Some(layer_offset) = extent.layer_offset else { continue };
                let common = common(&part, &(extent.offset..extent.offset + extent.length));
                let in_layer = layer_offset + (common.start - extent.offset);
                let in_layer = in_layer..in_layer + (common.end - common.start);
                for wanted in ranges_in(ranges, &in_layer) {
                    let at = start + (common.start - part.start) + (wanted.start - in_layer.start);
                    places.push(DataPlace {
                        offset: wanted.start,
                        archive: at..at + (wanted.end - wanted.start),
                    });
                }
            }
            start += part.end - part.start;
        }
    }
    Ok(places)
}

/// Parts of a file that the archive has, in its order.
fn parts_of(entry: &LayerEntry) -> Vec<Range<u64>> {
    match &entry.kind {
        LayerEntryKind::Sparse(extents) => {
            extents.iter().map(|(offset, length)| *offset..offset + length).collect()
        }
        _ => Vec::from([Range { start: 0, end: entry.size }]),
    }
}

fn common(one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    one.start.max(other.start)..one.end.min(other.end)
}

/// Parts of `within` that are in one of `ranges`, which are in order.
fn ranges_in(ranges: &[Range<u64>], within: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let first = ranges.partition_point(|range| range.end <= within.start);
    let overlapping = ranges[first..].iter().take_while(|range| range.start < within.end);
    overlapping.map(|range| common(range, within)).filter(|range| !range.is_empty())
}
