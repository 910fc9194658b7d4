//! The connection to an engine: one HTTP client, and the API version that both ends support.

use std::future::Future;
use std::time::Duration;

use larder::backend::{BackendError, CallErrorKind};
use larder::hint::Hint;
use parking_lot::Mutex;
use reqwest::header::{HeaderMap, HeaderValue};
use reqwest::{Client, Method, Response, Url};
use serde::de::DeserializeOwned;

use crate::api::{EngineVersion, ErrorMessage};
use crate::host::{EngineHost, SOCKET};
use crate::tls::{self, DockerTlsError, TlsFiles};
use crate::{error, names};

/// The newest supported API version.
const NEWEST: ApiVersion = ApiVersion(1, 51);

/// The oldest supported API version (Docker 17.04).
const OLDEST: ApiVersion = ApiVersion(1, 28);

/// The largest accepted response: the list of a hundred thousand images is smaller.
const LARGEST_ANSWER: usize = 256 << 20;

/// Settings of the connection to an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Time limit for opening a connection. Default 5 s.
    pub connect_timeout: Duration,
    /// Time limit of each method of [`Backend`](larder::backend::Backend); for a removal, of each call to the engine;
    /// none for a pull. Default 2 min.
    pub request_timeout: Duration,
    /// TLS files, for an engine that requires TLS.
    pub tls: Option<TlsFiles>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(120),
            tls: None,
        }
    }
}

/// A version of the API: `1.41` is `(1, 41)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ApiVersion(u32, u32);

impl ApiVersion {
    fn parse(text: &str) -> Option<ApiVersion> {
        let (major, minor) = text.split_once('.')?;
        Some(ApiVersion(major.parse().ok()?, minor.parse().ok()?))
    }
}

impl std::fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The version to use with an engine that supports these, if any.
fn agreed(oldest: ApiVersion, newest: ApiVersion) -> Result<ApiVersion, String> {
    if newest < OLDEST {
        return Err(format!("API version {newest} is too old; larder requires {OLDEST} or later"));
    }
    // Responses have only ever gained fields: a version beyond ours is better than none.
    Ok(NEWEST.min(newest).max(oldest))
}

/// A client of one engine.
pub(crate) struct EngineClient {
    host: EngineHost,
    base: Url,
    client: Client,
    config: EngineConfig,
    /// Determined once per start of the engine.
    version: Mutex<Option<ApiVersion>>,
}

