//! Image names: parse, normalise, default tag, digest, registry.
//!
//! Two grammars are in use, on purpose. Credentials and splitting work on the *normalised* name
//! ([`Reference::parse`], [`ImageName::reference`]): `busybox` is `docker.io/library/busybox`. What is sent to the
//! runtime ([`apply_default_tag`]) and what pull records are keyed by ([`trim_tag_and_digest`]) stays the text that
//! the user wrote.
//!
//! Promises: no input panics; time and memory grow at most linearly with the length of the input; error texts are
//! kubelet's, word for word.

mod digest;
mod error;
mod grammar;
mod name;
mod normalize;
#[cfg(test)]
mod properties;

use std::fmt;
use std::str::FromStr;

pub use digest::{Digest, DigestError, DigestHasher};
pub use error::{ReferenceError, ReferenceErrorKind};
pub(crate) use grammar::is_domain;
pub use name::{ImageId, ImageName, LayerId};

/// The tag that stands for a missing one.
pub const DEFAULT_TAG: &str = "latest";

/// A normalised image name: `registry/path[:tag][@digest]`, with the hub's rules applied.
///
/// Prints in full: `docker.io/library/busybox:1.36`. [`familiar`](Reference::familiar) is the short form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference {
    name: String,
    /// Where the path starts in `name`, after the slash.
    path_at: usize,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    /// Parses any name that a pod may carry, and normalises it: `busybox` is `docker.io/library/busybox`.
    pub fn parse(image: &str) -> Result<Self, ReferenceError> {
        Self::parse_kind(image).map_err(|kind| ReferenceError::plain(image, kind))
    }

    fn parse_kind(image: &str) -> Result<Self, ReferenceErrorKind> {
        let full = normalize::qualify(image)?;
        let parts = grammar::parse(&full)?;
        let digest = parts.digest.map(Digest::parse).transpose()?;
        let (name, tag) = (parts.name.to_owned(), parts.tag.map(str::to_owned));
        Ok(Reference { path_at: name.len() - parts.path.len(), name, tag, digest })
    }

    /// The full name without tag and digest, `docker.io/library/busybox`: the key of credential lookup.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The registry with its port, if any: `docker.io`, `registry.example:5000`.
    pub fn registry(&self) -> &str {
        &self.name[..self.path_at.saturating_sub(1)]
    }

    /// The name below the registry: `library/busybox`.
    pub fn path(&self) -> &str {
        &self.name[self.path_at..]
    }

    /// The tag as written; `None` where there is none, also without a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The tag; `latest` where there is neither tag nor digest.
    pub fn tag_or_default(&self) -> Option<&str> {
        match (&self.tag, &self.digest) {
            (None, None) => Some(DEFAULT_TAG),
            (tag, _) => tag.as_deref(),
        }
    }

    /// The digest as written.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// The name as docker prints it, without tag and digest: `docker.io/` and `library/` are left out.
    ///
    /// Where the short form would mean another image (`docker.io/localhost/app`), the full one is kept.
    pub fn familiar(&self) -> &str {
        let short = match (self.registry(), self.path()) {
            (normalize::HUB, path) => match path.strip_prefix(normalize::OFFICIAL) {
                Some(official) if !official.contains('/') => official,
                _ => path,
            },
            _ => return self.name(),
        };
        let means_the_same = Reference::parse_kind(short).is_ok_and(|parsed| parsed.name == self.name);
        if means_the_same { short } else { self.name() }
    }
}

/// `name[:tag][@digest]`, in full.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(image: &str) -> Result<Self, ReferenceError> {
        Reference::parse(image)
    }
}

/// The name as it is sent to the runtime: the input, with `:latest` appended if it has neither tag nor digest. It is
/// never qualified or rewritten. Fails when [`ImageName::reference`] does, with the same text.
pub fn apply_default_tag(image: &str) -> Result<String, ReferenceError> {
    ImageName::from(image).with_default_tag().map(String::from)
}

/// The input without its tag and digest, by the plain grammar: not qualified, so `ubuntu` and
/// `docker.io/library/ubuntu` stay two different keys. Pull records and allowlists are keyed by it.
pub fn trim_tag_and_digest(image: &str) -> Result<&str, ReferenceError> {
    let parts = grammar::parse(image).map_err(|kind| ReferenceError::plain(image, kind))?;
    let digest = parts.digest.map(Digest::parse).transpose();
    digest.map_err(|error| ReferenceError::plain(image, error.into()))?;
    Ok(parts.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(image: &str) -> Reference {
        Reference::parse(image).expect(image)
    }

    #[test]
    fn the_registry_is_what_stands_before_the_path() {
        let image = parsed("reg.example:5000/team/app:v1");
        assert_eq!((image.registry(), image.path()), ("reg.example:5000", "team/app"));
        assert_eq!(parsed("busybox").registry(), "docker.io");
    }

    #[test]
    fn familiar_names_leave_out_the_hub() {
        for (image, familiar) in [
            ("docker.io/library/busybox:1", "busybox"),
            ("index.docker.io/team/app", "team/app"),
            ("docker.io/library/a/b", "library/a/b"),
            ("registry.example/app", "registry.example/app"),
        ] {
            assert_eq!(parsed(image).familiar(), familiar);
        }
    }

    #[test]
    fn a_familiar_name_never_means_another_image() {
        let hex = "ab".repeat(32);
        for image in
            ["docker.io/localhost/app", "docker.io/reg.example/app", &format!("docker.io/library/{hex}")]
        {
            assert_eq!(parsed(image).familiar(), image);
        }
    }

    #[test]
    fn errors_suggest_what_to_change() {
        for (image, word) in [
            ("https://reg.example/app", "scheme"),
            ("busybox ", "whitespace"),
            ("", "enter an image name"),
            ("Reg/App", "lower case"),
            ("app@sha256:abcd", "digest"),
            ("app:", "after the colon"),
        ] {
            let hint = apply_default_tag(image).expect_err(image).hint().expect(image);
            assert!(hint.contains(word), "{image}: {hint}");
        }
    }

    #[test]
    fn a_very_long_input_is_refused_without_delay() {
        for part in ["a", "a/", "a.", "a:", "-", "a@", "[", "A-"] {
            assert!(apply_default_tag(&part.repeat(1 << 18)).is_err(), "{part}");
        }
    }
}
