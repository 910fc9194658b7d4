//! Images for tests: made in memory from files, written as an OCI layout, pushed with skopeo.
//!
//! A description always gives the same digests, on every machine: no clock, no random source but the seed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::packages::{Package, program};
use super::process::run;
use super::registry::{PASSWORD, RegistryAccess, RegistryProcess, USER};
use super::{PeerError, PeerResult};

/// One layer: files that are added in order, with their parent directories.
#[derive(Debug, Clone, Default)]
pub struct LayerFiles {
    files: Vec<(String, Vec<u8>)>,
    archive: Option<Vec<u8>>,
}

impl LayerFiles {
    /// A layer without files.
    pub fn new() -> LayerFiles {
        LayerFiles::default()
    }

    /// Adds a file; `path` is relative, such as `etc/motd`.
    #[must_use]
    pub fn file(mut self, path: impl Into<String>, content: impl Into<Vec<u8>>) -> LayerFiles {
        self.files.push((path.into(), content.into()));
        self
    }

    /// Adds a file of `size` bytes that hardly compress and that only `seed` decides.
    #[must_use]
    pub fn noise(self, path: impl Into<String>, size: usize, seed: u64) -> LayerFiles {
        self.file(path, noise(size, seed))
    }

    /// A layer that is exactly this tar archive; see [`larder_testkit::archive`].
    pub fn archive(archive: impl Into<Vec<u8>>) -> LayerFiles {
        LayerFiles { files: Vec::new(), archive: Some(archive.into()) }
    }

    fn tar(&self) -> PeerResult<Vec<u8>> {
        if let Some(archive) = &self.archive {
            return Ok(archive.clone());
        }
        let mut archive = tar::Builder::new(Vec::new());
        for (path, content) in &self.files {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o755);
            header.set_mtime(1_700_000_000);
            header.set_uid(0);
            header.set_gid(0);
            archive.append_data(&mut header, path, content.as_slice())?;
        }
        Ok(archive.into_inner()?)
    }
}

/// Contents of an image.
#[derive(Debug, Clone, Default)]
pub struct ImageBuilder {
    layers: Vec<LayerFiles>,
    user: String,
    created: Option<String>,
    labels: BTreeMap<String, String>,
    steps: Vec<String>,
    architecture: Option<&'static str>,
    artifact_type: Option<&'static str>,
}

impl ImageBuilder {
    /// An image without layers.
    pub fn new() -> ImageBuilder {
        ImageBuilder::default()
    }

    /// An image of one layer with one file of `size` bytes that hardly compress; `seed` decides the content.
    pub fn small(seed: u64, size: usize) -> ImageBuilder {
        ImageBuilder::new().layer(LayerFiles::new().noise("srv/data", size, seed))
    }

    /// Adds a layer on top.
    #[must_use]
    pub fn layer(mut self, layer: LayerFiles) -> ImageBuilder {
        self.layers.push(layer);
        self
    }

    /// Sets the user that its config names.
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> ImageBuilder {
        self.user = user.into();
        self
    }

    /// Sets when its config says that it was built.
    #[must_use]
    pub fn created(mut self, created: impl Into<String>) -> ImageBuilder {
        self.created = Some(created.into());
        self
    }

    /// Adds a step to the history in its config. The first steps made the layers, the others none.
    #[must_use]
    pub fn step(mut self, created_by: impl Into<String>) -> ImageBuilder {
        self.steps.push(created_by.into());
        self
    }

    /// Sets the architecture that its config names, instead of this machine's.
    #[must_use]
    pub fn architecture(mut self, architecture: &'static str) -> ImageBuilder {
        self.architecture = Some(architecture);
        self
    }

    /// Makes it an artifact of this type: each file is a blob of its own, with its path as title. Layers are lists of
    /// files then, and all that a config would have is left out.
    #[must_use]
    pub fn artifact(mut self, artifact_type: &'static str) -> ImageBuilder {
        self.artifact_type = Some(artifact_type);
        self
    }

