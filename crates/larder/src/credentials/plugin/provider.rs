//! One provider: answers from the cache or runs. Read [`Plugin::provide`] first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::accounts::{ServiceAccount, ServiceAccountClient, ServiceAccountTokenRequest};
use super::cache::PluginCache;
use super::config::{ProviderConfig, TokenAttributes};
use super::exec::{ObservedPlugin, PluginExecError, PluginExecutor, PluginRunObserver};
use super::keys::{self, GLOBAL};
use super::wire::{CredentialProviderRequest, CredentialProviderResponse};
use crate::config::GoDuration;
use crate::credentials::{DockerConfig, Secret, ServiceAccountCoordinates, matching};
use crate::pod::Pod;

/// One provider with its cached answers.
pub struct Plugin {
    name: String,
    match_images: Vec<String>,
    default_duration: Duration,
    token_attributes: Option<TokenAttributes>,
    program: Arc<dyn PluginExecutor>,
    accounts: Arc<dyn ServiceAccountClient>,
    cache: Mutex<PluginCache>,
    runs: Mutex<HashMap<Vec<u8>, WeakShared<PluginRun>>>,
}

type PluginRun = BoxFuture<'static, Result<Arc<CredentialProviderResponse>, PluginExecError>>;

/// A provider's credentials for an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProvidedCredentials {
    /// Credentials by pattern.
    pub auth: DockerConfig,
    /// Their owner; `None` is the node.
    pub account: Option<ServiceAccountCoordinates>,
}

/// Why a provider returned no credentials. The texts are kubelet's, without the program's output.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ProvideError {
    /// The service account is unknown.
    #[error("failed to get service account: {0}")]
    Account(String),
    /// It has no token.
    #[error("failed to get service account token: {0}")]
    Token(String),
    /// The program gave no answer.
    #[error("failed to get credential from external registry credential provider: {0}")]
    Exec(#[from] PluginExecError),
    /// It returned the token as the password, and the answer would be cached for other tokens.
    #[error(
        "credential provider plugin returned the service account token as the password which is not allowed when service account cache type is not set to 'Token'"
    )]
    TokenEcho,
    /// The answer has no valid cache key type.
    #[error(
        "credential provider plugin did not return a valid cacheKeyType: it must be Image, Registry or Global"
    )]
    CacheKeyType(Secret),
}

impl ProvideError {
    /// The text that kubelet logs, which contains the program's output.
    pub fn kubelet_text(&self) -> Secret {
        match self {
            ProvideError::CacheKeyType(given) => Secret::new(format!(
                "credential provider plugin did not return a valid cacheKeyType: {}",
                given.reveal()
            )),
            other => Secret::new(other.to_string()),
        }
    }
}

/// The pod of a request.
#[derive(Default)]
struct PluginIdentity {
    account: Option<ServiceAccountCoordinates>,
    token: Secret,
    annotations: BTreeMap<String, String>,
    /// See [`keys::account_key`]; empty without an account.
    key: Vec<u8>,
}

impl Plugin {
    /// A provider of this configuration, which has no [problems](super::problems), that is answered by `program`.
    pub fn new(
        config: &ProviderConfig,
        program: Arc<dyn PluginExecutor>,
        accounts: Arc<dyn ServiceAccountClient>,
    ) -> Plugin {
        Plugin {
            name: config.name.clone(),
            match_images: config.match_images.clone(),
            default_duration: config.default_cache_duration.and_then(GoDuration::to_std).unwrap_or_default(),
            token_attributes: config.token_attributes.clone(),
            program,
            accounts,
            cache: Mutex::new(PluginCache::new(Instant::now())),
            runs: Mutex::default(),
        }
    }

    /// Reports its runs to the observer.
    #[must_use]
    pub(super) fn observed_by(self, runs: &Arc<dyn PluginRunObserver>) -> Plugin {
        let (name, runs) = (self.name.clone(), Arc::clone(runs));
        Plugin { program: Arc::new(ObservedPlugin { name, program: self.program, runs }), ..self }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if the provider is configured for an image.
    pub fn matches(&self, image: &str) -> bool {
        self.match_images.iter().any(|pattern| matching::url_match(pattern, image).unwrap_or(false))
    }

    /// Credentials for a normalised repository. Callers with the same request share a run.
    pub async fn provide(&self, image: &str, pod: &Pod) -> Result<ProvidedCredentials, ProvideError> {
        if !self.matches(image) {
            return Ok(ProvidedCredentials::default());
        }
        let asker = match &self.token_attributes {
            None => PluginIdentity::default(),
            Some(attributes) => match self.asker(attributes, pod).await? {
                Some(asker) => asker,
                None => return Ok(ProvidedCredentials::default()),
            },
        };
        if let Some(auth) = self.known(image, &asker) {
            return Ok(ProvidedCredentials { auth, account: asker.account });
        }
        let response = self.run(image, &asker).await?;
        self.keep(image, &asker, &response)?;
        Ok(ProvidedCredentials { auth: response.auth.clone(), account: asker.account })
    }

    /// The keys of the cached answers, sorted.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn cached_keys(&self) -> Vec<Vec<u8>> {
        self.lock_cache().keys()
    }

