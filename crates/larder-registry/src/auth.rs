//! Authorization for one host, repository and credential: learned from the host's challenge, shared by all pulls that
//! need the same, renewed before it expires.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use larder::credentials::Credential;
use larder::credentials::Secret;
use larder::retry::retry;
use parking_lot::{Mutex as Map, MutexGuard as MapGuard};
use reqwest::Url;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinHandle;
use tokio::time::{self, Instant};

use super::address_class::AddressClass;
use super::attempts::{AttemptContext, NoticeClock, retry_policy};
use super::body::read_small;
use super::challenge::{self, AuthChallenge};
use super::config::RegistryConfig;
use super::error::{ErrorResponse, FetchErrorKind};
use super::fetch_notice::{FetchNotice, FetchWait, FetchWatcher};
use super::hosts::{RegistryHost, authority, is_loopback};
use super::token::{self, TokenHttpRequest};
use super::transport::{HttpRequest, HttpTransport};

/// How long an entry that no pull uses is cached. Tokens rarely live longer, and passwords are not kept needlessly.
const IDLE: Duration = Duration::from_secs(300);
/// Interval of the removal of expired entries; it also runs while no pull does.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// Number of entries from which all unused ones are dropped.
const MAX_ENTRIES: usize = 1024;

/// Tokens are renewed when a tenth of their life is left, at most this.
const MARGIN: Duration = Duration::from_secs(10);

/// The authorization of all hosts, shared by all pulls.
#[derive(Debug, Default)]
pub(crate) struct RegistryAuthCache(Arc<Map<CachedAuthorizers>>);

#[derive(Debug, Default)]
struct CachedAuthorizers {
    entries: HashMap<AuthorizerKey, CachedAuthorizer>,
    /// The task that removes expired entries, while there are entries. It ends with its runtime.
    expiry_task: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct CachedAuthorizer {
    auth: Arc<HostAuthorizer>,
    /// Time of the last use by a pull.
    asked: Instant,
}

/// The key of an entry. Credentials and repositories never share one: a token is for one repository.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AuthorizerKey {
    base: Url,
    repository: String,
    username: String,
    secrets: [Secret; 3],
}

impl RegistryAuthCache {
    /// The entry for a host, a repository and a credential.
    pub(crate) fn entry(
        &self,
        host: &RegistryHost,
        repository: &str,
        credential: Option<&Credential>,
    ) -> Arc<HostAuthorizer> {
        let secret = |of: fn(&Credential) -> &Secret| credential.map(of).cloned().unwrap_or_default();
        let key = AuthorizerKey {
            base: host.base.clone(),
            repository: repository.to_owned(),
            username: credential.map(|credential| credential.username.clone()).unwrap_or_default(),
            secrets: [
                secret(|credential| &credential.password),
                secret(|credential| &credential.identity_token),
                secret(|credential| &credential.registry_token),
            ],
        };
        let now = Instant::now();
        let mut known = lock(&self.0);
        known.forget(now);
        let new = || CachedAuthorizer {
            auth: Arc::new(HostAuthorizer::new(repository, credential.cloned())),
            asked: now,
        };
        let entry = known.entries.entry(key).or_insert_with(new);
        entry.asked = now;
        let auth = Arc::clone(&entry.auth);
        if known.expiry_task.as_ref().is_none_or(JoinHandle::is_finished) {
            known.expiry_task =
                Handle::try_current().ok().map(|runtime| runtime.spawn(expiry_task(Arc::downgrade(&self.0))));
        }
        auth
    }
}

impl CachedAuthorizers {
    /// Removes the entries that no pull uses and none has used for the retention time.
    fn forget(&mut self, now: Instant) {
        let full = self.entries.len() >= MAX_ENTRIES;
        let idle = |entry: &CachedAuthorizer| full || now.duration_since(entry.asked) >= IDLE;
        self.entries.retain(|_, entry| Arc::strong_count(&entry.auth) > 1 || !idle(entry));
    }
}

fn lock(known: &Map<CachedAuthorizers>) -> MapGuard<'_, CachedAuthorizers> {
    known.lock()
}

/// Removes expired entries until none is left: a node that pulls nothing more must not keep passwords in memory.
async fn expiry_task(known: Weak<Map<CachedAuthorizers>>) {
    loop {
        time::sleep(FORGET_EVERY).await;
        let Some(known) = known.upgrade() else { return };
        let mut known = lock(&known);
        known.forget(Instant::now());
        if known.entries.is_empty() {
            known.expiry_task = None;
            return;
        }
    }
}

