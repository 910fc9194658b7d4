//! larder's own store without a node: what needs it alone, while nothing else has it open. Everything here may block.

use std::path::Path;
use std::sync::Arc;

use larder::credentials::NodeKeyring;
use larder::error_chain;
use larder::hint::Hint;
use larder::pull::ImageManager;
use larder_agent::NodeOpenError;
use larder_agent::backend::{OpenMode, open_error, store_backend};
use larder_agent::config::Config;
use larder_store::backend::StoreBackend;
use larder_store::fsck::{FsckOptions, FsckReport, IncompleteImage, RebuildReport};
use larder_store::store::{Store, StoreError, StoreOpenError};

use crate::failure::Failure;

/// larder's own store, opened by this process alone.
pub(crate) struct OfflineStore {
    backend: StoreBackend,
}

impl OfflineStore {
    /// Rebuilds the index of the store from the files beside it. Returns what was found.
    pub(crate) fn rebuild(config: &Config) -> Result<RebuildReport, NodeOpenError> {
        let rebuilt = Store::rebuild(&config.root, config.store.config.clone());
        Ok(rebuilt.map_err(|error| open_error(&error))?.1)
    }

    /// Opens the store, which must exist. A damaged database is a failure, not a store that is unavailable; with
    /// `repair` it is rebuilt. Without, nothing is changed.
    pub(crate) fn open(config: &Config, repair: bool) -> Result<OfflineStore, NodeOpenError> {
        let mode = if repair { OpenMode::Existing } else { OpenMode::Check };
        let backend = store_backend(config, mode).map_err(|error| match &error {
            StoreOpenError::Database { .. } => {
                Failure::failed(error_chain(&error)).hints(error.hint()).into()
            }
            error => open_error(error),
        })?;
        Ok(OfflineStore { backend })
    }

    /// Where it is.
    pub(crate) fn root(&self) -> &Path {
        self.backend.store().root()
    }

    /// Lets deletions that are under way end when the store is closed.
    pub(crate) fn finish_deletion(&self) {
        self.backend.store().finish_deletion();
    }

    /// Checks records and sizes, without `quick` also contents; with `repair` fixes what can be fixed here.
    pub(crate) fn check(&self, quick: bool, repair: bool) -> Result<FsckReport, Failure> {
        let options = FsckOptions { contents: !quick, repair, ..FsckOptions::default() };
        self.backend.store().fsck(&options).map_err(|error| self.unchecked(&error))
    }

    /// The images that lack files.
    pub(crate) fn missing(&self) -> Result<Vec<IncompleteImage>, Failure> {
        self.backend.store().missing().map_err(|error| self.unchecked(&error))
    }

    /// A pull manager on the store, with these credentials.
    pub(crate) fn manager(&self, credentials: NodeKeyring) -> ImageManager {
        ImageManager::new(Arc::new(self.backend.clone())).with_credentials(credentials)
    }

    fn unchecked(&self, error: &StoreError) -> Failure {
        unchecked(self.root(), error)
    }
}

fn unchecked(root: &Path, error: &StoreError) -> Failure {
    let root = root.display();
    Failure::failed(format!("cannot check the store in {root}: {}", error_chain(error))).hint(
        error.hint().unwrap_or_else(|| {
            Hint::new().command(["fsck", "--rebuild"]).text(" rebuilds the database from the images on disk")
        }),
    )
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_check_that_fails_names_the_directory_and_the_next_step() {
        for cause in [io::ErrorKind::Other, io::ErrorKind::StorageFull] {
            let error = StoreError::Io { operation: "measure the trash", cause: cause.into() };
            let shown = format!("{:?}", unchecked("/images".as_ref(), &error));
            assert!(
                shown.contains("in /images: cannot measure the trash") && !shown.contains("hints: []"),
                "{shown}"
            );
        }
    }
}
