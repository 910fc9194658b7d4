//! What each host says to a credential, for people who want to know why an image can or cannot be had.

use reqwest::{Method, StatusCode};

use super::budget::RequestSize;
use super::error::FetchErrorKind;
use super::session::{RepositorySession, RequestError, SessionHost, accepting_manifests};
use larder::reference::DEFAULT_TAG;

/// What one host answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchAttempt {
    /// `HOST` or `HOST:PORT`.
    pub host: String,
    /// Whether the credential was shown: it is for this host, and the host or its token server asked for one.
    pub authenticated: bool,
    /// Whether the host has the image and lets it be pulled.
    pub accepted: bool,
    /// The status of its answer; `None` when there was none.
    pub status: Option<u16>,
    /// The answer, without any secret.
    pub answer: String,
}

impl RepositorySession {
    /// Asks the hosts in turn whether the image can be had, up to the first that says so. Each is asked once, and nothing is
    /// fetched.
    pub async fn try_hosts(&self) -> Vec<FetchAttempt> {
        let mut trials = Vec::new();
        for link in self.links().iter().filter(|link| self.asks_for_image(link)) {
            let trial = self.try_host(link).await;
            let done = trial.accepted;
            trials.push(trial);
            if done {
                break;
            }
        }
        trials
    }

    /// Whether a pull asks this host for the image: by digest it needs no host that may say what a tag means.
    fn asks_for_image(&self, link: &SessionHost) -> bool {
        if self.image().digest().is_some() { link.host.pull } else { link.host.resolve }
    }

    async fn try_host(&self, link: &SessionHost) -> FetchAttempt {
        let answered = self.head(link).await;
        let asked_token = matches!(&answered, Err(failed) if failed.token) && link.auth.has_credential();
        let shown = link.auth.has_authenticated().await || asked_token;
        let host = link.host.name();
        match answered {
            Ok(status) => FetchAttempt {
                host,
                authenticated: shown,
                accepted: true,
                status: Some(status.as_u16()),
                answer: status.to_string(),
            },
            Err(RequestError { host: at, kind, .. }) => {
                let answer = if at == host { answer(&kind) } else { format!("{at}: {}", answer(&kind)) };
                FetchAttempt { host, authenticated: shown, accepted: false, status: kind.status(), answer }
            }
        }
    }

    async fn head(&self, link: &SessionHost) -> Result<StatusCode, RequestError> {
        let failed = |kind| RequestError { host: link.host.name(), kind, token: false };
        let reference = match self.image().digest() {
            Some(digest) => digest.as_str(),
            None => self.image().tag().unwrap_or(DEFAULT_TAG),
        };
        let headers = accepting_manifests().map_err(failed)?;
        let url = self.url(link, "manifests", reference);
        let (reply, _permit) = self.request(link, Method::HEAD, url, headers, RequestSize::Small).await?;
        Ok(reply.response.status())
    }
}

/// The host's own words where there are some.
fn answer(kind: &FetchErrorKind) -> String {
    kind.answer().map_or_else(|| kind.to_string(), ToString::to_string)
}