/// The authorization of one repository at one host.
#[derive(Debug)]
pub(crate) struct HostAuthorizer {
    id: u64,
    repository: String,
    credential: Option<Credential>,
    state: Mutex<AuthorizerState>,
}

#[derive(Debug, Default)]
struct AuthorizerState {
    /// Counts the values sent. A rejection of an older value is ignored.
    generation: u64,
    shown: Option<AuthorizationHeader>,
    /// How tokens are requested, once known, and the class of the server that demanded it.
    challenge: Option<(AuthChallenge, AddressClass)>,
    /// The last failed renewal, for the requests that waited for it.
    failed: Option<(Instant, AuthorizationError)>,
}

#[derive(Debug, Clone)]
struct AuthorizationHeader {
    value: HeaderValue,
    expires: Option<Instant>,
}

/// The `Authorization` value of a request, and its generation.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestAuthorization {
    pub(crate) value: Option<HeaderValue>,
    generation: u64,
}

/// Context that a renewal needs besides the cached state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AuthorizationContext<'a> {
    pub(crate) transport: &'a HttpTransport,
    pub(crate) config: &'a RegistryConfig,
    pub(crate) host: &'a RegistryHost,
    pub(crate) watcher: &'a FetchWatcher,
}

/// A failed authorization, with the host that rejected it.
#[derive(Debug)]
pub(crate) struct AuthorizationError {
    pub(crate) host: String,
    pub(crate) kind: FetchErrorKind,
    /// Whether `host` is the token server.
    pub(crate) token: bool,
}

impl AuthorizationError {
    fn for_waiter(&self) -> AuthorizationError {
        AuthorizationError { host: self.host.clone(), kind: self.kind.for_waiter(), token: self.token }
    }
}

impl HostAuthorizer {
    fn new(repository: &str, credential: Option<Credential>) -> HostAuthorizer {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shown = credential
            .as_ref()
            .filter(|credential| !credential.registry_token.is_empty())
            .and_then(|credential| token::bearer(&credential.registry_token))
            .map(|value| AuthorizationHeader { value, expires: None });
        HostAuthorizer {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            repository: repository.into(),
            credential,
            state: Mutex::new(AuthorizerState { shown, ..AuthorizerState::default() }),
        }
    }

    /// Unique in this process: another repository, credential or host has another one.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The value to send now; a token that is about to expire is renewed first. Empty before the first challenge.
    pub(crate) async fn authorization(
        &self,
        context: AuthorizationContext<'_>,
    ) -> Result<RequestAuthorization, AuthorizationError> {
        let mut state = self.locked_state().await?;
        let expired = state
            .shown
            .as_ref()
            .and_then(|shown| shown.expires)
            .is_some_and(|expires| expires <= Instant::now());
        if expired && let Some((challenge, server)) = state.challenge.clone() {
            self.renew(&mut state, &challenge, server, context).await?;
        }
        Ok(state.pass())
    }

