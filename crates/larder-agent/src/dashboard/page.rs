//! The page: one document with its style and script, and the headers that let the browser run nothing else.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use larder::reference::Digest;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Response, StatusCode, header};

use crate::serve::responses::{page, text};

const HTML: &str = include_str!("assets/page.html");
const STYLE: &str = include_str!("assets/page.css");
const SCRIPT: &str = concat!(
    include_str!("assets/elements.js"),
    include_str!("assets/pictures.js"),
    include_str!("assets/page.js")
);
/// Where the document has its style and script.
const STYLE_PLACE: &str = "/* style */";
const SCRIPT_PLACE: &str = "/* script */";

/// Policy for responses that are no page: a browser may load nothing from them.
const DATA_POLICY: &str = "default-src 'none'; frame-ancestors 'none'";

static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        source_of(SCRIPT),
        source_of(STYLE)
    );
    // Letters, digits and punctuation; a policy that forbids all is the fallback.
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static(DATA_POLICY))
});

/// A hash as a source of the policy: `sha256-…`.
fn source_of(content: &str) -> String {
    let digest = Digest::sha256(content);
    let digits = digest.to_string();
    let digits = digits.trim_start_matches("sha256:");
    let byte = |at: usize| digits.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let bytes: Vec<u8> = (0..digits.len()).step_by(2).filter_map(byte).collect();
    format!("sha256-{}", BASE64_STANDARD.encode(bytes))
}

/// The document.
pub(super) fn document() -> Response<Body> {
    let html = HTML.replacen(STYLE_PLACE, STYLE, 1).replacen(SCRIPT_PLACE, SCRIPT, 1);
    let mut response = page(StatusCode::OK, html, HeaderValue::from_static("text/html; charset=utf-8"));
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY.clone());
    response
}

/// Where the document is.
pub(super) fn redirect() -> Response<Body> {
    let mut response = text(StatusCode::FOUND, "the dashboard is /dashboard/\n");
    super::set(response.headers_mut(), header::LOCATION, "/dashboard/");
    response
}

/// Adds the headers that all responses have.
pub(super) fn protect(headers: &mut HeaderMap) {
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(DATA_POLICY));
    super::set(headers, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    super::set(headers, header::X_FRAME_OPTIONS, "DENY");
    super::set(headers, header::REFERRER_POLICY, "no-referrer");
    super::set(headers, header::CACHE_CONTROL, "no-store");
    let policy = header::HeaderName::from_static("cross-origin-resource-policy");
    super::set(headers, policy, "same-origin");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_source_is_the_one_that_browsers_compute() {
        // The example of the specification of CSP.
        let source = source_of("alert('Hello, world.');");
        assert_eq!(source, "sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng=");
    }

    #[test]
    fn the_document_has_one_style_and_one_script_and_names_no_other_source() {
        let html = HTML.replacen(STYLE_PLACE, STYLE, 1).replacen(SCRIPT_PLACE, SCRIPT, 1);
        for (text, count) in [
            ("<script>", 1),
            ("</script", 1),
            ("<style>", 1),
            ("</style", 1),
            ("://", 1), // the name of the namespace of SVG
            ("http://www.w3.org/2000/svg", 1),
            (" style=", 0),
            ("innerHTML", 0),
            ("insertAdjacentHTML", 0),
            ("document.write", 0),
            ("eval(", 0),
        ] {
            assert_eq!(html.matches(text).count(), count, "{text:?}");
        }
        let after = html.split(" on").skip(1);
        let names = after.filter_map(|rest| rest.split_once(|c: char| !c.is_ascii_lowercase()));
        for (name, _) in names {
            assert!(!html.contains(&format!(" on{name}=")), "a handler in HTML: on{name}");
        }
        assert!(html.contains(&format!("<style>{STYLE}</style>")));
        assert!(html.contains(&format!("<script>{SCRIPT}</script>")));
    }
}
