//! Authentication, and the token server at `/token`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::http::{PlannedResponse, RequestHead};

/// The authentication that a registry requires.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum FaultRegistryAuth {
    /// Nothing.
    #[default]
    None,
    /// A user and password, by HTTP basic authentication.
    Basic {
        /// The user.
        user: String,
        /// The password.
        password: String,
    },
    /// A token of its own token server.
    Token {
        /// Where clients are sent for tokens; empty is its own `/token`.
        realm: String,
        /// The user and password, or the identity token (`("", token)`), that tokens require; `None` issues them to
        /// every client.
        login: Option<(String, String)>,
        /// `expires_in` of each token, in seconds.
        expires_in: u64,
    },
    /// This token, which the registry did not issue itself.
    Fixed(String),
}

#[derive(Debug, Default)]
pub(super) struct IssuedTokens {
    auth: FaultRegistryAuth,
    given: usize,
    /// Tokens up to this number are not accepted.
    expired: usize,
}

impl IssuedTokens {
    pub(super) fn require(&mut self, auth: FaultRegistryAuth) {
        self.auth = auth;
    }

    pub(super) fn expire(&mut self) {
        self.expired = self.given;
    }

    /// The response to an unauthenticated request.
    pub(super) fn check(&self, head: &RequestHead, own: &str) -> Option<PlannedResponse> {
        let shown = head.field("authorization").unwrap_or_default();
        let (good, challenge) = match &self.auth {
            FaultRegistryAuth::None => return None,
            FaultRegistryAuth::Basic { user, password } => {
                (shown == basic(user, password), "Basic realm=\"test\"".to_owned())
            }
            FaultRegistryAuth::Fixed(token) => {
                (shown == format!("Bearer {token}"), "Bearer realm=\"http://127.0.0.1:1/\"".into())
            }
            FaultRegistryAuth::Token { realm, .. } => {
                let number =
                    shown.strip_prefix("Bearer token-").and_then(|number| number.parse::<usize>().ok());
                let good = number.is_some_and(|number| number > self.expired && number <= self.given);
                let realm = if realm.is_empty() { format!("http://{own}/token") } else { realm.clone() };
                let scope = format!("repository:{}:pull", head.repository().unwrap_or("none"));
                (good, format!("Bearer realm=\"{realm}\",service=\"fault,registry\",scope=\"{scope}\""))
            }
        };
        if good {
            return None;
        }
        let body =
            json!({"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}).to_string();
        Some(PlannedResponse::new(401, body.into_bytes()).with("WWW-Authenticate", challenge))
    }

    /// The token server.
    pub(super) fn token(&mut self, head: &RequestHead, body: &str) -> PlannedResponse {
        let FaultRegistryAuth::Token { login, expires_in, .. } = &self.auth else {
            return PlannedResponse::new(404, Vec::new());
        };
        let good = match login {
            None => true,
            Some((user, token)) if user.is_empty() => {
                head.method == "POST"
                    && body.split('&').any(|field| field == "grant_type=refresh_token")
                    && body.split('&').any(|field| field == format!("refresh_token={token}"))
            }
            Some((user, password)) => head.field("authorization") == Some(basic(user, password).as_str()),
        };
        if !good {
            return PlannedResponse::new(401, br#"{"details":"incorrect username or password"}"#.to_vec());
        }
        self.given += 1;
        let token = format!("token-{}", self.given);
        PlannedResponse::new(200, json!({"token": token, "expires_in": expires_in}).to_string().into_bytes())
    }
}

fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}
