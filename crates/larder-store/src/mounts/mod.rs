//! Mounts the root filesystem of an image: an overlay of its layers.
//!
//! ```text
//! record the mount -> mount its layers -> mount the overlay -> mark it as mounted
//! umount -> remove the record -> unmount layers that no record has
//! ```
//!
//! Layers are mounted once, and all overlays share them (`layers.rs`).
//!
//! Guarantees: a mount is recorded before it exists, so its layers are not removed; when the store is opened, the
//! records are compared with the kernel's mount table; a mount in another mount namespace, also a copy, counts as in
//! use until no namespace has it; files written to a writable mount are retained until `umount`, also if a reboot ended
//! the mount.

mod error;
mod extracted;
mod layers;
mod other_namespaces;
mod overlay;
mod recover;
mod table;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub use error::MountError;
pub(crate) use extracted::{is_extracted, key_of};
pub(crate) use layers::visible_lowers;

use larder::reference::ImageName;
use rustix::fs::{Mode, OFlags};

use self::other_namespaces::MountLocation;
use self::overlay::{OverlaySpec, may_mount, through};
use self::table::MountTable;
use crate::disk::{DiskSpace, FileOpenMode, ensure_dir, measure};
use crate::store::db::{DbRead as _, MOUNTS, encode};
use crate::store::error::StoreErrorContext as _;
use crate::store::layout::names_in;
use crate::store::{ImageRecord, LayerHandle, LayerKey, MountRecord, OpenStore, Store, StoreError, seconds};

/// How to mount an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MountOptions {
    /// Make the mount writable. Its files are in a separate directory, which `umount` removes.
    pub writable: bool,
    /// Honor set-user-ID and set-group-ID bits and file capabilities of the image. Its author decides what they run.
    pub suid: bool,
    /// Honor device nodes of the image.
    pub dev: bool,
}

impl Store {
    /// Mounts an image's root filesystem at `target`, an existing directory where no image is mounted.
    pub fn mount(
        &self,
        image: impl Into<ImageName>,
        target: &Path,
        options: MountOptions,
        now: SystemTime,
    ) -> Result<MountRecord, MountError> {
        let (image, (target, place)) = (image.into(), directory(target)?);
        self.0.check_not_hidden(&target)?;
        // The new mount would hide the old one, and umount would not restore it.
        if MountTable::read()?.has_target(&target) {
            return Err(MountError::Taken { target });
        }
        let Some(found) = self.image(&image)? else {
            return Err(StoreError::NoImage { image }.into());
        };
        // Before a layer is extracted for a mount that the kernel refuses.
        if !may_mount() {
            return Err(MountError::Unprivileged { image });
        }
        // Held until the record protects them.
        let layers = self.layers_of(&found)?;
        if let Some(layer) = layers.iter().find(|layer| layer.record().damaged) {
            return Err(MountError::Damaged { key: layer.key().clone(), image });
        }
        let record = MountRecord {
            id: String::new(),
            image: found.id,
            name: image,
            target,
            writable: options.writable,
            layers: layers.iter().map(|layer| layer.key().clone()).collect(),
            mounted_at: seconds(now),
            seen_from: table::namespace_id(&*self.0.disk),
            mounted: false,
        };
        let mut record = self.0.record_mount(record)?;
        if let Err(error) = self.0.make_overlay(&record, &place, &layers, options) {
            self.0.forget_mount(&record.id)?;
            return Err(match error {
                MountError::Incomplete { key, .. } => {
                    MountError::Incomplete { key, image: record.name.to_string() }
                }
                MountError::Damaged { key, .. } => MountError::Damaged { key, image: record.name },
                error => error,
            });
        }
        record.mounted = true;
        let kept = record.clone();
        self.0.db.write("record a mount", |writer| Ok(writer.put(MOUNTS, &kept.id, &kept)?))?;
        self.0.begun_uses.note(kept.layers);
        Ok(record)
    }

