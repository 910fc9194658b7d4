//! One HTTP exchange with a host, including redirects.
//!
//! Promises: credentials and a host's configured header fields go to that host only and never along a redirect to
//! another; redirects are bounded, and never lead from TLS to plain HTTP on another host, nor into a network of the
//! node that the host is not part of; no error text contains a URL, which may carry a signature.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use larder::trace_context;
use parking_lot::Mutex;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, LOCATION, REFERER};
use reqwest::{Client, Method, Request, Response, StatusCode, Url};
use tokio::time;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::address_class::{AddressClass, GuardedResolver, InternalAddress};
use super::config::{Proxy, RegistryConfig};
use super::error::{FetchErrorKind, HANDSHAKE_CLOSED, NO_CONNECTION, printable};
use super::hosts::{RegistryHost, authority, is_loopback};
use super::tls::{self, ClientPem, TlsProblem, TlsSettings};

/// Name of larder in HTTP requests.
pub const USER_AGENT: &str = concat!("larder/", env!("CARGO_PKG_VERSION"));

/// The certificates of a connection to a server that is no registry; PEM.
#[derive(Default)]
pub struct PlainClientTls {
    /// CA certificates to trust besides the system's.
    pub authority: Option<Vec<u8>>,
    /// The client's certificate and its private key.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

/// A client for a server that is no registry, with TLS or for plain HTTP alone, which saves the memory of the
/// certificates.
pub fn plain_client(
    tls: Option<PlainClientTls>,
    connect_timeout: Duration,
) -> Result<Client, FetchErrorKind> {
    let tls = match tls {
        Some(PlainClientTls { authority, client }) => tls::client_config(&TlsSettings {
            authorities: authority.into_iter().collect(),
            client: client.map(|(certificate, key)| ClientPem { certificate, key }).into_iter().collect(),
            ..TlsSettings::default()
        }),
        None => tls::no_tls(),
    };
    let tls = tls.map_err(|error| FetchErrorKind::Tls(TlsProblem::Other(error.to_string())))?;
    let builder = Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(USER_AGENT)
        .connect_timeout(connect_timeout);
    builder.build().map_err(|error| explain(error, connect_timeout))
}

/// Most redirects of one request. Registries need one or two.
const MAX_REDIRECTS: usize = 5;

/// Number of cached clients. There is one for each TLS configuration, and changed files make new ones.
const MAX_CLIENTS: usize = 64;

/// A request, and the origin that its secrets belong to.
#[derive(Debug, Clone)]
pub(crate) struct HttpRequest<'a> {
    pub(crate) method: Method,
    pub(crate) url: Url,
    /// The class of the server that named this URL; `None` for a URL of the settings.
    pub(crate) named_by: Option<AddressClass>,
    /// Sent to every host of the redirect chain.
    pub(crate) headers: HeaderMap,
    /// Sent to the URL's own scheme, host and port only.
    pub(crate) authorization: Option<&'a HeaderValue>,
    /// As `authorization`.
    pub(crate) own_headers: &'a [(HeaderName, HeaderValue)],
    pub(crate) tls: &'a TlsSettings,
    /// Whether plain HTTP is used if the URL's own server does not speak TLS.
    pub(crate) plain_fallback: bool,
    pub(crate) body: Option<String>,
}

/// The response to a request.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) response: Response,
    /// True if the response came from another origin than requested.
    pub(crate) redirected: bool,
}

/// HTTP clients, created on first use.
#[derive(Debug)]
pub(crate) struct HttpTransport {
    config: Arc<RegistryConfig>,
    clients: Mutex<HashMap<HttpClientKey, Client>>,
    /// The servers (`HOST:PORT`) that turned out not to speak TLS.
    plain: Mutex<HashSet<String>>,
}

/// Settings that distinguish clients.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct HttpClientKey {
    /// `None` for plain HTTP.
    tls: Option<TlsSettings>,
    loopback: bool,
    /// As [`HttpRequest::named_by`].
    named_by: Option<AddressClass>,
}

impl HttpTransport {
    pub(crate) fn new(config: Arc<RegistryConfig>) -> HttpTransport {
        HttpTransport { config, clients: Mutex::default(), plain: Mutex::default() }
    }

