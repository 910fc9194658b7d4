//! Reading images from layouts and archives.

use std::io::{Cursor, Read as _, Write as _};
use std::path::{Path, PathBuf};

use larder::reference::{Digest, Platform, Reference};
use larder_registry::manifest::PlatformMatcher;
use larder_store::disk::DiskSpace;
use larder_store::store::import::{Import, ImportError, ImportSource};
use larder_store::store::{LayerKey, LayerMetadata, Store};
use serde_json::{Value, json};

use crate::help::*;

/// The files of a layout or an archive, by name.
pub(crate) type ArchiveFiles = Vec<(String, Vec<u8>)>;

pub(crate) fn amd64() -> PlatformMatcher {
    PlatformMatcher::for_platform(&Platform::new("linux", "amd64"))
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

pub(crate) fn tar_of(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content.as_slice()).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A layer's plain archive.
pub(crate) fn plain(name: &str) -> Vec<u8> {
    tar_of(&[(name.to_owned(), name.as_bytes().to_vec())])
}

fn config(architecture: &str, layers: &[&str]) -> Vec<u8> {
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest(plain(layer)).to_string()).collect();
    json!({
        "os": "linux", "architecture": architecture, "rootfs": { "type": "layers", "diff_ids": diff_ids },
    })
    .to_string()
    .into_bytes()
}

fn blob(files: &mut ArchiveFiles, bytes: Vec<u8>) -> Digest {
    let digest = digest(&bytes);
    let name = format!("blobs/sha256/{}", digest.hex());
    if !files.iter().any(|(other, _)| *other == name) {
        files.push((name, bytes));
    }
    digest
}

fn descriptor(kind: &str, digest: &Digest, size: usize) -> Value {
    json!({ "mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest.as_str(), "size": size })
}

/// Adds a manifest with its config and layers; gives its descriptor.
fn manifest(files: &mut ArchiveFiles, architecture: &str, layers: &[&str]) -> Value {
    let config = config(architecture, layers);
    let config_size = config.len();
    let config = descriptor("config.v1+json", &blob(files, config), config_size);
    let layers: Vec<Value> = layers
        .iter()
        .map(|layer| {
            let packed = gzip(&plain(layer));
            let size = packed.len();
            descriptor("layer.v1.tar+gzip", &blob(files, packed), size)
        })
        .collect();
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": layers }).to_string().into_bytes();
    let size = manifest.len();
    descriptor("manifest.v1+json", &blob(files, manifest), size)
}

fn named(mut descriptor: Value, annotation: &str, name: &str) -> Value {
    descriptor["annotations"] = json!({ annotation: name });
    descriptor
}

fn with_index(mut files: ArchiveFiles, manifests: &[Value]) -> ArchiveFiles {
    let index = json!({ "schemaVersion": 2, "manifests": manifests }).to_string().into_bytes();
    files.push(("index.json".into(), index));
    files.push(("oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()));
    files
}

/// A layout with one image.
pub(crate) fn layout(name: &str, layers: &[&str]) -> ArchiveFiles {
    let mut files = ArchiveFiles::new();
    let manifest = manifest(&mut files, "amd64", layers);
    with_index(files, &[named(manifest, "io.containerd.image.name", name)])
}

/// Builds an archive as `docker save` wrote it before it wrote OCI layouts. Every second layer is a link to the one
/// before, if equal.
fn docker_archive(tags: &[&str], layers: &[&str]) -> Vec<u8> {
    let config = config("amd64", layers);
    let config_name = format!("{}.json", digest(&config).hex());
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |name: &str, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content).unwrap();
    };
    add(&config_name, &config);
    let mut names: Vec<String> = Vec::new();
    let mut links: Vec<(String, String)> = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        let name = format!("id{number}/layer.tar");
        match layers[..number].iter().position(|other| other == layer) {
            Some(first) => links.push((name.clone(), format!("../id{first}/layer.tar"))),
            None => add(&name, &plain(layer)),
        }
        names.push(name);
    }
    let manifest = json!([{ "Config": config_name, "RepoTags": tags, "Layers": names }]).to_string();
    add("manifest.json", manifest.as_bytes());
    for (name, target) in links {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, name, target).unwrap();
    }
    builder.into_inner().unwrap()
}

