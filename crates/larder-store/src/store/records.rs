//! The records of the database: one for each image, layer, lease and mount, as JSON.
//!
//! The store's format covers them. Times are seconds since 1970, sizes are bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder::gc::ClockReading;
use larder::reference::{Digest, ImageName, Reference};
use larder_registry::manifest::Descriptor;
use serde::{Deserialize, Serialize};

use super::blob_source::{BlobSource, IngestId};
use crate::disk::DiskSpace;
use crate::erofs::ErofsFile;
use crate::lazy::toc::TocFormat;

/// Names the file of a layer: the hex digits of its diff id or, where what was unpacked depends on the
/// layers below, of its chain id.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerKey(String);

impl LayerKey {
    /// Accepts 64, 96 or 128 hexadecimal digits in lower case.
    pub fn parse(text: &str) -> Option<LayerKey> {
        let good = matches!(text.len(), 64 | 96 | 128)
            && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        good.then(|| LayerKey(text.to_owned()))
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&Digest> for LayerKey {
    /// The key of a layer with this diff id or chain id.
    fn from(digest: &Digest) -> LayerKey {
        LayerKey(digest.hex().to_owned())
    }
}

impl TryFrom<String> for LayerKey {
    type Error = String;

    fn try_from(text: String) -> Result<LayerKey, String> {
        LayerKey::parse(&text).ok_or_else(|| format!("{text:?} is not a layer key"))
    }
}

impl From<LayerKey> for String {
    fn from(key: LayerKey) -> String {
        key.0
    }
}

impl fmt::Display for LayerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Digest of its config: the image's id.
    pub id: Digest,
    /// The type of an artifact, such as `application/vnd.cncf.model.manifest.v1+json`; empty for an image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub artifact_type: String,
    /// The config of an artifact, whose bytes are kept. Its image has another one, which was made for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_config: Option<Digest>,
    /// Names with tags, in full: `docker.io/library/busybox:1.36`, or for another platform
    /// `docker.io/library/busybox:1.36#linux/arm64`. Sorted.
    pub tags: Vec<String>,
    /// Names with digests, in full: `docker.io/library/busybox@sha256:...`, or for another platform with that. Sorted.
    pub digests: Vec<String>,
    /// The manifests, and indexes, that led to it; their bytes are kept. Those of the last pull first, the outermost
    /// before the others.
    pub manifests: Vec<Digest>,
    /// Its layers, lowest first.
    pub layers: Vec<ImageLayer>,
    /// Allocated bytes of config and manifests.
    pub blob_bytes: u64,
    /// Allocated bytes of its layers, config, manifests and the copy of this record, whatever else needs the same
    /// files.
    pub disk_bytes: u64,
    /// The user that its config names: empty, `uid`, `name`, `uid:gid` or `name:group`.
    pub user: String,
    /// Never to be collected.
    pub pinned: bool,
    /// Whether an administrator loaded it from an archive. Any other image was pulled.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preloaded: bool,
    /// When it was built, as its config says; empty if it does not.
    pub created: String,
    /// When it was last pulled or loaded.
    pub pulled_at: u64,
    /// Whether all its layers are there. An incomplete image is not listed until its own pull has completed it or, if
    /// it was preloaded, any pull.
    pub complete: bool,
}

/// One layer of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLayer {
    /// Digest of the plain archive.
    pub diff_id: Digest,
    /// Key of the unpacked layer.
    pub key: LayerKey,
    /// Digest of the archive as it is fetched, usually compressed.
    pub digest: Digest,
    /// Size of the archive as it is fetched.
    pub size: u64,
    /// Its media type in the manifest.
    pub media_type: String,
}

