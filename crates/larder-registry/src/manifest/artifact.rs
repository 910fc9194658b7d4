//! Artifacts: manifests of other content than the layers of an image, such as models, charts and files.
//!
//! ```text
//! layer of an artifact -> a file, at the path that its annotations name
//!                      -> the files of an archive, if it is one
//! ```
//!
//! A store keeps an artifact as an image ([`ArtifactManifest::into_image`]): its config is made here, from the
//! documents of the artifact. Everything is pure.

use std::collections::BTreeMap;

use larder::reference::{Digest, Platform};
use serde::Deserialize;
use serde_json::json;

use super::media_type::{IMAGE_CONFIG, is_image_layer, is_model_layer};
use super::{Compression, Descriptor, ImageConfig, ImageManifest, ManifestError};

/// Annotation of the CNCF model format with the path of a file.
const MODEL_PATH: &str = "org.cncf.model.filepath";
/// Annotation of ORAS with the path of a file or directory.
const TITLE: &str = "org.opencontainers.image.title";
/// Annotation of the CNCF model format with the attributes of a file, as JSON.
const FILE_METADATA: &str = "org.cncf.model.file.metadata+json";
/// Annotation of a directory that ORAS packed: `true`.
const UNPACK: &str = "io.deis.oras.content.unpack";
/// Ends of titles that are those of archives.
const ARCHIVE_SUFFIXES: [&str; 5] = [".tar", ".gz", ".tgz", ".zst", ".tzst"];
/// Labels of the config that is made for an artifact.
const TYPE_LABEL: &str = "dev.larder.artifact.type";
const MANIFEST_LABEL: &str = "dev.larder.artifact.manifest";

/// Longest path of a file, in bytes; the kernel's limit is 4,096 with the end.
const MAX_PATH: usize = 4095;
/// Longest component of a path, in bytes; the kernel's limit.
const MAX_NAME: usize = 255;

/// The manifest of an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactManifest {
    /// Its type, such as `application/vnd.cncf.model.manifest.v1+json`: as the manifest names it, or else that of its
    /// config or first layer.
    pub artifact_type: String,
    /// Its config, which may be empty.
    pub config: Descriptor,
    /// Its layers, each of any media type.
    pub layers: Vec<Descriptor>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// A name of the file that is the content of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactFile {
    /// Its path below the root of the artifact.
    pub path: String,
    /// Permissions.
    pub mode: u32,
}

/// A blob of an artifact, and what a store makes of it: a file, or the files of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactLayer {
    /// The blob, as the manifest first names it.
    pub blob: Descriptor,
    /// Names of the file that the blob is; none for an archive.
    pub files: Vec<ArtifactFile>,
}

/// An artifact, and what its layers become.
#[derive(Debug, Clone)]
pub struct ResolvedArtifact {
    /// Digest of its manifest.
    pub digest: Digest,
    /// Its manifest.
    pub manifest: ArtifactManifest,
    /// The bytes of its own config.
    pub config: Vec<u8>,
    /// One for each blob.
    pub contents: Vec<ArtifactLayer>,
}

/// The image as which a store keeps an artifact.
#[derive(Debug, Clone)]
pub struct ArtifactImage {
    /// The artifact.
    pub artifact: ResolvedArtifact,
    /// The made config, and the blobs of the artifact.
    pub manifest: ImageManifest,
    /// The made config.
    pub config: ImageConfig,
    /// The bytes of the made config; their digest is the image ID.
    pub config_raw: Vec<u8>,
}

