//! An overlay of our layers shows what `umoci unpack` writes, path by path.
//!
//! `LARDER_ORACLE_IMAGES` may name a directory with more OCI layouts, one in each directory in it; all images in them
//! are compared as well. umoci knows no zstd: the layout `NAME-zstd` is compared with what we make of `NAME`, its twin.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use larder::reference::Digest;
use larder_store::unpack::{
    ExpectedLayer, MergedLayers, UnpackError, UnpackOptions, UnpackThreads, open_layer, unpack_layer,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};
use larder_testkit_peers::packages::Package;
use larder_testkit_peers::{ImageBuilder, LayerFiles, TreeListing, require};
use serde_json::Value;

use crate::support::{is_root, mount_layer};

#[test]
fn the_merged_view_of_tricky_layers_equals_umoci() {
    // We follow containerd: a directory takes the place of a lower layer's link. umoci follows the link.
    let known = ["lib", "lib/second.so", "usr/lib/second.so"];
    compare_image(
        "tricky",
        &ImageBuilder::new()
            .layer(LayerFiles::archive(edge_case_layers()[0].clone()))
            .layer(LayerFiles::archive(edge_case_layers()[1].clone())),
        &known,
    );
}

#[test]
fn the_merged_view_of_one_file_equals_umoci() {
    let app = TarBuilderEntry::file("bin/app", vec![b'#'; 1_500_000]).mode(0o755);
    compare_image(
        "tiny",
        &ImageBuilder::new().layer(LayerFiles::archive(TarBuilder::new().with(app).finish())),
        &[],
    );
}

#[test]
fn the_merged_view_above_an_opaque_root_equals_umoci() {
    let layer = |entries: &[TarBuilderEntry]| {
        LayerFiles::archive(entries.iter().cloned().fold(TarBuilder::new(), TarBuilder::with).finish())
    };
    let hidden = [TarBuilderEntry::file("etc/hidden", "1"), TarBuilderEntry::file("hidden", "1")];
    let opaque = TarBuilderEntry::file(".wh..wh..opq", "");
    let own = [TarBuilderEntry::file("etc/own", "2"), opaque.clone(), TarBuilderEntry::file("own", "2")];
    let above = [TarBuilderEntry::file("etc/above", "3"), TarBuilderEntry::file("above", "3")];
    let image = ImageBuilder::new().layer(layer(&hidden)).layer(layer(&own)).layer(layer(&above));
    compare_image("opaque", &image, &[]);
    let topmost = ImageBuilder::new().layer(layer(&above)).layer(layer(&hidden)).layer(layer(&own));
    compare_image("opaque at the top", &topmost, &[]);
}

