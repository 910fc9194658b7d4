//! Digests of small documents in memory.

use std::fmt::Write as _;

use larder::reference::Digest;
use sha2::{Digest as _, Sha256, Sha384, Sha512};

use super::error::FetchErrorKind;

/// The digest of a content with one of the algorithms that references may use.
fn digest(algorithm: &str, content: &[u8]) -> String {
    let hash = match algorithm {
        "sha384" => Sha384::digest(content).to_vec(),
        "sha512" => Sha512::digest(content).to_vec(),
        _ => Sha256::digest(content).to_vec(),
    };
    hash.iter().fold(format!("{algorithm}:"), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Checks that a content matches its digest.
pub(crate) fn check(expected: &Digest, content: &[u8]) -> Result<(), FetchErrorKind> {
    match digest(expected.algorithm(), content) {
        got if got == expected.as_str() => Ok(()),
        got => Err(FetchErrorKind::DigestMismatch { expected: expected.clone(), got }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_of_references_is_checked() {
        for (algorithm, empty) in [
            ("sha256", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (
                "sha384",
                "38b060a751ac96384cd9327eb1b1e36a21fdb71114be07434c0cc7bf63f6e1da274edebfe76f65fbd51ad2f14898b95b",
            ),
            (
                "sha512",
                "cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce47d0d13c5d85f2b0ff8318d2877eec2f63b931bd47417a81a538327af927da3e",
            ),
        ] {
            let digest = Digest::parse(&format!("{algorithm}:{empty}")).unwrap();
            check(&digest, b"").unwrap();
            assert!(matches!(check(&digest, b"x"), Err(FetchErrorKind::DigestMismatch { .. })));
        }
    }
}
