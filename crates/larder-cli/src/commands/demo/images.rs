//! Three generated images on a common base, as a registry serves them.

use std::collections::HashMap;
use std::io::{self, Write as _};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use larder::reference::Digest;
use serde_json::{Value, json};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

const MIB: usize = 1 << 20;

/// When all files were last changed, in seconds since 1970.
pub(super) const MODIFIED: u64 = 1_700_000_000;

/// Kind of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DemoBlobKind {
    Manifest,
    Config,
    Layer,
}

/// One thing that the registry serves.
#[derive(Debug, Clone)]
pub(super) struct DemoBlob {
    pub(super) kind: DemoBlobKind,
    pub(super) media_type: &'static str,
    pub(super) digest: Digest,
    pub(super) bytes: Bytes,
}

impl DemoBlob {
    fn new(kind: DemoBlobKind, media_type: &'static str, bytes: Vec<u8>) -> DemoBlob {
        DemoBlob { kind, media_type, digest: Digest::sha256(&bytes), bytes: bytes.into() }
    }

    fn descriptor(&self) -> Value {
        json!({ "mediaType": self.media_type, "digest": self.digest, "size": self.bytes.len() })
    }
}

/// One image.
#[derive(Debug)]
pub(super) struct DemoImage {
    /// Repository and tag.
    pub(super) name: &'static str,
    /// A file in its topmost layer.
    pub(super) file: String,
    /// Digest of that layer, and its size as it is served.
    pub(super) own_layer: (Digest, usize),
    /// Digest of its plain bytes.
    pub(super) own_diff_id: Digest,
}

/// Images of a registry.
#[derive(Debug, Default)]
pub(super) struct DemoImages {
    /// By the path that they are asked for under.
    pub(super) documents: HashMap<String, DemoBlob>,
    pub(super) images: Vec<DemoImage>,
    /// Size of the layer that all images share, as it is served.
    pub(super) base_size: usize,
    /// How many different layers there are, and their sizes together.
    pub(super) layers: (usize, usize),
}

/// A layer, and its diff id.
struct DemoLayer {
    document: DemoBlob,
    diff_id: Digest,
}

impl DemoImages {
    /// Makes the images. It takes a fraction of a second.
    pub(super) fn generate() -> io::Result<DemoImages> {
        let base = layer("usr/lib", 12, MIB, 1)?;
        let mut content = DemoImages {
            base_size: base.document.bytes.len(),
            layers: (1, base.document.bytes.len()),
            ..DemoImages::default()
        };
        for (seed, (name, files)) in
            [("shop/web:1.27", 6), ("shop/api:v2", 4), ("shop/migrate:v2", 2)].into_iter().enumerate()
        {
            let app = name.rsplit(['/', ':']).nth(1).unwrap_or(name);
            let own = layer(&format!("srv/{app}"), files, MIB, seed as u64 + 2)?;
            content.layers.0 += 1;
            content.layers.1 += own.document.bytes.len();
            content.add(name, format!("srv/{app}/data-1"), [&base, &own]);
        }
        Ok(content)
    }

    fn add(&mut self, name: &'static str, file: String, layers: [&DemoLayer; 2]) {
        let (repository, tag) = name.split_once(':').unwrap_or((name, "latest"));
        let diff_ids = layers.map(|layer| &layer.diff_id);
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "created": "2026-11-01T12:00:00Z",
            "config": { "Cmd": [format!("/{file}")] },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let config = DemoBlob::new(DemoBlobKind::Config, CONFIG, config.to_string().into_bytes());
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.descriptor(),
            "layers": layers.map(|layer| layer.document.descriptor()),
        });
        let manifest = DemoBlob::new(DemoBlobKind::Manifest, MANIFEST, manifest.to_string().into_bytes());
        let [_, own] = layers;
        self.images.push(DemoImage {
            name,
            file,
            own_layer: (own.document.digest.clone(), own.document.bytes.len()),
            own_diff_id: own.diff_id.clone(),
        });
        for blob in layers.map(|layer| &layer.document).into_iter().chain([&config]) {
            self.documents.insert(format!("/v2/{repository}/blobs/{}", blob.digest), blob.clone());
        }
        for reference in [tag, manifest.digest.as_str()] {
            self.documents.insert(format!("/v2/{repository}/manifests/{reference}"), manifest.clone());
        }
    }
}

/// A layer with so many files of so many bytes in one directory.
fn layer(dir: &str, files: usize, bytes: usize, seed: u64) -> io::Result<DemoLayer> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for number in 1..=files {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes as u64);
        header.set_mode(0o644);
        header.set_mtime(MODIFIED);
        let content = half_noise(bytes, &mut state);
        archive.append_data(&mut header, format!("{dir}/data-{number}"), content.as_slice())?;
    }
    let plain = archive.into_inner()?;
    let mut compressed = GzEncoder::new(Vec::with_capacity(plain.len() / 2), Compression::fast());
    compressed.write_all(&plain)?;
    Ok(DemoLayer {
        document: DemoBlob::new(DemoBlobKind::Layer, LAYER, compressed.finish()?),
        diff_id: Digest::sha256(&plain),
    })
}

/// Bytes that shrink to about half of them, as those of real images do.
fn half_noise(size: usize, state: &mut u64) -> Vec<u8> {
    const BLOCK: usize = 4096;
    let mut bytes = Vec::with_capacity(size + BLOCK);
    while bytes.len() < size {
        for _ in 0..BLOCK / 2 / 8 {
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        bytes.resize(bytes.len() + BLOCK / 2, b'.');
    }
    bytes.truncate(size);
    bytes
}

/// This machine, in the words of Go.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
