//! The client that all pulls share.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use larder::credentials::Credential;
use larder::reference::Reference;
use tokio::time::Instant;

use super::auth::RegistryAuthCache;
use super::budget::HostBudget;
use super::budget::RegistryLoad;
use super::budgets::HostBudgets;
use super::config::RegistryConfig;
use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::hosts::{RegistryHost, UnknownKey, hosts_of, names_registry};
use super::session::{RepositorySession, SessionHost};
use super::transport::HttpTransport;

/// A client for registries. Clones share connections, tokens and budgets.
#[derive(Debug, Clone)]
pub struct RegistryClient(pub(super) Arc<RegistryClientInner>);

#[derive(Debug)]
pub(crate) struct RegistryClientInner {
    pub(crate) config: Arc<RegistryConfig>,
    pub(crate) transport: HttpTransport,
    auth: RegistryAuthCache,
    budgets: Mutex<HostBudgets>,
    /// Unknown keys that were logged already: files are read for each pull.
    reported: Mutex<HashSet<UnknownKey>>,
}

impl RegistryClient {
    /// Creates a client. Opens no connection yet.
    pub fn new(config: RegistryConfig) -> RegistryClient {
        let config = Arc::new(config);
        let transport = HttpTransport::new(config.clone());
        RegistryClient(Arc::new(RegistryClientInner {
            config,
            transport,
            auth: RegistryAuthCache::default(),
            budgets: Mutex::default(),
            reported: Mutex::default(),
        }))
    }

    /// The settings of this client.
    pub fn config(&self) -> &RegistryConfig {
        &self.0.config
    }

    /// The load of each registry in use and of the last few hundred used ones, sorted by name.
    pub fn loads(&self) -> Vec<RegistryLoad> {
        let budgets: Vec<_> = {
            let budgets = self.0.budgets.lock().unwrap_or_else(PoisonError::into_inner);
            budgets.all()
        };
        let now = Instant::now();
        let mut loads: Vec<_> = budgets.iter().map(|budget| budget.load(now)).collect();
        loads.sort_by(|a, b| a.host.cmp(&b.host));
        loads
    }

    /// A session for one image's repository with one credential. Reads the registry's host configuration; sends no
    /// request.
    ///
    /// The credential belongs to the registry of the image's name. Mirrors get none, unless
    /// [`RepositorySession::with_mirror_credential`] sets one.
    pub fn session(
        &self,
        image: &Reference,
        credential: Option<&Credential>,
    ) -> Result<RepositorySession, FetchError> {
        let hosts = self.0.hosts(image.registry(), image.name())?;
        let links = hosts
            .into_iter()
            .map(|host| {
                let credential = credential.filter(|_| host.is_registry);
                self.0.link(image.registry(), image.path(), host, credential)
            })
            .collect();
        Ok(RepositorySession::new(self.0.clone(), image.clone(), links, credential))
    }
}

impl RegistryClientInner {
    /// The hosts of a registry as configured now; `about` is the repository named in errors.
    pub(crate) fn hosts(&self, registry: &str, about: &str) -> Result<Vec<RegistryHost>, FetchError> {
        hosts_of(registry, &self.config, &|unknown| self.report(unknown)).map_err(|error| FetchError {
            repository: about.to_owned(),
            target: FetchTarget::Hosts,
            host: String::new(),
            kind: Box::new(FetchErrorKind::Hosts(error)),
            context: Box::default(),
        })
    }

    /// Logs an unknown key, once per process.
    fn report(&self, unknown: UnknownKey) {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if !reported.contains(&unknown) {
            tracing::warn!("{unknown}");
            reported.insert(unknown);
        }
    }

    /// A host with the shared state that requests to a repository need.
    pub(crate) fn link(
        &self,
        registry: &str,
        repository: &str,
        host: RegistryHost,
        credential: Option<&Credential>,
    ) -> SessionHost {
        let origin = host.base.origin().ascii_serialization();
        let budget = {
            let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
            budgets.of(origin, Instant::now(), || HostBudget::new(host.name(), self.config.connections))
        };
        let auth = self.auth.entry(&host, repository, credential);
        let namespace = (!names_registry(&host.name(), registry)).then(|| registry.to_owned());
        SessionHost { host, budget, auth, namespace }
    }
}
