//! Digests: an algorithm and the hash it gave, `sha256:9f86…`.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256, Sha384, Sha512};

/// A digest whose algorithm is known and whose hash has the right length, in lower-case hex.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// Why a text is no digest. The texts are kubelet's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// Not `algorithm:hex`, or not in lower case.
    #[error("invalid checksum digest format")]
    Format,
    /// Too few or too many digits for the algorithm.
    #[error("invalid checksum digest length")]
    Length,
    /// Not sha256, sha384 or sha512.
    #[error("unsupported digest algorithm")]
    Algorithm,
}

impl Digest {
    /// Accepts sha256, sha384 and sha512 with all their digits in lower case.
    pub fn parse(text: &str) -> Result<Self, DigestError> {
        let (algorithm, hex) = text.split_once(':').ok_or(DigestError::Format)?;
        let digits = match algorithm {
            "sha256" => 64,
            "sha384" => 96,
            "sha512" => 128,
            other if is_algorithm_name(other) && is_encoded(hex) => return Err(DigestError::Algorithm),
            _ => return Err(DigestError::Format),
        };
        if hex.is_empty() {
            return Err(DigestError::Format);
        }
        if hex.len() != digits {
            return Err(DigestError::Length);
        }
        if !hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(DigestError::Format);
        }
        Ok(Digest(text.to_owned()))
    }

    /// The SHA-256 digest of a content.
    pub fn sha256(content: impl AsRef<[u8]>) -> Self {
        let mut hasher = DigestHasher::sha256();
        hasher.update(content.as_ref());
        hasher.finish()
    }

    /// Returns the digest of a content, with the algorithm of this one, if it is another one.
    pub fn check(&self, content: &[u8]) -> Result<(), Digest> {
        let mut hasher = DigestHasher::like(self);
        hasher.update(content);
        let found = hasher.finish();
        if found == *self { Ok(()) } else { Err(found) }
    }

    fn of_hash(algorithm: &str, hash: &[u8]) -> Digest {
        Digest(hash.iter().fold(format!("{algorithm}:"), |mut text, byte| {
            let _ = write!(text, "{byte:02x}"); // writing to a string does not fail
            text
        }))
    }

    /// `sha256`, `sha384` or `sha512`.
    pub fn algorithm(&self) -> &str {
        self.0.split_once(':').map_or("", |(algorithm, _)| algorithm)
    }

    /// The hash in lower-case hex.
    pub fn hex(&self) -> &str {
        self.0.split_once(':').map_or("", |(_, hex)| hex)
    }

    /// The whole text, `algorithm:hex`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A digest being computed.
#[derive(Debug, Clone)]
pub enum DigestHasher {
    /// SHA-256.
    Sha256(Sha256),
    /// SHA-384.
    Sha384(Sha384),
    /// SHA-512.
    Sha512(Sha512),
}

impl DigestHasher {
    /// Computes a SHA-256 digest.
    pub fn sha256() -> DigestHasher {
        DigestHasher::Sha256(Sha256::new())
    }

    /// Computes a digest with the algorithm of this one.
    pub fn like(digest: &Digest) -> DigestHasher {
        match digest.algorithm() {
            "sha384" => DigestHasher::Sha384(Sha384::new()),
            "sha512" => DigestHasher::Sha512(Sha512::new()),
            _ => DigestHasher::sha256(),
        }
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            DigestHasher::Sha256(hasher) => hasher.update(bytes),
            DigestHasher::Sha384(hasher) => hasher.update(bytes),
            DigestHasher::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// The digest of all bytes.
    pub fn finish(self) -> Digest {
        match self {
            DigestHasher::Sha256(hasher) => Digest::of_hash("sha256", &hasher.finalize()),
            DigestHasher::Sha384(hasher) => Digest::of_hash("sha384", &hasher.finalize()),
            DigestHasher::Sha512(hasher) => Digest::of_hash("sha512", &hasher.finalize()),
        }
    }
}

/// Lower-case words and digits joined by `.`, `+`, `_` or `-`: a well-formed name, if an unknown one.
fn is_algorithm_name(text: &str) -> bool {
    text.split(['.', '+', '_', '-'])
        .all(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()))
}

fn is_encoded(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'=' | b'_' | b'-'))
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for Digest {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

/// For documents: the error quotes the text.
impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Digest::parse(&text).map_err(|error| format!("{error}: {text:?}"))
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        Digest::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_input_error_has_its_own_message() {
        for (text, error) in [
            ("", DigestError::Format),
            ("sha256", DigestError::Format),
            ("sha256:", DigestError::Format),
            (":abc", DigestError::Format),
            ("sha256:abc", DigestError::Length),
            ("md5:0123456789abcdef0123456789abcdef", DigestError::Algorithm),
            ("SHA256:0123456789abcdef0123456789abcdef", DigestError::Format),
            (&format!("sha256:{}", "A".repeat(64)), DigestError::Format),
            (&format!("sha512:{}", "a".repeat(64)), DigestError::Length),
        ] {
            assert_eq!(Digest::parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn the_digest_of_a_content_is_a_digest() {
        let empty = Digest::sha256("");
        let hex = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!((Digest::parse(empty.as_str()), empty.hex()), (Ok(empty.clone()), hex));
    }

    #[test]
    fn a_digest_knows_its_parts() {
        let digest = Digest::parse(&format!("sha384:{}", "b".repeat(96))).expect("a digest");
        assert_eq!((digest.algorithm(), digest.hex().len()), ("sha384", 96));
    }

    #[test]
    fn a_content_is_checked_with_each_algorithm() {
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
            let digest = Digest::parse(&format!("{algorithm}:{empty}")).expect("a digest");
            assert_eq!(digest.check(b""), Ok(()));
            assert_eq!(digest.check(b"x").unwrap_err().algorithm(), algorithm);
        }
    }
}