    fn layers_of(&self, image: &ImageRecord) -> Result<Vec<LayerHandle>, StoreError> {
        let layer = |key: &LayerKey| self.layer(key)?.ok_or(StoreError::NoLayer { key: key.clone() });
        image.layers.iter().map(|found| layer(&found.key)).collect()
    }

    /// The mounts, ordered by ID, including writable mounts that a reboot ended (`mounted` is false).
    pub fn mounts(&self) -> Result<Vec<MountRecord>, StoreError> {
        self.0.db.read("list mounts", |reader| reader.all(MOUNTS))
    }

    /// Measures the files that were written to a mount, which its unmount frees; nothing for a read-only mount.
    pub fn written_to(&self, mount: &MountRecord) -> Result<DiskSpace, StoreError> {
        if !mount.writable {
            return Ok(DiskSpace::default());
        }
        measure(&self.0.layout.mount(&mount.id)).context("measure the files of a mount")
    }

    /// Unmounts the image at `target` and removes the files written to it. If another mount namespace has the mount
    /// too, this fails with [`MountError::OtherNamespace`], and the record keeps its layers until no namespace has it.
    pub fn umount(&self, target: &Path) -> Result<MountRecord, MountError> {
        self.umount_with(target, false)
    }

    /// Like [`umount`](Store::umount). With `forget`, the record is also removed if it is unknown whether another mount
    /// namespace has the mount: the caller must know that none does, or that mount may lose its files.
    pub fn umount_with(&self, target: &Path, forget: bool) -> Result<MountRecord, MountError> {
        let target = fs_err::canonicalize(target).unwrap_or_else(|_| target.to_owned());
        // The latest one: a reboot may have ended one before it, whose files are kept.
        let record = self.mounts()?.into_iter().rev().find(|mount| mount.target == target);
        let Some(record) = record else { return Err(MountError::NotOurs { target }) };
        let mounted = MountTable::read()?.has(&self.0.layout.mount(&record.id), &record.target);
        if mounted {
            overlay::unmount(&record.target)?;
        }
        if mounted || table::same_boot(&*self.0.disk, &record) {
            // A namespace that was cloned from this one still has the mount, and needs the layers.
            match self.0.find_mount(&record) {
                MountLocation::Nowhere => {}
                MountLocation::Unknown if forget => {}
                MountLocation::Process(pid) => {
                    return Err(MountError::OtherNamespace { target, process: Some(pid) });
                }
                MountLocation::Unknown => return Err(MountError::OtherNamespace { target, process: None }),
            }
        }
        self.0.forget_mount(&record.id)?;
        Ok(record)
    }
}

impl OpenStore {
    /// Refuses a directory of the store, and one that contains the store.
    fn check_not_hidden(&self, target: &Path) -> Result<(), MountError> {
        let store = fs_err::canonicalize(self.layout.root()).context("find the store's directory")?;
        if target.starts_with(&store) || store.starts_with(target) {
            return Err(MountError::HidesStore { target: target.to_owned(), store });
        }
        Ok(())
    }

    /// Records a mount before it is made, under an unused ID.
    fn record_mount(&self, mut record: MountRecord) -> Result<MountRecord, MountError> {
        let doing = "record a mount";
        let dirs = names_in(&self.layout.mounts()).context(doing)?;
        let record = self.db.write(doing, |writer| {
            let mut taken = dirs;
            taken.extend(writer.endings(MOUNTS, "")?);
            let next = taken.iter().filter_map(|id| id.parse::<u64>().ok()).max().unwrap_or(0) + 1;
            record.id = format!("{next:06}");
            writer.put(MOUNTS, &record.id, &record)?;
            Ok(record)
        })?;
        Ok(record)
    }