impl ArtifactManifest {
    /// The bytes of its config, if they need not be fetched: an empty object.
    pub fn known_config(&self) -> Option<&'static [u8]> {
        let empty = b"{}";
        self.config.digest.check(empty).is_ok().then_some(empty)
    }

    /// The image as which a store keeps the artifact: `digest` is that of this manifest, `config` are the bytes of its
    /// own config.
    pub fn into_image(self, digest: Digest, config: Vec<u8>) -> Result<ArtifactImage, ManifestError> {
        let contents = self.contents()?;
        let config_raw = self.image_config(&digest, &contents);
        let manifest = ImageManifest {
            config: Descriptor::new(IMAGE_CONFIG, Digest::sha256(&config_raw), config_raw.len() as u64),
            layers: contents.iter().map(|content| content.blob.clone()).collect(),
            annotations: self.annotations.clone(),
        };
        let parsed = ImageConfig::parse(&config_raw)?;
        let artifact = ResolvedArtifact { digest, manifest: self, config, contents };
        Ok(ArtifactImage { artifact, manifest, config: parsed, config_raw })
    }

    /// The blobs as a store unpacks them, each once. Fails if a path leaves the artifact, is a file and a directory, or
    /// is that of two files, and if a layer would have other content than its type says.
    pub fn contents(&self) -> Result<Vec<ArtifactLayer>, ManifestError> {
        let (mut contents, mut places, mut paths) =
            (Vec::<ArtifactLayer>::new(), BTreeMap::new(), BTreeMap::new());
        for layer in &self.layers {
            let file = file_of(layer)?;
            let place = *places.entry(&layer.digest).or_insert(contents.len());
            if place == contents.len() {
                contents.push(ArtifactLayer { blob: layer.clone(), files: Vec::new() });
            } else if contents[place].files.is_empty() != file.is_none()
                || contents[place].blob.size != layer.size
            {
                return Err(ManifestError::AmbiguousLayer { digest: layer.digest.clone() });
            }
            let Some(file) = file else { continue };
            match paths.insert(file.path.clone(), place) {
                None => contents[place].files.push(file),
                Some(other) if other == place => {}
                Some(_) => return Err(bad_path(&file.path, "two different files have this path")),
            }
        }
        // In the order of bytes, what is below a file follows it, apart from names that continue its own.
        for path in paths.keys() {
            let above = path.match_indices('/').map(|(at, _)| &path[..at]);
            if let Some(file) = above.into_iter().find(|above| paths.contains_key(*above)) {
                return Err(bad_path(path, &format!("{file} is a file")));
            }
        }
        Ok(contents)
    }

    fn image_config(&self, manifest: &Digest, contents: &[ArtifactLayer]) -> Vec<u8> {
        let host = Platform::host();
        let diff_ids: Vec<Digest> = contents.iter().map(ArtifactLayer::diff_id).collect();
        let labels = json!({ TYPE_LABEL: self.artifact_type, MANIFEST_LABEL: manifest.as_str() });
        // Shown when a container of it is started.
        let entrypoint = [format!("{} is an artifact: mount it as a volume", self.artifact_type)];
        let config = json!({
            "architecture": host.architecture,
            "os": host.os,
            "config": { "Entrypoint": entrypoint, "Labels": labels },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        config.to_string().into_bytes()
    }
}

impl ArtifactLayer {
    /// Identifies the unpacked layer, as a diff ID does: of a plain archive its digest; else it is made of the blob's
    /// digest, and of the file's names and mode.
    pub fn diff_id(&self) -> Digest {
        let digest = &self.blob.digest;
        let Some(file) = self.files.first() else {
            let is_plain = archive_compression(&self.blob.media_type) == Some(Compression::None);
            return if is_plain { digest.clone() } else { archive_id(digest) };
        };
        let mut identity = format!("larder.dev/file\n{digest}\n{:o}", file.mode);
        for file in &self.files {
            identity.push('\0');
            identity.push_str(&file.path);
        }
        Digest::sha256(identity)
    }
}

/// Identifies an unpacked archive whose plain digest is not known: it is made of the digest of the archive as it is.
pub fn archive_id(digest: &Digest) -> Digest {
    Digest::sha256(format!("larder.dev/archive\n{digest}"))
}

/// The file that a layer is; `None` for an archive.
fn file_of(layer: &Descriptor) -> Result<Option<ArtifactFile>, ManifestError> {
    let annotation = |key: &str| layer.annotations.get(key).filter(|value| !value.is_empty());
    if archive_compression(&layer.media_type).is_some_and(|compression| is_packed(layer, compression)) {
        return Ok(None);
    }
    if is_model_layer(&layer.media_type) && layer.media_type.contains('+') {
        // A file of compressed bytes is not what the path of the layer stands for.
        let (digest, media_type) = (layer.digest.clone(), layer.media_type.chars().take(200).collect());
        return Err(ManifestError::UnknownLayer { digest, media_type });
    }
    let named = annotation(MODEL_PATH).or_else(|| annotation(TITLE));
    let path = named.cloned().unwrap_or_else(|| layer.digest.hex().to_owned());
    check_path(&path).map_err(|problem| bad_path(&path, problem))?;
    Ok(Some(ArtifactFile { path, mode: mode_of(layer) }))
}

/// The compression of an archive by its media type, such as `application/vnd.cncf.helm.chart.content.v1.tar+gzip`;
/// `None` for other content.
fn archive_compression(media_type: &str) -> Option<Compression> {
    let bare = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match bare.rsplit_once(".tar")?.1 {
        "" => Some(Compression::None),
        "+gzip" | ".gzip" => Some(Compression::Gzip),
        "+zstd" | ".zstd" => Some(Compression::Zstd),
        _ => None,
    }
}

/// Returns true if a layer with the media type of an archive is to be unpacked. ORAS gives that of image layers to
/// files as well: with its title, a layer is a directory if the writer says so, or compressed it and did not name it
/// like an archive.
fn is_packed(layer: &Descriptor, compression: Compression) -> bool {
    let annotations = &layer.annotations;
    let of_oras = is_image_layer(&layer.media_type) && !annotations.contains_key(MODEL_PATH);
    let Some(title) = annotations.get(TITLE).filter(|_| of_oras) else { return true };
    let is_archive = ARCHIVE_SUFFIXES.iter().any(|suffix| title.to_ascii_lowercase().ends_with(suffix));
    let is_directory = annotations.get(UNPACK).is_some_and(|unpack| unpack == "true");
    is_directory || (compression != Compression::None && !is_archive)
}

/// The permissions of a file, without set-ID bits.
fn mode_of(layer: &Descriptor) -> u32 {
    #[derive(Deserialize)]
    struct FileMetadata {
        mode: u32,
    }
    let metadata = layer.annotations.get(FILE_METADATA);
    let metadata: Option<FileMetadata> = metadata.and_then(|text| serde_json::from_str(text).ok());
    metadata.map_or(0o644, |metadata| metadata.mode & 0o777)
}

fn check_path(path: &str) -> Result<(), &'static str> {
    if path.len() > MAX_PATH {
        return Err("longer than 4,095 bytes");
    }
    if path.contains('\0') {
        return Err("it contains a NUL");
    }
    for part in path.split('/') {
        match part {
            "" => return Err("absolute, or with an empty component"),
            "." | ".." => return Err("with . or .. as a component"),
            part if part.starts_with(".wh.") => return Err("a whiteout"),
            part if part.len() > MAX_NAME => return Err("with a component longer than 255 bytes"),
            _ => {}
        }
    }
    Ok(())
}

