//! The lookup for one pull: every source of credentials, in order.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::credential::{Credential, CredentialSource};
use super::docker_config::{DockerConfig, TokenPolicy};
use super::helpers::CredentialHelpers;
use super::node_files::NodeDockerConfig;
use super::pull_secrets::{self, PullSecret, SecretError};
use crate::pod::Pod;
use crate::reference::{ImageName, ReferenceError};

/// Why credentials could not be looked up. The text appears in the pod's status and contains no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// A pull secret is broken.
    #[error(transparent)]
    Secret(#[from] Box<SecretError>),
    /// The image has no repository to look up.
    #[error(transparent)]
    Image(#[from] ReferenceError),
}

impl CredentialsError {
    /// The next step.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            CredentialsError::Secret(_) => {
                Some("recreate the secret with `kubectl create secret docker-registry`".into())
            }
            CredentialsError::Image(error) => error.hint(),
        }
    }
}

/// A source of credentials outside of docker config files: an exec plugin, a credential helper.
#[async_trait]
pub trait CredentialProvider: Send + Sync {
    /// Credentials for a normalised repository, in the order to try them. An error is logged and counts as no
    /// credentials.
    async fn provide(&self, repository: &str, pod: &Pod) -> Vec<Credential>;

    /// The programs that it runs, one description each, without secrets. Two providers that run the same have the same.
    fn programs(&self) -> Vec<String>;
}

/// The node's sources of credentials, in addition to each pod's pull secrets. The default has no node files and no
/// providers.
#[derive(Default)]
pub struct NodeKeyring {
    node: NodeDockerConfig,
    /// Runs the helpers in the node's files; `None` disables them.
    helpers: Option<CredentialHelpers>,
    providers: Vec<Arc<dyn CredentialProvider>>,
    tokens: TokenPolicy,
    /// The owner of the credentials in the node's files and helpers; `None`: the node.
    owner: Option<CredentialSource>,
}

impl fmt::Debug for NodeKeyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources")
            .field("node", &self.node)
            .field("helpers", &self.helpers)
            .field("providers", &self.providers.len())
            .field("tokens", &self.tokens)
            .field("owner", &self.owner)
            .finish()
    }
}

impl NodeKeyring {
    /// Node files, and providers in the order to ask them.
    pub fn new(node: NodeDockerConfig, providers: Vec<Arc<dyn CredentialProvider>>) -> Self {
        NodeKeyring { node, providers, ..NodeKeyring::default() }
    }

    /// One config and nothing else, as when the user names a file or a user on the command line.
    pub fn fixed(config: &DockerConfig) -> Self {
        NodeKeyring::new(NodeDockerConfig::fixed(config), Vec::new())
    }

    /// Sets another owner than the node for the credentials in the node's files and helpers: an image pulled with them
    /// is accessible to callers with the same credentials, not to every pod.
    #[must_use]
    pub fn owned_by(mut self, owner: CredentialSource) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Enables the credential helpers in the node's files, which kubelet ignores.
    #[must_use]
    pub fn with_helpers(mut self, helpers: CredentialHelpers) -> Self {
        self.helpers = Some(helpers);
        self
    }

    /// Adds providers after the existing ones.
    #[must_use]
    pub fn with_provider(mut self, provider: Arc<dyn CredentialProvider>) -> Self {
        self.providers.push(provider);
        self
    }

    /// Sets what to do with identity and registry tokens in secrets and node files; kept by default. A
    /// [`fixed`](NodeKeyring::fixed) config keeps those that it was parsed with.
    #[must_use]
    pub fn with_tokens(mut self, tokens: TokenPolicy) -> Self {
        self.tokens = tokens;
        self
    }

