//! Whether a registry takes a user and a password, asked before they are written down.

use larder::credentials::Credential;
use larder::reference::Reference;
use reqwest::Method;
use reqwest::header::HeaderMap;

use super::budget::RequestSize;
use super::client::RegistryClient;
use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::session::RepositorySession;

/// What a registry said to a credential that is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoginResult {
    /// It asked for the credential, and took it.
    Accepted,
    /// It lets everybody in, so that nobody knows whether the credential is good.
    NotRequired,
}

impl RegistryClient {
    /// Shows a credential to a registry (`HOST` or `HOST:PORT`) and to nobody else, mirrors least of all. Asked once.
    pub async fn log_in(&self, registry: &str, credential: &Credential) -> Result<LoginResult, FetchError> {
        let failed = |host: String, kind| FetchError {
            repository: registry.to_owned(),
            target: FetchTarget::Login,
            host,
            kind: Box::new(kind),
            earlier: Vec::new(),
        };
        let hosts = self.0.hosts(registry, registry)?;
        let host = hosts.into_iter().rfind(|host| host.is_registry);
        let host = host.ok_or_else(|| failed(String::new(), FetchErrorKind::NoHost))?;
        // The name is in no request.
        let image = Reference::parse(&format!("{registry}/login"));
        let image =
            image.map_err(|error| failed(String::new(), FetchErrorKind::BadReply(error.to_string())))?;
        let link = self.0.link(registry, "", host, Some(credential));
        let session = RepositorySession::new(self.0.clone(), image, vec![link.clone()]);
        let mut url = link.host.base.clone();
        url.set_path(&format!("{}/", url.path().trim_end_matches('/')));
        match session.request(&link, Method::GET, url, HeaderMap::new(), RequestSize::Small).await {
            Ok(_) if link.auth.has_authenticated().await => Ok(LoginResult::Accepted),
            Ok(_) => Ok(LoginResult::NotRequired),
            Err(refused) => Err(failed(refused.host, refused.kind)),
        }
    }
}