fn write_dir(scratch: &TempStore, files: &ArchiveFiles) -> PathBuf {
    let dir = scratch.dir.path().join("layout");
    for (name, content) in files {
        let path = dir.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, content).unwrap();
    }
    dir
}

fn write_file(scratch: &TempStore, bytes: &[u8]) -> PathBuf {
    let path = scratch.dir.path().join("archive.tar");
    fs_err::write(&path, bytes).unwrap();
    path
}

fn read(store: &Store, from: ImportSource) -> Result<Import, ImportError> {
    store.read_import(from, &amd64(), None, DiskSpace::default())
}

fn based(store: &Store, from: ImportSource, base: &str) -> Result<Import, ImportError> {
    store.read_import(from, &amd64(), Some(&Reference::parse(base).unwrap()), DiskSpace::default())
}

pub(crate) fn stream(bytes: Vec<u8>) -> ImportSource {
    ImportSource::Stream(Box::new(Cursor::new(bytes)))
}

/// Checks that the one image has these names and layers, and that each layer can be read to its end.
fn assert_image(import: &Import, names: &[&str], layers: &[&str]) {
    let [image] = import.images.as_slice() else { panic!("{import:?}") };
    assert_eq!(image.names.iter().map(ToString::to_string).collect::<Vec<_>>(), names);
    assert_eq!(digest(&image.config.1), image.config.0);
    assert_eq!(image.manifest.layers.len(), layers.len());
    for (descriptor, layer) in image.manifest.layers.iter().zip(layers) {
        for _ in 0..2 {
            let mut bytes = Vec::new();
            import.open(&descriptor.digest).unwrap().read_to_end(&mut bytes).unwrap();
            assert_eq!(digest(&bytes), descriptor.digest, "{layer}");
            assert_eq!(bytes.len() as u64, descriptor.size, "{layer}");
        }
    }
}

pub(crate) const APP: &str = "registry.example/app:v1";

#[test]
fn a_damaged_header_is_reported_with_its_entry_and_place() {
    let scratch = TempStore::new();
    let mut archive = tar_of(&[("first".to_owned(), vec![0; 512])]);
    archive.truncate(1024);
    let mut header = tar::Header::new_gnu();
    header.set_path("layer.tar").unwrap();
    header.as_old_mut().size = [b'r'; 12];
    header.set_cksum();
    archive.extend(header.as_bytes());
    archive.resize(4096, 0);
    for from in [ImportSource::Path(write_file(&scratch, &archive)), stream(archive.clone())] {
        let error = read(&scratch.store, from).unwrap_err().to_string();
        let expected = "damaged at byte 1024: entry layer.tar: a number in the header is not octal";
        assert!(error.ends_with(expected), "{error}");
    }
}

#[test]
fn a_layout_is_read_from_a_directory_a_file_and_a_stream() {
    let scratch = TempStore::new();
    let files = layout(APP, &["a", "b"]);
    let archive = tar_of(&files);
    let store = &scratch.store;
    let file = write_file(&scratch, &archive);
    for from in [
        ImportSource::Path(write_dir(&scratch, &files)),
        ImportSource::Path(file),
        stream(archive.clone()),
        stream(gzip(&archive)),
        stream(zstd::encode_all(archive.as_slice(), 1).unwrap()),
    ] {
        let what = format!("{from:?}");
        let import = read(store, from).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_image(&import, &[APP], &["a", "b"]);
        assert!(import.images[0].has_digest, "{what}");
    }
    assert!(entries(&store.root().join("staging")).is_empty(), "what was kept of streams is gone");
    fs_err::write(scratch.dir.path().join("archive.tar"), gzip(&archive)).unwrap();
    let packed = ImportSource::Path(scratch.dir.path().join("archive.tar"));
    assert_image(&read(store, packed).unwrap(), &[APP], &["a", "b"]);
}