impl ImageRecord {
    /// All names, with tags first.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.tags.iter().chain(&self.digests)
    }

    /// Whether a layer is one of its layers.
    pub(crate) fn has_layer(&self, key: &LayerKey) -> bool {
        self.layers.iter().any(|layer| layer.key == *key)
    }

    /// One of its names, or its ID.
    pub fn name(&self) -> &str {
        self.names().next().map_or(self.id.as_str(), String::as_str)
    }

    /// The digest that the repository of this name served last for the image: of an index, if there is one.
    pub fn served_digest(&self, name: &Reference) -> Option<&Digest> {
        self.manifests.iter().find(|digest| self.digests.contains(&name.with_digest(digest).to_string()))
    }

    /// Its layers, each once: an image may have the same layer several times.
    pub fn keys(&self) -> Vec<&LayerKey> {
        let mut keys: Vec<_> = self.layers.iter().map(|layer| &layer.key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Digests of its blobs: configs and manifests.
    pub fn blobs(&self) -> impl Iterator<Item = &Digest> {
        std::iter::once(&self.id).chain(&self.manifests).chain(&self.artifact_config)
    }
}

/// Facts about a layer that its unpacking has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMetadata {
    /// Digest of the plain archive.
    pub diff_id: Digest,
    /// Digest of the archive as it was fetched.
    pub digest: Digest,
    /// Size of the archive as it was fetched.
    pub compressed_bytes: u64,
    /// Size of the plain archive.
    pub plain_bytes: u64,
    /// Extended attributes of its files that were left out: no kernel takes them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_xattrs: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// An unpacked layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Names its file.
    pub key: LayerKey,
    /// Facts from unpacking the layer.
    pub facts: LayerMetadata,
    /// Size and digest of its file, but for the copy of this record at its end. With implied directories, a layer that
    /// is kept under its diff ID fitted the layers that it was unpacked on; whether it fits others must be checked.
    pub erofs: ErofsFile,
    /// Disk usage of the layer's file, and of its index.
    pub usage: DiskSpace,
    /// Of it, what a remnant takes, which may be kept when the layer is removed.
    pub remnant: DiskSpace,
    /// True if the file exists. False once it was found missing.
    pub present: bool,
    /// `fsck` found it damaged. It is retained until the next pull or load of an image with it replaces it.
    pub damaged: bool,
    /// Where the rest of its data comes from, while some is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<PartialSource>,
}

/// The blob from which the missing data of a layer comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialSource {
    /// The blob of the repository that sends it.
    pub blob: BlobSource,
    /// Annotations of the blob, which say where its table of contents is and what digest that has. Empty if the data is
    /// fetched by the layer's own index.
    pub annotations: BTreeMap<String, String>,
    /// Identity of the layer on top of those below it.
    pub chain_id: Digest,
}

impl LayerRecord {
    /// The record of a complete layer, which was not measured.
    pub(crate) fn of_file(key: &LayerKey, facts: LayerMetadata, erofs: ErofsFile) -> LayerRecord {
        let (key, usage, remnant) = (key.clone(), DiskSpace::ZERO, DiskSpace::ZERO);
        LayerRecord { key, facts, erofs, usage, remnant, present: true, damaged: false, partial: None }
    }

    /// Notes that the layer's index, which took this space, was removed: without it, no remnant can be kept.
    pub(crate) fn forget_index(&mut self, index: DiskSpace) {
        self.usage = index.shortfall_to(self.usage);
        self.remnant = DiskSpace::ZERO;
    }

    /// Returns true when the layer looks the same on top of any layers: its archive implies no directory.
    pub(crate) fn fits_any_lowers(&self) -> bool {
        self.erofs.implied_bytes == 0
    }

    /// Returns true if the layer need not be fetched.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_mountable() && self.partial.is_none()
    }

    /// Returns true if the layer can be mounted: missing data comes while it is read.
    pub(crate) fn is_mountable(&self) -> bool {
        self.present && !self.damaged
    }
}

impl PartialSource {
    /// The blob, as a manifest describes it.
    pub(crate) fn descriptor(&self) -> Descriptor {
        let annotations = self.annotations.clone();
        Descriptor { annotations, ..Descriptor::new("", self.blob.digest.clone(), self.blob.size) }
    }

