//! Token requests. Building a request and parsing its response are pure; `auth` sends it.

use std::time::Duration;

use larder::credentials::{Credential, Secret, encode_auth};
use reqwest::header::HeaderValue;
use reqwest::{Method, Url};
use serde::Deserialize;

use super::challenge::AuthChallenge;
use super::hosts::is_loopback;

/// Largest response of a token server, in bytes. Tokens of large registries take a few KiB.
pub(crate) const MAX_REPLY: usize = 64 * 1024;

/// Life of a token whose response has none.
const DEFAULT_LIFE: Duration = Duration::from_secs(60);

/// A request for a token.
#[derive(Debug)]
pub(crate) struct TokenHttpRequest {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) authorization: Option<HeaderValue>,
    /// A form body. It contains the identity token.
    pub(crate) body: Option<Secret>,
}

/// A token and its life.
#[derive(Debug)]
pub(crate) struct BearerToken {
    pub(crate) value: Secret,
    pub(crate) life: Duration,
}

/// The request that a challenge demands, by a client with `credential` that reads `repository` at `registry`.
///
/// The error says why the challenge cannot be answered.
pub(crate) fn request(
    challenge: &AuthChallenge,
    registry: &Url,
    repository: &str,
    credential: Option<&Credential>,
) -> Result<TokenHttpRequest, String> {
    let realm = challenge.param("realm").ok_or("bearer challenge without realm")?;
    let mut url = Url::parse(realm).map_err(|_| "bearer challenge: realm is not a URL".to_owned())?;
    if !may_hold_tokens(&url, registry) {
        return Err("bearer challenge: realm is not https".into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("bearer challenge: realm contains credentials".into());
    }
    let service = challenge.param("service");
    // Without a repository, it is a login only.
    let default_scope = match repository {
        "" => String::new(),
        repository => format!("repository:{repository}:pull"),
    };
    let scope = scope_with_own(challenge.param("scope").unwrap_or_default(), repository, &default_scope);
    let scope = scope.as_str();

    if let Some(credential) = credential.filter(|credential| !credential.identity_token.is_empty()) {
        let body = Some(refresh_form(&credential.identity_token, scope, service));
        return Ok(TokenHttpRequest { method: Method::POST, url, authorization: None, body });
    }
    {
        let mut query = url.query_pairs_mut();
        if let Some(service) = service {
            query.append_pair("service", service);
        }
        // Several scopes are separated by spaces and requested one by one.
        for scope in scope.split(' ').filter(|scope| !scope.is_empty()) {
            query.append_pair("scope", scope);
        }
    }
    let authorization = credential.and_then(basic);
    Ok(TokenHttpRequest { method: Method::GET, url, authorization, body: None })
}

/// The scope of a challenge, and the repository's own if it is another one: some registries have a placeholder there,
/// such as `repository:user/image:pull`, and a token for it opens nothing.
fn scope_with_own(challenge: &str, repository: &str, own: &str) -> String {
    let resource = format!("repository:{repository}:");
    let has_own = repository.is_empty() || challenge.split(' ').any(|scope| scope.starts_with(&resource));
    match (challenge, has_own) {
        ("", _) => own.to_owned(),
        (challenge, true) => challenge.to_owned(),
        (challenge, false) => format!("{challenge} {own}"),
    }
}

/// The form that exchanges an identity token for a bearer token.
fn refresh_form(identity_token: &Secret, scope: &str, service: Option<&str>) -> Secret {
    let mut form = form_urlencoded(&[
        ("grant_type", "refresh_token"),
        ("client_id", "larder"),
        ("refresh_token", identity_token.reveal()),
    ]);
    if !scope.is_empty() {
        form = format!("{form}&{}", form_urlencoded(&[("scope", scope)]));
    }
    if let Some(service) = service {
        form = format!("{form}&{}", form_urlencoded(&[("service", service)]));
    }
    Secret::new(form)
}

/// Tokens and passwords are sent over TLS only, unless registry and token server are both on this machine, or the
/// operator chose plain HTTP for this very host.
fn may_hold_tokens(realm: &Url, registry: &Url) -> bool {
    match realm.scheme() {
        "https" => true,
        "http" => {
            (is_loopback(realm) && is_loopback(registry))
                || (registry.scheme() == "http"
                    && (is_loopback(realm) || realm.host_str() == registry.host_str()))
        }
        _ => false,
    }
}

/// `Authorization: Basic ...`, if the credential has a user name or a password.
pub(crate) fn basic(credential: &Credential) -> Option<HeaderValue> {
    if credential.username.is_empty() && credential.password.is_empty() {
        return None;
    }
    let encoded = encode_auth(&credential.username, &credential.password);
    sensitive(&format!("Basic {}", encoded.reveal()))
}

/// `Authorization: Bearer ...`; `None` if the token is not a valid header value.
pub(crate) fn bearer(token: &Secret) -> Option<HeaderValue> {
    sensitive(&format!("Bearer {}", token.reveal()))
}

fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn form_urlencoded(fields: &[(&str, &str)]) -> String {
    // The query of a URL has the format of such a form.
    let mut url = Url::parse("http://form/").ok();
    if let Some(url) = &mut url {
        url.query_pairs_mut().extend_pairs(fields);
    }
    url.and_then(|url| url.query().map(str::to_owned)).unwrap_or_default()
}

#[derive(Deserialize)]
struct TokenResponse {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
    #[serde(default)]
    expires_in: Option<f64>,
}

/// Parses a token server's response. The life counts from now: the server's clock may differ.
pub(crate) fn read_reply(body: &[u8]) -> Result<BearerToken, String> {
    let unreadable = || "token server's response contains no token".to_owned();
    let reply: TokenResponse = serde_json::from_slice(body).map_err(|_| unreadable())?;
    let value = [reply.token, reply.access_token].into_iter().flatten().find(|token| !token.is_empty());
    let life = match reply.expires_in {
        Some(seconds) if seconds > 0.0 => {
            Duration::try_from_secs_f64(seconds.min(1e6)).unwrap_or(DEFAULT_LIFE)
        }
        _ => DEFAULT_LIFE,
    };
    Ok(BearerToken { value: Secret::new(value.ok_or_else(unreadable)?), life })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::challenge;

    fn asked(
        header: &str,
        registry: &str,
        credential: Option<&Credential>,
    ) -> Result<TokenHttpRequest, String> {
        let registry = Url::parse(registry).unwrap();
        request(&challenge::parse(header)[0], &registry, "team/app", credential)
    }

    const HEADER: &str = r#"Bearer realm="https://auth.example/token?a=b",service="reg, one",scope="repository:team/app:pull""#;

    fn login(username: &str, password: &str) -> Credential {
        Credential { username: username.into(), password: Secret::new(password), ..Credential::default() }
    }

    #[test]
    fn a_token_is_asked_for_by_service_and_scope() {
        let request = asked(HEADER, "https://reg.example/v2", None).unwrap();
        assert_eq!(request.method, Method::GET);
        assert_eq!(
            request.url.as_str(),
            "https://auth.example/token?a=b&service=reg%2C+one&scope=repository%3Ateam%2Fapp%3Apull"
        );
        assert!(request.authorization.is_none());

        let no_scope =
            asked("Bearer realm=\"https://auth.example/\"", "https://reg.example/v2", None).unwrap();
        assert_eq!(no_scope.url.query(), Some("scope=repository%3Ateam%2Fapp%3Apull"));
    }

    #[test]
    fn a_placeholder_scope_does_not_replace_that_of_the_repository() {
        for (scope, sent) in [
            (
                "repository:user/image:pull",
                "scope=repository%3Auser%2Fimage%3Apull&scope=repository%3Ateam%2Fapp%3Apull",
            ),
            ("repository:team/app:pull,push", "scope=repository%3Ateam%2Fapp%3Apull%2Cpush"),
            ("", "scope=repository%3Ateam%2Fapp%3Apull"),
        ] {
            let header = format!("Bearer realm=\"https://auth.example/\",scope=\"{scope}\"");
            let request = asked(&header, "https://reg.example/v2", None).unwrap();
            assert_eq!(request.url.query(), Some(sent));
        }
        let challenge =
            &challenge::parse("Bearer realm=\"https://auth.example/\",scope=\"registry:catalog:*\"")[0];
        let login = request(challenge, &Url::parse("https://reg.example/v2").unwrap(), "", None).unwrap();
        assert_eq!(login.url.query(), Some("scope=registry%3Acatalog%3A*"));
    }

    #[test]
    fn a_password_is_sent_as_basic_and_an_identity_token_as_a_form() {
        let request = asked(HEADER, "https://reg.example/v2", Some(&login("u", "p"))).unwrap();
        assert_eq!(request.authorization.unwrap(), "Basic dTpw");

        let identity = Credential { identity_token: Secret::new("id&1"), ..login("u", "p") };
        let request = asked(HEADER, "https://reg.example/v2", Some(&identity)).unwrap();
        assert_eq!(request.method, Method::POST);
        assert!(request.authorization.is_none());
        let body = request.body.unwrap();
        assert!(body.reveal().contains("grant_type=refresh_token"), "{}", body.reveal());
        assert!(body.reveal().contains("&refresh_token=id%261"), "{}", body.reveal());
        assert!(body.reveal().contains("&service=reg%2C+one"), "{}", body.reveal());
    }

    #[test]
    fn nothing_is_sent_to_a_token_server_that_others_could_listen_to() {
        for (realm, registry, good) in [
            ("https://auth.example/t", "https://reg.example/v2", true),
            ("http://auth.example/t", "https://reg.example/v2", false),
            ("http://auth.example/t", "http://reg.example/v2", false),
            ("http://reg.example:5001/t", "http://reg.example:5000/v2", true),
            ("http://127.0.0.1:5001/t", "http://127.0.0.1:5000/v2", true),
            ("http://127.0.0.1:5001/t", "https://reg.example/v2", false),
            ("file:///etc/passwd", "https://reg.example/v2", false),
            ("https://u:p@auth.example/t", "https://reg.example/v2", false),
            ("no url", "https://reg.example/v2", false),
        ] {
            let request = asked(&format!("Bearer realm=\"{realm}\""), registry, None);
            assert_eq!(request.is_ok(), good, "{realm} for {registry}");
        }
        assert!(asked("Bearer service=x", "https://reg.example/v2", None).is_err());
    }

    #[test]
    fn both_spellings_of_a_token_are_read_and_its_life_is_bounded() {
        for (body, token, seconds) in [
            (r#"{"token":"a"}"#, "a", 60),
            (r#"{"access_token":"b","expires_in":300}"#, "b", 300),
            (r#"{"token":"","access_token":"c","expires_in":-1}"#, "c", 60),
            (r#"{"token":"d","expires_in":1e300}"#, "d", 1_000_000),
        ] {
            let read = read_reply(body.as_bytes()).unwrap();
            assert_eq!((read.value.reveal(), read.life.as_secs()), (token, seconds), "{body}");
        }
        for body in ["", "{}", r#"{"token":null}"#, "[]", r#"{"token":5}"#] {
            assert!(read_reply(body.as_bytes()).is_err(), "{body}");
        }
    }
}
