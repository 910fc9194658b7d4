//! The node's own credentials: docker config files, read again every five minutes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::credential::CredentialLocation;
use super::docker_config::{DockerConfig, DockerConfigEntry, TokenPolicy};
use super::helpers::HelperNames;
use super::keyring::Keyring;
use super::search::SearchPath;

/// How long a read config is used before the files are read again.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(5 * 60);

/// The node's docker config: none, a fixed one, or the first sound file of a search.
#[derive(Debug, Default)]
pub struct NodeDockerConfig(NodeConfigLocation);

#[derive(Debug, Default)]
enum NodeConfigLocation {
    #[default]
    None,
    Fixed(Arc<ParsedNodeConfig>),
    Search {
        path: SearchPath,
        /// Locked while the files are read, so that they are read once however many pulls wait.
        cache: Mutex<Option<CachedNodeConfig>>,
    },
}

/// A parsed docker config of the node.
#[derive(Debug, Default)]
pub(super) struct ParsedNodeConfig {
    pub(super) keyring: Keyring,
    pub(super) helpers: HelperNames,
}

#[derive(Debug)]
struct CachedNodeConfig {
    config: Arc<ParsedNodeConfig>,
    read_at: Instant,
    tokens: TokenPolicy,
}

impl NodeDockerConfig {
    /// No files at all.
    pub fn none() -> Self {
        NodeDockerConfig(NodeConfigLocation::None)
    }

    /// One fixed config.
    pub fn fixed(config: &DockerConfig) -> Self {
        NodeDockerConfig(NodeConfigLocation::Fixed(Arc::new(ParsedNodeConfig::of(config))))
    }

    /// The result of a search, repeated every five minutes. Unusable files are logged.
    pub fn search(path: SearchPath) -> Self {
        NodeDockerConfig(NodeConfigLocation::Search { path, cache: Mutex::new(None) })
    }

    /// The current config.
    pub(super) async fn config(&self, tokens: TokenPolicy) -> Arc<ParsedNodeConfig> {
        match &self.0 {
            NodeConfigLocation::None => Arc::default(),
            NodeConfigLocation::Fixed(config) => config.clone(),
            NodeConfigLocation::Search { path, cache } => {
                let mut cache = cache.lock().await;
                let now = Instant::now();
                if let Some(cached) = cache.as_ref().filter(|cached| cached.is_fresh(now, tokens)) {
                    return cached.config.clone();
                }
                let config = Arc::new(read(path.clone(), tokens).await);
                *cache = Some(CachedNodeConfig { config: config.clone(), read_at: now, tokens });
                config
            }
        }
    }
}

impl CachedNodeConfig {
    fn is_fresh(&self, now: Instant, tokens: TokenPolicy) -> bool {
        now < self.read_at + READ_AGAIN_AFTER && self.tokens == tokens
    }
}

/// Searches on a thread that may block.
async fn read(path: SearchPath, tokens: TokenPolicy) -> ParsedNodeConfig {
    let found = tokio::task::spawn_blocking(move || path.find(tokens)).await.unwrap_or_else(|error| {
        tracing::error!(%error, "cannot read the node's docker config");
        super::search::ConfigSearchResult::default()
    });
    for skipped in &found.skipped {
        tracing::warn!(%skipped, "skipped a docker config file");
    }
    ParsedNodeConfig::of(&found.config)
}

impl ParsedNodeConfig {
    /// Credentials of a config that was just read.
    fn of(config: &DockerConfig) -> ParsedNodeConfig {
        let unusable = config.unusable_entries();
        if unusable > 0 {
            tracing::warn!("ignored {unusable} docker config entries: location is not a URL");
        }
        let mut keyring = Keyring::default();
        if config.uses_helpers() {
            // If a helper stores the password, Docker leaves an empty entry.
            let mut filled = config.clone();
            filled.entries.retain(|_, entry| *entry != DockerConfigEntry::default());
            keyring.add(&filled, None, &CredentialLocation::ConfigFile);
        } else {
            keyring.add(config, None, &CredentialLocation::ConfigFile);
        }
        ParsedNodeConfig { keyring, helpers: HelperNames::from_config(config) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::config_file::DockerConfigFormat;
    use super::*;

    async fn user(files: &NodeDockerConfig) -> String {
        let found = files.config(TokenPolicy::Keep).await.keyring.lookup("r.example/app");
        found.into_iter().map(|credential| credential.username).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn files_are_read_again_after_five_minutes() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("config.json");
        let write = |user: &str| {
            let text = format!(r#"{{"auths": {{"r.example": {{"username": "{user}"}}}}}}"#);
            fs_err::write(&file, text).expect("written");
        };
        let files =
            NodeDockerConfig::search(SearchPath::new([(file.clone(), DockerConfigFormat::ConfigJson)]));
        write("one");
        assert_eq!(user(&files).await, "one");
        write("two");
        tokio::time::advance(READ_AGAIN_AFTER.saturating_sub(Duration::from_millis(1))).await;
        assert_eq!(user(&files).await, "one");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(user(&files).await, "two");
        fs_err::remove_file(&file).expect("removed");
        tokio::time::advance(READ_AGAIN_AFTER).await;
        assert_eq!(user(&files).await, "");
    }
}