#[test]
fn a_docker_archive_is_read_from_a_file_and_a_stream() {
    let scratch = TempStore::new();
    let archive = docker_archive(&["app:v1", APP], &["a", "b", "a"]);
    let file = write_file(&scratch, &archive);
    let mut manifests = Vec::new();
    for from in [ImportSource::Path(file), stream(archive.clone()), stream(gzip(&archive))] {
        let import = read(&scratch.store, from).unwrap();
        assert_image(&import, &["docker.io/library/app:v1", APP], &["a", "b", "a"]);
        assert!(!import.images[0].has_digest, "no registry knows the manifest");
        manifests.push(import.images[0].manifests.clone());
    }
    manifests.dedup();
    assert_eq!(manifests.len(), 1, "the same image has the same manifest each time");
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut packed = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut packed = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

#[test]
fn archives_may_be_packed_in_any_usual_way() {
    let scratch = TempStore::new();
    let plain = docker_archive(&["r.example/a:1"], &["a"]);
    for packed in [gzip(&plain), zstd::encode_all(&plain[..], 1).unwrap(), xz(&plain), bzip2(&plain)] {
        let import = read(&scratch.store, ImportSource::Path(write_file(&scratch, &packed))).unwrap();
        assert_image(&import, &["r.example/a:1"], &["a"]);
        let half = &packed[..packed.len() / 2];
        let cut = read(&scratch.store, ImportSource::Path(write_file(&scratch, half))).unwrap_err();
        assert!(cut.hint().is_some(), "{cut}");
    }
    // The header of the only block asks for a window of 4 GiB.
    let mut greedy = xz(&plain);
    let (block, length) = (12, (usize::from(greedy[12]) + 1) * 4);
    assert_eq!(greedy[block + 2..block + 4], [0x21, 1]);
    greedy[block + 4] = 40;
    let sum = crc32fast::hash(&greedy[block..block + length - 4]);
    greedy[block + length - 4..block + length].copy_from_slice(&sum.to_le_bytes());
    let refused = read(&scratch.store, ImportSource::Path(write_file(&scratch, &greedy))).unwrap_err();
    assert!(larder::error_chain(&refused).contains("memory"), "{}", larder::error_chain(&refused));
}

#[test]
fn a_directory_of_skopeo_is_an_image_without_a_name() {
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let descriptor = manifest(&mut files, "amd64", &["a", "b"]);
    let hex = descriptor["digest"].as_str().unwrap().trim_start_matches("sha256:").to_owned();
    let mut files: ArchiveFiles = files
        .into_iter()
        .map(|(name, bytes)| match name.trim_start_matches("blobs/sha256/") {
            name if name == hex => ("manifest.json".to_owned(), bytes),
            name => (name.to_owned(), bytes),
        })
        .collect();
    files.push(("version".into(), b"Directory Transport Version: 1.1\n".to_vec()));
    for from in [ImportSource::Path(write_dir(&scratch, &files)), stream(tar_of(&files))] {
        let import = read(&scratch.store, from).unwrap();
        assert_image(&import, &[], &["a", "b"]);
        assert_eq!(import.images[0].manifests[0].0.hex(), hex);
    }
    files.retain(|(name, _)| name.len() != 64);
    let missing = read(&scratch.store, stream(tar_of(&files))).unwrap_err();
    assert!(matches!(missing, ImportError::Missing { .. }), "{missing}");
}

#[test]
fn layers_of_docker_archives_may_be_packed() {
    let scratch = TempStore::new();
    let config = config("amd64", &["a"]);
    let manifest = json!([{ "Config": "config.json", "RepoTags": null, "Layers": ["a/layer.tar"] }]);
    let files = vec![
        ("manifest.json".to_owned(), manifest.to_string().into_bytes()),
        ("config.json".to_owned(), config),
        ("a/layer.tar".to_owned(), gzip(&plain("a"))),
    ];
    assert_image(&read(&scratch.store, stream(tar_of(&files))).unwrap(), &[], &["a"]);
}

#[test]
fn a_newer_docker_archive_has_its_names_in_full() {
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let manifest = manifest(&mut files, "amd64", &["a"]);
    let manifest = named(manifest, "org.opencontainers.image.ref.name", "v1");
    let config = digest(config("amd64", &["a"]));
    let docker = json!([{
        "Config": format!("blobs/sha256/{}", config.hex()), "RepoTags": [APP, "registry.example/app:v2"], "Layers": [],
    }]);
    files.push(("manifest.json".into(), docker.to_string().into_bytes()));
    let files = with_index(files, &[manifest]);
    let import = read(&scratch.store, stream(tar_of(&files))).unwrap();
    assert_image(&import, &[APP, "registry.example/app:v2"], &["a"]);
}

#[test]
fn a_bare_tag_requires_a_repository() {
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let manifest = manifest(&mut files, "amd64", &["a"]);
    let files = with_index(files, &[named(manifest, "org.opencontainers.image.ref.name", "v1")]);
    let dir = write_dir(&scratch, &files);
    assert_image(&read(&scratch.store, ImportSource::Path(dir.clone())).unwrap(), &[], &["a"]);
    let import = read(&scratch.store, ImportSource::Path(dir.clone())).unwrap();
    assert_eq!(import.images[0].bare_tags, ["v1"], "reported to the caller");
    for (base, name) in [
        ("registry.example/app", APP),
        ("registry.example/app:v9", "registry.example/app:v9"),
        ("localhost:5000/app", "localhost:5000/app:v1"),
    ] {
        let import = based(&scratch.store, ImportSource::Path(dir.clone()), base).unwrap();
        assert_image(&import, &[name], &["a"]);
        assert!(import.images[0].bare_tags.is_empty(), "it has a name now");
    }
}

#[test]
fn the_digest_of_a_repository_is_restored_if_a_kept_document_leads_to_the_image() {
    const NAME: &str = "io.containerd.image.name";
    const PULLED_AS: &str = "dev.larder.image.pulled-as";
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let saved = manifest(&mut files, "amd64", &["a"]);
    let other = manifest(&mut files, "amd64", &["b"]);
    // As it was pulled: a manifest of the same config, with layers that the archive does not have, below an index.
    let config = digest(config("amd64", &["a"]));
    let pulled = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("config.v1+json", &config, 1),
        "layers": [descriptor("layer.v1.tar+gzip", &digest(b"packed"), 6)],
    });
    let pulled = blob(&mut files, pulled.to_string().into_bytes());
    let index = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [other, descriptor("manifest.v1+json", &pulled, 1)],
    });
    let index = blob(&mut files, index.to_string().into_bytes());
    let read_as = |annotations: Value| {
        let mut descriptor = saved.clone();
        descriptor["annotations"] = annotations;
        let files = with_index(files.clone(), &[descriptor]);
        read(&scratch.store, ImportSource::Path(write_dir(&scratch, &files)))
    };
    let by_index = format!("r.example/a@{index}");
    for annotations in [json!({ NAME: "r.example/a:1", PULLED_AS: by_index }), json!({ PULLED_AS: by_index })]
    {
        let import = read_as(annotations).unwrap();
        let [image] = &import.images[..] else { panic!("one image") };
        let documents: Vec<_> = image.manifests.iter().map(|(digest, _)| digest).collect();
        assert_eq!(documents, [&index, &pulled]);
        assert!(image.names.iter().any(|name| name.to_string() == by_index));
        assert!(!image.has_digest, "no other digest is known to the repository");
    }
    assert!(!read_as(json!({ NAME: "r.example/a:1", PULLED_AS: "" })).unwrap().images[0].has_digest);
    let own = format!("r.example/a@{}", saved["digest"].as_str().unwrap());
    assert!(read_as(json!({ NAME: own })).unwrap().images[0].has_digest, "an archive of containerd");
    let of_another = format!("r.example/a@{}", other["digest"].as_str().unwrap());
    let invented = format!("r.example/a@{}", digest(b"invented"));
    for name in [&of_another, &invented] {
        for annotation in [NAME, PULLED_AS] {
            let error = read_as(json!({ annotation: name })).unwrap_err();
            assert!(matches!(error, ImportError::ForeignDigest { .. }), "{annotation}: {error}");
        }
    }
    assert!(matches!(read_as(json!({ PULLED_AS: "r.example/a:1" })), Err(ImportError::ForeignDigest { .. })));
}