    /// Adds a label to its config.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> ImageBuilder {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// Writes it as an OCI layout with one image, into a directory that does not exist yet or is empty.
    pub fn write(&self, dir: &Path) -> PeerResult<OciLayout> {
        fs_err::create_dir_all(dir.join("blobs/sha256"))?;
        if let Some(artifact_type) = self.artifact_type {
            return self.write_artifact(dir, artifact_type);
        }
        let (mut layers, mut diff_ids) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            let tar = layer.tar()?;
            diff_ids.push(digest(&tar));
            layers.push(blob(dir, "application/vnd.oci.image.layer.v1.tar+gzip", &gzip(&tar)?)?);
        }
        let mut config_section = json!({"User": self.user, "Cmd": ["/bin/true"]});
        if !self.labels.is_empty() {
            config_section["Labels"] = json!(self.labels);
        }
        let mut config = json!({
            "architecture": self.architecture.unwrap_or_else(architecture), "os": "linux",
            "created": self.created.as_deref().unwrap_or("2026-01-01T00:00:00Z"),
            "config": config_section,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let steps = self.steps.iter().enumerate();
        let steps = steps.map(|(at, by)| json!({"created_by": by, "empty_layer": at >= self.layers.len()}));
        let steps: Vec<_> = steps.collect();
        if !steps.is_empty() {
            config["history"] = json!(steps);
        }
        let config = blob(dir, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
        OciLayout::write(dir, json!({"config": config, "layers": layers}))
    }

    fn write_artifact(&self, dir: &Path, artifact_type: &str) -> PeerResult<OciLayout> {
        let config = blob(dir, "application/vnd.oci.empty.v1+json", b"{}")?;
        let mut layers = Vec::new();
        for (path, content) in self.layers.iter().flat_map(|layer| &layer.files) {
            let mut layer = blob(dir, "application/octet-stream", content)?;
            layer["annotations"] = json!({"org.opencontainers.image.title": path});
            layers.push(layer);
        }
        OciLayout::write(dir, json!({"artifactType": artifact_type, "config": config, "layers": layers}))
    }

    /// Writes it, and pushes it as `name` (`shop/web:1`). See [`OciLayout::push`].
    pub fn push(&self, registry: &RegistryProcess, name: &str) -> PeerResult<OciLayout> {
        let dir = tempfile::Builder::new().prefix("larder-image-").tempdir()?;
        let layout = self.write(dir.path())?;
        layout.push(registry, name)?;
        Ok(layout)
    }
}

const TAG_IN_LAYOUT: &str = "image";

/// An image on disk, as an OCI layout; its digests stay known after the directory is gone.
#[derive(Debug, Clone)]
pub struct OciLayout {
    dir: PathBuf,
    /// Digest of the manifest: the `sha256:...` of `NAME@sha256:...`.
    pub manifest_digest: String,
    /// Digest of the config, which is the ID of an image.
    pub image_id: String,
    /// Digests of all its blobs: the config, then the layers as they are stored, from the bottom up.
    pub blobs: Vec<String>,
}

impl OciLayout {
    /// Writes the documents of a layout that has the blobs of this manifest already.
    fn write(dir: &Path, mut manifest: Value) -> PeerResult<OciLayout> {
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        (manifest["schemaVersion"], manifest["mediaType"]) = (json!(2), json!(manifest_type));
        let image_id = digest_of(&manifest["config"]);
        let layers = manifest["layers"].as_array().into_iter().flatten().map(digest_of);
        let blobs: Vec<String> = std::iter::once(image_id.clone()).chain(layers).collect();
        let mut manifest = blob(dir, manifest_type, manifest.to_string().as_bytes())?;
        let manifest_digest = digest_of(&manifest);
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": TAG_IN_LAYOUT});
        fs_err::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let index = json!({"schemaVersion": 2, "manifests": [manifest]});
        fs_err::write(dir.join("index.json"), index.to_string())?;
        Ok(OciLayout { dir: dir.to_owned(), manifest_digest, image_id, blobs })
    }

    /// Pushes it into a registry as `name`, with a tag (`shop/web:1`). A registry that asks for a password gets it.
    pub fn push(&self, registry: &RegistryProcess, name: &str) -> PeerResult<()> {
        let mut skopeo = Command::new(program(Package::Skopeo)?);
        skopeo.args(["--insecure-policy", "copy", "--quiet", "--preserve-digests"]);
        match registry.ca() {
            None => skopeo.arg("--dest-tls-verify=false"),
            // skopeo reads every *.crt of the directory as an authority.
            Some(ca) => skopeo.arg("--dest-cert-dir").arg(ca.parent().unwrap_or(ca)),
        };
        if registry.auth() == RegistryAccess::Basic {
            skopeo.arg("--dest-creds").arg(format!("{USER}:{PASSWORD}"));
        }
        skopeo.arg(format!("oci:{}:{TAG_IN_LAYOUT}", self.dir.display()));
        skopeo.arg(format!("docker://{}", registry.image(name)));
        run(&mut skopeo).map(drop).map_err(|error| PeerError::new(format!("push {name}"), error))
    }
}

fn blob(dir: &Path, media_type: &str, content: &[u8]) -> PeerResult<Value> {
    let digest = digest(content);
    let hex = digest.trim_start_matches("sha256:");
    fs_err::write(dir.join("blobs/sha256").join(hex), content)?;
    Ok(json!({"mediaType": media_type, "digest": digest, "size": content.len()}))
}

fn digest_of(descriptor: &Value) -> String {
    descriptor["digest"].as_str().unwrap_or_default().to_owned()
}

fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().fold("sha256:".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn gzip(content: &[u8]) -> PeerResult<Vec<u8>> {
    let mut encoder = GzBuilder::new().mtime(0).write(Vec::new(), Compression::fast());
    encoder.write_all(content)?;
    Ok(encoder.finish()?)
}

/// The machine's architecture in OCI's words: a runtime refuses an image made for another.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Bytes that look random (xorshift64*), the same for the same seed.
fn noise(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_descriptions_give_equal_digests_and_other_seeds_other_ones() {
        let written = |seed| {
            let dir = tempfile::tempdir().unwrap();
            let layout = ImageBuilder::small(seed, 5000).user("1000").write(dir.path()).unwrap();
            for blob in &layout.blobs {
                let path = dir.path().join("blobs/sha256").join(blob.trim_start_matches("sha256:"));
                assert_eq!(&digest(&fs_err::read(path).unwrap()), blob);
            }
            (layout.manifest_digest, layout.image_id, layout.blobs)
        };
        assert_eq!(written(7), written(7));
        assert_ne!(written(7), written(8));
    }
}
