//! When to pull: `Always`, `IfNotPresent`, `Never`.

use std::fmt;

use crate::reference::{DEFAULT_TAG, ImageName};

/// A container's `imagePullPolicy`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PullPolicy {
    /// Pull each time, even if present: the tag may have moved.
    Always,
    /// Pull what is absent.
    IfNotPresent,
    /// Use the present image, or fail.
    Never,
    /// Any other text. Kubelet treats the image as absent and pulls it.
    Other(String),
}

impl PullPolicy {
    /// Reads a policy. The spelling counts: `always` is none of the three.
    pub fn parse(text: &str) -> Self {
        match text {
            "Always" => PullPolicy::Always,
            "IfNotPresent" => PullPolicy::IfNotPresent,
            "Never" => PullPolicy::Never,
            other => PullPolicy::Other(other.to_owned()),
        }
    }

    /// The policy as it is written.
    pub fn as_str(&self) -> &str {
        match self {
            PullPolicy::Always => "Always",
            PullPolicy::IfNotPresent => "IfNotPresent",
            PullPolicy::Never => "Never",
            PullPolicy::Other(text) => text,
        }
    }

    /// Whether the runtime is asked for the image before anything else is done.
    pub fn checks_presence_first(&self) -> bool {
        matches!(self, PullPolicy::IfNotPresent | PullPolicy::Never)
    }
}

impl fmt::Display for PullPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The policy of a container that names none: `Always` for the tag `latest`, given or implied, else `IfNotPresent`. A
/// digest is not a tag, and its image cannot change. An invalid name gets `IfNotPresent`; `ensure` reports it.
pub fn default_policy(image: impl Into<ImageName>) -> PullPolicy {
    match image.into().reference() {
        Ok(name) if name.tag_or_default() == Some(DEFAULT_TAG) => PullPolicy::Always,
        _ => PullPolicy::IfNotPresent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_may_move_are_pulled_always() {
        for (image, policy) in [
            ("busybox", PullPolicy::Always),
            ("busybox:latest", PullPolicy::Always),
            ("registry.example:5000/team/app", PullPolicy::Always),
            ("busybox:1.36", PullPolicy::IfNotPresent),
            ("BAD NAME", PullPolicy::IfNotPresent),
        ] {
            assert_eq!(default_policy(image), policy, "{image}");
        }
        let pinned = format!("busybox@sha256:{}", "a".repeat(64));
        assert_eq!(default_policy(&pinned), PullPolicy::IfNotPresent);
    }
}
