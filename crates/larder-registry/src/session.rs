//! One image's repository with one credential: manifests, configs, blobs.
//!
//! A request is attempted at the hosts in order: each is retried while its failures may pass, then the next one
//! follows. Digests make hosts interchangeable, so a fetch that changes its host resumes at the byte reached.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use larder::credentials::{Credential, CredentialLocation};
use larder::reference::{DEFAULT_TAG, Digest, Reference};
use larder::retry::{RetryAdvice, retry};
use larder::threads::in_place;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use reqwest::{Method, Response, StatusCode, Url};
use tokio::time::Instant;

use super::attempts::{AttemptContext, NoticeClock, retry_policy};
use super::auth::{AuthorizationContext, AuthorizationError, HostAuthorizer};
use super::body::{BlobBody, read_small};
use super::budget::{ConnectionPermit, HostBudget, RateLimitScope, RequestSize};
use super::client::RegistryClientInner;
use super::error::{ErrorResponse, FetchError, FetchErrorKind, FetchTarget};
use super::fetch_notice::{FetchNotice, FetchWatcher};
use super::hosts::{HostsConfig, RegistryHost, authority};
use super::next_step::{FetchContext, OtherFailures};
use super::rate_limit::{reported_quota, requested_wait};
use super::response::{part_of, refusal};
use super::tls::TlsProblem;
use super::transport::{HttpRequest, HttpResponse, class_of};
use crate::manifest::{ACCEPTED_MANIFESTS, Descriptor, MAX_BYTES, ManifestOrIndex};

/// Largest body of an error response that is read, in bytes.
const MAX_REFUSAL: usize = 64 * 1024;

/// One image's repository. Clones are cheap and share all state.
#[derive(Debug, Clone)]
pub struct RepositorySession {
    pub(crate) shared: Arc<RegistryClientInner>,
    image: Reference,
    links: Arc<[SessionHost]>,
    pub(crate) watcher: FetchWatcher,
    /// Where the credential for the registry was found; `None` without one.
    credential: Option<CredentialLocation>,
    /// True if documents of an artifact are an error.
    pub(crate) refuse_artifacts: bool,
}

/// A host of the session with its shared state.
#[derive(Debug, Clone)]
pub(crate) struct SessionHost {
    pub(crate) host: RegistryHost,
    pub(crate) budget: Arc<HostBudget>,
    pub(crate) auth: Arc<HostAuthorizer>,
    /// The registry that a mirror stands for.
    pub(crate) namespace: Option<String>,
}

impl SessionHost {
    /// Whether the host may have been sent a secret, which its texts could repeat.
    pub(crate) fn was_sent_secret(&self) -> bool {
        self.auth.has_credential() || !self.host.headers.is_empty()
    }
}

/// The target of an image name.
#[derive(Debug, Clone)]
pub struct ResolvedManifest {
    /// Type, digest and size of the manifest or index.
    pub descriptor: Descriptor,
    /// Its bytes as received; the digest is theirs.
    pub raw: Bytes,
    /// The parsed manifest.
    pub document: ManifestOrIndex,
    /// The host that resolved it.
    pub host: String,
}

/// A failed request, and the host that caused it: the registry host or its token server.
pub(crate) type RequestError = AuthorizationError;

/// The capability that a request requires of a host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HostCapability {
    Pull,
    Resolve,
    Referrers,
}

impl RepositorySession {
    pub(crate) fn new(
        shared: Arc<RegistryClientInner>,
        image: Reference,
        links: Vec<SessionHost>,
        credential: Option<&Credential>,
    ) -> RepositorySession {
        let credential = credential.map(|credential| credential.origin.clone());
        let watcher = FetchWatcher::default();
        let refuse_artifacts = false;
        RepositorySession { shared, image, links: links.into(), watcher, credential, refuse_artifacts }
    }

    /// The image of the session.
    pub fn image(&self) -> &Reference {
        &self.image
    }

    /// The hosts in the order of the requests.
    pub fn hosts(&self) -> Vec<String> {
        self.links.iter().map(|link| link.host.name()).collect()
    }

