//! One layer in a directory of its own, with things beside it that nothing may touch.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use larder::reference::Digest;
use larder_store::erofs::ErofsFile;
use larder_store::store::LayerFormat;
use larder_store::unpack::layer_manifest::{LayerManifestReader, ManifestRecord};
use larder_store::unpack::{
    AllocatedSpace, ArchiveRecord, CheckDepth, ExpectedLayer, LowerMergeMode, LowerMergeReport, PathMismatch,
    RebuildError, UnpackError, UnpackOptions, UnpackTarget, UnpackedLayer, merge_lowers, rebuild_archive,
    unpack_image, unpack_layer, verify,
};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

pub(crate) fn digest(bytes: &[u8]) -> Digest {
    let hex = Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    Digest::parse(&format!("sha256:{hex}")).unwrap()
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// `cap_net_raw=ep`, as the kernel keeps it.
pub(crate) fn capability() -> Vec<u8> {
    let mut bytes = 0x0200_0001u32.to_le_bytes().to_vec();
    bytes.extend((1u32 << 13).to_le_bytes());
    bytes.resize(20, 0);
    bytes
}

/// Whether this process is root. If not, says that a test is skipped; in CI that is a failure.
pub(crate) fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        assert!(std::env::var_os("CI").is_none(), "CI must run these tests as root");
        eprintln!("==== SKIPPED, NOT TESTED: needs root ====");
    }
    root
}

/// A directory with `root`, `files.v1`, and `outside/`, which is guarded.
pub(crate) struct UnpackDir {
    dir: TempDir,
    before: Vec<GuardedFile>,
    /// Whether `root` is a mounted image.
    is_image: Cell<bool>,
}

impl Drop for UnpackDir {
    fn drop(&mut self) {
        if self.is_image.get() {
            let _ = rustix::mount::unmount(self.root(), rustix::mount::UnmountFlags::DETACH);
        }
    }
}

type GuardedFile = (PathBuf, u64, u32, u64, i64, i64, Vec<u8>);