fn bad_path(path: &str, problem: &str) -> ManifestError {
    let path = path.chars().take(200).collect();
    ManifestError::ArtifactPath { path, problem: problem.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(media_type: &str, annotations: &[(&str, &str)]) -> Descriptor {
        let mut layer = Descriptor::new(media_type, Digest::sha256(format!("{annotations:?}")), 7);
        layer.annotations =
            annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        layer
    }

    fn artifact(layers: Vec<Descriptor>) -> ArtifactManifest {
        let config = Descriptor::new("application/vnd.oci.empty.v1+json", Digest::sha256("{}"), 2);
        ArtifactManifest { artifact_type: "test".into(), config, layers, annotations: BTreeMap::new() }
    }

    fn titled(title: &str) -> Descriptor {
        layer("application/octet-stream", &[("org.opencontainers.image.title", title)])
    }

    #[test]
    fn a_file_has_the_path_and_mode_of_its_annotations() {
        let model = layer(
            "application/vnd.cncf.model.weight.v1.raw",
            &[
                ("org.cncf.model.filepath", "a/w.bin"),
                (FILE_METADATA, r#"{"name":"w.bin","mode":35309,"size":7}"#),
            ],
        );
        let bare = layer("application/octet-stream", &[]);
        let contents = artifact(vec![model, titled("a/readme.md"), bare.clone()]).contents().unwrap();
        let files: Vec<_> = contents.iter().flat_map(|content| &content.files).collect();
        assert_eq!(*files[0], ArtifactFile { path: "a/w.bin".into(), mode: 0o755 });
        assert_eq!(*files[1], ArtifactFile { path: "a/readme.md".into(), mode: 0o644 });
        assert_eq!(files[2].path, bare.digest.hex());
    }

    #[test]
    fn archives_are_unpacked_whose_types_say_so_and_files_of_oras_are_files() {
        const PACKED: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
        const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
        let model = layer("application/vnd.cncf.model.weight.v1.tar", &[(MODEL_PATH, "a"), (TITLE, "a")]);
        let chart = layer("application/vnd.cncf.helm.chart.content.v1.tar+gzip", &[]);
        let noted = layer(PACKED, &[(UNPACK, "true"), (TITLE, "a.tar")]);
        let of_python = layer(PACKED, &[(TITLE, "b")]);
        let layers = [&model, &chart, &noted, &of_python];
        let contents = artifact(layers.map(Clone::clone).to_vec()).contents().unwrap();
        assert!(contents.iter().all(|content| content.files.is_empty()));
        assert_eq!(contents[0].diff_id(), model.digest);
        assert_eq!(contents[1].diff_id(), archive_id(&chart.digest));

        for (media_type, title) in
            [(PLAIN, "notes.txt"), (PLAIN, "dir.tar"), (PACKED, "dir.tar.gz"), (PACKED, "a.TGZ")]
        {
            let file = file_of(&layer(media_type, &[(TITLE, title)])).unwrap();
            assert_eq!(file.unwrap().path, title, "as it is");
        }
    }

    #[test]
    fn compressed_files_of_a_model_are_refused_and_those_of_another_version_are_kept() {
        for media_type in
            ["application/vnd.cncf.model.weight.v1.tar+xz", "application/vnd.cncf.model.code.v1.raw+br"]
        {
            let error = artifact(vec![layer(media_type, &[])]).contents().unwrap_err().to_string();
            assert!(error.contains("unsupported media type") && error.contains(media_type), "{error}");
        }
        let next = artifact(vec![layer("application/vnd.cncf.model.weight.v2.raw+br", &[])]);
        assert_eq!(next.contents().unwrap()[0].files.len(), 1);
    }

    #[test]
    fn a_blob_has_all_its_names_in_one_layer() {
        let blob = titled("a");
        let named = |title: &str| Descriptor { digest: blob.digest.clone(), ..titled(title) };
        let contents =
            artifact(vec![named("a"), titled("other"), named("b/c"), named("a")]).contents().unwrap();
        let paths: Vec<Vec<&str>> =
            contents.iter().map(|content| content.files.iter().map(|file| &*file.path).collect()).collect();
        assert_eq!(paths, [vec!["a", "b/c"], vec!["other"]]);
        let ids =
            [vec![named("a")], vec![named("a"), named("b/c")], vec![named("a"), named("b"), named("c")]];
        let ids = ids.map(|layers| artifact(layers).contents().unwrap()[0].diff_id());
        assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");

        let archive = layer("application/vnd.cncf.model.weight.v1.tar", &[]);
        let as_archive = Descriptor { digest: blob.digest.clone(), ..archive.clone() };
        let larger = Descriptor { size: 8, ..named("b") };
        for layers in
            [vec![named("a"), as_archive.clone()], vec![as_archive, named("a")], vec![named("a"), larger]]
        {
            let error = artifact(layers).contents().unwrap_err();
            assert!(matches!(error, ManifestError::AmbiguousLayer { .. }), "{error}");
        }
        assert_eq!(artifact(vec![archive.clone(), archive]).contents().unwrap().len(), 1);
    }

    #[test]
    fn hostile_paths_are_refused_by_name() {
        for path in [
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            ".",
            "a/.wh.b",
            "a\0b",
            &"a/".repeat(3000),
            &"n".repeat(256),
        ] {
            let error = artifact(vec![titled(path)]).contents().unwrap_err();
            assert!(error.to_string().starts_with("path \""), "{path:?}: {error}");
        }
        let twice = |other: Descriptor| artifact(vec![titled("a"), other]).contents();
        assert!(twice(titled("a")).is_ok(), "one file twice");
        let other = layer("text/plain", &[("org.opencontainers.image.title", "a")]);
        assert!(twice(Descriptor { digest: Digest::sha256("other"), ..other }).is_err());
        assert!(artifact(vec![titled("a"), titled("a-b"), titled("a/b")]).contents().is_err());
    }
}