    fn format(&self) -> Option<TocFormat> {
        TocFormat::of(&self.descriptor())
    }

    /// The lease on what has come of the blob, until the layer is complete.
    pub(super) fn lease(&self, key: &LayerKey) -> LeaseRecord {
        let mut ingests = vec![self.blob.ingest_id()];
        let table = self.format().and_then(|format| self.blob.table(&format));
        ingests.extend(table.map(|table| table.ingest_id()));
        let leased = LeaseResources { layers: Vec::new(), ingests };
        LeaseRecord::granted(PartialSource::lease_id(key), leased, Duration::MAX, &ClockReading::now())
    }

    /// ID of the lease of a layer.
    pub(super) fn lease_id(key: &LayerKey) -> String {
        PartialSource::lease_id_start() + key.as_str()
    }

    /// What IDs of such leases start with; the key of the layer follows.
    pub(super) fn lease_id_start() -> String {
        "fill/".to_owned()
    }
}

/// Content that a lease protects.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LeaseResources {
    /// Layers, kept even when no image has them.
    pub layers: Vec<LayerKey>,
    /// Ingests, kept for resuming whatever their age, with the layers that they became.
    pub ingests: Vec<IngestId>,
}

/// Retains what a pull that has not ended with an image can use again, until a time or until space is needed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// Chosen by the caller: `pull/...`, `fetched/...`. A lease with the same ID is replaced.
    pub id: String,
    /// Content of the lease.
    pub leased: LeaseResources,
    /// All clocks when it was granted.
    pub granted_at: ClockReading,
    /// For how long it was granted.
    pub seconds: u64,
}

impl LeaseRecord {
    /// A lease that is granted now. Steps of the wall clock neither end nor extend it.
    pub fn granted(
        id: impl Into<String>,
        leased: LeaseResources,
        time: Duration,
        now: &ClockReading,
    ) -> LeaseRecord {
        let granted_at = now.clone();
        LeaseRecord { id: id.into(), leased, granted_at, seconds: time.as_secs() }
    }

    /// True for the lease of an incomplete layer.
    pub(super) fn is_of_fill(&self) -> bool {
        self.id.starts_with(&PartialSource::lease_id_start())
    }

    /// Time until it expires, at most the granted time; zero once it has expired.
    pub fn left(&self, now: &ClockReading) -> Duration {
        Duration::from_secs(self.seconds).saturating_sub(self.granted_at.age(now))
    }
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A mounted image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// Names its directory in `mounts`.
    pub id: String,
    /// Id of the image.
    pub image: Digest,
    /// The name it was asked for by.
    pub name: ImageName,
    /// Where it is mounted, absolute.
    pub target: PathBuf,
    /// True if the mount takes writes, into a directory of its own.
    pub writable: bool,
    /// Its layers, lowest first, kept as long as the mount is.
    pub layers: Vec<LayerKey>,
    /// When it was mounted.
    pub mounted_at: u64,
    /// The mount namespace and run of the machine in which it was mounted: only there can one see whether it still is.
    pub seen_from: String,
    /// True while it is mounted, as far as was seen. False for a writable mount that is gone, whose files are kept
    /// until `umount`.
    pub mounted: bool,
}

/// Ratio of unpacked to compressed bytes on this node so far, for estimates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct UnpackRatio {
    /// Bytes on disk for each byte fetched.
    pub bytes: f64,
    /// Inodes for each byte fetched.
    pub inodes: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_key_cannot_leave_its_directory() {
        assert!(LayerKey::parse(&"a1".repeat(32)).is_some());
        for bad in ["", "..", &"A1".repeat(32), &format!("../{}", "a".repeat(61)), &"a".repeat(63)] {
            assert_eq!(LayerKey::parse(bad), None, "{bad}");
            assert!(serde_json::from_value::<LayerKey>(bad.into()).is_err(), "{bad}");
        }
    }
}
