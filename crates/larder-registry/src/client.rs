//! The client that all pulls share.

use std::collections::HashSet;
use std::sync::Arc;

use larder::credentials::Credential;
use larder::reference::Reference;
use larder::threads::in_place;
use parking_lot::Mutex;
use reqwest::header::HeaderMap;
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
use super::warnings::RegistryWarnings;

/// A client for registries. Clones share connections, tokens and budgets.
#[derive(Debug, Clone)]
pub struct RegistryClient {
    pub(super) inner: Arc<RegistryClientInner>,
    skip_tls_verify: bool,
}

#[derive(Debug)]
pub(crate) struct RegistryClientInner {
    pub(crate) config: Arc<RegistryConfig>,
    pub(crate) transport: HttpTransport,
    auth: RegistryAuthCache,
    budgets: Mutex<HostBudgets>,
    /// Unknown keys that were logged already: files are read for each pull.
    reported: Mutex<HashSet<UnknownKey>>,
    warnings: RegistryWarnings,
}

impl RegistryClient {
    /// Creates a client. Opens no connection yet.
    pub fn new(config: RegistryConfig) -> RegistryClient {
        let config = Arc::new(config);
        let transport = HttpTransport::new(config.clone());
        let inner = RegistryClientInner {
            config,
            transport,
            auth: RegistryAuthCache::default(),
            budgets: Mutex::default(),
            reported: Mutex::default(),
            warnings: RegistryWarnings::default(),
        };
        RegistryClient { inner: Arc::new(inner), skip_tls_verify: false }
    }

    /// Returns the client for calls that accept any certificate, and plain HTTP where a server does not speak TLS.
    #[must_use]
    pub fn without_tls_verify(&self) -> RegistryClient {
        RegistryClient { skip_tls_verify: true, ..self.clone() }
    }

    /// The settings of this client.
    pub fn config(&self) -> &RegistryConfig {
        &self.inner.config
    }

    /// The load of each registry in use and of the last few hundred used ones, sorted by name. A host that is reached
    /// over both HTTP and HTTPS counts as one.
    pub fn loads(&self) -> Vec<RegistryLoad> {
        let budgets: Vec<_> = {
            let budgets = self.inner.budgets.lock();
            budgets.all()
        };
        let now = Instant::now();
        let mut loads: Vec<_> = budgets.iter().map(|budget| budget.load(now)).collect();
        loads.sort_by(|a, b| a.host.cmp(&b.host));
        loads.dedup_by(|next, kept| {
            let is_same = next.host == kept.host;
            if is_same {
                kept.add(next);
            }
            is_same
        });
        loads
    }

    /// The loads for metrics: of a bounded number of hosts by name, the first that were used, and of all others as
    /// `other`.
    pub fn series(&self) -> Vec<RegistryLoad> {
        let budgets = self.inner.budgets.lock();
        budgets.series(Instant::now())
    }

    /// A session for one image's repository with one credential. Reads the registry's host configuration; sends no
    /// request.
    ///
    /// The credential belongs to the registry of the image's name. Mirrors get none.
    pub fn session(
        &self,
        image: &Reference,
        credential: Option<&Credential>,
    ) -> Result<RepositorySession, FetchError> {
        let hosts = self.hosts(image.registry(), image.name())?;
        let links = hosts
            .into_iter()
            .map(|host| {
                let credential = credential.filter(|_| host.is_registry);
                self.inner.link(image.registry(), image.path(), host, credential)
            })
            .collect();
        Ok(RepositorySession::new(self.inner.clone(), image.clone(), links, credential))
    }

    /// The hosts of a registry as configured now, for this client; `about` is the repository named in errors.
    pub(crate) fn hosts(&self, registry: &str, about: &str) -> Result<Vec<RegistryHost>, FetchError> {
        let mut hosts = self.inner.hosts(registry, about)?;
        for host in hosts.iter_mut().filter(|_| self.skip_tls_verify) {
            host.tls.skip_verify = true;
            host.tls.skip_is_implied = false;
            host.plain_fallback = host.base.scheme() == "https";
        }
        Ok(hosts)
    }
}

impl RegistryClientInner {
    /// The hosts of a registry as configured now; `about` is the repository named in errors.
    fn hosts(&self, registry: &str, about: &str) -> Result<Vec<RegistryHost>, FetchError> {
        // Files of the disk are read, and a session is opened by tasks.
        let hosts = in_place(|| hosts_of(registry, &self.config, &|unknown| self.report(unknown)));
        hosts.map_err(|error| FetchError {
            repository: about.to_owned(),
            target: FetchTarget::Hosts,
            host: String::new(),
            kind: Box::new(FetchErrorKind::Hosts(error)),
            context: Box::default(),
        })
    }

    /// The warnings of a response that its host has not sent before.
    pub(crate) fn new_warnings(&self, host: &str, headers: &HeaderMap) -> Vec<String> {
        self.warnings.new_ones(host, headers)
    }

    /// Logs an unknown key, once per process.
    fn report(&self, unknown: UnknownKey) {
        let mut reported = self.reported.lock();
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
            let mut budgets = self.budgets.lock();
            budgets.of(origin, Instant::now(), || HostBudget::new(host.name(), self.config.connections))
        };
        let auth = self.auth.entry(&host, repository, credential);
        let namespace = (!names_registry(&host.name(), registry)).then(|| registry.to_owned());
        SessionHost { host, budget, auth, namespace }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::budget::RateLimitScope;

    #[tokio::test(start_paused = true)]
    async fn a_host_with_two_schemes_is_one_load() {
        let client = RegistryClient::new(RegistryConfig::default());
        let budget = |origin: &str, host: &str| {
            let new = || HostBudget::new(host, 4);
            client.inner.budgets.lock().of(origin.to_owned(), Instant::now(), new)
        };
        budget("http://m.example", "m.example").pause(
            RateLimitScope::Host,
            Instant::now(),
            Duration::from_secs(9),
            Duration::MAX,
        );
        for (origin, host) in [("https://m.example", "m.example"), ("https://z.example", "z.example")] {
            budget(origin, host);
        }
        let loads = client.loads();
        let shown: Vec<_> =
            loads.iter().map(|load| (&*load.host, load.limit, load.waits, load.held_for.as_secs())).collect();
        assert_eq!(shown, [("m.example", 8, 1, 9), ("z.example", 4, 0, 0)]);
    }
}