    /// Returns the session with an observer of bytes and waits. It is called from within fetches, so it must return
    /// quickly.
    #[must_use]
    pub fn with_watcher(&self, watcher: impl Fn(FetchNotice) + Send + Sync + 'static) -> RepositorySession {
        RepositorySession { watcher: FetchWatcher::new(watcher), ..self.clone() }
    }

    /// Returns the session for images of containers: the documents of an artifact are an error.
    #[must_use]
    pub fn without_artifacts(&self) -> RepositorySession {
        RepositorySession { refuse_artifacts: true, ..self.clone() }
    }

    /// Returns the session without some of its hosts, for example those that served wrong bytes.
    #[must_use]
    pub fn without_hosts(&self, hosts: &[String]) -> RepositorySession {
        let links = self.links.iter().filter(|link| !hosts.contains(&link.host.name())).cloned().collect();
        RepositorySession { links, ..self.clone() }
    }

    /// Fetches the manifest or index that the image's name points at: by its digest if it has one, else by its tag.
    pub async fn resolve(&self) -> Result<ResolvedManifest, FetchError> {
        if let Some(digest) = self.image.digest() {
            return self.fetch_manifest(digest.as_str(), Some(digest), HostCapability::Pull).await;
        }
        let tag = self.image.tag().unwrap_or(DEFAULT_TAG);
        match self.fetch_manifest(tag, None, HostCapability::Resolve).await {
            Err(mut error) if matches!(*error.kind, FetchErrorKind::NotFound(_)) => {
                error.context.nearest_tags = self.nearest_tags(&error.host, tag).await;
                Err(error)
            }
            resolved => resolved,
        }
    }

    /// Fetches a manifest or index by its descriptor.
    pub async fn manifest(&self, descriptor: &Descriptor) -> Result<ResolvedManifest, FetchError> {
        let resolved = self
            .fetch_manifest(descriptor.digest.as_str(), Some(&descriptor.digest), HostCapability::Pull)
            .await?;
        Ok(ResolvedManifest { descriptor: descriptor.clone(), ..resolved })
    }

    /// Fetches an image's config, or another blob of at most 4 MiB, whole and verified.
    pub async fn config(&self, descriptor: &Descriptor) -> Result<Bytes, FetchError> {
        let target = FetchTarget::Config(descriptor.digest.clone());
        let request = self.host_request(target, HostCapability::Pull)?;
        request.send(|link| async move { Ok(self.config_at(link, descriptor).await?) }).await
    }

    pub(crate) async fn fetch_manifest(
        &self,
        reference: &str,
        digest: Option<&Digest>,
        capability: HostCapability,
    ) -> Result<ResolvedManifest, FetchError> {
        let request = self.host_request(FetchTarget::Manifest(reference.to_owned()), capability)?;
        request.send(|link| async move { Ok(self.manifest_at(link, reference, digest).await?) }).await
    }

    async fn manifest_at(
        &self,
        link: &SessionHost,
        reference: &str,
        expected: Option<&Digest>,
    ) -> Result<ResolvedManifest, RequestError> {
        let failed = |kind| RequestError { host: link.host.name(), kind, token: false };
        let headers = accepting_manifests().map_err(failed)?;
        let url = self.url(link, "manifests", reference);
        let (reply, _permit) = self.get(link, url, headers, RequestSize::Small).await?;
        let field = |name: &str| {
            let value = reply.response.headers().get(name)?.to_str().ok()?;
            Some(value.to_owned())
        };
        let media_type = field(CONTENT_TYPE.as_str()).unwrap_or_default();
        // The server decides what a tag points at, but its digest header must match the content.
        let header_digest =
            field("docker-content-digest").and_then(|header_digest| Digest::parse(header_digest.trim()).ok());
        let raw = read_small(reply.response, MAX_BYTES, &self.shared.config).await.map_err(failed)?;
        if let Some(digest) = expected.or(header_digest.as_ref()) {
            check_digest(digest, &raw).map_err(failed)?;
        }
        let document = ManifestOrIndex::parse(&raw, &media_type).map_err(|error| failed(error.into()))?;
        let digest = match expected {
            Some(digest) => digest.clone(),
            None => header_digest.unwrap_or_else(|| Digest::sha256(&raw)),
        };
        let media_type = document.media_type(&raw, &media_type);
        let descriptor = Descriptor::new(media_type, digest, raw.len() as u64);
        Ok(ResolvedManifest { descriptor, raw, document, host: link.host.name() })
    }