#[test]
fn images_without_a_name_get_the_given_one_and_others_keep_theirs() {
    let scratch = TempStore::new();
    for (tags, base, names) in [
        (&[][..], "registry.example/app:v1", &[APP][..]),
        (&[], "registry.example/app", &["registry.example/app"]),
        (&[APP], "other/app:v2", &[APP]),
    ] {
        let archive = docker_archive(tags, &["a"]);
        assert_image(&based(&scratch.store, stream(archive), base).unwrap(), names, &["a"]);
    }
    let mut files = ArchiveFiles::new();
    let tagged = ["v1", "v2"]
        .map(|tag| named(manifest(&mut files, "amd64", &[tag]), "org.opencontainers.image.ref.name", tag));
    let files = with_index(files, &tagged);
    let import = based(&scratch.store, stream(tar_of(&files)), "registry.example/app").unwrap();
    let names: Vec<String> =
        import.images.iter().flat_map(|image| &image.names).map(ToString::to_string).collect();
    assert_eq!(names, [APP, "registry.example/app:v2"]);
    let error = based(&scratch.store, stream(tar_of(&files)), APP).expect_err("one name for two images");
    assert!(matches!(error, ImportError::OneName { .. }) && error.hint().is_some(), "{error}");
}

#[test]
fn the_image_of_the_wanted_platform_is_taken() {
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let mut entries = Vec::new();
    for architecture in ["arm64", "amd64"] {
        let mut entry = manifest(&mut files, architecture, &["a", architecture]);
        entry["platform"] = json!({ "os": "linux", "architecture": architecture });
        entries.push(entry);
    }
    let index = json!({ "schemaVersion": 2, "manifests": entries }).to_string().into_bytes();
    let size = index.len();
    let index = descriptor("index.v1+json", &blob(&mut files, index), size);
    for top in [vec![named(index, "io.containerd.image.name", APP)], entries.clone()] {
        let nested = top.len() == 1;
        let files = with_index(files.clone(), &top);
        let import = read(&scratch.store, stream(tar_of(&files))).unwrap();
        assert_image(&import, if nested { &[APP] } else { &[] }, &["a", "amd64"]);
        assert_eq!(import.images[0].manifests.len(), if nested { 2 } else { 1 });
        let other = PlatformMatcher::for_platform(&Platform::new("linux", "s390x"));
        let error = scratch
            .store
            .read_import(stream(tar_of(&files)), &other, None, DiskSpace::default())
            .unwrap_err();
        assert!(matches!(&error, ImportError::NoPlatform { offered, .. } if offered.len() == 2), "{error}");
    }
}

