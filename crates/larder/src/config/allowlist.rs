//! Patterns of `preloadedImagesVerificationAllowlist`.

use crate::reference;

/// Names of images that may be used without credentials: one repository, or all below a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowlistPattern {
    /// This repository, compared as it is written.
    Exact(String),
    /// All repositories below this prefix, which ends with a slash.
    Prefix(String),
}

/// Why a pattern is invalid. The texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PatternError {
    /// There are spaces around it.
    #[error("leading/trailing spaces are not allowed: {0}")]
    Spaces(String),
    /// It is empty.
    #[error("the supplied pattern is too short: {0}")]
    Empty(String),
    /// A star is not at the end after a slash.
    #[error("not a valid wildcard pattern, only patterns ending with '/*' are allowed: {0}")]
    Wildcard(String),
    /// It is only the wildcard.
    #[error("at least registry hostname is required")]
    NoRegistry,
    /// It is not an image name.
    #[error("failed to parse as an image name: {0}")]
    Name(String),
    /// It has a tag or a digest.
    #[error("neither tag nor digest is accepted in an image reference: {0}")]
    TagOrDigest(String),
}

impl AllowlistPattern {
    /// Reads one pattern.
    pub fn parse(text: &str) -> Result<AllowlistPattern, PatternError> {
        if text.trim() != text {
            return Err(PatternError::Spaces(text.into()));
        }
        if text.is_empty() {
            return Err(PatternError::Empty(text.into()));
        }
        let prefix = text.strip_suffix("/*");
        if prefix.unwrap_or(text).contains('*') {
            return Err(PatternError::Wildcard(text.into()));
        }
        match prefix {
            Some("") => Err(PatternError::NoRegistry),
            Some(prefix) => Ok(AllowlistPattern::Prefix(format!("{prefix}/"))),
            None => exact(text),
        }
    }

    /// Returns true if it matches a name without tag and digest. The text is compared as it is: no default registry
    /// is added.
    pub(crate) fn matches(&self, name: &str) -> bool {
        match self {
            AllowlistPattern::Exact(exact) => exact == name,
            AllowlistPattern::Prefix(prefix) => name.starts_with(prefix.as_str()),
        }
    }
}

fn exact(text: &str) -> Result<AllowlistPattern, PatternError> {
    match reference::trim_tag_and_digest(text) {
        Err(error) => Err(PatternError::Name(error.kind().to_string())),
        Ok(name) if name != text => Err(PatternError::TagOrDigest(text.into())),
        Ok(_) => Ok(AllowlistPattern::Exact(text.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_prefixes_are_distinguished() {
        let exact = AllowlistPattern::parse("registry.example/app").unwrap();
        assert!(exact.matches("registry.example/app") && !exact.matches("registry.example/app2"));
        let prefix = AllowlistPattern::parse("registry.example/team/*").unwrap();
        assert!(prefix.matches("registry.example/team/app") && !prefix.matches("registry.example/team"));
        assert!(!AllowlistPattern::parse("docker.io/library/*").unwrap().matches("busybox"));
    }

    #[test]
    fn bad_patterns_are_named_in_kubelets_order_and_words() {
        for (text, said) in [
            (" ", "leading/trailing spaces are not allowed:  "),
            ("", "the supplied pattern is too short: "),
            ("*", "not a valid wildcard pattern, only patterns ending with '/*' are allowed: *"),
            ("/*", "at least registry hostname is required"),
            ("a*/*", "not a valid wildcard pattern, only patterns ending with '/*' are allowed: a*/*"),
            ("registry.example/", "failed to parse as an image name: invalid reference format"),
            ("a:v1", "neither tag nor digest is accepted in an image reference: a:v1"),
        ] {
            assert_eq!(AllowlistPattern::parse(text).expect_err(text).to_string(), said);
        }
    }
}
