//! Opening a store: lock, format, database, recovery.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use larder::trusted_path;
use parking_lot::Mutex;

use super::db::Db;
use super::error::{StoreError, StoreOpenError};
use super::extraction_locks::ExtractionLocks;
use super::handle::{OpenStore, Store};
use super::layout::{StoreLayout, names_in};
use super::lock::{StoreLock, StoreLockError};
use super::trash::Trash;
use super::{FORMAT, StoreConfig, TITLE};
use crate::disk::{Disk, FileOpenMode, RealDisk, SizeAccuracy};
use crate::fsck::rebuild::{RebuildLayerCheck, rebuild_begun};

impl Store {
    /// Opens the store in the directory `root`, or creates one if the directory is empty or new. Cleans up after a
    /// process that died.
    pub fn open(root: &Path, config: StoreConfig) -> Result<Store, StoreOpenError> {
        Store::open_on(Arc::new(RealDisk), root, config)
    }

    /// Like [`open`](Store::open), on a disk of the caller's choice.
    pub fn open_on(disk: Arc<dyn Disk>, root: &Path, config: StoreConfig) -> Result<Store, StoreOpenError> {
        Store::open_begun(LockedStoreDir::begin(disk, root, MissingStoreAction::Make)?, config)
    }

    /// Opens the store in the directory `root`. Never creates one: fails with [`StoreOpenError::NoStore`].
    pub fn open_existing(root: &Path, config: StoreConfig) -> Result<Store, StoreOpenError> {
        Store::open_begun(
            LockedStoreDir::begin(Arc::new(RealDisk), root, MissingStoreAction::Refuse)?,
            config,
        )
    }

    /// Opens the store for a check: changes nothing in it. A damaged database is an error, and what an interrupted
    /// operation left stays.
    pub fn open_for_check(root: &Path, config: StoreConfig) -> Result<Store, StoreOpenError> {
        let opening = LockedStoreDir::begin(Arc::new(RealDisk), root, MissingStoreAction::RefuseChange)?;
        let path = opening.layout.database();
        let db = Db::open_unchanged(&opening.disk, &path, config.database_cache_bytes)
            .map_err(|cause| StoreOpenError::Database { path, cause })?;
        opening.into_store(db, config, OpenStore::look)
    }

    fn open_begun(opening: LockedStoreDir, config: StoreConfig) -> Result<Store, StoreOpenError> {
        let damage = match opening.open_database(&config) {
            Ok(db) => return opening.into_store(db, config, OpenStore::recover),
            Err(error) if error.is_damage() => error,
            Err(error) => return Err(error),
        };
        tracing::warn!("{}; rebuilding it from the images on disk", larder::error_chain(&damage));
        let (store, rebuilt) = rebuild_begun(opening, config, RebuildLayerCheck::Size)?;
        tracing::warn!("{rebuilt}");
        Ok(store)
    }
}

/// Treatment of a missing store, or of one without the directories and the format of today.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingStoreAction {
    /// Make one.
    Make,
    /// Leave it so, unless the directory has remains of one.
    Rebuild,
    /// Leave it so.
    Refuse,
    /// Leave a store as it is, and fail where it would have to change.
    RefuseChange,
}

/// A store whose directory is locked and understood.
pub(crate) struct LockedStoreDir {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) layout: StoreLayout,
    lock: StoreLock,
}

