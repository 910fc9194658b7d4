//! The embedded store as a backend: where it is, and how it is opened.

use std::env;
use std::path::{Path, PathBuf};

use larder_registry::{Client, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{PullConfig, Puller};
use larder_store::store::{OpenError, Store, StoreConfig};

use crate::Error;
use larder::hint::Hint;
use larder::chain;

/// Where the store is of root, when nobody says.
pub(crate) const ROOT_OF_ROOT: &str = "/var/lib/larder";

/// Where the store is when nobody says: one for the machine, or one for a user who is not root.
pub(crate) fn default_root() -> Result<PathBuf, Error> {
    if rustix::process::geteuid().is_root() {
        return Ok(ROOT_OF_ROOT.into());
    }
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/share")));
    match data {
        Some(data) => Ok(data.join("larder")),
        None => Err(Error::bad_input("no place for the store: neither XDG_DATA_HOME nor HOME is set")
            .hint("name a folder with --root DIR")),
    }
}

/// Opens the store, and makes it if there is none: for commands that bring images. Closing it stops what is being
/// deleted: a command that removes something calls [`Store::finish_deletion`], since who removes wants the room when
/// the command is done.
pub(crate) fn open_or_make(root: &Path, registry: RegistryConfig) -> Result<StoreBackend, Error> {
    let store = Store::open(root, StoreConfig::default()).map_err(|error| cannot_open(&error))?;
    Ok(backend(store, registry))
}

/// Opens the store that is there: a mistyped folder is not to become one.
pub(crate) fn open(root: &Path, registry: RegistryConfig) -> Result<StoreBackend, Error> {
    let store = Store::open_existing(root, StoreConfig::default()).map_err(|error| cannot_open(&error))?;
    Ok(backend(store, registry))
}

/// Opens the store that is there; `None` where nothing has been pulled yet into the user's usual one.
pub(crate) fn open_usual(registry: RegistryConfig) -> Result<Option<StoreBackend>, Error> {
    match Store::open_existing(&default_root()?, StoreConfig::default()) {
        Ok(store) => Ok(Some(backend(store, registry))),
        Err(OpenError::NoStore { .. }) => Ok(None),
        Err(error) => Err(cannot_open(&error)),
    }
}

/// Opens the store that a daemon keeps, and makes it if there is none.
pub(crate) fn open_configured(
    root: &Path,
    settings: StoreConfig,
    registry: RegistryConfig,
    pull: PullConfig,
) -> Result<StoreBackend, Error> {
    let store = Store::open(root, settings).map_err(|error| cannot_open(&error))?;
    Ok(StoreBackend::new(Puller::new(store, Client::new(registry), pull)))
}

fn backend(store: Store, registry: RegistryConfig) -> StoreBackend {
    StoreBackend::new(Puller::new(store, Client::new(registry), PullConfig::default()))
}

/// How registries are found: by the folder that the user names, else by those where such configuration usually is.
pub(crate) fn registries(certs_d: Option<&Path>) -> Result<RegistryConfig, Error> {
    let mut config = RegistryConfig::default();
    match certs_d {
        Some(folder) if !folder.is_dir() => {
            return Err(Error::bad_input(format!("--certs-d {}: no such folder", folder.display()))
                .hint("name a folder that has one folder for each registry, with a hosts.toml in it"));
        }
        Some(folder) => config.config_dirs = vec![folder.to_owned()],
        None => config.config_dirs.splice(..0, user_certs()).for_each(drop),
    }
    Ok(config)
}

/// The folder of a user who is not root. What it says of a registry comes before what the machine's say.
fn user_certs() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
    config.map(|config| config.join("larder/certs.d"))
}

/// The folder that a variable names.
fn absolute(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Why the store is not open, and what to do about it.
pub(crate) fn cannot_open(error: &OpenError) -> Error {
    let failure = Error::unreachable(chain(error));
    match error {
        OpenError::NoStore { root } if default_root().is_ok_and(|usual| usual == *root) => {
            Error::unreachable(format!(
                "{failure}: nothing has been pulled yet",
                failure = failure.message()
            ))
            .hint(Hint::new().command(["pull", "IMAGE"]).text(" makes it; the folder of another store is named with --root DIR"))
        }
        error => failure.hints(error.hint()),
    }
}
