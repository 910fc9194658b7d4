//! Reports what each host answers to a credential: a diagnosis of why an image can or cannot be pulled.

use reqwest::{Method, StatusCode};

use super::budget::RequestSize;
use super::error::FetchErrorKind;
use super::session::{RepositorySession, RequestError, SessionHost, accepting_manifests};
use larder::reference::DEFAULT_TAG;

/// Outcome of a request to one host, as `larder explain access -o json` prints it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct FetchAttempt {
    /// `HOST` or `HOST:PORT`.
    pub host: String,
    /// Whether the credential was sent: it is for this host, and the host or its token server requested one.
    #[serde(rename = "sent")]
    pub authenticated: bool,
    /// Whether the host has the image and permits its pull.
    pub accepted: bool,
    /// The HTTP status; `None` without a response.
    pub status: Option<u16>,
    /// The response as text, without secrets.
    pub answer: String,
}

impl RepositorySession {
    /// Requests the image's manifest from the hosts in order, up to the first that accepts: by `HEAD`, and by `GET` for
    /// the message of a host that refuses without having been sent a secret.
    pub async fn try_hosts(&self) -> Vec<FetchAttempt> {
        let mut attempts = Vec::new();
        for link in self.links().iter().filter(|link| self.serves_image(link)) {
            let attempt = self.try_host(link).await;
            let done = attempt.accepted;
            attempts.push(attempt);
            if done {
                break;
            }
        }
        attempts
    }

    /// Whether a pull requests the image from this host. A digest needs `pull` only, a tag needs `resolve`.
    fn serves_image(&self, link: &SessionHost) -> bool {
        if self.image().digest().is_some() { link.host.pull } else { link.host.resolve }
    }

    async fn try_host(&self, link: &SessionHost) -> FetchAttempt {
        let result = match self.request_manifest(link, Method::HEAD).await {
            // An answer to HEAD has no message. That of a host that was sent a secret is not repeated.
            Err(failed) if !failed.token && !link.was_sent_secret() && lacks_message(&failed.kind) => {
                self.request_manifest(link, Method::GET).await
            }
            result => result,
        };
        let token_requested = matches!(&result, Err(failed) if failed.token) && link.auth.has_credential();
        let authenticated = link.auth.has_authenticated().await || token_requested;
        let host = link.host.name();
        match result {
            Ok(status) => FetchAttempt {
                host,
                authenticated,
                accepted: true,
                status: Some(status.as_u16()),
                answer: status.to_string(),
            },
            Err(RequestError { host: at, kind, .. }) => {
                let answer = if at == host { answer(&kind) } else { format!("{at}: {}", answer(&kind)) };
                FetchAttempt { host, authenticated, accepted: false, status: kind.status(), answer }
            }
        }
    }

    async fn request_manifest(&self, link: &SessionHost, method: Method) -> Result<StatusCode, RequestError> {
        let failed = |kind| RequestError { host: link.host.name(), kind, token: false };
        let reference = match self.image().digest() {
            Some(digest) => digest.as_str(),
            None => self.image().tag().unwrap_or(DEFAULT_TAG),
        };
        let headers = accepting_manifests().map_err(failed)?;
        let url = self.url(link, "manifests", reference);
        let (reply, _permit) = self.request(link, method, url, headers, RequestSize::Small).await?;
        Ok(reply.response.status())
    }
}

fn lacks_message(kind: &FetchErrorKind) -> bool {
    kind.answer().is_some_and(|answer| answer.message.is_empty())
}

/// The host's own message if there is one.
fn answer(kind: &FetchErrorKind) -> String {
    kind.answer().map_or_else(|| kind.to_string(), ToString::to_string)
}
