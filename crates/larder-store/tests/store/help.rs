//! Small images, made without a registry.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::reference::{Digest, Reference};
use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsOptions, ErofsTime, ErofsWriter};
use larder_store::disk::{Disk, FileOpenMode};
use larder_store::erofs::ErofsFile;
use larder_store::store::{
    BlobSource, CommitLayer, ImageCommit, ImageRecord, IngestId, LAYER_FILE, LayerHandle, LayerKey,
    LayerMetadata, LayerStaging, Store, StoreConfig,
};
use sha2::{Digest as _, Sha256};

pub(crate) fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

/// Nothing happens behind the test's back.
pub(crate) fn config() -> StoreConfig {
    StoreConfig { background_deletion: false, ..StoreConfig::default() }
}

pub(crate) fn open(root: &Path) -> Store {
    Store::open(root, config()).expect("the store opens")
}

/// A store in a directory that is deleted when this is dropped.
pub(crate) struct TempStore {
    pub(crate) store: Store,
    pub(crate) dir: tempfile::TempDir,
}

impl TempStore {
    pub(crate) fn new() -> TempStore {
        let dir = tempfile::tempdir().unwrap();
        TempStore { store: open(&dir.path().join("store")), dir }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.store.root().to_owned()
    }

    /// As after a restart.
    pub(crate) fn reopen(self) -> TempStore {
        let TempStore { store, dir } = self;
        drop(store);
        TempStore { store: open(&dir.path().join("store")), dir }
    }
}

pub(crate) fn digest(bytes: impl AsRef<[u8]>) -> Digest {
    let hash = Sha256::digest(bytes.as_ref());
    let text = hash.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"));
    Digest::parse(&text).unwrap()
}

/// Diff id of the layer of this name.
pub(crate) fn diff_id(layer: &str) -> Digest {
    digest(format!("plain {layer}"))
}

pub(crate) fn key(layer: &str) -> LayerKey {
    LayerKey::from(&diff_id(layer))
}

pub(crate) fn facts(layer: &str) -> LayerMetadata {
    LayerMetadata {
        diff_id: diff_id(layer),
        digest: digest(format!("packed {layer}")),
        compressed_bytes: 1000,
        plain_bytes: 10_000,
        skipped_xattrs: 0,
    }
}

/// The blob of a layer, which an archive has sent.
pub(crate) fn blob(facts: &LayerMetadata) -> BlobSource {
    BlobSource::archive(facts.digest.clone(), facts.compressed_bytes)
}

/// A blob of an archive with this digest and size.
pub(crate) fn blob_of(name: &str, size: u64) -> BlobSource {
    BlobSource::archive(digest(name), size)
}

/// The download of the layer of this name.
pub(crate) fn ingest_id(layer: &str) -> IngestId {
    blob(&facts(layer)).ingest_id()
}

/// The layer of this name: the present one, or one "unpacked" now, through `disk` so that it can fail.
pub(crate) fn layer_on(
    disk: &dyn Disk,
    store: &Store,
    name: &str,
) -> Result<LayerHandle, Box<dyn std::error::Error>> {
    if let Some(layer) = store.layer(&key(name))? {
        return Ok(layer);
    }
    let staging = store.begin_layer()?;
    let files = [("etc/name", name.to_owned()), (name, name.repeat(2000))];
    stage(disk, staging, &key(name), facts(name), &erofs(&files))
}

/// Finishes a layer whose file begins with these bytes.
pub(crate) fn stage(
    disk: &dyn Disk,
    staging: LayerStaging,
    key: &LayerKey,
    facts: LayerMetadata,
    erofs: &[u8],
) -> Result<LayerHandle, Box<dyn std::error::Error>> {
    let path = staging.dir().join(LAYER_FILE);
    disk.open(&path, FileOpenMode::CreateNew)?.write_all_at(erofs, 0)?;
    let blob = blob(&facts);
    Ok(staging.finish(key, facts, ErofsFile::of(&path)?, &blob)?)
}

