//! The plain grammar of image names. One pass from left to right, no backtracking.
//!
//! ```text
//! reference = [domain "/"] path [":" tag] ["@" digest]
//! ```
//!
//! The first part is the domain whenever it can be one; otherwise everything is path.

use super::error::ReferenceErrorKind;

/// Longest path in characters, the domain not counted.
const MAX_PATH: usize = 255;
/// Longest tag in characters.
const MAX_TAG: usize = 128;
/// Fewest hexadecimal digits of a digest.
const MIN_DIGEST_HEX: usize = 32;

/// A name cut at its joints. Empty parts do not occur; a missing domain leaves `name` equal to `path`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NameParts<'a> {
    pub(super) name: &'a str,
    pub(super) path: &'a str,
    pub(super) tag: Option<&'a str>,
    /// Fits the grammar; whether the algorithm is known and the length right is for
    /// [`Digest::parse`](super::Digest::parse) to say.
    pub(super) digest: Option<&'a str>,
}

pub(super) fn parse(text: &str) -> Result<NameParts<'_>, ReferenceErrorKind> {
    let Some(parts) = split(text) else {
        return Err(match text {
            "" => ReferenceErrorKind::Empty,
            text if split(&lower_case(text)).is_some() => ReferenceErrorKind::Uppercase,
            _ => ReferenceErrorKind::Format,
        });
    };
    if parts.path.len() > MAX_PATH {
        return Err(ReferenceErrorKind::TooLong);
    }
    Ok(parts)
}

/// The text in lower case, character by character as Go does it: no character grows into two.
pub(super) fn lower_case(text: &str) -> String {
    text.chars().map(|c| c.to_lowercase().next().unwrap_or(c)).collect()
}

fn split(text: &str) -> Option<NameParts<'_>> {
    let path_at = match text.split_once('/') {
        Some((first, _)) if is_domain(first) => first.len() + 1,
        _ => 0,
    };
    let rest = &text[path_at..];
    let path_end = rest.find([':', '@']).unwrap_or(rest.len());
    let (name, path) = (&text[..path_at + path_end], &rest[..path_end]);
    let (tag, digest) = match rest[path_end..].split_once('@') {
        Some((tag, digest)) => (tag, Some(digest)),
        None => (&rest[path_end..], None),
    };
    let tag = match tag {
        "" => None,
        tag => Some(tag.strip_prefix(':')?),
    };
    let fits = path.split('/').all(is_path_part) && tag.is_none_or(is_tag) && digest.is_none_or(is_digest);
    fits.then_some(NameParts { name, path, tag, digest })
}

/// Whether a text can stand before the first slash as a registry: host labels or a bracketed address, and a port.
pub(crate) fn is_domain(text: &str) -> bool {
    if let Some(inside) = text.strip_prefix('[') {
        return inside.split_once(']').is_some_and(|(address, port)| is_address(address) && is_port(port));
    }
    let host_end = text.find(':').unwrap_or(text.len());
    text[..host_end].split('.').all(is_label) && is_port(&text[host_end..])
}

/// Nothing, or a colon and at least one digit.
fn is_port(text: &str) -> bool {
    match text.strip_prefix(':') {
        Some(digits) => !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()),
        None => text.is_empty(),
    }
}

fn is_address(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b':')
}

fn is_label(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Runs of `a-z0-9` joined by `.`, `_`, `__` or any number of `-`.
fn is_path_part(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    // Two neighbouring word characters have an empty join between them.
    let mut joins = text.split(is_word);
    text.starts_with(is_word)
        && text.ends_with(is_word)
        && joins.all(|join| matches!(join, "." | "_" | "__") || join.bytes().all(|b| b == b'-'))
}

fn is_tag(text: &str) -> bool {
    text.len() <= MAX_TAG
        && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn is_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else {
        return false;
    };
    let mut words = algorithm.split(['-', '_', '+', '.']);
    words.all(|word| {
        word.bytes().next().is_some_and(|b| b.is_ascii_alphabetic())
            && word.bytes().all(|b| b.is_ascii_alphanumeric())
    }) && hex.len() >= MIN_DIGEST_HEX
        && hex.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_part_that_is_no_domain_is_path() {
        let parts = parse("my_reg/app:v1").expect("a path of two parts");
        assert_eq!((parts.name, parts.path), ("my_reg/app", "my_reg/app"));
        let parts = parse("my-reg/app:v1").expect("a domain and a path");
        assert_eq!((parts.name, parts.path), ("my-reg/app", "app"));
    }

    #[test]
    fn a_digest_alone_reads_as_a_name_with_a_tag() {
        let text = format!("sha256:{}", "a".repeat(64));
        let parts = parse(&text).expect("a name");
        assert_eq!((parts.path, parts.tag), ("sha256", Some(&text[7..])));
    }

    #[test]
    fn separators_stand_between_words_only() {
        for good in ["a", "a.b", "a_b", "a__b", "a-b", "a----b", "0"] {
            assert!(is_path_part(good), "{good}");
        }
        for bad in ["", ".a", "a.", "a..b", "a___b", "a.-b", "-a", "a-", "aB", "é", "a é b", "_", "--"] {
            assert!(!is_path_part(bad), "{bad}");
        }
    }

    #[test]
    fn domains_are_labels_or_bracketed_addresses() {
        for good in ["localhost", "A.b", "a:5000", "1.2.3.4", "[2001:db8::1]", "[::1]:5000"] {
            assert!(is_domain(good), "{good}");
        }
        for bad in
            ["", "a_b", "-a", "a-", "a..b", ".a", "a:", "a:b", "a:1:2", "[]", "[::1", "[::1]5", "[g]", "é"]
        {
            assert!(!is_domain(bad), "{bad}");
        }
    }

    #[test]
    fn an_upper_case_name_is_distinguished_from_a_broken_one() {
        assert_eq!(parse("reg/App"), Err(ReferenceErrorKind::Uppercase));
        // Lower case of the Kelvin sign and of the dotted capital I is ASCII, as it is in Go.
        assert_eq!(parse("\u{212a}\u{130}"), Err(ReferenceErrorKind::Uppercase));
        assert_eq!(parse("reg/App!"), Err(ReferenceErrorKind::Format));
    }
}
