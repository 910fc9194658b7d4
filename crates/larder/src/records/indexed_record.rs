//! A pull record with indexes: a check costs the same for any number of credentials. Pure.

use std::collections::{HashMap, HashSet};

use super::document::{ImagePullCredentials, ImagePulledRecord, RecordedSecret};
use crate::credentials::{SecretCoordinates, ServiceAccountCoordinates};
use crate::reference::{self, ImageName, ReferenceError};

/// From this number of secrets on, equal coordinates are not enough, and checks add no more secrets.
pub const LEARNED_SECRETS: usize = 100;

/// A record with its indexes.
#[derive(Debug)]
pub(super) struct IndexedRecord {
    /// Sorted by name.
    names: Box<[IndexedName]>,
    /// Approximate memory use in bytes.
    pub(super) weight: usize,
}

#[derive(Debug)]
struct IndexedName {
    name: Box<str>,
    /// True for the remainder that trimming leaves, as of each name that was recorded by the rules.
    is_name: bool,
    holders: CredentialIndex,
}

/// Who may use the image under one name.
#[derive(Debug)]
pub(super) struct CredentialIndex {
    node_pods: bool,
    service_accounts: Vec<ServiceAccountCoordinates>,
    /// The hash of each secret's content.
    secrets: HashMap<SecretCoordinates, String>,
    /// The hashes of all secrets.
    hashes: HashSet<String>,
}

/// Whether a pod may use an image with its credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AccessCheck {
    /// It may.
    Yes,
    /// It may; add this secret to the record.
    AllowedByRotatedSecret(RecordedSecret),
    /// None of its credentials is recorded.
    No,
}

impl IndexedRecord {
    pub(super) fn new(record: &ImagePulledRecord) -> IndexedRecord {
        let named = |(name, access): (&String, &ImagePullCredentials)| IndexedName {
            is_name: reference::trim_tag_and_digest(name).is_ok_and(|trimmed| trimmed == name),
            name: name.as_str().into(),
            holders: CredentialIndex::new(access),
        };
        let weight =
            200 + record.names.iter().map(|(name, access)| name.len() + weight(access)).sum::<usize>();
        IndexedRecord { names: record.names.iter().map(named).collect(), weight }
    }

    /// The credentials for the name in this image text of a pod. An error if the text is not an image.
    pub(super) fn credentials_for(
        &self,
        image: &ImageName,
    ) -> Result<Option<&CredentialIndex>, ReferenceError> {
        // Fast path with the same result as the grammar, for nearly all checks.
        if let [one] = &*self.names
            && one.is_name
            && image.as_str().strip_prefix(&*one.name).is_some_and(is_tag_or_nothing)
        {
            return Ok(Some(&one.holders));
        }
        let name = image.trimmed()?;
        let found = self.names.binary_search_by(|named| named.name.as_ref().cmp(name));
        Ok(found.ok().map(|number| &self.names[number].holders))
    }
}

/// Whether this, after a name, is a tag, so that the name is all of the name.
fn is_tag_or_nothing(rest: &str) -> bool {
    let Some(tag) = rest.strip_prefix(':') else { return rest.is_empty() };
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || byte == b'.' || byte == b'-')
}

/// The hash of a secret is in both indexes.
fn weight(access: &ImagePullCredentials) -> usize {
    let secret = |secret: &RecordedSecret| {
        250 + secret.at.uid.len() + secret.at.namespace.len() + secret.at.name.len() + 2 * secret.hash.len()
    };
    let account = |at: &ServiceAccountCoordinates| 100 + at.uid.len() + at.namespace.len() + at.name.len();
    300 + access.secrets.iter().map(secret).sum::<usize>()
        + access.service_accounts.iter().map(account).sum::<usize>()
}

impl CredentialIndex {
    fn new(access: &ImagePullCredentials) -> CredentialIndex {
        let secrets = access.secrets.iter();
        CredentialIndex {
            node_pods: access.node_pods,
            service_accounts: access.service_accounts.clone(),
            secrets: secrets.clone().map(|secret| (secret.at.clone(), secret.hash.clone())).collect(),
            hashes: secrets.map(|secret| secret.hash.clone()).collect(),
        }
    }

    /// Every pod on the node.
    pub(super) fn allows_all_pods(&self) -> bool {
        self.node_pods
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.node_pods && self.secrets.is_empty() && self.service_accounts.is_empty()
    }