    /// `None`: this pod is skipped.
    async fn asker(
        &self,
        attributes: &TokenAttributes,
        pod: &Pod,
    ) -> Result<Option<PluginIdentity>, ProvideError> {
        if pod.service_account.is_empty() {
            let required = attributes.require_service_account.unwrap_or(true);
            return Ok((!required).then(PluginIdentity::default));
        }
        let account = self.accounts.get(&pod.namespace, &pod.service_account).await;
        let ServiceAccount { at, annotations: all } = account.map_err(ProvideError::Account)?;
        let mut annotations = BTreeMap::new();
        for key in &attributes.required_annotation_keys {
            let Some(value) = all.get(key) else { return Ok(None) };
            annotations.insert(key.clone(), value.clone());
        }
        for key in &attributes.optional_annotation_keys {
            annotations.extend(all.get(key).map(|value| (key.clone(), value.clone())));
        }
        let request = ServiceAccountTokenRequest {
            account: at.clone(),
            audience: attributes.audience.clone(),
            pod_name: pod.name.clone(),
            pod_uid: pod.uid.clone(),
        };
        let token = self.accounts.token(&request).await.map_err(ProvideError::Token)?;
        let key = keys::account_key(&at, &annotations, is_per_token(attributes).then_some(&token));
        Ok(Some(PluginIdentity { account: Some(at), token, annotations, key }))
    }

    fn known(&self, image: &str, asker: &PluginIdentity) -> Option<DockerConfig> {
        let (mut cache, now) = (self.lock_cache(), Instant::now());
        cache.purge(now);
        [image, keys::registry_of(image), GLOBAL]
            .into_iter()
            .find_map(|base| cache.get(&keys::cache_key(base, &asker.key), now))
    }

    /// Runs the program, or waits for a run with the same request.
    async fn run(
        &self,
        image: &str,
        asker: &PluginIdentity,
    ) -> Result<Arc<CredentialProviderResponse>, PluginExecError> {
        let key = keys::flight_key(image, &asker.token, &asker.annotations);
        let request = CredentialProviderRequest {
            image: image.to_owned(),
            token: asker.token.clone(),
            annotations: asker.annotations.clone(),
        };
        let run = {
            let mut runs = self.runs.lock();
            runs.retain(|_, run| run.upgrade().is_some());
            match runs.get(&key).and_then(WeakShared::upgrade) {
                Some(run) if run.peek().is_none() => run,
                _ => {
                    let run = self.start(request);
                    runs.extend(run.downgrade().map(|weak| (key, weak)));
                    run
                }
            }
        };
        run.await
    }

    fn start(&self, request: CredentialProviderRequest) -> Shared<PluginRun> {
        let program = Arc::clone(&self.program);
        async move { program.execute(&request).await.map(Arc::new) }.boxed().shared()
    }

    /// Caches an answer with its own duration and key type, if allowed.
    fn keep(
        &self,
        image: &str,
        asker: &PluginIdentity,
        response: &CredentialProviderResponse,
    ) -> Result<(), ProvideError> {
        let echoes = |password: &Secret| !asker.token.is_empty() && *password == asker.token;
        let per_token = self.token_attributes.as_ref().is_some_and(is_per_token);
        if !per_token && response.auth.entries.values().any(|entry| echoes(&entry.password)) {
            return Err(ProvideError::TokenEcho);
        }
        let base = match response.cache_key_type.as_str() {
            "Image" => image,
            "Registry" => keys::registry_of(image),
            "Global" => GLOBAL,
            other => return Err(ProvideError::CacheKeyType(Secret::new(other))),
        };
        // As in kubelet, a negative duration is cached as expired, and zero is not cached.
        let time = response.cache_duration.map_or(Some(self.default_duration), GoDuration::to_std);
        if time.is_none_or(|time| !time.is_zero()) {
            let key = keys::cache_key(base, &asker.key);
            self.lock_cache().put(key, response.auth.clone(), time, Instant::now());
        }
        Ok(())
    }

    fn lock_cache(&self) -> MutexGuard<'_, PluginCache> {
        self.cache.lock()
    }
}

fn is_per_token(attributes: &TokenAttributes) -> bool {
    attributes.cache_type == "Token"
}