    /// The programs that a lookup may run, sorted: one description each, without secrets.
    pub async fn programs(&self) -> Vec<String> {
        let mut programs: Vec<_> = self.providers.iter().flat_map(|provider| provider.programs()).collect();
        if self.helpers.is_some() {
            programs.extend(self.node.config(self.tokens).await.helpers.programs());
        }
        programs.sort();
        programs.dedup();
        programs
    }

    /// The credentials to try for an image, in order: of the pod's secrets, of the node's files, of the helpers that
    /// these name, of the providers.
    /// Duplicates are kept. None at all means one anonymous pull.
    pub async fn lookup(
        &self,
        image: &ImageName,
        secrets: &[PullSecret],
        pod: &Pod,
    ) -> Result<Vec<Credential>, CredentialsError> {
        let repository = image.reference()?.name();
        let mut found = pull_secrets::keyring(secrets, self.tokens)?.lookup(repository);
        let node = self.node.config(self.tokens).await;
        let mut of_files = node.keyring.lookup(repository);
        match &self.helpers {
            Some(helpers) => of_files.extend(helpers.lookup(&node.helpers, repository).await),
            None if node.helpers.is_empty() => {}
            None => {
                tracing::debug!(
                    "ignored the credential helpers of the docker config: disabled for this node"
                );
            }
        }
        for credential in &mut of_files {
            credential.source.clone_from(&self.owner);
        }
        found.extend(of_files);
        for provider in &self.providers {
            found.extend(provider.provide(repository, pod).await);
        }
        Ok(found)
    }
}

/// A lookup that is made at most once, on demand.
pub struct LazyCredentialLookup<'a> {
    sources: &'a NodeKeyring,
    image: &'a ImageName,
    secrets: &'a [PullSecret],
    pod: &'a Pod,
    found: Option<Result<Vec<Credential>, CredentialsError>>,
}

impl<'a> LazyCredentialLookup<'a> {
    /// Prepares a lookup without making it.
    pub fn new(
        sources: &'a NodeKeyring,
        image: &'a ImageName,
        secrets: &'a [PullSecret],
        pod: &'a Pod,
    ) -> Self {
        LazyCredentialLookup { sources, image, secrets, pod, found: None }
    }

    /// The answer, looked up on the first call.
    pub(crate) async fn get(&mut self) -> Result<&[Credential], CredentialsError> {
        let found = match self.found.take() {
            Some(found) => found,
            None => self.sources.lookup(self.image, self.secrets, self.pod).await,
        };
        match self.found.insert(found) {
            Ok(found) => Ok(found),
            Err(error) => Err(error.clone()),
        }
    }