    /// Whether a pod with these pull secrets (each with its hash) and this service account has access.
    ///
    /// A secret matches if its content equals a recorded one. As in kubelet, a recorded secret whose content has
    /// changed also matches while fewer than [`LEARNED_SECRETS`] are recorded, but not without a UID, because then it
    /// may be another secret.
    pub(super) fn check_pod<'a>(
        &self,
        secrets: impl Iterator<Item = (&'a SecretCoordinates, &'a str)>,
        account: Option<&ServiceAccountCoordinates>,
    ) -> AccessCheck {
        let may_learn = self.secrets.len() < LEARNED_SECRETS;
        for (at, hash) in secrets {
            let recorded = self.secrets.get(at);
            let is_same_secret = may_learn && !at.uid.is_empty() && recorded.is_some();
            let has_same_content = !hash.is_empty()
                && (recorded.is_some_and(|recorded| recorded == hash) || self.hashes.contains(hash));
            if !has_same_content && !is_same_secret {
                continue;
            }
            if !may_learn || recorded.is_some_and(|recorded| recorded == hash) {
                return AccessCheck::Yes;
            }
            let secret = RecordedSecret { at: at.clone(), hash: hash.to_owned() };
            return AccessCheck::AllowedByRotatedSecret(secret);
        }
        match account {
            Some(account) if self.service_accounts.contains(account) => AccessCheck::Yes,
            _ => AccessCheck::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(uid: &str) -> SecretCoordinates {
        SecretCoordinates { uid: uid.into(), namespace: "team".into(), name: "pull".into() }
    }

    fn holders(secrets: &[(&str, &str)]) -> CredentialIndex {
        let secret = |(uid, hash): &(&str, &str)| RecordedSecret { at: at(uid), hash: (*hash).into() };
        CredentialIndex::new(&ImagePullCredentials {
            secrets: secrets.iter().map(secret).collect(),
            ..ImagePullCredentials::default()
        })
    }

    fn asked(holders: &CredentialIndex, uid: &str, hash: &str) -> AccessCheck {
        holders.check_pod([(&at(uid), hash)].into_iter(), None)
    }

    #[test]
    fn a_secret_without_a_uid_is_identified_by_its_content() {
        let known = holders(&[("", "h1")]);
        assert_eq!(asked(&known, "", "h1"), AccessCheck::Yes);
        assert_eq!(asked(&known, "", "h2"), AccessCheck::No, "anybody can write a manifest with that name");
        let with_uid = holders(&[("u", "h1")]);
        assert!(matches!(asked(&with_uid, "u", "h2"), AccessCheck::AllowedByRotatedSecret(_)));
    }

    #[test]
    fn beyond_the_bound_only_content_counts_and_nothing_is_learned() {
        let all: Vec<_> = (0..LEARNED_SECRETS).map(|n| (format!("u{n}"), format!("h{n}"))).collect();
        let all: Vec<_> = all.iter().map(|(uid, hash)| (uid.as_str(), hash.as_str())).collect();
        let full = holders(&all);
        assert_eq!(asked(&full, "u5", "other"), AccessCheck::No);
        assert_eq!(asked(&full, "new", "h5"), AccessCheck::Yes);
        let nearly = holders(&all[1..]);
        assert!(matches!(asked(&nearly, "u5", "other"), AccessCheck::AllowedByRotatedSecret(_)));
        assert!(matches!(asked(&nearly, "new", "h5"), AccessCheck::AllowedByRotatedSecret(_)));
    }

    #[test]
    fn a_name_is_found_by_each_text_of_a_pod_that_has_it_and_no_other() {
        let names = |names: &[&str]| {
            let names = names.iter().map(|name| ((*name).to_owned(), ImagePullCredentials::node())).collect();
            IndexedRecord::new(&ImagePulledRecord { names, ..ImagePulledRecord::default() })
        };
        let digest = format!("sha256:{}", "a".repeat(64));
        let long = "t".repeat(129);
        for known in [names(&["r.example/app"]), names(&["a", "r.example/app", "z"])] {
            for (rest, found) in [
                ("", true),
                (":v1", true),
                (":5000", true),
                (&format!("@{digest}") as &str, true),
                (&format!(":v1@{digest}"), true),
                ("s:v1", false),
                ("/more:v1", false),
                (":v1/more", false),
                (":", false),
                (":-v", false),
                (":v 1", false),
                (&format!(":{long}"), false),
                ("@sha256:a", false),
            ] {
                let image = ImageName::from(format!("r.example/app{rest}"));
                let trimmed = image.trimmed().map(|name| name == "r.example/app");
                let under = known.credentials_for(&image).map(|found| found.is_some());
                assert_eq!(under.ok(), trimmed.ok(), "{image}");
                assert_eq!(
                    known.credentials_for(&image).is_ok_and(|found| found.is_some()),
                    found,
                    "{image}"
                );
            }
        }
        assert!(names(&["r.example"]).credentials_for(&"r.example:5000/app".into()).unwrap().is_none());
        assert!(names(&[""]).credentials_for(&":v1".into()).is_err(), "an invalid name gives no access");
    }
}
