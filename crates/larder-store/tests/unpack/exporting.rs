//! Files of layers as an archive, as other programs read it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use larder_store::unpack::{HoleEncoding, MergedLayers, open_layer, write_merged_files};
use larder_testkit_peers::packages::Package;
use larder_testkit_peers::tree_listing::walk;
use larder_testkit_peers::{ImageBuilder, LayerFiles, require};

use crate::support::{UnpackDir, is_root};

/// Prints names and sizes, which it checks by reading.
const PYTHON: &str = "
import sys, tarfile
archive = tarfile.open(sys.argv[1])
for member in archive:
    if member.isfile():
        content = archive.extractfile(member).read() if member.size < 1 << 28 else b''
        assert not content or len(content) == member.size
        print(member.size, member.name.removeprefix('./'))
";

/// Sizes of files by path.
type Sizes = BTreeMap<String, u64>;

/// The arguments of GNU tar for each sparse format. The old one has two forms: more extents than four are not in the
/// header.
const SPARSE_FORMATS: [&[&str]; 4] = [
    &["--format=gnu"],
    &["--format=pax", "--sparse-version=0.0"],
    &["--format=pax", "--sparse-version=0.1"],
    &["--format=pax", "--sparse-version=1.0"],
];

/// Writes files with holes of all kinds. Returns their sizes.
fn sparse_files(dir: &Path) -> Sizes {
    let long = format!("{}/{}", "d".repeat(90), "f".repeat(90));
    let files: [(&str, &[u64], u64); 6] = [
        ("all-hole", &[], 1_000_000),
        ("end-hole", &[0], 1_000_000),
        ("end-data", &[0, 999_997], 1_000_000),
        ("no-hole", &[0], 3),
        ("many-extents", &[0, 100_000, 200_000, 300_000, 400_000, 500_000, 600_000], 10_000_001),
        (&long, &[8192], 70_000),
    ];
    for (name, data, size) in files {
        let path = dir.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        let file = fs_err::File::create(path).unwrap();
        for at in data {
            rustix::io::pwrite(&file, b"abc", *at).unwrap();
        }
        file.set_len(size).unwrap();
    }
    files.iter().map(|(name, _, size)| ((*name).to_owned(), *size)).collect()
}

/// A layer of these files, packed by GNU tar with `format`, as an archive of files.
fn exported(dir: &Path, format: &[&str], holes: HoleEncoding) -> Vec<u8> {
    let tar = Command::new("tar").args(["-c", "--sparse"]).args(format).arg("-C").arg(dir).arg(".").output();
    let tar = tar.unwrap();
    assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
    let layer = UnpackDir::new();
    layer.unpack(&tar.stdout).unwrap();
    let layers = MergedLayers::new(vec![open_layer(&layer.layer()).unwrap()]).unwrap();
    let mut archive = Vec::new();
    write_merged_files(&layers, holes, &mut archive).unwrap();
    archive
}

/// Sizes of files below a directory.
fn sizes(dir: &Path) -> Sizes {
    let files = walk(dir).into_iter().filter(|(_, meta)| meta.is_file());
    files.map(|(path, meta)| (path.strip_prefix(dir).unwrap().display().to_string(), meta.len())).collect()
}

/// Sizes of the files that a program extracts from an archive.
fn extracted_by(program: &[&str], archive: &[u8]) -> Sizes {
    let dir = tempfile::tempdir().unwrap();
    let (file, root) = (dir.path().join("archive.tar"), dir.path().join("root"));
    fs_err::write(&file, archive).unwrap();
    fs_err::create_dir(&root).unwrap();
    let output =
        Command::new(program[0]).args(&program[1..]).arg("-C").arg(&root).arg("-xf").arg(file).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{program:?}: {}", String::from_utf8_lossy(&output.stderr));
    sizes(&root)
}

fn read_by_python(archive: &[u8]) -> Sizes {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("archive.tar");
    fs_err::write(&file, archive).unwrap();
    let output = Command::new("python3").args(["-c", PYTHON]).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let sizes = lines.lines().map(|line| line.split_once(' ').unwrap());
    sizes.map(|(size, name)| (name.to_owned(), size.parse().unwrap())).collect()
}

/// umoci reads layers with Go's `archive/tar`.
fn extracted_by_go(archive: &[u8]) -> Sizes {
    let dir = tempfile::tempdir().unwrap();
    let (layout, bundle) = (dir.path().join("layout"), dir.path().join("bundle"));
    ImageBuilder::new().layer(LayerFiles::archive(archive.to_vec())).write(&layout).unwrap();
    let index = fs_err::read_to_string(layout.join("index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let tag = index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"].as_str().unwrap();
    let image = format!("{}:{tag}", layout.display());
    let output = Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    sizes(&bundle.join("rootfs"))
}

fn ready() -> bool {
    require(&[Package::Libarchive, Package::Busybox, Package::Umoci]).is_available() && is_root()
}

/// Readers of archives that know sparse files.
fn readers(archive: &[u8]) -> [(&'static str, Sizes); 4] {
    [
        ("GNU tar", extracted_by(&["tar"], archive)),
        ("bsdtar", extracted_by(&["bsdtar"], archive)),
        ("Python", read_by_python(archive)),
        ("Go", extracted_by_go(archive)),
    ]
}

#[test]
fn all_readers_restore_the_sizes_of_files_with_holes() {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let expected = sparse_files(dir.path());
    for format in SPARSE_FORMATS {
        let archive = exported(dir.path(), format, HoleEncoding::Zeros);
        for (reader, sizes) in readers(&archive) {
            assert_eq!(sizes, expected, "{format:?}, {reader}");
        }
        assert_eq!(extracted_by(&["busybox", "tar"], &archive), expected, "{format:?}, busybox");
    }
}

#[test]
fn readers_that_know_sparse_files_restore_their_sizes() {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut expected = sparse_files(dir.path());
    let archive = exported(dir.path(), SPARSE_FORMATS[3], HoleEncoding::Sparse);
    assert!(archive.len() < 200_000, "{}", archive.len());
    for (reader, sizes) in readers(&archive) {
        assert_eq!(sizes, expected, "{reader}");
    }
    // More zeros than an archive may have.
    fs_err::File::create(dir.path().join("large")).unwrap().set_len(10 << 30).unwrap();
    expected.insert("large".to_owned(), 10 << 30);
    let archive = exported(dir.path(), SPARSE_FORMATS[3], HoleEncoding::Zeros);
    assert!(archive.len() < 20_000_000, "{}", archive.len());
    for (reader, sizes) in [
        ("GNU tar", extracted_by(&["tar"], &archive)),
        ("bsdtar", extracted_by(&["bsdtar"], &archive)),
        ("Python", read_by_python(&archive)),
    ] {
        assert_eq!(sizes, expected, "{reader}");
    }
}
