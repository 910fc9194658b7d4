//! Targets for tables of contents, which a lazy pull reads before anything else of a layer.
//!
//! A table that is accepted makes a layer that our own reader reads to its end, and whose missing data are holes of its
//! file. No input takes much memory.

use std::ops::Range;
use std::path::Path;
use std::sync::LazyLock;

use fs_err::os::unix::fs::FileExt as _;
use larder::reference::Digest;
use larder_erofs::InodeKind;
use larder_registry::manifest::{ArtifactManifest, Descriptor, ManifestOrIndex};
use larder_store::lazy::{LayerSkeleton, read_skeleton};
use larder_store::unpack::{LayerReader, MergedLayers, UnpackLimits, UnpackOptions, open_layer};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::chunked_layer::{ChunkedFormat, ChunkedLayer};
use serde_json::json;

use super::targets::dir;

/// Memory that one input may take, at most: that of a table, and what other targets of this process take meanwhile.
const MAX_MEMORY: usize = 384 << 20;
/// Plain bytes of a chunk of the archive below.
const CHUNK: usize = 1500;
/// Bytes of the layer that the ztocs of the corpus are of.
const SOCI_LAYER: u64 = 57_645;
/// Stands for the 32 KiB of zeros of a checkpoint: mutations would hardly change anything else.
const WINDOW_MARK: &[u8] = b"<window>";

/// The archive whose data the documents of the corpus describe.
static ARCHIVE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let text: Vec<u8> =
        (0..800).flat_map(|number| format!("{} ", number * number % 1009).into_bytes()).collect();
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::dir("etc/").xattr("user.one", "1"))
        .with(TarBuilderEntry::fifo("etc/fifo"))
        .with(TarBuilderEntry::file("etc/text", text))
        .with(TarBuilderEntry::file("etc/zeros", vec![0; 2 * CHUNK]))
        .with(TarBuilderEntry::symlink("etc/link", "text"))
        .with(TarBuilderEntry::hard_link("etc/hard", "etc/text"))
        .with(TarBuilderEntry::file("etc/last", "last"));
    archive.finish()
});

/// A document of zstd:chunked or eStargz, as both.
pub(super) fn table(data: &[u8]) {
    for format in [ChunkedFormat::ZstdChunked, ChunkedFormat::EStargz] {
        accepts_document(format, data);
    }
}

fn accepts_document(format: ChunkedFormat, document: &[u8]) -> bool {
    let layer = ChunkedLayer::with_document(&ARCHIVE, format, CHUNK, |_| document.to_vec());
    let size = layer.blob.len() as u64;
    let descriptor = Descriptor::new("", Digest::sha256(&layer.blob), size);
    accepts(&Descriptor { annotations: layer.annotations, ..descriptor }, None, &layer.blob)
}

/// A SOCI index, or a ztoc, which a right index names.
pub(super) fn soci(data: &[u8]) {
    accepts_soci(data);
}

fn accepts_soci(data: &[u8]) -> bool {
    let ztoc =
        if data.starts_with(b"{") { include_bytes!("../../../../fuzz/corpus/soci/spans") } else { data };
    let ztoc = with_windows(ztoc);
    let layer = Descriptor::new("", Digest::sha256("layer"), SOCI_LAYER);
    let index = if data.starts_with(b"{") { data.to_vec() } else { index_of(&layer, &ztoc) };
    match ManifestOrIndex::parse(&index, "application/vnd.oci.image.manifest.v1+json") {
        Ok(ManifestOrIndex::Artifact(index)) => accepts(&layer, Some(&index), &ztoc),
        Ok(_) | Err(_) => false,
    }
}

/// The ztoc with zeros in place of marks.
fn with_windows(mut data: &[u8]) -> Vec<u8> {
    let mut ztoc = Vec::new();
    while let Some(at) = data.windows(WINDOW_MARK.len()).position(|bytes| bytes == WINDOW_MARK) {
        ztoc.extend_from_slice(&data[..at]);
        ztoc.resize(ztoc.len() + (32 << 10), 0);
        data = &data[at + WINDOW_MARK.len()..];
    }
    ztoc.extend_from_slice(data);
    ztoc
}

