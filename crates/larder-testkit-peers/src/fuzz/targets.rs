//! The fuzz targets.

use std::path::Path;
use std::sync::OnceLock;

use larder::credentials::{TokenPolicy, parse_config_json, parse_dockercfg};
use larder::reference::{Digest, ImageName, Reference};
use larder_registry::manifest::{ImageConfig, ManifestOrIndex, PlatformMatcher};
use larder_registry::{RegistryClient, RegistryConfig, challenge_schemes};
use larder_store::disk::DiskSpace;
use larder_store::store::import::ImportSource;
use larder_store::store::{Store, StoreConfig};
use larder_store::unpack::{
    ExpectedLayer, MergedLayers, UnpackLimits, UnpackOptions, UnpackThreads, UnpackedLayer, unpack_layer,
};
use tempfile::TempDir;

use larder_testkit::fault_registry::digest;

use super::answers::answers;
use super::tables::{soci, table};

/// Something that reads what strangers send.
#[derive(Debug)]
pub struct FuzzTarget {
    /// Its name, which is also that of its corpus.
    pub name: &'static str,
    /// Reads one input.
    ///
    /// # Panics
    /// When a promise is broken.
    pub fuzz_one: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [FuzzTarget; 10] = [
    FuzzTarget { name: "layer", fuzz_one: layer },
    FuzzTarget { name: "manifest", fuzz_one: manifest },
    FuzzTarget { name: "challenge", fuzz_one: challenge },
    FuzzTarget { name: "hosts", fuzz_one: hosts },
    FuzzTarget { name: "reference", fuzz_one: reference },
    FuzzTarget { name: "docker_config", fuzz_one: docker_config },
    FuzzTarget { name: "import", fuzz_one: import },
    FuzzTarget { name: "answers", fuzz_one: answers },
    FuzzTarget { name: "table", fuzz_one: table },
    FuzzTarget { name: "soci", fuzz_one: soci },
];

/// A directory in memory where there is such a filesystem.
pub(super) fn dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

/// Everything in a directory, for comparison.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs_err::read_dir(dir)
        .expect("the directory exists")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Gives every header of an archive the checksum it should have: without that, hardly a changed one is read.
fn with_checksums(data: &[u8]) -> Vec<u8> {
    let mut bytes = data.to_vec();
    let mut at = 0_usize;
    while let Some(header) = bytes.get_mut(at..at.saturating_add(512)) {
        if header.iter().any(|byte| *byte != 0) {
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let digits = String::from_utf8_lossy(&header[124..135]).into_owned();
        let size = usize::from_str_radix(digits.trim_matches([' ', '\0']), 8).unwrap_or(0);
        at = at.saturating_add(512).saturating_add(size.div_ceil(512).saturating_mul(512));
    }
    bytes
}

/// A layer archive, plain or compressed, as it is and with right checksums.
fn layer(data: &[u8]) {
    unpack_one(data);
    unpack_one(&with_checksums(data));
}

/// Unpacks a layer on one thread and on two, which must agree.
fn unpack_one(data: &[u8]) {
    let [one, two] = [UnpackThreads::One, UnpackThreads::Two].map(|threads| unpack_on(threads, data));
    assert!(one == two, "it depends on the threads");
}

/// Returns the unpacked layer with its file; `None` if it was refused. Nothing may appear or change beside that file.
fn unpack_on(threads: UnpackThreads, data: &[u8]) -> Option<(UnpackedLayer, Vec<u8>)> {
    let dir = dir();
    fs_err::write(dir.path().join("guard"), "untouched").expect("a file");
    let diff_id = Digest::parse(&digest(data)).expect("a digest");
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let limits = UnpackLimits { max_plain_bytes: 8 << 20, ..UnpackLimits::default() };
    let options = UnpackOptions { threads, limits, ..UnpackOptions::default() };
    let path = dir.path().join("layer");
    let unpacked = unpack_layer(data, &expected, &path, &options);
    let made = unpacked.ok().and_then(|(unpacked, layer)| {
        let alone = MergedLayers::default();
        layer.finish(&alone, &options.progress).ok()?;
        Some((unpacked, fs_err::read(&path).expect("the layer is there")))
    });
    let mut left = names(dir.path());
    left.retain(|name| name != "layer");
    assert_eq!(left, ["guard"], "something was written beside the layer");
    let guard = fs_err::read_to_string(dir.path().join("guard")).expect("the file is there");
    assert_eq!(guard, "untouched");
    made
}

/// Manifests, indexes and configs.
fn manifest(data: &[u8]) {
    let platform = PlatformMatcher::host();
    for media_type in [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/json",
    ] {
        match ManifestOrIndex::parse(data, media_type) {
            Ok(ManifestOrIndex::Index(index)) => drop((index.candidates(&platform).len(), index.platforms())),
            Ok(ManifestOrIndex::Manifest(manifest)) => drop(manifest.size()),
            Ok(ManifestOrIndex::Artifact(artifact)) => {
                if let Ok(image) = artifact.into_image(Digest::sha256(data), data.to_vec()) {
                    assert_eq!(image.config.diff_ids.len(), image.manifest.layers.len());
                }
            }
            Err(error) => drop((error.to_string(), error.hint())),
        }
    }
    if let Ok(config) = ImageConfig::parse(data) {
        let _ = config.check_layers(config.diff_ids.len());
    }
}

/// `WWW-Authenticate`.
fn challenge(data: &[u8]) {
    let schemes = challenge_schemes(&String::from_utf8_lossy(data));
    assert!(schemes.iter().all(|scheme| *scheme == scheme.to_ascii_lowercase()), "{schemes:?}");
}

/// `hosts.toml`, as a client finds it.
fn hosts(data: &[u8]) {
    let dir = dir();
    let of_registry = dir.path().join("registry.example");
    fs_err::create_dir(&of_registry).expect("a directory");
    fs_err::write(of_registry.join("hosts.toml"), data).expect("a file");
    let config = RegistryConfig { config_dirs: vec![dir.path().into()], ..RegistryConfig::default() };
    let name = Reference::parse("registry.example/app:1").expect("a name");
    if let Err(error) = RegistryClient::new(config).session(&name, None) {
        drop((error.to_string(), error.hint()));
    }
}

/// Names of images. What is understood is understood again in its full form, as the same.
fn reference(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let name = ImageName::from(&*text);
    let _ = (name.reference(), name.with_default_tag(), name.trimmed(), Digest::parse(&text));
    if let Ok(name) = Reference::parse(&text) {
        let full = name.to_string();
        let again = Reference::parse(&full).unwrap_or_else(|error| panic!("{text:?} is {full:?}: {error}"));
        assert_eq!(again.to_string(), full, "{text:?}");
    }
}

/// `config.json` and `.dockercfg`. Secrets do not print.
fn docker_config(data: &[u8]) {
    for tokens in [TokenPolicy::Keep, TokenPolicy::Ignore] {
        for parsed in [parse_config_json(data, tokens), parse_dockercfg(data, tokens)] {
            let printed = format!("{parsed:?}");
            assert!(!printed.contains("hunter2-secret"), "{printed}");
        }
    }
}

/// An archive that is loaded: an OCI layout or what `docker save` writes.
fn import(data: &[u8]) {
    load_one(data);
    load_one(&with_checksums(data));
}

fn load_one(data: &[u8]) {
    static STORE: OnceLock<(TempDir, Store)> = OnceLock::new();
    let (dir, store) = STORE.get_or_init(|| {
        let dir = dir();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).expect("a store");
        (dir, store)
    });
    let file = dir.path().join("archive");
    fs_err::write(&file, data).expect("a file");
    let from = ImportSource::Path(file);
    let base = Reference::parse("registry.example/app").expect("a name");
    match store.read_import(from, &PlatformMatcher::host(), Some(&base), DiskSpace::default()) {
        Ok(import) => {
            for image in &import.images {
                for layer in &image.manifest.layers {
                    let _ = import
                        .open(&layer.digest)
                        .map(|mut layer| std::io::copy(&mut layer, &mut std::io::sink()));
                }
            }
        }
        Err(error) => drop((error.to_string(), error.hint())),
    }
    assert_eq!(names(dir.path()), ["archive", "store"]);
}