    /// Handles a 401 for `sent`: returns the value to send instead, or an error if there is no other.
    pub(crate) async fn handle_unauthorized(
        &self,
        sent: &RequestAuthorization,
        reply: &HeaderMap,
        server: AddressClass,
        answer: ErrorResponse,
        context: AuthorizationContext<'_>,
    ) -> Result<RequestAuthorization, AuthorizationError> {
        let mut state = self.locked_state().await?;
        if state.generation != sent.generation {
            return Ok(state.pass()); // another request renewed it
        }
        let refused = |kind| AuthorizationError { host: context.host.name(), kind, token: false };
        let fixed = self.credential.as_ref().is_some_and(|credential| !credential.registry_token.is_empty());
        if fixed {
            return Err(refused(FetchErrorKind::CredentialRejected(answer)));
        }
        let challenges: Vec<AuthChallenge> = reply
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|header| header.to_str().ok())
            .flat_map(challenge::parse)
            .collect();
        let of = |scheme: &str| challenges.iter().find(|challenge| challenge.scheme == scheme);
        if let Some(challenge) = of("bearer") {
            self.renew(&mut state, challenge, server, context).await?;
            return Ok(state.pass());
        }
        let login = self.credential.as_ref().and_then(token::basic);
        match (of("basic"), login) {
            (Some(_), Some(value)) if state.shown.is_none() => {
                state.show(AuthorizationHeader { value, expires: None }, None);
                Ok(state.pass())
            }
            (Some(_), Some(_)) => Err(refused(FetchErrorKind::CredentialRejected(answer))),
            _ => Err(refused(FetchErrorKind::Denied(answer))),
        }
    }

    /// Renews the bearer token that was sent, for a host that refused it without a challenge. `None` if there was none.
    pub(crate) async fn renew_token(
        &self,
        sent: &RequestAuthorization,
        context: AuthorizationContext<'_>,
    ) -> Result<Option<RequestAuthorization>, AuthorizationError> {
        let mut state = self.locked_state().await?;
        if sent.value.is_some() && state.generation == sent.generation {
            let Some((challenge, server)) = state.challenge.clone() else { return Ok(None) };
            self.renew(&mut state, &challenge, server, context).await?;
        }
        Ok(sent.value.is_some().then(|| state.pass()))
    }

    /// Waits for a renewal under way; its failure is that of all who waited, or each would repeat all its attempts.
    async fn locked_state(&self) -> Result<MutexGuard<'_, AuthorizerState>, AuthorizationError> {
        let began = Instant::now();
        let state = self.state.lock().await;
        match &state.failed {
            Some((at, error)) if *at > began => Err(error.for_waiter()),
            _ => Ok(state),
        }
    }

    /// Whether there is a credential for the host, and the host requested it.
    pub(crate) async fn has_authenticated(&self) -> bool {
        self.credential.is_some() && self.state.lock().await.shown.is_some()
    }

    /// Whether there is a credential for the host.
    pub(crate) fn has_credential(&self) -> bool {
        self.credential.is_some()
    }

    async fn renew(
        &self,
        state: &mut AuthorizerState,
        challenge: &AuthChallenge,
        named_by: AddressClass,
        context: AuthorizationContext<'_>,
    ) -> Result<(), AuthorizationError> {
        let renewed = self.request_token(state, challenge, named_by, context).await;
        state.failed = renewed.as_ref().err().map(|error| (Instant::now(), error.for_waiter()));
        renewed
    }

    fn token_request(
        &self,
        challenge: &AuthChallenge,
        context: AuthorizationContext<'_>,
    ) -> Result<TokenHttpRequest, AuthorizationError> {
        let AuthorizationContext { transport, host, .. } = context;
        token::request(challenge, &transport.base_in_use(host), &self.repository, self.credential.as_ref())
            .map_err(|problem| AuthorizationError {
                host: host.name(),
                kind: FetchErrorKind::BadReply(problem),
                token: false,
            })
    }

    async fn request_token(
        &self,
        state: &mut AuthorizerState,
        challenge: &AuthChallenge,
        named_by: AddressClass,
        context: AuthorizationContext<'_>,
    ) -> Result<(), AuthorizationError> {
        let request = self.token_request(challenge, context)?;
        let server = authority(&request.url);
        context.watcher.notify(FetchNotice::Waiting(FetchWait::Token { host: server.clone() }));
        let first = state.generation == 0;
        let token = self.fetch(&request, named_by, first, context).await;
        context.watcher.notify(FetchNotice::Resumed);
        let token = token.map_err(|kind| AuthorizationError { host: server.clone(), kind, token: true })?;
        let value = token::bearer(&token.value).ok_or_else(|| AuthorizationError {
            host: server,
            kind: FetchErrorKind::BadReply("token is not a valid header value".into()),
            token: true,
        })?;
        let expires = Instant::now() + token.life.saturating_sub((token.life / 10).min(MARGIN));
        state
            .show(AuthorizationHeader { value, expires: Some(expires) }, Some((challenge.clone(), named_by)));
        Ok(())
    }

    /// Requests a token, with retries after server errors; if it is not the `first` one, also after a refused
    /// connection.
    async fn fetch(
        &self,
        request: &TokenHttpRequest,
        named_by: AddressClass,
        first: bool,
        context: AuthorizationContext<'_>,
    ) -> Result<token::BearerToken, FetchErrorKind> {
        let longest_hold = context.config.longest_hold;
        let attempts = AttemptContext { has_fallback: false, is_first_contact: first, longest_hold };
        let advice = |failure: &FetchErrorKind| attempts.advice(failure, false);
        let clock = NoticeClock { watcher: context.watcher, host: authority(&request.url) };
        retry(&retry_policy(context.config, false), &clock, advice, || {
            self.fetch_once(request, named_by, context)
        })
        .await
    }

    async fn fetch_once(
        &self,
        request: &TokenHttpRequest,
        named_by: AddressClass,
        context: AuthorizationContext<'_>,
    ) -> Result<token::BearerToken, FetchErrorKind> {
        let same_host = request.url.origin() == context.host.base.origin()
            || (context.host.plain_fallback && authority(&request.url) == context.host.name());
        let strangers = context.host.tls.for_other(is_loopback(&request.url));
        let mut headers = HeaderMap::new();
        if request.body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
        }
        let outgoing = HttpRequest {
            method: request.method.clone(),
            url: request.url.clone(),
            named_by: (!same_host).then_some(named_by),
            headers,
            authorization: request.authorization.as_ref(),
            own_headers: if same_host { &context.host.headers } else { &[] },
            tls: if same_host { &context.host.tls } else { &strangers },
            plain_fallback: false,
            body: request.body.as_ref().map(|body| body.reveal().to_owned()),
        };
        let reply = context.transport.send(outgoing).await?;
        let status = reply.response.status().as_u16();
        let after =
            super::rate_limit::requested_wait(status, reply.response.headers(), std::time::SystemTime::now());
        let body = read_small(reply.response, token::MAX_REPLY, context.config).await?;
        if status == 200 {
            return token::read_reply(&body).map_err(FetchErrorKind::BadReply);
        }
        let has_credential = request.authorization.is_some() || request.body.is_some();
        let was_sent_secret = has_credential || (same_host && !context.host.headers.is_empty());
        let answer = ErrorResponse::read(status, &body, was_sent_secret);
        Err(match status {
            400 | 401 if has_credential => FetchErrorKind::CredentialRejected(answer),
            // Token servers refuse logins in each of these ways.
            400 | 401 | 403 | 404 => FetchErrorKind::Denied(answer),
            429 => FetchErrorKind::RateLimited { answer, after },
            500.. => FetchErrorKind::Failing(answer),
            _ => FetchErrorKind::Refused(answer),
        })
    }
}

