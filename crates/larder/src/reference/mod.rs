//! Image names: parse, normalise, default tag, digest, registry.
//!
//! Two grammars are in use, on purpose. Credentials and splitting work on the *normalised* name
//! ([`Reference::parse`], [`ImageName::reference`]): `busybox` is `docker.io/library/busybox`. What is sent to the
//! runtime ([`apply_default_tag`]) and what pull records are keyed by ([`trim_tag_and_digest`]) stays the text that
//! the user wrote.
//!
//! A name may end with the platform of an image for other machines: `busybox:1.36#linux/arm64`. Each platform's image
//! has a name of its own, so a store can have several of them, and none takes the name that stands for the node's
//! image. The suffix is larder's: registries and runtimes never see it.
//!
//! Promises: no input panics; time and memory grow at most linearly with the length of the input; error texts are
//! kubelet's, word for word.

mod digest;
mod error;
mod grammar;
mod name;
mod normalize;
mod platform;
#[cfg(test)]
mod properties;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use digest::{Digest, DigestError, DigestHasher};
pub use error::{ReferenceError, ReferenceErrorKind};
pub(crate) use grammar::is_domain;
pub use name::{ImageId, ImageName, LayerId};
pub use platform::{Platform, PlatformError};

/// The tag that stands for a missing one.
pub const DEFAULT_TAG: &str = "latest";

/// The character before the platform of a name. Names in registries do not have it.
pub(crate) const PLATFORM_MARK: char = '#';

/// Whether a stored name is that of an image for other machines.
pub fn names_platform(name: &str) -> bool {
    name.contains(PLATFORM_MARK)
}

/// Splits the platform from a name: `None` if it has none, or if that is this machine's.
fn split_platform(text: &str) -> Result<(&str, Option<Platform>), ReferenceErrorKind> {
    let Some((name, platform)) = text.split_once(PLATFORM_MARK) else { return Ok((text, None)) };
    let platform: Platform = platform.parse().map_err(|_| ReferenceErrorKind::Format)?;
    Ok((name, other_platform(&platform)))
}

/// The platform in its canonical form; `None` for this machine's.
fn other_platform(platform: &Platform) -> Option<Platform> {
    (!platform.is_host()).then(|| platform.canonical())
}

/// A normalised image name: `registry/path[:tag][@digest][#platform]`, with the hub's rules applied.
///
/// Prints in full: `docker.io/library/busybox:1.36`. [`familiar`](Reference::familiar) is the short form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference {
    name: String,
    /// Where the path starts in `name`, after the slash.
    path_at: usize,
    tag: Option<String>,
    digest: Option<Digest>,
    /// In its canonical form; `None` if it is this machine's.
    platform: Option<Arc<Platform>>,
}

impl Reference {
    /// Parses any name that a pod may carry, or such a name with a platform, and normalises it: `busybox` is
    /// `docker.io/library/busybox`.
    pub fn parse(image: &str) -> Result<Self, ReferenceError> {
        Self::parse_kind(image).map_err(|kind| ReferenceError::plain(image, kind))
    }

    fn parse_kind(image: &str) -> Result<Self, ReferenceErrorKind> {
        let (image, platform) = split_platform(image)?;
        let full = normalize::qualify(image)?;
        let parts = grammar::parse(&full)?;
        let digest = parts.digest.map(Digest::parse).transpose()?;
        let (name, tag) = (parts.name.to_owned(), parts.tag.map(str::to_owned));
        Ok(Reference {
            path_at: name.len() - parts.path.len(),
            name,
            tag,
            digest,
            platform: platform.map(Arc::new),
        })
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

    /// The platform of its image, in the canonical form; `None` if it is this machine's.
    pub fn platform(&self) -> Option<&Platform> {
        self.platform.as_deref()
    }

    /// The name of the image for this platform; `None` is this machine's, and the name in registries.
    #[must_use]
    pub fn for_platform(&self, platform: Option<&Platform>) -> Reference {
        let platform = platform.and_then(other_platform).map(Arc::new);
        Reference { platform, ..self.clone() }
    }

    /// The name of the content with this digest, without a tag.
    #[must_use]
    pub fn with_digest(&self, digest: &Digest) -> Reference {
        Reference { tag: None, digest: Some(digest.clone()), ..self.clone() }
    }

    /// The name with one of tag and digest, as stores have it: with `latest` if it has neither, without the tag if it
    /// has both.
    #[must_use]
    pub fn stored(&self) -> Reference {
        match &self.digest {
            Some(digest) => self.with_digest(digest),
            None => Reference { tag: self.tag_or_default().map(str::to_owned), ..self.clone() },
        }
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

/// `name[:tag][@digest][#platform]`, in full.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        if let Some(platform) = &self.platform {
            write!(f, "{PLATFORM_MARK}{platform}")?;
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

/// The input without its tag, digest and platform, by the plain grammar: not qualified, so `ubuntu` and
/// `docker.io/library/ubuntu` stay two different keys. Pull records and allowlists are keyed by it.
pub fn trim_tag_and_digest(image: &str) -> Result<&str, ReferenceError> {
    let parts = split_platform(image).and_then(|(name, _)| grammar::parse(name));
    let parts = parts.map_err(|kind| ReferenceError::plain(image, kind))?;
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
    fn a_name_may_have_the_platform_of_another_machine() {
        let image = parsed("busybox:1#linux/S390X");
        assert_eq!(image.to_string(), "docker.io/library/busybox:1#linux/s390x");
        assert_eq!((image.name(), image.tag()), ("docker.io/library/busybox", Some("1")));
        assert_eq!(parsed(&image.to_string()), image);
        assert_ne!(image, parsed("busybox:1"));
        assert_eq!(image.for_platform(None), parsed("busybox:1"));
        assert_eq!(parsed("busybox:1").for_platform(image.platform()), image);
        let digest = format!("sha256:{}", "a".repeat(64));
        let pinned = parsed(&format!("busybox:1@{digest}#linux/s390x"));
        assert_eq!(pinned.stored().to_string(), format!("docker.io/library/busybox@{digest}#linux/s390x"));
        assert_eq!(trim_tag_and_digest("busybox:1#linux/s390x").unwrap(), "busybox");
    }

    #[test]
    fn the_platform_of_this_machine_is_no_part_of_a_name() {
        let host = Platform::host();
        for own in [host.to_string(), format!("{}/{}", host.os, host.architecture)] {
            assert_eq!(parsed(&format!("busybox#{own}")), parsed("busybox"));
            assert_eq!(
                ImageName::from(format!("busybox#{own}")).with_default_tag().unwrap(),
                "busybox:latest"
            );
        }
        let name = ImageName::new("busybox#linux/s390x").with_default_tag().unwrap();
        assert_eq!(name, "busybox:latest#linux/s390x");
    }

    #[test]
    fn a_mark_without_a_platform_is_no_name() {
        for image in ["busybox#", "busybox#linux", "#linux/s390x", "busybox#linux/s390x#linux/arm", "a#b/c~"]
        {
            let error = apply_default_tag(image).expect_err(image);
            assert!(error.hint().is_some_and(|hint| hint.contains("[#platform]")), "{image}");
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