    async fn config_at(&self, link: &SessionHost, descriptor: &Descriptor) -> Result<Bytes, RequestError> {
        let failed = |kind| RequestError { host: link.host.name(), kind, token: false };
        if descriptor.size > MAX_BYTES as u64 {
            return Err(failed(FetchErrorKind::TooLarge { limit: MAX_BYTES as u64 }));
        }
        let url = self.url(link, "blobs", descriptor.digest.as_str());
        let (reply, _permit) = self.get(link, url, HeaderMap::new(), RequestSize::Small).await?;
        let raw = read_small(reply.response, MAX_BYTES, &self.shared.config).await.map_err(failed)?;
        check_digest(&descriptor.digest, &raw).map_err(failed)?;
        Ok(raw)
    }

    /// Opens a blob from `offset` up to `end` (exclusive, above `offset`) at one host, which may ignore the range.
    pub(crate) async fn open_at(
        &self,
        link: &SessionHost,
        descriptor: &Descriptor,
        offset: u64,
        end: u64,
        load: RequestSize,
    ) -> Result<BlobBody, RequestError> {
        let size = descriptor.size;
        let asked = (offset > 0 || end < size).then_some((offset, end));
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some((offset, end)) = asked {
            let range = format!("bytes={offset}-{}", end.saturating_sub(1));
            if let Ok(range) = HeaderValue::from_str(&range) {
                headers.insert(RANGE, range);
            }
        }
        let url = self.url(link, "blobs", descriptor.digest.as_str());
        let (reply, permit) = self.get(link, url, headers, load).await?;
        let part = part_of(&reply.response, asked, size).map_err(|kind| RequestError {
            host: link.host.name(),
            kind,
            token: false,
        })?;
        Ok(BlobBody::new(reply.response, permit, part, &self.shared.config, link.host.name()))
    }

    pub(super) fn url(&self, link: &SessionHost, kind: &str, reference: &str) -> Url {
        let mut url = link.host.base.clone();
        let base = url.path().trim_end_matches('/');
        let path = format!("{base}/{}/{kind}/{reference}", self.image.path());
        url.set_path(&path);
        if let Some(namespace) = &link.namespace {
            url.query_pairs_mut().append_pair("ns", namespace);
        }
        url
    }

    /// The hosts in the order of the requests.
    pub(super) fn links(&self) -> &[SessionHost] {
        &self.links
    }

    /// A `GET` request to one host, with authorization. Fails unless the response is successful.
    pub(super) async fn get(
        &self,
        link: &SessionHost,
        url: Url,
        headers: HeaderMap,
        load: RequestSize,
    ) -> Result<(HttpResponse, ConnectionPermit), RequestError> {
        self.request(link, Method::GET, url, headers, load).await
    }