#[test]
fn the_config_decides_where_no_index_declares_a_platform() {
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let entries = ["arm64", "amd64"].map(|arch| {
        let mut entry = manifest(&mut files, arch, &["a", arch]);
        entry["platform"] = json!({ "os": "", "architecture": "" });
        entry
    });
    let index = json!({ "schemaVersion": 2, "manifests": entries }).to_string().into_bytes();
    let size = index.len();
    let index = descriptor("index.v1+json", &blob(&mut files, index), size);
    for top in [vec![named(index, "io.containerd.image.name", APP)], entries.to_vec()] {
        let names: &[&str] = if top.len() == 1 { &[APP] } else { &[] };
        let import = read(&scratch.store, stream(tar_of(&with_index(files.clone(), &top)))).unwrap();
        assert_image(&import, names, &["a", "amd64"]);
        assert_eq!(import.left_out.len(), top.len() - 1, "{:?}", import.left_out);
    }
    let foreign = with_index(files, &entries[..1]);
    let docker = docker_archive(&[APP], &["a"]);
    let arm = PlatformMatcher::for_platform(&Platform::new("linux", "s390x"));
    for (archive, platform) in [(tar_of(&foreign), amd64()), (docker, arm)] {
        let error =
            scratch.store.read_import(stream(archive), &platform, None, DiskSpace::default()).unwrap_err();
        assert!(matches!(error, ImportError::NoPlatform { .. }) && error.hint().is_some(), "{error}");
    }
}

