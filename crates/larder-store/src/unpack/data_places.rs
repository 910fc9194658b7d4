//! Finds the data of a layer's file in the layer's archive.

use std::ops::Range;

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::file_finder::FileFinder;
use super::merged_layers::{LayerReader, MergedLayers};
use super::raw_file::blob_data;
use super::rebuild_archive::{RebuildError, open};
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

/// Where the archive of this layer, or the blob that is its file, has the data of these ranges of the layer's file, in
/// the order of the archive; a later place counts. Metadata, and data that is not the archive's, has no place.
///
/// The record of the archive and the metadata must not be damaged, or the places are wrong.
pub(crate) fn data_places(layer: LayerReader, ranges: &[Range<u64>]) -> Result<Vec<DataPlace>, RebuildError> {
    let unreadable = |error| RebuildError::Record(UnpackError::Read(error));
    if let Some(blob) = blob_data(&layer).map_err(unreadable)? {
        let place = |data: Range<u64>| DataPlace {
            offset: data.start,
            archive: data.start - blob.start..data.end - blob.start,
        };
        return Ok(ranges_in(ranges, &blob).map(place).collect());
    }
    let layer = MergedLayers::new(vec![layer]).map_err(unreadable)?;
    let options = UnpackOptions::for_accepted_layer();
    let mut feed = open(&layer)?;
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, None, &options), &options);
    let (mut places, mut contents, mut files) = (Vec::new(), 0, FileFinder::new(&layer));
    while let Some(entry) = archive.next().map_err(RebuildError::Record)? {
        // The record leaves out the contents before it.
        let start = archive.position() + contents;
        let content = archive.content_elsewhere();
        contents += content;
        let Some(file) = files.find(&entry.path).ok().filter(|file| file.size == entry.size) else {
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

#[cfg(test)]
mod tests {
    use larder::reference::Digest;
    use larder_erofs::InodeKind;
    use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};

    use super::*;
    use crate::unpack::{ExpectedLayer, open_layer, unpack_layer};

    /// Files with holes, files of the same name, and several names of one file.
    fn odd_files() -> Vec<u8> {
        let data: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
        let sparse = TarBuilderEntry::file("sparse", &data[..70_000])
            .pax("GNU.sparse.map", "0,10000,1048576,50000,2097152,10000,3000000,0")
            .pax("GNU.sparse.size", "3000000")
            .pax("GNU.sparse.name", "sparse");
        TarBuilder::new()
            .with(TarBuilderEntry::file("twice", &data[..300_000]))
            .with(sparse)
            .with(TarBuilderEntry::file("large", data.clone()))
            .with(TarBuilderEntry::hard_link("link", "large"))
            .with(TarBuilderEntry::file("twice", &data[100_000..400_000]))
            .with(TarBuilderEntry::file(".wh.gone", &data[..5000]))
            .with(TarBuilderEntry::symlink("dir", "real"))
            .with(TarBuilderEntry::file("real/x", ""))
            .with(TarBuilderEntry::file("dir/through-a-link", &data[7..9000]))
            .finish()
    }

    #[test]
    fn all_data_of_files_has_its_place_in_the_archive() {
        for archive in edge_case_layers().into_iter().chain([odd_files()]) {
            let dir = tempfile::tempdir().unwrap();
            let (path, diff_id) = (dir.path().join("layer"), Digest::sha256(&archive));
            let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
            let record = Some(dir.path().join("record"));
            let options = UnpackOptions { archive_record: record, ..UnpackOptions::default() };
            let (_, layer) = unpack_layer(&archive[..], &expected, &path, &options).unwrap();
            layer.finish(&MergedLayers::default(), &options.progress).unwrap();
            let file = fs_err::read(&path).unwrap();

            let at = |offset: u64| usize::try_from(offset).unwrap();
            let (mut found, mut is_found) = (vec![0; file.len()], vec![false; file.len()]);
            // Ranges whose ends lie in files.
            let ranges: Vec<_> = (0..file.len() as u64).step_by(70_001).collect();
            let ranges: Vec<_> = ranges.windows(2).map(|pair| pair[0]..pair[1] - 1).collect();
            for place in data_places(open_layer(&path).unwrap(), &ranges).unwrap() {
                let data = &archive[at(place.archive.start)..at(place.archive.end)];
                let places = at(place.offset)..at(place.offset) + data.len();
                found[places.clone()].copy_from_slice(data);
                is_found[places].fill(true);
            }
            let layer = open_layer(&path).unwrap();
            for entry in layer.walk().unwrap() {
                let entry = entry.unwrap();
                let is_file = entry.inode.kind == InodeKind::File;
                let extents = is_file.then(|| layer.extents(&entry.inode)).into_iter().flatten();
                for extent in extents.map(Result::unwrap) {
                    let Some(start) = extent.layer_offset else { continue };
                    for wanted in ranges_in(&ranges, &(start..start + extent.length)) {
                        let wanted = at(wanted.start)..at(wanted.end);
                        let name = String::from_utf8_lossy(&entry.path);
                        assert!(found[wanted.clone()] == file[wanted.clone()], "{name}: other data");
                        let is_zero = file[wanted.clone()].iter().all(|byte| *byte == 0);
                        assert!(is_zero || is_found[wanted].iter().any(|found| *found), "{name}: no place");
                    }
                }
            }
        }
    }
}
