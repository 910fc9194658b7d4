//! Texts of runtimes and registries without the secrets of URLs: they go into objects that many users of a cluster may
//! read.

use std::borrow::Cow;

/// Placeholder for a secret.
const HIDDEN: &str = "****";

/// The text without user names, passwords and queries of URLs: a signed URL of a blob is a credential.
pub(super) fn without_url_secrets(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        clean.push_str(before);
        let ends_url = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '<' | '>');
        let (url, next) = after.split_at(after.find(ends_url).unwrap_or(after.len()));
        clean.push_str(&without_secrets(url));
        rest = next;
    }
    clean.push_str(rest);
    clean
}

/// Returns the rest of a URL after its scheme, without user and query. The `@` of a digest ends no user.
fn without_secrets(url: &str) -> Cow<'_, str> {
    let is_digest = |rest: &str| rest.starts_with("sha256:") || rest.starts_with("sha512:");
    let (place, query) = match url.split_once('?') {
        // A password with `?`, which no URL should have.
        Some((place, query)) if !place.contains('/') && query.contains('@') => ("", Some(query)),
        Some((place, query)) => (place, Some(query)),
        None => (url, None),
    };
    let user_end = place.match_indices('@').map(|(at, _)| at).rfind(|at| !is_digest(&place[at + 1..]));
    match (user_end, query) {
        (None, None) => Cow::Borrowed(url),
        (None, Some(_)) => Cow::Owned(format!("{place}?{HIDDEN}")),
        (Some(at), None) => Cow::Owned(format!("{HIDDEN}{}", &place[at..])),
        (Some(at), Some(_)) => Cow::Owned(format!("{HIDDEN}{}?{HIDDEN}", &place[at..])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_queries_of_urls_are_hidden_and_the_place_remains() {
        let cases = [
            (
                "Get \"https://b.example/blobs/ab?X-Amz-Signature=k3y&X-Amz-Date=1\": 403 Forbidden",
                "Get \"https://b.example/blobs/ab?****\": 403 Forbidden",
            ),
            ("https://bob:k3y@r.example/v2/a@sha256:0?x=1@2", "https://****@r.example/v2/a@sha256:0?****"),
            (
                "proxy http://bob:k3/y@proxy:3128, http://proxy:1/",
                "proxy http://****@proxy:3128, http://proxy:1/",
            ),
            ("https://bob:k?3y@r.example/v2/", "https://?****"),
            (
                "r.example/a@sha256:0: not found: https://r.example/v2/",
                "r.example/a@sha256:0: not found: https://r.example/v2/",
            ),
            ("why?", "why?"),
        ];
        for (text, clean) in cases {
            assert_eq!(without_url_secrets(text), clean);
        }
    }
}