#[test]
fn other_content_beside_an_image_is_left_out_and_listed() {
    let scratch = TempStore::new();
    let mut files = ArchiveFiles::new();
    let other = |files: &mut ArchiveFiles, config: &str, layer: &str| {
        let config = descriptor(config, &blob(files, b"{}".to_vec()), 2);
        let layer = json!({ "mediaType": layer, "digest": blob(files, b"s".to_vec()).as_str(), "size": 1 });
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [layer] }).to_string();
        let size = manifest.len();
        descriptor("manifest.v1+json", &blob(files, manifest.into_bytes()), size)
    };
    let mut attestation = manifest(&mut files, "amd64", &["b"]);
    attestation["platform"] = json!({ "os": "unknown", "architecture": "unknown" });
    let others = [
        other(&mut files, "config.v1+json", "application/vnd.dev.cosign.simplesigning.v1+json"),
        other(&mut files, "empty.v1+json", "text/spdx+json"),
        descriptor("layer.v1.tar", &digest("x"), 1),
        attestation,
    ];
    let image = named(manifest(&mut files, "amd64", &["a"]), "io.containerd.image.name", APP);
    let nested = [&others[..2], std::slice::from_ref(&image)].concat();
    let nested = json!({ "schemaVersion": 2, "manifests": nested }).to_string().into_bytes();
    let size = nested.len();
    let nested = descriptor("index.v1+json", &blob(&mut files, nested), size);
    for (image, left_out) in [(image, 4), (named(nested, "io.containerd.image.name", APP), 4)] {
        let top = [&others[..], &[image]].concat();
        let import = read(&scratch.store, stream(tar_of(&with_index(files.clone(), &top)))).unwrap();
        assert_image(&import, &[APP], &["a"]);
        assert_eq!(import.left_out.len(), left_out);
        assert_eq!(import.left_out[0].digest.as_str(), others[0]["digest"]);
        assert!(import.left_out[0].reason.contains("simplesigning"), "{:?}", import.left_out);
    }
    // Without an image they are what the archive has.
    let import = read(&scratch.store, stream(tar_of(&with_index(files, &others)))).unwrap();
    let types = import.images.iter().map(|image| &image.artifact.as_ref().unwrap().manifest.artifact_type);
    let expected =
        ["application/vnd.dev.cosign.simplesigning.v1+json", "application/vnd.oci.image.empty.v1+json"];
    assert_eq!(types.collect::<Vec<_>>(), expected);
    assert_eq!(import.left_out.len(), 2);
}

#[test]
fn archives_are_read_as_go_programs_read_them() {
    let scratch = TempStore::new();
    let archive = |list: Value| {
        tar_of(&[
            ("manifest.json".to_owned(), list.to_string().into_bytes()),
            ("config.json".to_owned(), config("amd64", &["a"])),
            ("layer.tar".to_owned(), plain("a")),
        ])
    };
    for (names, list) in [
        (&[APP][..], json!([{ "config": "config.json", "repoTags": [APP], "LAYERS": ["layer.tar"] }])),
        (
            &[APP],
            json!([{ "Config": "config.json", "RepoTags": ["", APP], "Layers": ["layer.tar"], "Parent": {} }]),
        ),
        (&[], json!([{ "Config": "config.json", "RepoTags": null, "Layers": ["layer.tar"] }])),
    ] {
        assert_image(&read(&scratch.store, stream(archive(list))).unwrap(), names, &["a"]);
    }
    let error = read(&scratch.store, stream(archive(Value::Null))).unwrap_err();
    assert!(matches!(error, ImportError::NoImages), "{error}");
    let mut files = ArchiveFiles::new();
    let mut image = manifest(&mut files, "amd64", &["a"]);
    image["mediaType"] = "".into();
    image["annotations"] =
        json!({ "org.opencontainers.image.ref.name": "", "io.containerd.image.name": null });
    assert_image(&read(&scratch.store, stream(tar_of(&with_index(files, &[image])))).unwrap(), &[], &["a"]);
}