impl EngineClient {
    pub(crate) fn new(host: EngineHost, config: EngineConfig) -> Result<EngineClient, DockerTlsError> {
        let tls = match (&host, &config.tls) {
            (EngineHost::Tcp { tls: true, .. }, Some(files)) => tls::client_config(files)?,
            _ => tls::no_tls()?,
        };
        let builder = Client::builder()
            .tls_backend_preconfigured(tls)
            .http1_only()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .user_agent(concat!("larder/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(config.connect_timeout)
            .pool_idle_timeout(Duration::from_secs(15));
        let (builder, base) = match &host {
            EngineHost::Unix(path) => (builder.unix_socket(path.as_path()), "http://localhost".to_owned()),
            EngineHost::Tcp { address, tls: true } => (builder, format!("https://{address}")),
            EngineHost::Tcp { address, tls: false } => (builder, format!("http://{address}")),
        };
        let broken = |problem: String| DockerTlsError::Content { path: host.to_string().into(), problem };
        let base = Url::parse(&base).map_err(|error| broken(error.to_string()))?;
        let client = builder.build().map_err(|error| broken(error.to_string()))?;
        Ok(EngineClient { base, client, config, host, version: Mutex::default() })
    }

    pub(crate) fn host(&self) -> &EngineHost {
        &self.host
    }

    /// Time limit of one method.
    pub(crate) fn limit(&self) -> Duration {
        self.config.request_timeout
    }

    /// Time limit for opening a connection.
    pub(crate) fn connect_limit(&self) -> Duration {
        self.config.connect_timeout
    }

    /// Runs all calls of one method within its time limit.
    pub(crate) async fn within<T>(
        &self,
        work: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let limit = self.limit();
        tokio::time::timeout(limit, Box::pin(work)).await.unwrap_or_else(|_| Err(error::too_late(limit)))
    }

    /// The engine's version information. Also determines the API version.
    pub(crate) async fn version(&self) -> Result<(EngineVersion, ApiVersion), BackendError> {
        let asked = async {
            let response = self.exchange(Method::GET, "/version".into(), &[], HeaderMap::new()).await?;
            self.read::<EngineVersion>("/version", response).await
        };
        let foreign = |why: &str| {
            let problem = format!("not a Docker Engine ({why})");
            let hint = Hint::from("set the engine's socket with ").setting("backend", SOCKET);
            error::unusable(&self.host, &problem, hint)
        };
        let version = match asked.await {
            Ok(version) if version.api_version.is_empty() => return Err(foreign("no API version")),
            // The engine is starting or stopping.
            Err(error @ BackendError::Call { kind: CallErrorKind::Unavailable, .. }) => return Err(error),
            Err(BackendError::Incomplete(why) | BackendError::Call { message: why, .. }) => {
                return Err(foreign(&why));
            }
            Ok(version) if version.os == "windows" => {
                let hint = "only engines on Linux are supported";
                return Err(error::unusable(&self.host, "the engine runs on Windows", hint));
            }
            version => version?,
        };
        let newest = ApiVersion::parse(&version.api_version).unwrap_or(ApiVersion(0, 0));
        let oldest = ApiVersion::parse(&version.min_api_version).unwrap_or(OLDEST);
        let agreed = agreed(oldest, newest).map_err(|problem| {
            error::unusable(&self.host, &problem, "update the engine to Docker 17.04 or later")
        })?;
        *self.version.lock() = Some(agreed);
        Ok((version, agreed))
    }

    /// Makes the next call determine the API version again.
    pub(crate) fn forget_version(&self) {
        *self.version.lock() = None;
    }

    /// A response as JSON, within the limit of one method; `None` if the object does not exist.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Option<T>, BackendError> {
        self.within(async {
            match self.call(Method::GET, path, query, HeaderMap::new()).await {
                Ok(response) => self.read(path, response).await.map(Some),
                Err(BackendError::Call { kind: CallErrorKind::NotFound, .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
        .await
    }

    /// A response as JSON, for an object that every engine has.
    pub(crate) async fn get_required<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<T, BackendError> {
        self.get(path, query).await?.ok_or_else(|| error::unreadable(path, "not found"))
    }

    /// Inspects an image by name or ID.
    pub(crate) async fn inspect<T: DeserializeOwned>(&self, image: &str) -> Result<Option<T>, BackendError> {
        self.get(&format!("/images/{}/json", names::in_path(image)?), &[]).await
    }

    /// A call, up to the headers of a successful response.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        headers: HeaderMap<HeaderValue>,
    ) -> Result<Response, BackendError> {
        let known = *self.version.lock();
        if let Some(version) = known {
            let path = format!("/v{version}{path}");
            let answer = self.exchange(method.clone(), path, query, headers.clone()).await;
            if !answer.as_ref().is_err_and(is_of_another_version) {
                return answer;
            }
            // Another engine owns the socket now, without a refused connection in between.
            self.forget_version();
        }
        let (_, version) = self.version().await?;
        self.exchange(method, format!("/v{version}{path}"), query, headers).await
    }

    async fn exchange(
        &self,
        method: Method,
        path: String,
        query: &[(&str, &str)],
        headers: HeaderMap<HeaderValue>,
    ) -> Result<Response, BackendError> {
        let mut url = self.base.clone();
        url.set_path(&path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let sent = self.client.request(method, url).headers(headers).send().await;
        let response = sent.map_err(|cause| {
            // The restarted engine may be of another version.
            self.forget_version();
            error::no_answer(&self.host, &cause)
        })?;
        let status = response.status();
        if status.is_success() || status.as_u16() == 304 {
            return Ok(response);
        }
        let body = body(response).await.unwrap_or_default();
        let reported = serde_json::from_slice::<ErrorMessage>(&body).unwrap_or_default().message;
        let message = if reported.is_empty() { format!("the engine returned {status}") } else { reported };
        Err(error::refused(status.as_u16(), &message))
    }

    pub(crate) async fn read<T: DeserializeOwned>(
        &self,
        what: &str,
        response: Response,
    ) -> Result<T, BackendError> {
        let body = body(response).await?;
        serde_json::from_slice(&body).map_err(|why| error::unreadable(what, why))
    }
}

/// Whether the engine refused a call because of its API version, before any effect.
fn is_of_another_version(error: &BackendError) -> bool {
    matches!(error, BackendError::Call { message, kind: CallErrorKind::Other, .. } if message.starts_with("client version "))
}

/// The whole body, up to the size limit.
async fn body(mut response: Response) -> Result<Vec<u8>, BackendError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|cause| error::broken(&cause))? {
        if body.len() + chunk.len() > LARGEST_ANSWER {
            return Err(error::unreadable("a call", format!("larger than {LARGEST_ANSWER} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_agree_on_the_newest_version_that_they_know() {
        let agree = |oldest: &str, newest: &str| {
            agreed(ApiVersion::parse(oldest).unwrap(), ApiVersion::parse(newest).unwrap())
                .map(|version| version.to_string())
        };
        assert_eq!(agree("1.12", "1.41").as_deref(), Ok("1.41"));
        assert_eq!(agree("1.44", "1.53").as_deref(), Ok("1.51"));
        assert_eq!(agree("1.60", "1.70").as_deref(), Ok("1.60"), "an engine of the future");
        assert_eq!(
            agree("1.12", "1.24").unwrap_err(),
            "API version 1.24 is too old; larder requires 1.28 or later"
        );
        assert_eq!(ApiVersion::parse("2"), None);
        assert!(ApiVersion(1, 9) < ApiVersion(1, 41), "versions are no decimals");
    }
}