fn index_of(layer: &Descriptor, ztoc: &[u8]) -> Vec<u8> {
    let kind = "application/vnd.amazon.soci.index.v2+json";
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": kind, "digest": Digest::sha256("{}").as_str(), "size": 2},
        "layers": [{
            "mediaType": "application/octet-stream",
            "digest": Digest::sha256(ztoc).as_str(),
            "size": ztoc.len(),
            "annotations": {"com.amazon.soci.image-layer-digest": layer.digest.as_str()},
        }],
    });
    index.to_string().into_bytes()
}

/// Returns true if a layer can be made of its table of contents.
fn accepts(layer: &Descriptor, soci: Option<&ArtifactManifest>, blob: &[u8]) -> bool {
    let dir = dir();
    let path = dir.path().join("layer");
    let limits = UnpackLimits { max_plain_bytes: 8 << 30, ..UnpackLimits::default() };
    let options = UnpackOptions { limits, ..UnpackOptions::default() };
    let part = |range: Range<u64>| {
        let [start, end] = [range.start, range.end].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
        blob.get(start..end).map(<[u8]>::to_vec).unwrap_or_default()
    };
    let before = reset_peak();
    let read = read_skeleton(layer, soci, part, &path, &options);
    let taken = peak().saturating_sub(before);
    assert!(taken < MAX_MEMORY, "{taken} bytes of memory for {} bytes", blob.len());
    let Ok(Some(LayerSkeleton { layer: pending, missing, .. })) = read else { return false };
    if pending.finish(&MergedLayers::default(), &options.progress).is_err() {
        return false;
    }
    check_files(&open_layer(&path).expect("a layer"));
    check_missing(&path, &missing, layer.size);
    true
}

/// Reads all metadata of a layer.
fn check_files(layer: &LayerReader) {
    for entry in layer.walk().expect("a root") {
        let inode = entry.expect("an entry").inode;
        layer.xattrs(&inode).expect("attributes");
        match inode.kind {
            InodeKind::Symlink => drop(layer.symlink_target(&inode).expect("a target")),
            InodeKind::File => {
                let lengths = layer.extents(&inode).map(|extent| extent.expect("an extent").length);
                assert_eq!(lengths.sum::<u64>(), inode.size);
            }
            _ => {}
        }
    }
}

/// Missing data are holes of the file, one behind the other, and each has its place in the blob.
fn check_missing(path: &Path, missing: &[(Range<u64>, Range<u64>)], blob_size: u64) {
    let file = fs_err::File::open(path).expect("the layer");
    let (length, mut end) = (file.metadata().expect("the layer").len(), 0);
    for (place, blob) in missing {
        assert!(
            place.start >= end && place.start < place.end && place.end <= length,
            "{place:?} in {length}"
        );
        assert!(blob.start < blob.end && blob.end <= blob_size, "{blob:?} in {blob_size}");
        end = place.end;
        for at in [place.start, place.end.saturating_sub(4096).max(place.start)] {
            let mut bytes = [0; 4096];
            let wanted = usize::try_from(place.end - at).map_or(4096, |left| left.min(4096));
            file.read_exact_at(&mut bytes[..wanted], at).expect("bytes of the layer");
            assert_eq!(bytes, [0; 4096], "{place:?} has metadata");
        }
    }
}

/// Memory that this process has at most from now on; returns what it has.
fn reset_peak() -> usize {
    fs_err::write("/proc/self/clear_refs", "5").expect("the peak is reset");
    peak()
}

/// The most memory that this process had, in bytes, since it was reset.
fn peak() -> usize {
    let status = fs_err::read_to_string("/proc/self/status").expect("the process's state");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok());
    kib.expect("the peak") << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::{corpus, seeds, target};

    /// Seeds of a target that are not hostile.
    fn good_seeds(name: &str) -> Vec<(String, Vec<u8>)> {
        let mut seeds = seeds(&corpus(), target(name).unwrap()).unwrap();
        seeds.retain(|(name, _)| !name.starts_with("hostile"));
        assert!(seeds.len() > 1, "{name}");
        seeds
    }

    #[test]
    fn layers_are_made_of_seeds() {
        for (name, document) in good_seeds("table") {
            let formats = [ChunkedFormat::ZstdChunked, ChunkedFormat::EStargz];
            assert!(formats.iter().any(|format| accepts_document(*format, &document)), "{name}");
        }
        for (name, data) in good_seeds("soci") {
            assert!(accepts_soci(&data), "{name}");
        }
    }
}
