//! Lists of referrers: indexes that may have more entries than those of images.

use serde::Deserialize;

use super::bounded::{self, FirstElements};
use super::limits::{MAX_BYTES, MAX_REFERRERS};
use super::{Descriptor, ManifestError};

/// A page of a list of referrers: the first [`MAX_REFERRERS`] entries.
#[derive(Debug, Deserialize)]
pub(crate) struct ReferrerList {
    /// Manifests that refer to one subject.
    #[serde(deserialize_with = "bounded::first::<MAX_REFERRERS, _, _>")]
    pub(crate) manifests: FirstElements<Descriptor>,
}

impl ReferrerList {
    /// Parses a page.
    pub(crate) fn parse(raw: &[u8]) -> Result<ReferrerList, ManifestError> {
        if raw.len() > MAX_BYTES {
            return Err(ManifestError::TooLarge { size: raw.len() as u64 });
        }
        bounded::object(raw)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_long_list_is_cut_and_other_content_is_none() {
        let entry = json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 7,
            "digest": format!("sha256:{}", "ab".repeat(32)), "artifactType": "application/spdx+json",
            "annotations": {"a": "b"}});
        for (count, has_more) in [(2, false), (MAX_REFERRERS, false), (10_000, true)] {
            let text = json!({"schemaVersion": 2, "manifests": vec![&entry; count]}).to_string();
            let list = ReferrerList::parse(text.as_bytes()).unwrap().manifests;
            assert_eq!((list.elements.len(), list.has_more), (count.min(MAX_REFERRERS), has_more));
            assert_eq!(list.elements[0].artifact_type, "application/spdx+json");
        }
        let none = ReferrerList::parse(br#"{"manifests": null}"#).unwrap().manifests;
        assert!(none.elements.is_empty() && !none.has_more);
        for other in ["<html>", "{}", r#"{"manifests": [{}]}"#, "[]", r#"{"manifests": {}}"#] {
            assert!(ReferrerList::parse(other.as_bytes()).is_err(), "{other}");
        }
    }
}
