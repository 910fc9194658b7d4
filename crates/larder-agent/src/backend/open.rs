//! Opens the backend that the settings name.

use std::sync::Arc;

use larder::error_chain;
use larder::hint::Hint;
use larder_cri::{CriBackend, Endpoint, NoRuntimeFound, WELL_KNOWN_SOCKETS, discover};
use larder_registry::RegistryClient;
use larder_store::backend::StoreBackend;
use larder_store::pull::StorePuller;
use larder_store::store::{Store, StoreConfig, StoreOpenError};

use super::docker;
use super::handle::BackendHandle;
use super::target::BackendTarget;
use crate::config::{BackendSetting, Config};
use crate::environment::DefaultPaths;
use crate::error::{Error, NodeOpenError};

/// Whether a store that does not exist is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Fail: a mistyped directory does not become a store.
    Existing,
    /// Fail if it does not exist or is damaged, and change nothing.
    Check,
    /// Create it if missing.
    Create,
}

/// The behaviour if `backend: cri` names no endpoint and no runtime runs yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeRequirement {
    /// Wait for the most common socket.
    WaitForDefault,
    /// Fail.
    Require,
}

/// Opens the backend. A store is locked by this process until it is dropped.
pub fn open(
    config: &Config,
    mode: OpenMode,
    runtime: RuntimeRequirement,
) -> Result<BackendHandle, NodeOpenError> {
    if let BackendSetting::Docker(text) = &config.backend {
        let request = config.images.runtime_request_timeout.to_std();
        let connect = Some(config.runtime.connect_timeout);
        return Ok(docker::open(text, &named_by(config), request, connect)?);
    }
    let Some((endpoint, cri)) = config.cri() else {
        let store = store_backend(config, mode).map_err(|error| open_error(&error))?;
        return Ok(BackendHandle::Store(store));
    };
    let endpoint = match endpoint {
        Some(endpoint) => endpoint,
        None => found(runtime)?,
    };
    Ok(BackendHandle::Runtime(Arc::new(CriBackend::new(endpoint, cri))))
}

/// The backend of these settings. Opens nothing.
pub fn target_of(config: &Config) -> Result<BackendTarget, Error> {
    if let BackendSetting::Docker(text) = &config.backend {
        return Ok(BackendTarget::Runtime(docker::place(text, &named_by(config))?));
    }
    Ok(match config.cri() {
        None => BackendTarget::Store(config.root.clone()),
        Some((Some(endpoint), _)) => BackendTarget::Runtime(endpoint.to_string()),
        Some((None, _)) => BackendTarget::Runtime(found(RuntimeRequirement::Require)?.to_string()),
    })
}

/// Returns the setting that named the backend, for errors.
fn named_by(config: &Config) -> String {
    match config.origin("backend") {
        crate::config::SettingOrigin::Default => "backend".to_owned(),
        origin => origin.to_string(),
    }
}

/// Why a store was not opened, by what a caller may do about it.
pub fn open_error(error: &StoreOpenError) -> NodeOpenError {
    let of_kind = match error {
        StoreOpenError::InUse { .. } => NodeOpenError::InUse,
        StoreOpenError::NoStore { .. } => NodeOpenError::NoStore,
        _ => NodeOpenError::Failed,
    };
    of_kind(cannot_open(error))
}

/// The store of these settings as a backend.
pub fn store_backend(config: &Config, mode: OpenMode) -> Result<StoreBackend, StoreOpenError> {
    let keep_remnants = !config.lazy.images.is_empty();
    let reserve = config.store_pull().reserve;
    let settings = StoreConfig { reserve, keep_remnants, ..config.store.config.clone() };
    let store = match mode {
        OpenMode::Create => Store::open(&config.root, settings),
        OpenMode::Existing => Store::open_existing(&config.root, settings),
        OpenMode::Check => Store::open_for_check(&config.root, settings),
    }?;
    Ok(StoreBackend::new(StorePuller::new(
        store,
        RegistryClient::new(config.registry.clone()),
        config.store_pull(),
    )))
}

/// Why a store cannot be opened, with the next step.
fn cannot_open(error: &StoreOpenError) -> Error {
    let failure = Error::unreachable(error_chain(error));
    match error {
        StoreOpenError::NoStore { root } if DefaultPaths::current().root.as_ref() == Some(root) => {
            Error::unreachable(format!("{}: nothing has been pulled yet", failure.message())).hint(
                Hint::new()
                    .command(["pull", "IMAGE"])
                    .text(" creates it; or name the directory of another store: ")
                    .setting("root", "DIR"),
            )
        }
        error => failure.hints(error.hint()),
    }
}

fn found(mode: RuntimeRequirement) -> Result<Endpoint, Error> {
    match (discover(), mode) {
        (Ok(endpoint), _) => Ok(endpoint),
        (Err(error), RuntimeRequirement::WaitForDefault) => Ok(expected(&error)),
        (Err(error), RuntimeRequirement::Require) => {
            Err(Error::unreachable(error.to_string()).hint(error.hint()).hint(
                Hint::from("or use larder's own store, which needs no runtime: ").setting("backend", "store"),
            ))
        }
    }
}

/// The most likely socket of a runtime that starts after larder.
fn expected(error: &NoRuntimeFound) -> Endpoint {
    let expected = Endpoint::at(WELL_KNOWN_SOCKETS[0]);
    tracing::warn!("{error}; waiting for {expected}; name another with backend: unix:///path/to.sock");
    expected
}
