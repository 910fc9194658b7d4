//! Why a text is no image name, in kubelet's words, and what to do about it.

use std::borrow::Cow;
use std::fmt;

use super::PLATFORM_MARK;
use super::digest::DigestError;
use crate::go_format;

/// Why a text is no image name. Prints as kubelet prints it; [`hint`](ReferenceError::hint) says what to change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferenceError {
    image: String,
    kind: ReferenceErrorKind,
    /// Whether the text starts with the image's name.
    named: bool,
}

/// Reason why an image name is invalid. The texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceErrorKind {
    /// There is no name at all.
    #[error("repository name must have at least one component")]
    Empty,
    /// It would be a name in lower case.
    #[error("repository name must be lowercase")]
    Uppercase,
    /// The repository, shown as the hub's rules complete it, has upper-case letters.
    #[error("invalid reference format: repository name ({0}) must be lowercase")]
    UppercaseRepository(String),
    /// It does not fit the grammar.
    #[error("invalid reference format")]
    Format,
    /// The path is longer than 255 characters.
    #[error("repository name must not be more than 255 characters")]
    TooLong,
    /// 64 hexadecimal digits alone are an image id, not a name.
    #[error("invalid repository name ({0}), cannot specify 64-byte hexadecimal strings")]
    LooksLikeId(String),
    /// The text after `@` is no digest.
    #[error(transparent)]
    Digest(#[from] DigestError),
}

impl ReferenceError {
    /// An error that prints its cause alone.
    pub(super) fn plain(image: &str, kind: ReferenceErrorKind) -> Self {
        ReferenceError { image: image.to_owned(), kind, named: false }
    }

    /// An error that prints as `couldn't parse image name "IMAGE": CAUSE`.
    pub(super) fn named(image: &str, kind: ReferenceErrorKind) -> Self {
        ReferenceError { image: image.to_owned(), kind, named: true }
    }

    /// Returns the reason why the name is invalid.
    pub fn kind(&self) -> &ReferenceErrorKind {
        &self.kind
    }

    /// Returns the change that the reader could make.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        Some(match &self.kind {
            ReferenceErrorKind::Empty => "enter an image name, such as busybox:1.36".into(),
            ReferenceErrorKind::Uppercase | ReferenceErrorKind::UppercaseRepository(_) => {
                "write the repository in lower case; only registry and tag may contain upper-case letters"
                    .into()
            }
            ReferenceErrorKind::Format => self.hint_about_format(),
            ReferenceErrorKind::TooLong => return None,
            ReferenceErrorKind::LooksLikeId(_) => "this is an image ID; use the image's name".into(),
            ReferenceErrorKind::Digest(DigestError::Algorithm) => {
                "use a sha256, sha384 or sha512 digest".into()
            }
            ReferenceErrorKind::Digest(_) => {
                "copy the complete digest in lower case: sha256 has 64 hexadecimal digits".into()
            }
        })
    }

    fn hint_about_format(&self) -> Cow<'static, str> {
        let image = self.image.as_str();
        if let Some((index, character)) =
            image.chars().enumerate().find(|(_, character)| !character.is_ascii())
        {
            let (place, code) = (index + 1, u32::from(character));
            return format!(
                "character {place} is {character:?} (U+{code:04X}), which may only look like a letter of an image name; type it again"
            )
            .into();
        }
        let hint = if image.is_empty() {
            "enter an image name, such as busybox:1.36"
        } else if image.contains("://") {
            "remove the scheme: use registry.example/app, not https://registry.example/app"
        } else if image.contains(char::is_whitespace) {
            "remove the whitespace"
        } else if image.ends_with(':') {
            "add a tag after the colon, or remove the colon"
        } else if image.contains(PLATFORM_MARK) {
            "expected [registry[:port]/]repository[:tag][@digest][#platform], such as busybox:1.36#linux/arm64"
        } else if image.contains('@') {
            "put the digest last: name@sha256:... with 64 hexadecimal digits"
        } else {
            "expected [registry[:port]/]repository[:tag][@digest]"
        };
        hint.into()
    }
}

impl fmt::Display for ReferenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.named {
            write!(f, "couldn't parse image name {}: ", go_format::quote(&self.image))?;
        }
        write!(f, "{}", self.kind)
    }
}

impl std::error::Error for ReferenceError {}