    /// Sends a request and follows redirects, until the headers of the last response.
    pub(crate) async fn send(&self, mut outgoing: HttpRequest<'_>) -> Result<HttpResponse, FetchErrorKind> {
        if !outgoing.plain_fallback {
            return self.send_as_named(outgoing).await;
        }
        let server = authority(&outgoing.url);
        if !self.plain.lock().contains(&server) {
            match self.send_as_named(outgoing.clone()).await {
                Err(failure) if is_without_tls(&failure) => {}
                answered => return answered,
            }
        }
        outgoing.url = without_tls(outgoing.url);
        let answered = self.send_as_named(outgoing).await;
        // One that is restarted with TLS answers 400, or not at all.
        let is_certain =
            answered.as_ref().is_ok_and(|answer| answer.response.status() != StatusCode::BAD_REQUEST);
        if is_certain {
            self.plain.lock().insert(server);
        } else {
            self.plain.lock().remove(&server);
        }
        answered
    }

    /// The base of a host's URLs as requests use it: with plain HTTP, if its server turned out not to speak TLS.
    pub(crate) fn base_in_use(&self, host: &RegistryHost) -> Url {
        let base = host.base.clone();
        let is_plain = host.plain_fallback && self.plain.lock().contains(&authority(&base));
        if is_plain { without_tls(base) } else { base }
    }

    /// Returns true if a server that was asked over plain HTTP speaks TLS.
    pub(crate) async fn speaks_tls(&self, url: &Url) -> bool {
        let mut url = url.clone();
        if url.set_scheme("https").is_err() {
            return false;
        }
        let tls = TlsSettings { skip_verify: true, ..TlsSettings::default() };
        let probe = self.exchange(Request::new(Method::HEAD, url), &tls, None);
        match time::timeout(self.config.connect_timeout, probe).await {
            Ok(Ok(_)) => true,
            Ok(Err(FetchErrorKind::Tls(problem))) => problem != TlsProblem::PlainHttp,
            _ => false,
        }
    }

    async fn send_as_named(&self, outgoing: HttpRequest<'_>) -> Result<HttpResponse, FetchErrorKind> {
        let origin = outgoing.url.origin();
        let mut url = outgoing.url.clone();
        let mut redirected = false;
        let mut named_by = outgoing.named_by;
        let mut referer = None;
        for _ in 0..=MAX_REDIRECTS {
            let other = redirected.then(|| outgoing.tls.for_other(is_loopback(&url)));
            let tls = other.as_ref().unwrap_or(outgoing.tls);
            let mut request = Request::new(outgoing.method.clone(), url.clone());
            *request.headers_mut() = outgoing.headers.clone();
            if !redirected {
                for (name, value) in outgoing.own_headers {
                    request.headers_mut().append(name, value.clone());
                }
                if let Some(value) = outgoing.authorization {
                    request.headers_mut().insert(AUTHORIZATION, value.clone());
                }
            }
            if let Some(referer) = referer.take() {
                request.headers_mut().entry(REFERER).or_insert(referer);
            }
            if let Some(body) = &outgoing.body {
                *request.body_mut() = Some(body.clone().into());
            }
            let span = request_span(&request, redirected);
            let exchange = self.exchange(request, tls, named_by).instrument(span.clone());
            let response = exchange.await.map_err(|kind| along(kind, redirected, &url));
            note_outcome(&span, &response);
            let response = response?;
            if !is_redirect(&response) || !matches!(outgoing.method, Method::GET | Method::HEAD) {
                return Ok(HttpResponse { response, redirected });
            }
            let next = next_url(&url, &response)?;
            referer = referer_of(&url, &next, redirected);
            // A redirect back to the first origin does not restore its credentials.
            redirected |= next.origin() != origin;
            if next.origin() != url.origin() {
                // The first host of the chain decides: one that it leads to gives no further rights.
                named_by = named_by.or_else(|| Some(class_of(&response)));
            }
            url = next;
        }
        Err(FetchErrorKind::BadReply(format!("more than {MAX_REDIRECTS} redirects")))
    }

    async fn exchange(
        &self,
        mut request: Request,
        tls: &TlsSettings,
        named_by: Option<AddressClass>,
    ) -> Result<Response, FetchErrorKind> {
        if let Some(server) = named_by {
            server.check(request.url()).map_err(|internal| FetchErrorKind::BadReply(internal.to_string()))?;
        }
        for (name, value) in trace_context::headers_for_others() {
            if let Ok(value) = HeaderValue::from_str(&value) {
                request.headers_mut().insert(name, value);
            }
        }
        let client = self.client(request.url(), tls, named_by)?;
        let limit = self.config.header_timeout;
        match time::timeout(limit, client.execute(request)).await {
            Ok(done) => done.map_err(|error| explain(error, self.config.connect_timeout)),
            Err(_) => Err(FetchErrorKind::NoAnswer(limit)),
        }
    }

