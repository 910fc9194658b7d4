//! Opening a store: lock, format, database, recovery.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use super::db::Db;
use super::error::OpenError;
use super::inner::{Inner, Store};
use super::layout::{Layout, names_in};
use super::lock::{Lock, Refused};
use super::trash::Trash;
use super::{FORMAT, StoreConfig};
use crate::disk::{Disk, OpenHow, RealDisk};

/// First line of the file `format`.
const TITLE: &str = "larder image store";

impl Store {
    /// Opens the store in the folder `root`, or makes one there if the folder is empty or new. Puts in order what a
    /// dead process left.
    pub fn open(root: &Path, config: StoreConfig) -> Result<Store, OpenError> {
        Store::open_on(Arc::new(RealDisk), root, config)
    }

    /// Like [`open`](Store::open), on a disk of the caller's choice.
    pub fn open_on(disk: Arc<dyn Disk>, root: &Path, config: StoreConfig) -> Result<Store, OpenError> {
        Store::open_begun(Opening::begin(disk, root, Absent::Make)?, config)
    }

    /// Opens the store in the folder `root`. Where there is none, nothing is made: [`OpenError::NoStore`].
    pub fn open_existing(root: &Path, config: StoreConfig) -> Result<Store, OpenError> {
        Store::open_begun(Opening::begin(Arc::new(RealDisk), root, Absent::Refuse)?, config)
    }

    fn open_begun(opening: Opening, config: StoreConfig) -> Result<Store, OpenError> {
        let path = opening.layout.database();
        let db = Db::open(&opening.disk, &path, config.database_cache_bytes)
            .map_err(|cause| OpenError::Database { path, cause })?;
        opening.finish(db, config)
    }
}

/// What to do where there is no store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absent {
    /// Make one.
    Make,
    /// Leave it so, unless the folder has remains of one.
    Rebuild,
    /// Leave it so.
    Refuse,
}

/// A store whose folder is locked and understood.
pub(crate) struct Opening {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) layout: Layout,
    lock: Lock,
}

impl Opening {
    pub(crate) fn begin(disk: Arc<dyn Disk>, root: &Path, absent: Absent) -> Result<Opening, OpenError> {
        let failed = |doing| move |cause| OpenError::Io { doing, root: root.to_owned(), cause };
        let no_store = || OpenError::NoStore { root: root.to_owned() };
        match fs_err::metadata(root) {
            Ok(found) if !found.is_dir() => return Err(OpenError::NotAFolder { root: root.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound && absent != Absent::Make => {
                return Err(no_store());
            }
            _ => {}
        }
        if absent == Absent::Make {
            fs_err::create_dir_all(root).map_err(failed("create"))?;
        }
        let no_store = no_store();
        let root = &fs_err::canonicalize(root).map_err(failed("open"))?;
        let layout = Layout::new(root);
        let format = read_format(&layout)?;
        if format.is_none() && !may_become_a_store(root).map_err(failed("open"))? {
            return Err(OpenError::NotAStore { root: root.clone() });
        }
        let some_of_it = || names_in(root).map(|names| !names.is_empty()).map_err(failed("open"));
        if format.is_none() && (absent == Absent::Refuse || (absent == Absent::Rebuild && !some_of_it()?)) {
            return Err(no_store);
        }
        let lock = Lock::take(&layout.lock()).map_err(|refused| match refused {
            Refused::Held(holder) => OpenError::InUse { root: root.clone(), holder },
            Refused::Io(cause) => failed("lock")(cause),
        })?;
        match format {
            None => create(&*disk, &layout)?,
            // Folders that somebody removed are made again: what they had is then found missing, and can be fetched.
            Some(FORMAT) => layout.create(&*disk).map_err(failed("put in order"))?,
            // There is no earlier format that would have to be brought up to date.
            Some(found) => {
                return Err(OpenError::Newer { root: root.clone(), found, known: FORMAT });
            }
        }
        Ok(Opening { disk, layout, lock })
    }

    pub(crate) fn finish(self, db: Db, config: StoreConfig) -> Result<Store, OpenError> {
        let Opening { disk, layout, lock } = self;
        let root = layout.root().to_owned();
        let inner = Inner {
            trash: Trash::new(disk.clone(), layout.trash(), &config),
            db,
            disk,
            layout,
            config,
            holds: Arc::default(),
            arrivals: super::layers::Arrivals::default(),
            gate: Mutex::new(()),
            _lock: lock,
        };
        let store = Store(Arc::new(inner));
        store.0.recover().map_err(|cause| OpenError::Recovery { root, cause: Box::new(cause) })?;
        Ok(store)
    }
}

/// The format that the store says it has; `None` when nothing says so.
fn read_format(layout: &Layout) -> Result<Option<u32>, OpenError> {
    let path = layout.format();
    let text = match fs_err::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => {
            return Err(OpenError::Io { doing: "open", root: layout.root().to_owned(), cause });
        }
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
    };
    let version = text.strip_prefix(TITLE).and_then(|rest| rest.trim().parse().ok());
    version.filter(|version| *version > 0).map(Some).ok_or(OpenError::Format { path })
}

/// Whether a folder without a format may be made a store: it is empty, or an earlier attempt did not come to its end.
fn may_become_a_store(root: &Path) -> io::Result<bool> {
    let ours = [
        "blobs",
        "collect",
        "format.new",
        "images",
        "ingest",
        "larder.redb",
        "larder.redb.new",
        "larder.redb.old",
        "layers",
        "lock",
        "lost+found",
        "mounts",
        "staging",
        "trash",
    ];
    Ok(names_in(root)?.iter().all(|name| ours.contains(&name.as_str())))
}

/// The format is written last, when everything else is durable.
fn create(disk: &dyn Disk, layout: &Layout) -> Result<(), OpenError> {
    let failed = |cause| OpenError::Io { doing: "create", root: layout.root().to_owned(), cause };
    layout.create(disk).map_err(failed)?;
    let path = layout.database();
    Db::create(disk, &path, |_| Ok(())).map_err(|cause| OpenError::Database { path, cause })?;
    write_format(disk, layout).map_err(failed)
}

fn write_format(disk: &dyn Disk, layout: &Layout) -> io::Result<()> {
    let new = layout.root().join("format.new");
    disk.remove_file(&new)?;
    let file = disk.open(&new, OpenHow::CreateNew)?;
    file.write_all_at(format!("{TITLE} {FORMAT}\n").as_bytes(), 0)?;
    file.sync_data()?;
    disk.sync_all(layout.root())?;
    disk.rename(&new, &layout.format())?;
    disk.sync_dir(layout.root())
}