    /// Drops a mount's record and directory, and the layers that only it needed.
    pub(crate) fn forget_mount(&self, id: &str) -> Result<(), StoreError> {
        let doing = "remove the record of a mount";
        self.db.write(doing, |writer| Ok(writer.delete(MOUNTS, id)?))?;
        self.discard(&self.layout.mount(id)).context(doing)?;
        self.release_layers()?;
        self.trash.kick();
        self.sweep().map(drop)
    }

    /// Where a mount still exists.
    fn find_mount(&self, record: &MountRecord) -> MountLocation {
        let is_own = record.seen_from == table::namespace_id(&*self.disk);
        other_namespaces::find_mount(&self.layout.mount(&record.id), is_own)
    }

    fn make_overlay(
        &self,
        record: &MountRecord,
        place: &OwnedFd,
        layers: &[LayerHandle],
        options: MountOptions,
    ) -> Result<(), MountError> {
        let doing = "create the directories of a mount";
        let dir = self.layout.mount(&record.id);
        let make = |name: &str| -> Result<PathBuf, StoreError> {
            let path = dir.join(name);
            ensure_dir(&*self.disk, &path).context(doing)?;
            Ok(path)
        };
        ensure_dir(&*self.disk, &dir).context(doing)?;
        let mut lower = self.mount_layers(layers)?;
        lower.reverse();
        lower.truncate(visible_lowers(&lower).context("read the layers")?);
        let upper = if record.writable { Some((make("upper")?, make("work")?)) } else { None };
        if let Some((upper, _)) = &upper {
            // The root of the mount looks like the upper directory does.
            like(upper, lower.first().map(PathBuf::as_path)).context(doing)?;
        }
        // The kernel wants two directories at least.
        while lower.len() + usize::from(upper.is_some()) < 2 {
            let empty = make(&format!("empty{}", lower.len()))?;
            like(&empty, None).context(doing)?;
            lower.push(empty);
        }
        let mounted = MountRecord { mounted: true, ..record.clone() };
        let copy = encode(&record.id, &mounted).context(doing)?;
        let file =
            self.disk.open(&self.layout.mount_record(&record.id), FileOpenMode::CreateNew).context(doing)?;
        file.write_all_at(&copy, 0).context(doing)?;
        OverlaySpec {
            dir: &dir,
            lower: &lower,
            upper: upper.as_ref(),
            suid: options.suid,
            devices: options.dev,
        }
        .mount(place, &record.target)
    }
}

/// Whether this process sees an image of any store mounted at `target`. One that another process mounted may be in a
/// mount namespace that does not propagate here.
pub fn is_seen_at(target: &Path) -> Result<bool, MountError> {
    Ok(MountTable::read()?.has_target(target))
}

/// Targets of the overlays whose directories are in `mounts`.
pub(crate) fn mounted_of(mounts: &Path) -> io::Result<Vec<String>> {
    let table = match MountTable::read() {
        Ok(table) => table,
        Err(MountError::Table(cause)) => return Err(cause),
        Err(other) => return Err(io::Error::other(other)),
    };
    Ok(table.targets_in(mounts))
}

/// The target of a mount, which must be a directory: its path without links, and the directory itself. The path is not
/// looked up again, as others may change it.
fn directory(target: &Path) -> Result<(PathBuf, OwnedFd), MountError> {
    let open = || -> io::Result<(PathBuf, OwnedFd)> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(target, flags, Mode::empty())?;
        Ok((fs_err::read_link(through(&dir))?, dir))
    };
    open().map_err(|cause| MountError::Target { target: target.to_owned(), cause })
}

/// Gives a directory the mode and owner of another one, or those that a root directory usually has.
fn like(path: &Path, model: Option<&Path>) -> io::Result<()> {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let Some(model) = model else {
        return fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o755));
    };
    let (model, own) = (fs_err::metadata(model)?, fs_err::metadata(path)?);
    if (model.uid(), model.gid()) != (own.uid(), own.gid()) {
        chown(path, Some(model.uid()), Some(model.gid()))?;
    }
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(model.mode() & 0o7777))
}