    fn client(
        &self,
        url: &Url,
        tls: &TlsSettings,
        named_by: Option<AddressClass>,
    ) -> Result<Client, FetchErrorKind> {
        let tls = (url.scheme() == "https").then(|| tls.clone());
        let key = HttpClientKey { tls, loopback: is_loopback(url), named_by };
        let mut clients = self.clients.lock();
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let client = self.build(&key)?;
        if clients.len() >= MAX_CLIENTS {
            // Requests in progress keep their client.
            clients.clear();
        }
        clients.insert(key, client.clone());
        Ok(client)
    }

    fn build(&self, key: &HttpClientKey) -> Result<Client, FetchErrorKind> {
        let tls = match &key.tls {
            Some(settings) => tls::client_config(settings),
            None => tls::no_tls(),
        };
        let tls = tls.map_err(|error| FetchErrorKind::Tls(TlsProblem::Other(error.to_string())))?;
        let builder = Client::builder()
            .tls_backend_preconfigured(tls)
            .http1_only() // on one HTTP/2 connection all ranges of a blob would share one window
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .user_agent(USER_AGENT)
            .connect_timeout(self.config.connect_timeout)
            .pool_idle_timeout(Duration::from_secs(15))
            .pool_max_idle_per_host(self.config.connections);
        // A proxy resolves names itself, and its own name is none that a registry has named.
        let builder = match key.named_by {
            Some(server) if !self.config.proxy.is_configured() => {
                builder.dns_resolver(Arc::new(GuardedResolver(server)))
            }
            _ => builder,
        };
        let builder = match &self.config.proxy {
            _ if key.loopback => builder.no_proxy(),
            Proxy::None => builder.no_proxy(),
            Proxy::FromEnvironment => builder,
            Proxy::Fixed { url, except } => {
                let proxy = reqwest::Proxy::all(url)
                    .map_err(|_| FetchErrorKind::Unreachable("invalid proxy URL".into()))?;
                builder.proxy(proxy.no_proxy(reqwest::NoProxy::from_string(except)))
            }
        };
        builder.build().map_err(|error| explain(error, self.config.connect_timeout))
    }
}

/// Whether a failure is one of a server that does not speak TLS: it answers in plain HTTP, or closes the connection.
fn is_without_tls(failure: &FetchErrorKind) -> bool {
    match failure {
        FetchErrorKind::Tls(TlsProblem::PlainHttp) => true,
        // A reset may be that of a connection on which TLS was spoken: what was sent must not follow in clear text.
        FetchErrorKind::Unreachable(text) => text.starts_with(HANDSHAKE_CLOSED),
        _ => false,
    }
}

/// The URL with plain HTTP instead of TLS, on the same port.
fn without_tls(mut url: Url) -> Url {
    // Both have default ports, so neither step fails.
    let port = url.port_or_known_default();
    let _ = url.set_scheme("http");
    let _ = url.set_port(port);
    url
}

/// The class of the server that sent a response; that of a proxy, where one is between.
pub(crate) fn class_of(response: &Response) -> AddressClass {
    response.remote_addr().map(|address| AddressClass::of(address.ip())).unwrap_or_default()
}

/// The span of one exchange, until the headers of the response; named as containerd names it. The path of a redirect
/// target is left out, and so is any query: they may be signed.
fn request_span(request: &Request, redirected: bool) -> Span {
    let url = request.url();
    let span = tracing::trace_span!(
        "request",
        otel.name = "remotes.docker.resolver.HTTPRequest",
        otel.kind = "client",
        otel.status_description = Empty,
        http.request.method = request.method().as_str(),
        http.response.status_code = Empty,
        server.address = url.host_str(),
        server.port = url.port_or_known_default(),
        url.scheme = url.scheme(),
        url.path = Empty,
        error.type = Empty,
    );
    if !redirected {
        span.record("url.path", url.path());
    }
    span
}

fn note_outcome(span: &Span, response: &Result<Response, FetchErrorKind>) {
    match response {
        Ok(response) => {
            let status = response.status();
            span.record("http.response.status_code", status.as_u16());
            if status.is_client_error() || status.is_server_error() {
                // The semantic conventions have the code as the type of the error, and no text for it.
                trace_context::fail(span, status.as_u16(), "");
            }
        }
        Err(error) => trace_context::fail(span, "request", error),
    }
}

fn is_redirect(response: &Response) -> bool {
    matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308)
        && response.headers().contains_key(LOCATION)
}