/// A layer of these files.
pub(crate) fn layer_of(
    store: &Store,
    key: &LayerKey,
    facts: LayerMetadata,
    files: &[(&str, String)],
) -> LayerHandle {
    let disk = larder_store::disk::RealDisk;
    stage(&disk, store.begin_layer().unwrap(), key, facts, &erofs(files)).unwrap()
}

/// Returns the name in a layer of [`layer`].
pub(crate) fn name_in(layer: &LayerHandle) -> String {
    let files = layer.open().unwrap();
    let file = files.find(b"etc/name").unwrap().unwrap();
    std::io::read_to_string(files.reader(&file)).unwrap()
}

/// Damages the layer in this file, without a change of its size.
pub(crate) fn damage_layer(layer: &Path) {
    let file = std::fs::File::options().write(true).open(layer).unwrap();
    file.write_all_at(b"damage", 2000).unwrap();
}

/// Whether what [`damage_layer`] damaged is there.
pub(crate) fn is_damaged(layer: &Path) -> bool {
    fs_err::read(layer).unwrap()[2000..].starts_with(b"damage")
}

/// An EROFS filesystem of these files.
pub(crate) fn erofs(files: &[(&str, String)]) -> Vec<u8> {
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    for (path, content) in files {
        let (path, kind) = (path.as_bytes(), ErofsEntryKind::File { size: content.len() as u64 });
        let (mode, mtime) = (0o644, ErofsTime::default());
        writer.add(&ErofsEntry { path, kind, mode, uid: 0, gid: 0, mtime, xattrs: &[] }).unwrap();
        writer.write_data(content.as_bytes()).unwrap();
    }
    writer.finish().unwrap().0
}

pub(crate) fn layer(store: &Store, name: &str) -> LayerHandle {
    layer_on(&larder_store::disk::RealDisk, store, name).expect("a layer")
}

/// An image of these layers, under these names. Equal layers make an equal image.
pub(crate) fn image(names: &[&str], layers: &[LayerHandle]) -> ImageCommit {
    let diff_ids: Vec<&str> = layers.iter().map(|layer| layer.record().facts.diff_id.as_str()).collect();
    let config = serde_json::json!({
        "os": "linux", "architecture": "amd64",
        "config": { "User": "1000:1000" },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let config = config.to_string().into_bytes();
    let manifest = format!("manifest of {}", digest(&config)).into_bytes();
    let commit_layer = |layer: &LayerHandle| CommitLayer {
        layer: layer.clone(),
        digest: layer.record().facts.digest.clone(),
        size: layer.record().facts.compressed_bytes,
        media_type: "application/vnd.oci.image.layer.v1.tar+gzip".into(),
    };
    ImageCommit {
        names: names.iter().map(|name| Reference::parse(name).unwrap()).collect(),
        config: (digest(&config), config),
        manifests: vec![(digest(&manifest), manifest)],
        has_digest: true,
        artifact: None,
        layers: layers.iter().map(commit_layer).collect(),
        ingests: layers.iter().map(|layer| blob(&layer.record().facts).ingest_id()).collect(),
        pinned: false,
        preloaded: false,
        end_lease: None,
    }
}

/// Commits an image of the layers of these names.
pub(crate) fn commit(store: &Store, name: &str, layers: &[&str]) -> ImageRecord {
    let layers: Vec<LayerHandle> = layers.iter().map(|name| layer(store, name)).collect();
    store.commit(&image(&[name], &layers), noon()).expect("a commit")
}

/// Names of all images.
pub(crate) fn tags(store: &Store) -> Vec<String> {
    let mut tags: Vec<String> = store.list().unwrap().into_iter().flat_map(|image| image.repo_tags).collect();
    tags.sort();
    tags
}

pub(crate) fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs_err::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A disk for tests that need one behind an `Arc`.
pub(crate) fn real() -> Arc<dyn Disk> {
    Arc::new(larder_store::disk::RealDisk)
}