#[test]
fn links_to_layers_may_lack_the_way_up() {
    let scratch = TempStore::new();
    for target in ["../id0/layer.tar", "id0/layer.tar"] {
        let list = json!([{ "Config": "config.json", "RepoTags": [APP], "Layers": ["id0/layer.tar", "id1/layer.tar"] }]);
        let mut archive = tar_of(&[
            ("manifest.json".to_owned(), list.to_string().into_bytes()),
            ("config.json".to_owned(), config("amd64", &["a", "a"])),
            ("id0/layer.tar".to_owned(), plain("a")),
        ]);
        archive.truncate(archive.len() - 1024);
        let mut builder = tar::Builder::new(archive);
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, "id1/layer.tar", target).unwrap();
        let archive = builder.into_inner().unwrap();
        assert_image(&read(&scratch.store, stream(archive)).unwrap(), &[APP], &["a", "a"]);
    }
    // In a directory: links that stay in it.
    let dir = write_dir(&scratch, &layout(APP, &["a"]));
    fs_err::rename(dir.join("index.json"), dir.join("blobs/real")).unwrap();
    std::os::unix::fs::symlink("blobs/real", dir.join("index.json")).unwrap();
    assert_image(&read(&scratch.store, ImportSource::Path(dir)).unwrap(), &[APP], &["a"]);
}

#[test]
fn layers_that_the_store_has_are_not_kept_again() {
    let scratch = TempStore::new();
    let store = &scratch.store;
    let large = "a".repeat(3 << 20);
    let packed = gzip(&plain(&large[..100]));
    let files = layout(APP, &[&large[..100], "b"]);
    // The first layer is already present.
    let diff_id = digest(plain(&large[..100]));
    let facts = LayerMetadata {
        digest: digest(&packed),
        compressed_bytes: packed.len() as u64,
        plain_bytes: 1,
        skipped_xattrs: 0,
        diff_id: diff_id.clone(),
    };
    let layer = layer_of(store, &LayerKey::from(&diff_id), facts, &[]);
    store.commit(&image(&["other"], &[layer]), noon()).unwrap();

    let import = read(store, stream(tar_of(&files))).unwrap();
    let [image] = import.images.as_slice() else { panic!("{import:?}") };
    let first = &image.manifest.layers[0];
    assert_eq!((&first.digest, first.size), (&digest(&packed), packed.len() as u64));
    assert!(
        matches!(import.open(&first.digest), Err(ImportError::Missing { .. })),
        "its bytes were left out"
    );
    assert!(import.open(&image.manifest.layers[1].digest).is_ok());
    store.remove("other", &larder_store::store::RemoveOptions::default()).unwrap();
    assert!(store.layer(&LayerKey::from(&diff_id)).unwrap().is_some(), "it stays while the import lasts");
}

#[test]
fn bytes_that_do_not_match_their_name_are_refused() {
    let scratch = TempStore::new();
    for (damaged, what) in [(".json", "config"), ("manifest", "manifest")] {
        let mut files = layout(APP, &["a"]);
        let is_config = damaged == ".json";
        let (_, content) = files
            .iter_mut()
            .find(|(_, content)| {
                content.starts_with(if is_config { b"{\"architecture" } else { b"{\"config\"" })
            })
            .unwrap();
        content.push(b' ');
        let error = read(&scratch.store, stream(tar_of(&files))).unwrap_err();
        assert!(matches!(error, ImportError::WrongDigest { .. }), "{what}: {error}");
    }
}