    /// One request to one host, with authorization. Fails unless the response is successful.
    pub(super) async fn request(
        &self,
        link: &SessionHost,
        method: Method,
        url: Url,
        headers: HeaderMap,
        load: RequestSize,
    ) -> Result<(HttpResponse, ConnectionPermit), RequestError> {
        let failed = |kind| RequestError { host: link.host.name(), kind, token: false };
        let permit = self.enter(link, load).await.map_err(failed)?;
        let context = self.authorization_context(link);
        let mut pass = link.auth.authorization(context).await?;
        let mut renewed = false;
        loop {
            let outgoing = HttpRequest {
                method: method.clone(),
                url: url.clone(),
                named_by: None,
                headers: headers.clone(),
                authorization: pass.value.as_ref(),
                own_headers: &link.host.headers,
                tls: &link.host.tls,
                plain_fallback: link.host.plain_fallback,
                body: None,
            };
            let reply = self.shared.transport.send(outgoing).await.map_err(failed)?;
            link.budget.reached();
            let after = self.note_limits(link, &reply.response);
            let status = reply.response.status();
            if !reply.redirected && !link.was_sent_secret() {
                let host = link.host.name();
                for warning in self.shared.new_warnings(&host, reply.response.headers()) {
                    tracing::warn!(host, "the registry warns: {warning}");
                    self.watcher.notify(FetchNotice::Warning(format!("{host} warns: {warning}")));
                }
            }
            if matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
                return Ok((reply, permit));
            }
            let redirected = reply.redirected;
            let (fields, server) = (reply.response.headers().clone(), class_of(&reply.response));
            let answer = self.read_refusal(link, reply).await;
            if status == StatusCode::UNAUTHORIZED && !redirected && !renewed {
                pass = link.auth.handle_unauthorized(&pass, &fields, server, answer, context).await?;
                renewed = true;
                continue;
            }
            // Amazon's public registry answers so when a token has expired.
            if status == StatusCode::BAD_REQUEST
                && !redirected
                && !renewed
                && let Some(fresh) = link.auth.renew_token(&pass, context).await?
            {
                (pass, renewed) = (fresh, true);
                continue;
            }
            if status == StatusCode::UNAUTHORIZED && !redirected && pass.is_login() {
                return Err(failed(FetchErrorKind::CredentialRejected(answer)));
            }
            return Err(failed(refusal(answer, redirected, after)));
        }
    }

    fn authorization_context<'a>(&'a self, link: &'a SessionHost) -> AuthorizationContext<'a> {
        let (transport, config) = (&self.shared.transport, &*self.shared.config);
        AuthorizationContext { transport, config, host: &link.host, watcher: &self.watcher }
    }

    /// Waits until the host's budget admits a request.
    async fn enter(&self, link: &SessionHost, load: RequestSize) -> Result<ConnectionPermit, FetchErrorKind> {
        let longest_hold = self.shared.config.longest_hold;
        link.budget.acquire(load, link.auth.id(), longest_hold, &self.watcher).await.map_err(|left| {
            let answer = ErrorResponse::new(429, "rate limit in effect, request not sent");
            FetchErrorKind::RateLimited { answer, after: Some(left) }
        })
    }

    /// Reads an error response. The text of a server that the registry redirects to may be anybody's and is not
    /// repeated.
    async fn read_refusal(&self, link: &SessionHost, reply: HttpResponse) -> ErrorResponse {
        let status = reply.response.status().as_u16();
        if reply.redirected {
            let storage = authority(reply.response.url());
            return ErrorResponse::new(status, &format!("from {storage}, where the registry redirects to"));
        }
        let body = read_small(reply.response, MAX_REFUSAL, &self.shared.config).await.unwrap_or_default();
        ErrorResponse::read(status, &body, link.was_sent_secret())
    }

    /// Applies the rate limit of a response, and returns the requested wait.
    fn note_limits(&self, link: &SessionHost, response: &Response) -> Option<Duration> {
        let (status, longest) = (response.status(), self.shared.config.longest_hold);
        let now = SystemTime::now();
        if let Some(quota) = reported_quota(response.headers(), now) {
            link.budget.note_quota(quota);
        }
        let after = requested_wait(status.as_u16(), response.headers(), now)?;
        let scope = match status {
            StatusCode::SERVICE_UNAVAILABLE => RateLimitScope::Host,
            _ => RateLimitScope::Authorizer(link.auth.id()),
        };
        // A quota exhausted for hours may not apply to this kind of request: the next one finds out.
        if !status.is_success() || after <= longest {
            link.budget.pause(scope, Instant::now(), after, longest);
        }
        Some(after)
    }

    /// A request to the hosts with a capability; fails if there are none.
    pub(crate) fn host_request(
        &self,
        target: FetchTarget,
        capability: HostCapability,
    ) -> Result<HostRequest<'_>, FetchError> {
        let is_able = |link: &&SessionHost| match capability {
            HostCapability::Pull => link.host.pull,
            HostCapability::Resolve => link.host.resolve,
            HostCapability::Referrers => link.host.referrers,
        };
        let hosts: Vec<_> = self.links.iter().filter(is_able).collect();
        if hosts.is_empty() {
            return Err(self.error(target, String::new(), FetchErrorKind::NoHost, OtherFailures::default()));
        }
        Ok(HostRequest { session: self, target, hosts, first: AtomicUsize::new(0) })
    }

    pub(crate) fn error(
        &self,
        what: FetchTarget,
        host: String,
        kind: FetchErrorKind,
        others: OtherFailures,
    ) -> FetchError {
        let (kind, context) = (Box::new(kind), Box::new(self.context(&host, others)));
        FetchError { repository: self.image.name().to_owned(), target: what, host, kind, context }
    }

    /// Whether a request over plain HTTP failed because the server speaks TLS on this port.
    pub(crate) async fn is_plain_http_to_tls(&self, link: &SessionHost, error: &RequestError) -> bool {
        let may_be = match &error.kind {
            FetchErrorKind::Refused(answer) => answer.status == 400,
            FetchErrorKind::BadReply(_) => true,
            FetchErrorKind::Unreachable(_) => !error.kind.is_unconnected(),
            _ => false,
        };
        may_be
            && !error.token
            && link.host.base.scheme() == "http"
            && self.shared.transport.speaks_tls(&link.host.base).await
    }

    /// Returns the input of the text and next step of an error at this host.
    fn context(&self, host: &str, others: OtherFailures) -> FetchContext {
        let asked = self.links.iter().find(|link| link.host.name() == host);
        let gets_credential = asked.is_none_or(|link| link.host.is_registry);
        FetchContext {
            others,
            credential: self.credential.clone().filter(|_| gets_credential),
            hosts: Some(in_place(|| HostsConfig::of(self.image.registry(), &self.shared.config))),
            is_mirror: asked.is_some_and(|link| !link.host.is_registry),
            has_authorities: asked.is_some_and(|link| !link.host.tls.authorities.is_empty()),
            is_unverified: asked.is_some_and(|link| link.host.is_registry && !link.host.has_public_tls()),
            nearest_tags: Vec::new(),
        }
    }
}

