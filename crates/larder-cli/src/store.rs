//! The embedded store as a backend: where it is, and how it is opened.

use std::env;
use std::path::{Path, PathBuf};

use larder_store::backend::StoreBackend;
use larder_store::pull::{PullConfig, Puller};
use larder_store::registry::{Client, RegistryConfig};
use larder_store::store::{OpenError, Store, StoreConfig};

use crate::failure::{Failure, chain};

/// Where the store is when nobody says: one for the machine, or one for a user who is not root.
pub(crate) fn default_root() -> Result<PathBuf, Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/larder".into());
    }
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    match data {
        Some(data) => Ok(data.join("larder")),
        None => Err(Failure::bad_input("no place for the store: neither XDG_DATA_HOME nor HOME is set")
            .hint("name a folder with --root DIR")),
    }
}

/// Opens the store, and makes it if there is none: for commands that bring images. Closing it stops what is being
/// deleted: a command that removes something calls [`Store::finish_deletion`], since who removes wants the room when
/// the command is done.
pub(crate) fn open_or_make(root: &Path) -> Result<StoreBackend, Failure> {
    Ok(backend(Store::open(root, StoreConfig::default()).map_err(|error| cannot_open(&error))?))
}

/// Opens the store that is there: a mistyped folder is not to become one.
pub(crate) fn open(root: &Path) -> Result<StoreBackend, Failure> {
    Ok(backend(Store::open_existing(root, StoreConfig::default()).map_err(|error| cannot_open(&error))?))
}

/// Opens the store that is there; `None` where nothing has been pulled yet into the user's usual one.
pub(crate) fn open_usual() -> Result<Option<StoreBackend>, Failure> {
    match Store::open_existing(&default_root()?, StoreConfig::default()) {
        Ok(store) => Ok(Some(backend(store))),
        Err(OpenError::NoStore { .. }) => Ok(None),
        Err(error) => Err(cannot_open(&error)),
    }
}

fn backend(store: Store) -> StoreBackend {
    let client = Client::new(RegistryConfig::default());
    StoreBackend::new(Puller::new(store, client, PullConfig::default()))
}

/// Why the store is not open, and what to do about it.
pub(crate) fn cannot_open(error: &OpenError) -> Failure {
    let failure = Failure::unreachable(chain(error));
    match error {
        OpenError::NoStore { root } if default_root().is_ok_and(|usual| usual == *root) => {
            Failure::unreachable(format!(
                "{failure}: nothing has been pulled yet",
                failure = failure.message()
            ))
            .hint("larder pull IMAGE makes it; the folder of another store is named with --root DIR")
        }
        error => failure.hints(error.hint()),
    }
}
