//! How a snapshot is mounted: an overlay of the snapshots below it, or a bind mount.
//!
//! containerd makes the mount itself, so its options must be plain paths. They are short (`snapshots/12/fs`), also of a
//! layer of the store, where that is a link: `mount` takes all of them on one page of memory.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use super::SnapshotError;
use crate::disk::ensure_dir;
use crate::mounts::visible_lowers;
use crate::store::error::StoreErrorContext as _;
use crate::store::{LayerHandle, LayerKey, OpenStore, SnapshotKind, SnapshotRecord, Store, StoreError};

/// A mount that the caller is to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotMount {
    /// `overlay` or `bind`.
    pub kind: &'static str,
    /// A directory, or `overlay`.
    pub source: String,
    /// As `mount -o` takes them.
    pub options: Vec<String>,
}

/// Options of every overlay, as of those that larder mounts itself: marks of the kernel in an image are not followed.
const OPTIONS: [&str; 3] = ["index=off", "metacopy=off", "redirect_dir=nofollow"];

impl Store {
    /// The mounts of an active snapshot or a view, after all their directories are there. `below` are its ancestors.
    pub(super) fn mounts_of(
        &self,
        snapshot: &SnapshotRecord,
        below: &[SnapshotRecord],
    ) -> Result<Vec<SnapshotMount>, SnapshotError> {
        let has_parent = !snapshot.parent.is_empty();
        if has_parent && below.last().is_none_or(|lowest| !lowest.parent.is_empty()) {
            return Err(SnapshotError::not_found(&snapshot.parent));
        }
        let lowers = self.lower_dirs(below)?;
        let (fs, work) = self.0.own_dirs(snapshot, lowers.first())?;
        let is_view = snapshot.kind == SnapshotKind::View;
        let text = |path: &Path| path.display().to_string();
        let bind = |path: &Path, flag: &str| SnapshotMount {
            kind: "bind",
            source: text(path),
            options: vec![flag.to_owned(), "rbind".to_owned()],
        };
        Ok(vec![match lowers.as_slice() {
            [] => bind(&fs, if is_view { "ro" } else { "rw" }),
            [only] if is_view => bind(&fs_err::canonicalize(only).context("find a layer")?, "ro"),
            lowers => {
                let mut options: Vec<String> = OPTIONS.map(str::to_owned).into();
                if !is_view {
                    options.extend([format!("workdir={}", text(&work)), format!("upperdir={}", text(&fs))]);
                }
                let lowers: Vec<String> = lowers.iter().map(|lower| text(lower)).collect();
                options.push(format!("lowerdir={}", lowers.join(":")));
                SnapshotMount { kind: "overlay", source: "overlay".to_owned(), options }
            }
        }])
    }

    /// Where the files of these snapshots are, the nearest first. Those of layers are mounted.
    fn lower_dirs(&self, below: &[SnapshotRecord]) -> Result<Vec<PathBuf>, SnapshotError> {
        // The kernel refuses a directory that is named twice. The upper place hides all of the lower one.
        let mut seen: HashSet<LayerKey> = HashSet::new();
        let mut is_first =
            |snapshot: &SnapshotRecord| snapshot.layer.clone().is_none_or(|key| seen.insert(key));
        let below: Vec<&SnapshotRecord> = below.iter().filter(|snapshot| is_first(snapshot)).collect();
        let layer = |key: &LayerKey| -> Result<LayerHandle, StoreError> {
            let found = self.layer(key)?.filter(|layer| layer.record().is_mountable());
            found.ok_or_else(|| StoreError::NoLayer { key: key.clone() })
        };
        let layers = below.iter().filter_map(|snapshot| snapshot.layer.as_ref()).map(layer);
        let layers: Vec<LayerHandle> = layers.collect::<Result<_, _>>()?;
        let mut of_layers = self.0.mount_layers(&layers)?.into_iter();
        let mut lowers: Vec<PathBuf> =
            below.iter().map(|below| self.0.layout.snapshot_fs(below.id)).collect();
        let mut targets = lowers.clone();
        for (snapshot, target) in below.iter().zip(&mut targets) {
            if snapshot.layer.is_some()
                && let Some(of_layer) = of_layers.next()
            {
                self.0.link_snapshot(snapshot, &of_layer)?;
                *target = of_layer;
            }
        }
        lowers.truncate(visible_lowers(&targets).context("read the layers of a snapshot")?);
        Ok(lowers)
    }
}

impl OpenStore {
    /// The directories `fs` and `work` of a snapshot, made where they are missing: as a rule, and after a power cut.
    fn own_dirs(
        &self,
        snapshot: &SnapshotRecord,
        lower: Option<&PathBuf>,
    ) -> Result<(PathBuf, PathBuf), StoreError> {
        let doing = "create the directories of a snapshot";
        self.snapshot_dir(snapshot.id).context(doing)?;
        let (fs, work) =
            (self.layout.snapshot_fs(snapshot.id), self.layout.snapshot(snapshot.id).join("work"));
        if !fs.exists() {
            ensure_dir(&*self.disk, &fs).context(doing)?;
            fs_err::set_permissions(&fs, std::fs::Permissions::from_mode(0o755)).context(doing)?;
            // As containerd's overlayfs does: the root of the mount looks like this directory.
            if let Some(lower) = lower {
                let model = fs_err::metadata(lower).context(doing)?;
                chown(&fs, Some(model.uid()), Some(model.gid())).context(doing)?;
            }
        }
        if snapshot.kind == SnapshotKind::Active {
            ensure_dir(&*self.disk, &work).context(doing)?;
        }
        Ok((fs, work))
    }

    pub(super) fn snapshot_dir(&self, id: u64) -> io::Result<()> {
        if !self.layout.snapshots().exists() {
            ensure_dir(&*self.disk, &self.layout.snapshots())?;
            self.disk.sync_dir(self.layout.root())?;
        }
        ensure_dir(&*self.disk, &self.layout.snapshot(id))
    }

    /// Makes `fs` of a snapshot a link to its layer. The path changes when a layer is mounted that was extracted
    /// before.
    fn link_snapshot(&self, snapshot: &SnapshotRecord, layer: &Path) -> Result<(), StoreError> {
        let doing = "link a snapshot to its layer";
        let link = self.layout.snapshot_fs(snapshot.id);
        if fs_err::read_link(&link).is_ok_and(|target| target == layer) {
            return Ok(());
        }
        self.snapshot_dir(snapshot.id).context(doing)?;
        self.disk.remove_file(&link).context(doing)?;
        match fs_err::os::unix::fs::symlink(layer, &link) {
            // Another call made it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.context(doing),
        }
    }
}
