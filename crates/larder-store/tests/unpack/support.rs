//! One layer in a directory of its own, with things beside it that nothing may touch.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder::reference::Digest;
use larder_store::erofs::ErofsFile;
use larder_store::unpack::{
    ExpectedLayer, MergedLayers, RebuildError, UnpackError, UnpackOptions, UnpackedLayer, rebuild_archive,
    unpack_layer,
};
use larder_testkit_peers::tree_listing::walk;
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

/// A directory with a layer, `root`, where it is mounted, and `outside/`, which is guarded.
pub(crate) struct UnpackDir {
    dir: TempDir,
    before: Vec<GuardedFile>,
    is_mounted: Cell<bool>,
}

impl Drop for UnpackDir {
    fn drop(&mut self) {
        if self.is_mounted.get() {
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
        UnpackDir { dir, before, is_mounted: Cell::new(false) }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// The file of the layer.
    pub(crate) fn layer(&self) -> PathBuf {
        self.dir.path().join("layer")
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
        let record = self.dir.path().join("archive");
        let options = &UnpackOptions { archive_record: Some(record.clone()), ..options.clone() };
        let (unpacked, pending) = unpack_layer(compressed, expected, &self.layer(), options)?;
        let finished = pending.finish(&MergedLayers::default(), &Arc::default())?;
        assert!(!record.exists(), "the layer takes it over");
        let mut content = fs_err::read(self.layer()).unwrap();
        let digests = content.split_off(usize::try_from(finished.file.bytes).unwrap());
        assert_eq!(Digest::sha256(digests).hex(), finished.file.sha256_of_pieces, "those of the pieces");
        let covered = self.dir.path().join("covered");
        fs_err::write(&covered, content).unwrap();
        let written = ErofsFile::of(&covered).unwrap();
        fs_err::remove_file(&covered).unwrap();
        assert_eq!(finished.file.sha256_of_pieces, written.sha256_of_pieces);
        self.assert_archive(expected);
        if rustix::process::geteuid().is_root() {
            mount_layer(&self.layer(), &self.root());
            self.is_mounted.set(true);
        }
        Ok(unpacked)
    }

    /// Panics unless the layer's archive can be written again. One with two contents for a path, or with a content for
    /// a whiteout, cannot, and says so.
    fn assert_archive(&self, expected: &ExpectedLayer<'_>) {
        match rebuild_archive(&self.layer(), expected.diff_id, &mut std::io::sink()) {
            Ok(()) | Err(RebuildError::Replaced(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Whether the layer is mounted at `root`.
    pub(crate) fn is_mounted(&self) -> bool {
        self.is_mounted.get()
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

    /// Panics if anything outside of the layer is not as it was.
    pub(crate) fn assert_contained(&self) {
        assert_eq!(guarded(self.dir.path()), self.before, "something outside changed");
        let mut beside: Vec<_> =
            fs_err::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        beside.retain(|name| !["root", "outside", "layer", "archive"].iter().any(|own| name == own));
        assert!(beside.is_empty(), "{beside:?} appeared beside the layer");
    }
}

/// Mounts a layer at a directory: from its file, or through a loop device before Linux 6.12.
pub(crate) fn mount_layer(layer: &Path, at: &Path) {
    if rustix::mount::mount(layer, at, "erofs", rustix::mount::MountFlags::RDONLY, None).is_err() {
        let mut command = std::process::Command::new("mount");
        let mounted = command.args(["-t", "erofs", "-o", "ro,loop"]).args([layer, at]).status().unwrap();
        assert!(mounted.success(), "cannot mount {}", layer.display());
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