/// A distribution's own files, as GNU tar packs them: what there is on any machine that runs this.
#[test]
fn the_merged_view_of_a_distribution_equals_umoci() {
    if !ready() {
        return;
    }
    let pack = |arguments: &[&str]| {
        let tar = Command::new("tar")
            .args(["-C", "/", "-c", "--sort=name", "--one-file-system"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(tar.stdout.len() > 1 << 20, "{}", String::from_utf8_lossy(&tar.stderr));
        tar.stdout
    };
    let image = ImageBuilder::new()
        .layer(LayerFiles::archive(pack(&["--format=gnu", "bin", "lib", "sbin", "usr/share/zoneinfo"])))
        .layer(LayerFiles::archive(pack(&[
            "--format=pax",
            "--xattrs",
            "--xattrs-include=*",
            "etc",
            "usr/sbin",
            "usr/share/zoneinfo/Europe",
        ])));
    compare_image("debian", &image, &[]);
}

#[test]
fn the_merged_views_of_more_images_equal_umoci() {
    let Some(dir) = std::env::var_os("LARDER_ORACLE_IMAGES").map(PathBuf::from) else {
        eprintln!(
            "==== ONLY THE BUILT-IN IMAGES: LARDER_ORACLE_IMAGES=DIR names a directory with more layouts ===="
        );
        return;
    };
    if !ready() {
        return;
    }
    let mut layouts: Vec<PathBuf> =
        fs_err::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    layouts.retain(|layout| layout.join("index.json").is_file());
    layouts.sort();
    assert!(!layouts.is_empty(), "{} has no OCI layouts", dir.display());
    for layout in layouts {
        for (name, image) in images(&layout) {
            eprint!("{}: ", layout.display());
            if image.iter().any(|layer| layer.zstd) {
                compare_with_twin(&layout, &name, &image);
                continue;
            }
            let known: &[&str] =
                if name == "tricky" { &["lib", "lib/second.so", "usr/lib/second.so"] } else { &[] };
            compare(&layout, &name, &image, known);
        }
    }
}

/// Compares a layout with zstd layers with the one of the same content with gzip layers.
fn compare_with_twin(layout: &Path, name: &str, image: &[OracleLayer]) {
    let Some(twin) = layout.to_str().and_then(|layout| layout.strip_suffix("-zstd")).map(Path::new) else {
        panic!("{}: umoci knows no zstd, and a twin is known only of NAME-zstd", layout.display());
    };
    let plain = |name: &str| name.trim_end_matches("-zstd").to_owned();
    let (_, other) = images(twin).into_iter().find(|(other, _)| plain(other) == plain(name)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let looks = ["zstd", "gzip"].map(|name| dir.path().join(name)).map(|dir| {
        let layers = if dir.ends_with("zstd") { image } else { &other };
        fs_err::create_dir(&dir).unwrap();
        TreeListing::of(merge(&dir, layers).unwrap().path())
    });
    looks[0].assert_equal(name, &looks[1], &[]);
    eprintln!("{name}: {} paths equal to those of {}", looks[0].len(), twin.display());
}

fn ready() -> bool {
    require(&[Package::Umoci]).is_available() && is_root()
}

fn compare_image(name: &str, image: &ImageBuilder, known: &[&str]) {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    image.write(dir.path()).unwrap();
    let (tag, layers) = images(dir.path()).remove(0);
    eprintln!("{name}:");
    compare(dir.path(), &tag, &layers, known);
}

/// A layer of a layout: its file, its digest, its diff id.
struct OracleLayer {
    file: PathBuf,
    digest: Digest,
    diff_id: Digest,
    size: u64,
    zstd: bool,
}

/// The images of a layout by their names, each with its layers from the bottom up.
fn images(layout: &Path) -> Vec<(String, Vec<OracleLayer>)> {
    let blob = |digest: &Value| layout.join("blobs").join(digest.as_str().unwrap().replace(':', "/"));
    let json = |path: &Path| serde_json::from_slice::<Value>(&fs_err::read(path).unwrap()).unwrap();
    let digest = |value: &Value| Digest::parse(value.as_str().unwrap()).unwrap();
    let index = json(&layout.join("index.json"));
    let image = |descriptor: &Value| {
        let manifest = json(&blob(&descriptor["digest"]));
        let config = json(&blob(&manifest["config"]["digest"]));
        let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap().clone();
        let layers =
            manifest["layers"].as_array().unwrap().iter().zip(diff_ids).map(|(layer, diff_id)| OracleLayer {
                file: blob(&layer["digest"]),
                digest: digest(&layer["digest"]),
                diff_id: digest(&diff_id),
                size: layer["size"].as_u64().unwrap(),
                zstd: layer["mediaType"].as_str().unwrap().ends_with("zstd"),
            });
        let name =
            descriptor["annotations"]["org.opencontainers.image.ref.name"].as_str().unwrap().to_owned();
        (name, layers.collect())
    };
    index["manifests"].as_array().unwrap().iter().map(image).collect()
}

fn compare(layout: &Path, name: &str, layers: &[OracleLayer], known: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let merged = merge(dir.path(), layers).unwrap();
    let ours = TreeListing::of(merged.path());
    let bundle = dir.path().join("bundle");
    let image = format!("{}:{name}", layout.display());
    let umoci = Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle).output().unwrap();
    assert!(umoci.status.success(), "{}", String::from_utf8_lossy(&umoci.stderr));
    let theirs = TreeListing::of(&bundle.join("rootfs"));
    ours.assert_equal(name, &theirs, known);
    // What is known to differ does, or it is no longer known.
    for path in known {
        assert_ne!(ours.get(path), theirs.get(path), "{path}");
    }
    eprintln!("{name}: {} paths equal", ours.len());
}

/// A read-only overlay, unmounted when dropped.
struct MergedMount {
    at: PathBuf,
    mounted: bool,
    /// Where layers are mounted.
    layers: Vec<PathBuf>,
}

impl MergedMount {
    fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for MergedMount {
    fn drop(&mut self) {
        if self.mounted {
            rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
        for layer in &self.layers {
            rustix::mount::unmount(layer, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
    }
}

fn merge(dir: &Path, layers: &[OracleLayer]) -> Result<MergedMount, UnpackError> {
    let mut roots: Vec<PathBuf> = Vec::new();
    let mut files: Vec<PathBuf> = Vec::new();
    for (at, layer) in layers.iter().enumerate() {
        let root = dir.join(format!("l{at}"));
        let file = dir.join(format!("l{at}.erofs"));
        fs_err::create_dir(&root).unwrap();
        let expected =
            ExpectedLayer { digest: Some(&layer.digest), size: Some(layer.size), diff_id: &layer.diff_id };
        let threads = [UnpackThreads::One, UnpackThreads::Two][at % 2];
        let options = UnpackOptions { threads, ..UnpackOptions::default() };
        let archive = fs_err::File::open(&layer.file).unwrap();
        let (_, pending) = unpack_layer(archive, &expected, &file, &options)?;
        let lowers = files.iter().rev().map(|file| open_layer(file).unwrap()).collect();
        pending.finish(&MergedLayers::new(lowers).unwrap(), &Arc::default())?;
        mount_layer(&file, &root);
        files.push(file);
        roots.push(root);
    }
    // An overlay without an upper directory needs two lower ones.
    let empty = dir.join("empty");
    fs_err::create_dir(&empty).unwrap();
    let at = dir.join("merged");
    fs_err::create_dir(&at).unwrap();
    let mut lowers: Vec<OsString> = roots.iter().rev().map(|root| root.clone().into_os_string()).collect();
    let opaque = files.iter().rev().position(|file| {
        let layer = open_layer(file).unwrap();
        layer.is_opaque(&layer.root().unwrap()).unwrap()
    });
    lowers.truncate(opaque.map_or(lowers.len(), |at| at + 1));
    if let [only] = &lowers[..] {
        return Ok(MergedMount { at: PathBuf::from(only), mounted: false, layers: roots.clone() });
    }
    let mut option = OsString::from("lowerdir=");
    option.push(lowers.join(std::ffi::OsStr::new(":")));
    let option = std::ffi::CString::new(option.as_bytes()).unwrap();
    rustix::mount::mount(
        "overlay",
        &at,
        "overlay",
        rustix::mount::MountFlags::RDONLY,
        Some(option.as_c_str()),
    )
    .unwrap();
    Ok(MergedMount { at, mounted: true, layers: roots })
}