/// Header fields of a request for a manifest.
pub(super) fn accepting_manifests() -> Result<HeaderMap, FetchErrorKind> {
    let accept = format!("{}, */*;q=0.1", ACCEPTED_MANIFESTS.join(", "));
    let accept =
        HeaderValue::from_str(&accept).map_err(|error| FetchErrorKind::BadReply(error.to_string()))?;
    Ok(HeaderMap::from_iter([(ACCEPT, accept)]))
}

/// A request for one target. Its parts share the hosts: one that failed for one part is not used for the next ones.
#[derive(Debug)]
pub(crate) struct HostRequest<'s> {
    session: &'s RepositorySession,
    target: FetchTarget,
    /// At least one.
    hosts: Vec<&'s SessionHost>,
    /// Index of the first host that has not failed.
    first: AtomicUsize,
}

/// Why an attempt at one host failed.
#[derive(Debug)]
pub(crate) struct AttemptFailure {
    pub(crate) error: RequestError,
    /// Whether the attempt made progress, so that attempts are counted from here.
    pub(crate) progressed: bool,
}

impl From<RequestError> for AttemptFailure {
    fn from(error: RequestError) -> Self {
        AttemptFailure { error, progressed: false }
    }
}

/// Why a host is left for the next one.
enum HostFailure {
    /// It is known to be unreachable or busy, and other hosts are left.
    Skipped(&'static str),
    Failed(AttemptFailure),
}

impl fmt::Display for HostFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostFailure::Skipped(reason) => f.write_str(reason),
            HostFailure::Failed(failure) => failure.error.kind.fmt(f),
        }
    }
}