#[test]
fn missing_blobs_are_named_before_unpacking() {
    let scratch = TempStore::new();
    let files = layout(APP, &["a", "b"]);
    for missing in 0..files.len() {
        let mut files = files.clone();
        let (name, _) = files.remove(missing);
        match read(&scratch.store, stream(tar_of(&files))) {
            Err(ImportError::Missing { name: missing }) => assert_eq!(missing, name),
            Err(ImportError::NoImages) => assert_eq!(name, "index.json"),
            Ok(_) => assert_eq!(name, "oci-layout"),
            Err(other) => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn strange_inputs_are_refused_and_leave_nothing() {
    let scratch = TempStore::new();
    let large = vec![b' '; (4 << 20) + 1];
    let docker = |manifest: Value| vec![("manifest.json".to_owned(), manifest.to_string().into_bytes())];
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("no archive", b"hello".repeat(1000)),
        ("no images", tar_of(&[("a".into(), b"b".to_vec())])),
        ("a large index", tar_of(&[("index.json".into(), large.clone())])),
        ("a large list", tar_of(&[("manifest.json".into(), large)])),
        ("a list of nothing", tar_of(&docker(json!([])))),
        ("no list", tar_of(&docker(json!({ "Config": "a" })))),
        ("a config outside", tar_of(&docker(json!([{ "Config": "../../etc/passwd", "Layers": [] }])))),
        ("a config at the root", tar_of(&docker(json!([{ "Config": "/etc/passwd", "Layers": [] }])))),
        ("a bad name", docker_archive(&["Not A Name"], &["a"])),
        ("cut", tar_of(&layout(APP, &["a"]))[..3000].to_vec()),
        ("cut in its packing", gzip(&tar_of(&layout(APP, &["a"])))[..200].to_vec()),
    ];
    for (what, bytes) in cases {
        let file = write_file(&scratch, &bytes);
        for from in [stream(bytes), ImportSource::Path(file)] {
            let error = read(&scratch.store, from).expect_err(what);
            assert!(!error.to_string().is_empty(), "{what}");
        }
    }
    let nowhere = ImportSource::Path(Path::new("/nowhere/at/all").to_owned());
    let error = read(&scratch.store, nowhere).unwrap_err();
    assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    assert!(entries(&scratch.root().join("staging")).is_empty());
}

#[test]
fn a_truncated_archive_and_the_files_of_an_image_are_reported_as_such() {
    let scratch = TempStore::new();
    let whole = tar_of(&[("blobs/sha256/x".into(), vec![1; 5000])]);
    let root = tar_of(&[("etc/passwd".into(), b"root".to_vec()), ("usr/bin/tool".into(), b"#!".to_vec())]);
    for (bytes, expected, next) in [
        (&whole[..3000], "the archive is truncated: it ends at byte 3000, within blobs/", "larder save"),
        (&root[..], "the files of a root filesystem, such as etc/passwd", "export only the files"),
    ] {
        let file = write_file(&scratch, bytes);
        for from in [stream(bytes.to_vec()), ImportSource::Path(file)] {
            let error = read(&scratch.store, from).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.hint().unwrap().to_string().contains(next), "{error:?}");
        }
    }
}

#[test]
fn links_in_circles_and_out_of_the_archive_lead_nowhere() {
    let scratch = TempStore::new();
    let link = |builder: &mut tar::Builder<Vec<u8>>, name: &str, target: &str, kind| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        builder.append_link(&mut header, name, target).unwrap();
    };
    for target in ["index.json", "other", "/etc/passwd", "../../../etc/passwd"] {
        for kind in [tar::EntryType::Symlink, tar::EntryType::Link] {
            let mut builder = tar::Builder::new(Vec::new());
            link(&mut builder, "index.json", target, kind);
            link(&mut builder, "other", "index.json", kind);
            let error = read(&scratch.store, stream(builder.into_inner().unwrap())).unwrap_err();
            assert!(
                matches!(error, ImportError::Missing { .. } | ImportError::NoImages),
                "{target}: {error}"
            );
        }
    }
}

#[test]
fn a_directory_is_not_left_through_links() {
    let scratch = TempStore::new();
    let dir = write_dir(&scratch, &layout(APP, &["a"]));
    let secret = scratch.dir.path().join("secret");
    fs_err::rename(dir.join("index.json"), &secret).unwrap();
    std::os::unix::fs::symlink(&secret, dir.join("index.json")).unwrap();
    let error = read(&scratch.store, ImportSource::Path(dir)).unwrap_err();
    assert!(matches!(error, ImportError::NoImages), "{error}");
}

#[test]
fn an_archive_from_a_pipe_with_a_name_is_a_stream() {
    let scratch = TempStore::new();
    let pipe = scratch.dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    let archive = tar_of(&layout(APP, &["a"]));
    std::thread::scope(|scope| {
        let path = pipe.clone();
        scope.spawn(move || fs_err::write(path, archive).unwrap());
        assert_image(&read(&scratch.store, ImportSource::Path(pipe)).unwrap(), &[APP], &["a"]);
    });
}
