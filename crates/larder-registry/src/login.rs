//! Validates a user name and password with a registry before they are stored.

use larder::credentials::Credential;
use larder::reference::Reference;
use larder::threads::in_place;
use reqwest::Method;
use reqwest::header::HeaderMap;

use super::budget::RequestSize;
use super::client::RegistryClient;
use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::hosts::HostsConfig;
use super::next_step::FetchContext;
use super::session::RepositorySession;
use super::tls::TlsProblem;

/// The result of a login that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoginResult {
    /// The registry requested the credential and accepted it.
    Accepted,
    /// The registry does not require authentication; the credential is not verified.
    NotRequired,
}

impl RegistryClient {
    /// Sends a credential to a registry (`HOST` or `HOST:PORT`), never to its mirrors. No retries. Of several
    /// configured hosts that are the registry, the first that answers decides, as for a pull.
    pub async fn log_in(&self, registry: &str, credential: &Credential) -> Result<LoginResult, FetchError> {
        let failed = |host: String, kind| FetchError {
            repository: registry.to_owned(),
            target: FetchTarget::Login,
            host,
            kind: Box::new(kind),
            context: Box::new(FetchContext {
                hosts: Some(in_place(|| HostsConfig::of(registry, &self.inner.config))),
                ..FetchContext::default()
            }),
        };
        // No request contains the name.
        let image = Reference::parse(&format!("{registry}/login"));
        let image =
            image.map_err(|error| failed(String::new(), FetchErrorKind::BadReply(error.to_string())))?;
        let hosts = self.hosts(registry, registry)?;
        let mut first_failure = None;
        for host in hosts.into_iter().filter(|host| host.is_registry) {
            let link = self.inner.link(registry, "", host, Some(credential));
            let session = RepositorySession::new(
                self.inner.clone(),
                image.clone(),
                vec![link.clone()],
                Some(credential),
            );
            let mut url = link.host.base.clone();
            url.set_path(&format!("{}/", url.path().trim_end_matches('/')));
            match session.request(&link, Method::GET, url, HeaderMap::new(), RequestSize::Small).await {
                Ok(_) if link.auth.has_authenticated().await => return Ok(LoginResult::Accepted),
                Ok(_) => return Ok(LoginResult::NotRequired),
                Err(mut refused) => {
                    if session.is_plain_http_to_tls(&link, &refused).await {
                        refused.kind = FetchErrorKind::Tls(TlsProblem::NotPlainHttp);
                    }
                    let may_differ_elsewhere = refused.kind.is_host_gone();
                    let mut failure = failed(refused.host, refused.kind);
                    failure.context.has_authorities = !link.host.tls.authorities.is_empty();
                    if !may_differ_elsewhere {
                        return Err(failure);
                    }
                    first_failure.get_or_insert(failure);
                }
            }
        }
        Err(first_failure.unwrap_or_else(|| failed(String::new(), FetchErrorKind::NoHost)))
    }
}