impl RequestAuthorization {
    /// Returns true for a user name and a password, rather than a token that stands for them.
    pub(crate) fn is_login(&self) -> bool {
        self.value.as_ref().is_some_and(|value| value.as_bytes().starts_with(b"Basic "))
    }
}

impl AuthorizerState {
    fn show(&mut self, shown: AuthorizationHeader, challenge: Option<(AuthChallenge, AddressClass)>) {
        self.generation += 1;
        self.shown = Some(shown);
        self.challenge = challenge;
    }

    fn pass(&self) -> RequestAuthorization {
        RequestAuthorization {
            value: self.shown.as_ref().map(|shown| shown.value.clone()),
            generation: self.generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> RegistryHost {
        RegistryHost::new(Url::parse("http://registry.example/v2").unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn unused_entries_expire() {
        let (cache, host) = (RegistryAuthCache::default(), host());
        let kept = |cache: &RegistryAuthCache| lock(&cache.0).entries.len();
        let used = cache.entry(&host, "used", None);
        let again = Arc::downgrade(&cache.entry(&host, "again", None));
        drop(cache.entry(&host, "once", None));

        time::advance(IDLE.saturating_sub(Duration::from_secs(1))).await;
        assert!(again.ptr_eq(&Arc::downgrade(&cache.entry(&host, "again", None))), "it is remembered");
        assert_eq!(kept(&cache), 3);
        time::advance(Duration::from_secs(1)).await;
        drop(cache.entry(&host, "new", None));
        assert_eq!(kept(&cache), 3, "used, again, new");
        assert!(Arc::ptr_eq(&used, &cache.entry(&host, "used", None)));
    }

    #[tokio::test(start_paused = true)]
    async fn unused_entries_expire_without_further_pulls() {
        let (cache, host) = (RegistryAuthCache::default(), host());
        let kept = |cache: &RegistryAuthCache| lock(&cache.0).entries.len();
        for round in 0..2 {
            let used = cache.entry(&host, "used", None);
            drop(cache.entry(&host, "once", None));
            time::sleep(IDLE.saturating_sub(Duration::from_secs(1))).await;
            assert_eq!(kept(&cache), 2, "{round}");
            time::sleep(FORGET_EVERY + Duration::from_secs(2)).await;
            assert_eq!(kept(&cache), 1, "{round}: a pull uses it");
            drop(used);
            time::sleep(FORGET_EVERY + Duration::from_secs(1)).await;
            assert_eq!(kept(&cache), 0, "{round}");
            assert!(lock(&cache.0).expiry_task.is_none(), "{round}: and nothing is waited for");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn unused_entries_are_removed_early_when_there_are_many() {
        let (cache, host) = (RegistryAuthCache::default(), host());
        let used = cache.entry(&host, "used", None);
        for number in 0..5 * MAX_ENTRIES {
            drop(cache.entry(&host, &format!("repository-{number}"), None));
            assert!(lock(&cache.0).entries.len() <= MAX_ENTRIES);
        }
        assert!(Arc::ptr_eq(&used, &cache.entry(&host, "used", None)));
    }
}
