//! What a command needs of its images: the store, the state directory, pulls, and the settings that it depends on.

use std::sync::Arc;

use larder::credentials::NodeKeyring as Credentials;
use larder::pull::PullConfig;
use larder_agent::config::SettingsSource;
use larder_agent::node::StateDirAccess;

use crate::failure::Failure;

/// What a command wants of its images.
#[derive(Default)]
pub(crate) struct ImageAccess {
    /// Only larder's own store has it: `LARDER_BACKEND` is not read.
    pub(crate) store_only: bool,
    /// A store that does not exist is created.
    pub(crate) creates: bool,
    /// What of the state directory.
    pub(crate) state: Option<StateDirAccess>,
    /// How images are pulled, where flags say so.
    pub(crate) pulling: Option<LocalPullSettings>,
    /// The settings that it depends on, as beginnings of keys; those of pulls are without number.
    pub(crate) settings: &'static [&'static str],
}

/// What collection depends on.
const OF_COLLECTION: &[&str] =
    &["gc.", "imageGC", "imageMinimumGCAge", "imageMaximumGCAge", "state", "store.", "docker."];

/// How a node in this process pulls.
pub(crate) struct LocalPullSettings {
    /// Changes the settings as flags say.
    pub(crate) adjust: Box<dyn Fn(PullConfig) -> Result<PullConfig, Failure> + Send>,
    /// The flags that were given, each with the setting that it changes.
    pub(crate) given: Vec<(&'static str, &'static str)>,
    /// Settings that flags give a value.
    pub(crate) settings: Vec<SettingsSource>,
    /// Credentials beside those that come with requests.
    pub(crate) credentials: Arc<dyn Fn() -> Credentials + Send + Sync>,
}

impl ImageAccess {
    /// To list and inspect.
    pub(crate) fn read() -> ImageAccess {
        ImageAccess { state: Some(StateDirAccess::None), ..ImageAccess::default() }
    }

    /// The same, and when images were last used.
    pub(crate) fn list() -> ImageAccess {
        ImageAccess { state: Some(StateDirAccess::Exclusive), settings: &["state"], ..ImageAccess::default() }
    }

    /// To change images, or what is known of them.
    pub(crate) fn write() -> ImageAccess {
        ImageAccess {
            state: Some(StateDirAccess::CurrentUser),
            settings: &["state", "store."],
            ..ImageAccess::default()
        }
    }

    /// To collect, or to say what collection would do.
    pub(crate) fn collect() -> ImageAccess {
        ImageAccess {
            state: Some(StateDirAccess::Exclusive),
            settings: OF_COLLECTION,
            ..ImageAccess::default()
        }
    }

    /// To list or change what collection keeps.
    pub(crate) fn keep() -> ImageAccess {
        ImageAccess { settings: &["gc.keep", "state"], ..ImageAccess::collect() }
    }

    /// Whether the setting with this key changes what the command does.
    pub(super) fn depends_on(&self, key: &str) -> bool {
        self.pulling.is_some() || self.settings.iter().any(|start| key.starts_with(start))
    }

    /// The same, of larder's own store only.
    pub(crate) fn of_store(self) -> ImageAccess {
        ImageAccess { store_only: true, ..self }
    }

    /// The same, and a store that does not exist is created.
    pub(crate) fn create_store(self) -> ImageAccess {
        ImageAccess { creates: true, ..self }
    }
}