impl<'s> HostRequest<'s> {
    /// Attempts the request at each host until one succeeds. Fails with the error of the last host, unless that is
    /// unreachable and an earlier one has refused the request.
    pub(crate) async fn send<T, F>(&self, attempt: impl Fn(&'s SessionHost) -> F) -> Result<T, FetchError>
    where
        F: Future<Output = Result<T, AttemptFailure>>,
    {
        let mut failures: Vec<HostFailure> = Vec::new();
        let mut names = Vec::new();
        let first = self.first.load(Ordering::Relaxed);
        for (at, host) in self.hosts.iter().enumerate().skip(first) {
            let is_last = at + 1 == self.hosts.len();
            let mut failure = match self.send_to(host, is_last, &attempt).await {
                Ok(done) => return Ok(done),
                Err(failure) => failure,
            };
            if let HostFailure::Failed(AttemptFailure { error, .. }) = &mut failure {
                if self.session.is_plain_http_to_tls(host, error).await {
                    error.kind = FetchErrorKind::Tls(TlsProblem::NotPlainHttp);
                }
                if !is_last {
                    self.first.fetch_max(at + 1, Ordering::Relaxed);
                }
            }
            names.push(match &failure {
                HostFailure::Skipped(_) => host.host.name(),
                HostFailure::Failed(failure) => failure.error.host.clone(),
            });
            failures.push(failure);
        }
        let decisive = decisive_failure(&failures, &self.hosts[first..]);
        let texts: Vec<_> =
            names.into_iter().zip(&failures).map(|(name, failure)| (name, failure.to_string())).collect();
        let of_others = |mut texts: Vec<(String, String)>, decisive: &(String, String)| {
            texts.retain(|text| text != decisive);
            texts
        };
        let others = OtherFailures {
            earlier: of_others(texts[..decisive].to_vec(), &texts[decisive]),
            later: of_others(texts[decisive + 1..].to_vec(), &texts[decisive]),
        };
        match failures.swap_remove(decisive) {
            HostFailure::Failed(AttemptFailure { error, .. }) => {
                let target = if error.token { FetchTarget::Token } else { self.target.clone() };
                Err(self.session.error(target, error.host, error.kind, others))
            }
            // The last host is never skipped.
            HostFailure::Skipped(_) => {
                Err(self.session.error(self.target.clone(), String::new(), FetchErrorKind::NoHost, others))
            }
        }
    }

    async fn send_to<T, F>(
        &self,
        host: &'s SessionHost,
        is_last: bool,
        attempt: &impl Fn(&'s SessionHost) -> F,
    ) -> Result<T, HostFailure>
    where
        F: Future<Output = Result<T, AttemptFailure>>,
    {
        let config = &*self.session.shared.config;
        let context = AttemptContext {
            has_fallback: !is_last,
            is_first_contact: matches!(self.target, FetchTarget::Manifest(_)),
            longest_hold: config.longest_hold,
        };
        let advice = |failure: &HostFailure| match failure {
            HostFailure::Skipped(_) => RetryAdvice::GiveUp,
            // Token requests have their own attempts.
            HostFailure::Failed(failure) if failure.error.token => RetryAdvice::GiveUp,
            HostFailure::Failed(failure) => match context.advice(&failure.error.kind, failure.progressed) {
                RetryAdvice::After(_) => RetryAdvice::After(Duration::ZERO), // the budget makes all requests wait
                advice => advice,
            },
        };
        let checked_attempt = || async {
            if !is_last && let Some(reason) = host.budget.avoid_reason(host.auth.id(), Instant::now()) {
                return Err(HostFailure::Skipped(reason));
            }
            let failure = match attempt(host).await {
                Ok(done) => return Ok(done),
                Err(failure) => failure,
            };
            if !failure.error.token && failure.error.kind.is_host_gone() {
                host.budget.avoid(Instant::now());
            }
            Err(HostFailure::Failed(failure))
        };
        let clock = NoticeClock { watcher: &self.session.watcher, host: host.host.name() };
        retry(&retry_policy(config, !is_last), &clock, advice, checked_attempt).await
    }
}

/// The index of the failure that people have to know: the last one, or, if that host gave no answer, the first refusal.
/// That a mirror does not have the image is none.
fn decisive_failure(failures: &[HostFailure], hosts: &[&SessionHost]) -> usize {
    let last = failures.len() - 1;
    let HostFailure::Failed(of_last) = &failures[last] else { return last };
    if !of_last.error.kind.is_host_gone() {
        return last;
    }
    let is_refusal = |(failure, host): (&HostFailure, &&SessionHost)| match failure {
        HostFailure::Skipped(_) => false,
        HostFailure::Failed(failure) => match &failure.error.kind {
            FetchErrorKind::NotFound(_) => host.host.is_registry,
            kind => kind.answer().is_some(),
        },
    };
    failures.iter().zip(hosts).position(is_refusal).unwrap_or(last)
}

/// Checks that a content has its digest.
fn check_digest(expected: &Digest, content: &[u8]) -> Result<(), FetchErrorKind> {
    let mismatch = |got| FetchErrorKind::DigestMismatch { expected: expected.clone(), got };
    expected.check(content).map_err(mismatch)
}
