//! Whether a pod wants its images lazily: its annotation, beside what the settings say.

use std::collections::BTreeMap;

use crate::backend::PullUntil;
use crate::go_format;

/// Annotation of a pod: `true` for images whose containers start before all of their data is here, `false` for images
/// that are pulled in full; without it, the settings decide.
pub const LAZY_ANNOTATION: &str = "images.larder.dev/lazy";

/// Characters of a value that are shown.
const MAX_SHOWN: usize = 64;

/// A value of the annotation that is neither `true` nor `false`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {LAZY_ANNOTATION} is {}, and neither \"true\" nor \"false\"; its images are pulled in full: write \"true\" or \"false\", or delete the annotation", go_format::quote(.0))]
pub struct InvalidLazyAnnotation(String);

impl PullUntil {
    /// When a pull returns that is for a pod with these annotations, if its caller does not say it.
    pub fn of_pod(annotations: &BTreeMap<String, String>) -> Result<PullUntil, InvalidLazyAnnotation> {
        match annotations.get(LAZY_ANNOTATION).map(String::as_str) {
            None => Ok(PullUntil::Configured),
            Some("true") => Ok(PullUntil::Startable),
            Some("false") => Ok(PullUntil::Complete),
            Some(other) => Err(InvalidLazyAnnotation(other.chars().take(MAX_SHOWN).collect())),
        }
    }

    /// Returns what the caller says; else what the pod says, which wants all of the image if that cannot be understood.
    #[must_use]
    pub fn or_of_pod(self, annotations: &BTreeMap<String, String>) -> PullUntil {
        match self {
            PullUntil::Configured => PullUntil::of_pod(annotations).unwrap_or(PullUntil::Complete),
            decided => decided,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(LAZY_ANNOTATION.to_owned(), value.to_owned())])
    }

    #[test]
    fn a_pod_decides_where_its_caller_does_not() {
        let of = |until: PullUntil, value: &str| until.or_of_pod(&annotations(value));
        assert_eq!(of(PullUntil::Configured, "true"), PullUntil::Startable);
        assert_eq!(of(PullUntil::Configured, "false"), PullUntil::Complete);
        assert_eq!(of(PullUntil::Complete, "true"), PullUntil::Complete);
        assert_eq!(of(PullUntil::Startable, "false"), PullUntil::Startable);
        assert_eq!(PullUntil::Configured.or_of_pod(&BTreeMap::new()), PullUntil::Configured);
    }

    #[test]
    fn a_value_without_a_meaning_is_named_and_gets_all_of_the_image() {
        for value in ["", "yes", "True", " true", "1"] {
            assert_eq!(PullUntil::Configured.or_of_pod(&annotations(value)), PullUntil::Complete, "{value}");
        }
        let error = PullUntil::of_pod(&annotations("ye\u{1b}s")).unwrap_err().to_string();
        let expected = "annotation images.larder.dev/lazy is \"ye\\x1bs\", and neither \"true\" nor \"false\"; its images \
                        are pulled in full: write \"true\" or \"false\", or delete the annotation";
        assert_eq!(error, expected);
        let long = PullUntil::of_pod(&annotations(&"x".repeat(10_000))).unwrap_err().to_string();
        assert!(long.len() < 300, "{long}");
    }
}
