//! The hub's rules: which part of a short name is a registry, and what a name without one means.

use super::error::ReferenceErrorKind;
use super::grammar::lower_case;

/// The registry of names without one.
pub(super) const HUB: &str = "docker.io";
/// The prefix of one-part names on the hub.
pub(super) const OFFICIAL: &str = "library/";
const LEGACY_HUB: &str = "index.docker.io";

/// Writes out what a name leaves implied, tag and digest untouched: `app:1` is `docker.io/library/app:1`.
/// The result is still to be checked against the plain grammar.
pub(super) fn qualify(image: &str) -> Result<String, ReferenceErrorKind> {
    if image.len() == 64 && image.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(ReferenceErrorKind::LooksLikeId(image.to_owned()));
    }
    let (registry, rest) = split_registry(image);
    let prefix = if registry == HUB && !rest.contains('/') { OFFICIAL } else { "" };
    let name_end = rest.find(':').unwrap_or(rest.len());
    if lower_case(&rest[..name_end]) != rest[..name_end] {
        return Err(ReferenceErrorKind::UppercaseRepository(format!("{prefix}{}", &rest[..name_end])));
    }
    Ok(format!("{registry}/{prefix}{rest}"))
}

fn split_registry(image: &str) -> (&str, &str) {
    match image.split_once('/') {
        Some((LEGACY_HUB, rest)) => (HUB, rest),
        Some((first, rest))
            if first == "localhost" || first.contains(['.', ':']) || lower_case(first) != first =>
        {
            (first, rest)
        }
        _ => (HUB, image),
    }
}
