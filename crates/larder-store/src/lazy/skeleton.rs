//! Makes the file of a layer from its table of contents: all metadata, and holes for the data of files.
//!
//! The ordinary writer makes it, so that the layer's data comes to the same places when the archive is unpacked.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use larder_registry::manifest::{ArtifactManifest, Descriptor};

use super::toc::{
    ChunkContent, GzipSpan, SociToc, TABLE_REQUESTS, TableOfContents, TocChunk, TocFormat, TocStep,
};
use crate::unpack::{
    DetectedCompression, ExpectedLayer, PendingLayer, UnpackError, UnpackOptions, UnpackedLayer,
};

/// Bytes of a chunk, at most: it is in memory when it is verified.
const MAX_CHUNK: u64 = 16 << 20;

/// eStargz: files before it are read when a container starts.
const LANDMARK: &[u8] = b".prefetch.landmark";

/// A chunk, and where it belongs in the layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlacedChunk {
    /// Offset in the layer's file.
    pub(crate) offset: u64,
    pub(crate) chunk: TocChunk,
    /// True for the first chunk of a file.
    pub(crate) begins_file: bool,
    /// True before the landmark, if the layer has one.
    pub(crate) is_before_landmark: bool,
}

/// A layer without its data, which a caller has written outside of a store.
pub struct LayerSkeleton {
    /// Counts of what was written.
    pub unpacked: UnpackedLayer,
    /// The layer, to be finished on the layers below.
    pub layer: PendingLayer,
    /// Places of the missing data in the layer's file, in order, each with the bytes of the blob that have it.
    pub missing: Vec<(Range<u64>, Range<u64>)>,
}

/// Data that a layer does not have yet.
#[derive(Debug)]
pub(crate) struct MissingData {
    /// In the order of their offsets.
    pub(crate) chunks: Vec<PlacedChunk>,
    /// As in the [table](TableOfContents::spans).
    pub(crate) spans: Arc<[Arc<GzipSpan>]>,
}

impl PlacedChunk {
    /// Offset of its end.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.chunk.size)
    }
}

/// Writes a layer to a new file at `path` as a lazy pull does, by the table of contents that its descriptor or the SOCI
/// index of its image names. `fetch` returns bytes of the blob that has the table. `None` if no table is named, or the
/// error as text.
pub fn read_skeleton(
    layer: &Descriptor,
    soci: Option<&ArtifactManifest>,
    fetch: impl Fn(Range<u64>) -> Vec<u8>,
    path: &Path,
    options: &UnpackOptions,
) -> Result<Option<LayerSkeleton>, String> {
    let in_words = |error: &dyn std::error::Error| larder::error_chain(error);
    let mut layer = layer.clone();
    let of_index = soci.and_then(|index| SociToc::annotations(index).remove(&layer.digest));
    layer.annotations.extend(of_index);
    let Some(format) = TocFormat::of(&layer) else { return Ok(None) };
    let size = format.blob().unwrap_or(&layer).size;
    let mut range = format.first_range(size).map_err(|error| in_words(&error))?;
    for _ in 0..TABLE_REQUESTS {
        let bytes = fetch(range.clone());
        let table = match format.read(range, &bytes, size, &options.limits) {
            Ok(TocStep::Read(table)) => table,
            Ok(TocStep::Needs(needed)) => {
                range = needed;
                continue;
            }
            Err(error) => return Err(in_words(&error)),
        };
        let expected = ExpectedLayer { digest: None, size: Some(layer.size), diff_id: &layer.digest };
        let written = write_skeleton(&table, &expected, path, options);
        let (unpacked, layer, chunks) = written.map_err(|error| in_words(&error))?;
        let place =
            |chunk: &PlacedChunk| Some((chunk.offset..chunk.end(), chunk.chunk.content.blob()?.clone()));
        let missing = chunks.iter().filter_map(place).collect();
        return Ok(Some(LayerSkeleton { unpacked, layer, missing }));
    }
    Err("its table of contents is not where it should be".into())
}

/// Writes a layer without its data to a new file at `path`. Returns the chunks that are to be filled, too, in the order
/// of their offsets.
pub(crate) fn write_skeleton(
    table: &TableOfContents,
    expected: &ExpectedLayer<'_>,
    path: &Path,
    options: &UnpackOptions,
) -> Result<(UnpackedLayer, PendingLayer, Vec<PlacedChunk>), UnpackError> {
    let mut layer = PendingLayer::without_data(expected.diff_id, path, options)?;
    let (mut chunks, mut plain_bytes) = (Vec::<PlacedChunk>::new(), 0_u64);
    for entry in &table.entries {
        if entry.entry.path == LANDMARK {
            for chunk in &mut chunks {
                chunk.is_before_landmark = true;
            }
        }
        let Some((start, length)) = layer.add_without_data(&entry.entry)? else { continue };
        plain_bytes = plain_bytes.saturating_add(length);
        if plain_bytes > options.limits.max_plain_bytes {
            return Err(UnpackError::over(options.limits.max_plain_bytes, "plain bytes"));
        }
        let (mut offset, mut begins_file) = (start, true);
        for chunk in &entry.chunks {
            if chunk.content != ChunkContent::Zeros {
                if chunk.size > MAX_CHUNK {
                    return Err(UnpackError::over(MAX_CHUNK, "bytes of a chunk"));
                }
                let chunk = chunk.clone();
                chunks.push(PlacedChunk { offset, chunk, begins_file, is_before_landmark: false });
                begins_file = false;
            }
            offset += chunk.size;
        }
    }
    let unpacked = UnpackedLayer {
        compression: DetectedCompression::None,
        compressed_bytes: expected.size.unwrap_or_default(),
        plain_bytes,
        entries: table.entries.len() as u64,
        lower_work: layer.pause()?,
        skipped_xattrs: layer.skipped_xattrs(),
        hides_lowers: layer.hides_lowers(),
        checkpoints: Vec::new(),
    };
    Ok((unpacked, layer, chunks))
}