/// The target of a redirect.
fn next_url(from: &Url, response: &Response) -> Result<Url, FetchErrorKind> {
    let bad = |problem: &str| FetchErrorKind::BadReply(format!("redirect {problem}"));
    let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
    let mut next =
        location.and_then(|location| from.join(location).ok()).ok_or_else(|| bad("to an invalid URL"))?;
    if !matches!(next.scheme(), "http" | "https") || next.host_str().is_none() {
        return Err(bad("to a URL that is not HTTP"));
    }
    if from.scheme() == "https" && next.scheme() == "http" && !(is_loopback(from) && is_loopback(&next)) {
        return Err(bad(&format!("from TLS to plain HTTP at {}", authority(&next))));
    }
    // A user in the URL would become an Authorization field.
    if next.set_username("").and_then(|()| next.set_password(None)).is_err() {
        return Err(bad("to an invalid host"));
    }
    Ok(next)
}

/// The `Referer` of a redirect, as Go's client sends it and some storage hosts require it: never from TLS to plain
/// HTTP, without a user, and without the query of a URL that another redirect led to, which may be signed.
fn referer_of(from: &Url, to: &Url, redirected: bool) -> Option<HeaderValue> {
    if from.scheme() == "https" && to.scheme() == "http" {
        return None;
    }
    let mut referer = from.clone();
    referer.set_fragment(None);
    referer.set_username("").and_then(|()| referer.set_password(None)).ok()?;
    if redirected {
        referer.set_query(None);
    }
    HeaderValue::from_str(referer.as_str()).ok()
}

/// Adds the redirect target to an error that it caused.
fn along(kind: FetchErrorKind, redirected: bool, url: &Url) -> FetchErrorKind {
    match kind {
        FetchErrorKind::Unreachable(text) if redirected => {
            FetchErrorKind::Unreachable(format!("redirected to {}: {text}", authority(url)))
        }
        FetchErrorKind::Tls(problem) if redirected => {
            FetchErrorKind::Tls(TlsProblem::Redirected { to: authority(url), problem: Box::new(problem) })
        }
        other => other,
    }
}

/// Classifies an error of the HTTP client. Omits its URL, which may be signed.
pub(crate) fn explain(error: reqwest::Error, connect_timeout: Duration) -> FetchErrorKind {
    let error = error.without_url();
    if error.is_timeout() && error.is_connect() {
        return FetchErrorKind::Unreachable(format!(
            "{NO_CONNECTION} {}",
            super::fetch_notice::short(connect_timeout)
        ));
    }
    if let Some(problem) = TlsProblem::behind(&error) {
        return FetchErrorKind::Tls(problem);
    }
    let mut texts: Vec<String> = Vec::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<InternalAddress>() {
            return FetchErrorKind::BadReply(error.to_string());
        }
        let text = error.to_string();
        // Said by the "dns error" around it.
        let text = text.strip_prefix("failed to lookup address information: ").unwrap_or(&text).to_owned();
        // The outer errors only repeat the inner ones.
        texts.retain(|outer| {
            !outer.contains(&text) && !outer.starts_with("client error") && outer != "error resolving DNS"
        });
        texts.push(text);
        cause = error.source();
    }
    if texts.is_empty() {
        texts.push(error.to_string());
    }
    let text = texts.join(": ");
    // Before the first request, a reset is one of the handshake: the server has accepted the connection.
    let has_closed = |sign: &&str| text.contains(*sign);
    let in_handshake = error.is_connect() && ["Connection reset", "Broken pipe"].iter().any(has_closed);
    let text = if in_handshake || text.contains("tls handshake eof") { HANDSHAKE_CLOSED } else { &text };
    FetchErrorKind::Unreachable(printable(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_referer_has_no_user_and_no_signature_and_is_not_sent_without_tls() {
        for (from, to, redirected, referer) in [
            (
                "https://reg.example/v2/a/blobs/x?ns=b",
                "https://cdn.example/x",
                false,
                Some("https://reg.example/v2/a/blobs/x?ns=b"),
            ),
            ("https://u:p@reg.example/v2/", "https://cdn.example/x", false, Some("https://reg.example/v2/")),
            ("https://cdn.example/x?sig=y", "https://other.example/x", true, Some("https://cdn.example/x")),
            ("http://reg.example/v2/", "http://cdn.example/x", false, Some("http://reg.example/v2/")),
            ("https://127.0.0.1/v2/", "http://127.0.0.1/x", false, None),
        ] {
            let [from, to] = [from, to].map(|url| Url::parse(url).unwrap());
            let sent = referer_of(&from, &to, redirected);
            assert_eq!(sent.as_ref().and_then(|value| value.to_str().ok()), referer, "{from}");
        }
    }
}