    /// The answer, looked up now unless it was before.
    pub(crate) async fn into_inner(mut self) -> Result<Vec<Credential>, CredentialsError> {
        match self.found.take() {
            Some(found) => found,
            None => self.sources.lookup(self.image, self.secrets, self.pod).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::credential::{CredentialLocation, SecretCoordinates};
    use super::super::docker_config::DockerConfigEntry;
    use super::super::secret::Secret;
    use super::*;

    #[derive(Default)]
    struct CountingProvider(AtomicUsize);

    #[async_trait]
    impl CredentialProvider for CountingProvider {
        async fn provide(&self, repository: &str, _pod: &Pod) -> Vec<Credential> {
            self.0.fetch_add(1, Ordering::Relaxed);
            vec![Credential { username: format!("provider of {repository}"), ..Credential::default() }]
        }

        fn programs(&self) -> Vec<String> {
            vec!["provider counting".to_owned()]
        }
    }

    fn secret(kind: &str, key: &str, value: &str) -> PullSecret {
        PullSecret {
            kind: kind.into(),
            coordinates: SecretCoordinates {
                uid: "u".into(),
                namespace: "team".into(),
                name: "regcred".into(),
            },
            data: BTreeMap::from([(key.into(), value.into())]),
        }
    }

    fn user(name: &str) -> DockerConfigEntry {
        DockerConfigEntry {
            username: name.into(),
            password: Secret::new("hunter2"),
            ..DockerConfigEntry::default()
        }
    }

    fn users(found: &[Credential]) -> Vec<&str> {
        found.iter().map(|credential| credential.username.as_str()).collect()
    }

    #[tokio::test]
    async fn secrets_come_before_node_files_and_those_before_providers() {
        let node = NodeDockerConfig::fixed(&DockerConfig::with_entry("docker.io", user("node")));
        let sources = NodeKeyring::new(node, vec![Arc::new(CountingProvider::default())]);
        let secrets =
            [secret("kubernetes.io/dockercfg", ".dockercfg", r#"{"docker.io": {"username": "pod"}}"#)];
        let found = sources.lookup(&"busybox:1".into(), &secrets, &Pod::default()).await.expect("found");
        assert_eq!(users(&found), ["pod", "node", "provider of docker.io/library/busybox"]);
        assert!(found[0].source.is_some() && found[1].source.is_none());
    }

    #[tokio::test]
    async fn an_empty_directory_has_no_match() {
        let found =
            NodeKeyring::default().lookup(&"busybox".into(), &[], &Pod::default()).await.expect("no error");
        assert_eq!(found, []);
    }

    #[tokio::test]
    async fn a_broken_secret_is_named_with_its_key_and_place() {
        for (value, problem) in [
            (
                "{\"auths\": {\"r.example\": {\"auth\": \"hunter2!\"}}}",
                "line 1, column 34: entry \"r.example\": \"auth\" is not valid base64",
            ),
            ("hunter2", "line 1, column 1: a docker config must be an object"),
        ] {
            let secrets = [secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson", value)];
            let error = NodeKeyring::default()
                .lookup(&"busybox".into(), &secrets, &Pod::default())
                .await
                .expect_err("broken");
            assert_eq!(error.to_string(), format!("secret team/regcred: key .dockerconfigjson: {problem}"));
            assert!(!format!("{error:?}").contains("hunter2"));
        }
    }

    #[tokio::test]
    async fn a_lazy_lookup_is_made_once_and_only_when_asked() {
        let provider = Arc::new(CountingProvider::default());
        let sources = NodeKeyring::new(NodeDockerConfig::none(), vec![provider.clone()]);
        let (image, pod) = (ImageName::from("busybox"), Pod::default());
        let mut lookup = LazyCredentialLookup::new(&sources, &image, &[], &pod);
        assert_eq!(provider.0.load(Ordering::Relaxed), 0);
        lookup.get().await.expect("found");
        lookup.get().await.expect("found");
        assert_eq!(lookup.into_inner().await.expect("found").len(), 1);
        assert_eq!(provider.0.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn programs_are_those_that_a_lookup_may_run() {
        let config = DockerConfig {
            creds_store: Some("pass".into()),
            cred_helpers: [("r.example:5000".into(), "ecr".into())].into(),
            ..DockerConfig::default()
        };
        let without = NodeKeyring::fixed(&config).with_provider(Arc::new(CountingProvider::default()));
        assert_eq!(without.programs().await, ["provider counting"], "helpers are not asked");
        let all = without.with_helpers(CredentialHelpers::on_path("/bin".as_ref()));
        let helpers = ["docker-credential-ecr for r.example:5000", "docker-credential-pass"];
        assert_eq!(all.programs().await, [helpers[0], helpers[1], "provider counting"]);
    }

    #[test]
    fn nothing_that_holds_a_password_prints_it() {
        let config = DockerConfig::with_entry("https://bob:hunter2@r.example", user("bob"));
        let credential = Credential::of(&user("bob"), None, &CredentialLocation::Caller);
        let secret = secret("Opaque", "key", "hunter2");
        let sources = NodeKeyring::fixed(&config);
        let printed = format!("{config:?} {credential:?} {secret:?} {sources:?}");
        assert!(!printed.contains("hunter2") && !printed.contains(&credential.hash), "{printed}");
    }
}