impl LockedStoreDir {
    pub(crate) fn begin(
        disk: Arc<dyn Disk>,
        root: &Path,
        absent: MissingStoreAction,
    ) -> Result<LockedStoreDir, StoreOpenError> {
        let failed = |doing| move |cause| StoreOpenError::Io { doing, root: root.to_owned(), cause };
        let no_store = || StoreOpenError::NoStore { root: root.to_owned() };
        match fs_err::metadata(root) {
            Ok(found) if !found.is_dir() => {
                return Err(StoreOpenError::NotADirectory { root: root.to_owned() });
            }
            // Before the advice about what others can change in it.
            Ok(_) if is_of_another_program(root) => {
                return Err(StoreOpenError::NotAStore { root: root.to_owned() });
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(StoreOpenError::NotADirectory { root: root.to_owned() });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && absent != MissingStoreAction::Make => {
                return Err(no_store());
            }
            _ => {}
        }
        let no_store = no_store();
        // What is removed in the store, as root, must not lead out of it.
        let found = match absent {
            MissingStoreAction::Make => trusted_path::create_dir(root),
            _ => trusted_path::check_dir(root),
        };
        let root = &found.map_err(|error| failed("open")(error.into()))?;
        let layout = StoreLayout::new(root);
        let is_store = check_format(&layout)?;
        if !is_store && !may_become_a_store(root).map_err(failed("open"))? {
            return Err(StoreOpenError::NotAStore { root: root.clone() });
        }
        let some_of_it = || names_in(root).map(|names| !names.is_empty()).map_err(failed("open"));
        if !is_store
            && (matches!(absent, MissingStoreAction::Refuse | MissingStoreAction::RefuseChange)
                || (absent == MissingStoreAction::Rebuild && !some_of_it()?))
        {
            return Err(no_store);
        }
        let lock = StoreLock::acquire(&layout.lock()).map_err(|refused| match refused {
            StoreLockError::Held(holder) => StoreOpenError::InUse { root: root.clone(), holder },
            StoreLockError::Io(cause) => failed("lock")(cause),
        })?;
        if !is_store {
            create(&*disk, &layout)?;
        } else if absent != MissingStoreAction::RefuseChange {
            // Removed directories are created again: their content is then found missing, and can be fetched.
            layout.create(&*disk).map_err(failed("prepare"))?;
        }
        Ok(LockedStoreDir { disk, layout, lock })
    }

    pub(crate) fn open_database(&self, config: &StoreConfig) -> Result<Db, StoreOpenError> {
        let path = self.layout.database();
        Db::open(&self.disk, &path, config.database_cache_bytes)
            .map_err(|cause| StoreOpenError::Database { path, cause })
    }

    /// The open store, once `prepare` has looked at what is there.
    pub(crate) fn into_store(
        self,
        db: Db,
        config: StoreConfig,
        prepare: impl FnOnce(&OpenStore) -> Result<(), StoreError>,
    ) -> Result<Store, StoreOpenError> {
        let LockedStoreDir { disk, layout, lock } = self;
        let root = layout.root().to_owned();
        let sizes = SizeAccuracy::of(&root).map_err(|cause| StoreOpenError::Io {
            doing: "open",
            root: root.clone(),
            cause,
        })?;
        let inner = OpenStore {
            sizes,
            erofs: OnceLock::new(),
            chains: super::image_chains::ImageChains::default(),
            partials: crate::lazy::PartialLayers::default(),
            verified: crate::lazy::VerifiedLayers::default(),
            layer_mounts: Mutex::new(()),
            extractions: ExtractionLocks::default(),
            begun_uses: super::begun_uses::BegunUses::default(),
            trash: Trash::new(disk.clone(), layout.trash(), &config),
            db,
            disk,
            layout,
            config,
            references: Arc::default(),
            uncommitted_layers: super::layers::UncommittedLayers::default(),
            content: Mutex::new(()),
            writes: Mutex::new(None),
            _lock: lock,
        };
        let store = Store(Arc::new(inner));
        prepare(&store.0).map_err(|cause| StoreOpenError::Recovery { root, cause: Box::new(cause) })?;
        Ok(store)
    }
}

fn format_line() -> String {
    format!("{TITLE} {FORMAT}\n")
}

/// Whether the directory has a store, as its file `format` says. Fails for a store of another format.
fn check_format(layout: &StoreLayout) -> Result<bool, StoreOpenError> {
    let root = || layout.root().to_owned();
    match fs_err::read(layout.format()) {
        Ok(line) if line == format_line().as_bytes() => Ok(true),
        Ok(line) => {
            let found = String::from_utf8_lossy(&line[..line.len().min(40)]).trim_end().to_owned();
            Err(StoreOpenError::Format { root: root(), found })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(cause) => Err(StoreOpenError::Io { doing: "open", root: root(), cause }),
    }
}

/// Returns true if a directory has files, and none of a store. False where that cannot be determined.
fn is_of_another_program(root: &Path) -> bool {
    let has_format = fs_err::symlink_metadata(StoreLayout::new(root).format()).is_ok();
    !has_format && may_become_a_store(root).is_ok_and(|may_become| !may_become)
}

/// Whether a directory without a format may be made a store: it is empty, or an earlier attempt did not come to its
/// end.
fn may_become_a_store(root: &Path) -> io::Result<bool> {
    let ours = [
        "blobs",
        "collect",
        "extracted",
        "format.new",
        "guard",
        "images",
        "indexes",
        "ingest",
        "larder.db",
        "larder.db-wal",
        "larder.db.new",
        "larder.db.new-wal",
        "larder.db.old",
        "larder.db.old-wal",
        "layers",
        "lock",
        "lost+found",
        "lost-snapshots",
        "lowers",
        "mounts",
        "settings",
        "snapshots",
        "staging",
        "trash",
    ];
    Ok(names_in(root)?.iter().all(|name| ours.contains(&name.as_str())))
}

/// The format is written last, when everything else is durable.
fn create(disk: &dyn Disk, layout: &StoreLayout) -> Result<(), StoreOpenError> {
    let failed = |cause| StoreOpenError::Io { doing: "create", root: layout.root().to_owned(), cause };
    let filesystem = disk.open_sync(layout.root()).map_err(failed)?;
    layout.create(disk).map_err(failed)?;
    let path = layout.database();
    Db::create(disk, &path, |_| Ok(())).map_err(|cause| StoreOpenError::Database { path, cause })?;
    filesystem.sync().and_then(|()| write_format(disk, layout)).map_err(failed)
}

/// Everything else that the format promises must be durable.
fn write_format(disk: &dyn Disk, layout: &StoreLayout) -> io::Result<()> {
    let new = layout.root().join("format.new");
    disk.remove_file(&new)?;
    let file = disk.open(&new, FileOpenMode::CreateNew)?;
    file.write_all_at(format_line().as_bytes(), 0)?;
    file.sync_data()?;
    disk.rename(&new, &layout.format())?;
    disk.sync_dir(layout.root())
}