impl UnpackDir {
    pub(crate) fn new() -> UnpackDir {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(dir.path().join("root")).unwrap();
        fs_err::create_dir_all(dir.path().join("outside/dir")).unwrap();
        fs_err::write(dir.path().join("outside/secret"), "untouched").unwrap();
        let before = guarded(dir.path());
        UnpackDir { dir, before, is_image: Cell::new(false) }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub(crate) fn files(&self) -> PathBuf {
        self.dir.path().join("files.v1")
    }

    /// The guarded directory.
    pub(crate) fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    pub(crate) fn unpack(&self, plain: &[u8]) -> Result<UnpackedLayer, UnpackError> {
        self.unpack_with(plain, plain, &UnpackOptions::default())
    }

    pub(crate) fn unpack_with(
        &self,
        compressed: &[u8],
        plain: &[u8],
        options: &UnpackOptions,
    ) -> Result<UnpackedLayer, UnpackError> {
        let (digest, diff_id) = (digest(compressed), digest(plain));
        let expected =
            ExpectedLayer { digest: Some(&digest), size: Some(compressed.len() as u64), diff_id: &diff_id };
        self.unpack_expecting(compressed, &expected, options)
    }

    pub(crate) fn unpack_expecting(
        &self,
        compressed: &[u8],
        expected: &ExpectedLayer<'_>,
        options: &UnpackOptions,
    ) -> Result<UnpackedLayer, UnpackError> {
        let record = self.dir.path().join("archive.v1");
        let _ = fs_err::remove_file(&record); // of a layer that was unpacked before
        let options = &UnpackOptions { archive_record: Some(record.clone()), ..options.clone() };
        let (root, files) = (self.root(), self.files());
        if crate::LAYERS == LayerFormat::Erofs && is_root() {
            match self.unpack_image(compressed, expected, options) {
                Err(UnpackError::NeedsDirectory { .. }) => {
                    fs_err::remove_file(self.image()).unwrap();
                    fs_err::remove_file(&record).unwrap();
                }
                unpacked => {
                    assert!(unpacked.is_err() || !record.exists(), "the image takes it over");
                    self.assert_archive(unpacked.is_ok(), &ArchiveRecord::Image(self.image()), expected);
                    return unpacked;
                }
            }
        }
        let unpacked =
            unpack_layer(compressed, expected, UnpackTarget { root: &root, files: &files }, options);
        self.assert_archive(unpacked.is_ok(), &ArchiveRecord::File(record), expected);
        unpacked
    }

    /// Panics unless an unpacked layer's archive can be written again. One with two contents for a path, or with a content for a
    /// whiteout, cannot, and says so.
    fn assert_archive(&self, unpacked: bool, record: &ArchiveRecord, expected: &ExpectedLayer<'_>) {
        let root = fs_err::File::open(self.root()).unwrap().into_parts().0.into();
        if !unpacked {
            return;
        }
        match rebuild_archive(record, root, expected.diff_id, &mut std::io::sink()) {
            Ok(()) | Err(RebuildError::Replaced(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("layer.erofs")
    }

    /// Unpacks into an image, and mounts it at `root`.
    fn unpack_image(
        &self,
        compressed: &[u8],
        expected: &ExpectedLayer<'_>,
        options: &UnpackOptions,
    ) -> Result<UnpackedLayer, UnpackError> {
        let (unpacked, image) = unpack_image(compressed, expected, &self.image(), options)?;
        let finished = image.finish(Vec::new(), &self.files())?;
        assert_eq!(finished.file, ErofsFile::of(&self.image()).unwrap());
        mount_image(&self.image(), &self.root());
        self.is_image.set(true);
        Ok(unpacked)
    }

    /// Panics unless the layer takes on disk what unpacking said. The store measures images.
    pub(crate) fn assert_usage(&self, unpacked: &UnpackedLayer) {
        if !self.is_image.get() {
            assert_eq!(unpacked.usage, self.usage_on_disk());
        }
    }

    pub(crate) fn settle(
        &self,
        lowers: &[&UnpackDir],
        settling: LowerMergeMode,
    ) -> Result<LowerMergeReport, UnpackError> {
        let roots: Vec<PathBuf> = lowers.iter().map(|layer| layer.root()).collect();
        let roots: Vec<&Path> = roots.iter().map(PathBuf::as_path).collect();
        let (root, files) = (self.root(), self.files());
        merge_lowers(UnpackTarget { root: &root, files: &files }, &roots, settling)
    }

    pub(crate) fn damage(&self) -> Vec<PathMismatch> {
        if self.is_image.get() {
            return Vec::new(); // its digest was compared
        }
        verify(&self.root(), &self.files(), CheckDepth::Content).unwrap().collect::<Result<_, _>>().unwrap()
    }

    pub(crate) fn records(&self) -> Vec<ManifestRecord> {
        LayerManifestReader::open(&self.files()).unwrap().collect::<Result<_, _>>().unwrap()
    }

    pub(crate) fn record(&self, path: &str) -> ManifestRecord {
        self.records().into_iter().find(|record| record.path == path.as_bytes()).expect(path)
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs_err::read_to_string(self.root().join(path)).unwrap()
    }

    pub(crate) fn meta(&self, path: &str) -> std::fs::Metadata {
        fs_err::symlink_metadata(self.root().join(path)).unwrap()
    }

    pub(crate) fn is_whiteout(&self, path: &str) -> bool {
        let meta = self.meta(path);
        meta.mode() & 0o170_000 == 0o020_000 && meta.rdev() == 0
    }

    pub(crate) fn opaque(&self, path: &str) -> bool {
        let mut value = [0; 8];
        rustix::fs::lgetxattr(self.root().join(path), "trusted.overlay.opaque", &mut value[..]).is_ok()
    }

    /// What the tree takes, counted by walking it.
    pub(crate) fn usage_on_disk(&self) -> AllocatedSpace {
        let mut seen = std::collections::HashSet::new();
        let mut usage = AllocatedSpace::default();
        for (_, meta) in walk(&self.root()) {
            if seen.insert(meta.ino()) {
                usage.inodes += 1;
                usage.allocated_bytes += meta.blocks() * 512;
            }
        }
        usage
    }

    /// Panics if anything outside of the layer is not as it was.
    pub(crate) fn assert_contained(&self) {
        assert_eq!(guarded(self.dir.path()), self.before, "something outside changed");
        let mut beside: Vec<_> =
            fs_err::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        beside.retain(|name| {
            !["root", "outside", "files.v1", "layer.erofs", "archive.v1"].iter().any(|own| name == own)
        });
        assert!(beside.is_empty(), "{beside:?} appeared beside the layer");
    }
}

/// Mounts an image at a directory: from its file, or through a loop device before Linux 6.12.
pub(crate) fn mount_image(image: &Path, at: &Path) {
    if rustix::mount::mount(image, at, "erofs", rustix::mount::MountFlags::RDONLY, None).is_err() {
        let mut command = std::process::Command::new("mount");
        let mounted = command.args(["-t", "erofs", "-o", "ro,loop"]).args([image, at]).status().unwrap();
        assert!(mounted.success(), "cannot mount {}", image.display());
    }
}

fn guarded(dir: &Path) -> Vec<GuardedFile> {
    let outside = dir.join("outside");
    walk(&outside)
        .into_iter()
        .map(|(path, meta)| {
            let content = if meta.is_file() { fs_err::read(&path).unwrap() } else { Vec::new() };
            (path, meta.ino(), meta.mode(), meta.nlink(), meta.mtime_nsec(), meta.ctime_nsec(), content)
        })
        .collect()
}

/// Everything below a directory and itself, sorted by path.
pub(crate) fn walk(dir: &Path) -> Vec<(PathBuf, std::fs::Metadata)> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let meta = fs_err::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            todo.extend(fs_err::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        found.push((path, meta));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}
