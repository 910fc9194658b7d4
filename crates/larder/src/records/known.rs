//! One record, ready to be asked: however many credentials it names, a question costs the same. Pure.

use std::collections::HashMap;

use super::document::{Access, PulledRecord, RecordedSecret};
use crate::credentials::{SecretCoordinates, ServiceAccountCoordinates};

/// From so many secrets on, being the same secret is not enough, and no more are learned from checks.
pub const LEARNED_SECRETS: usize = 100;

/// A record with its indexes.
#[derive(Debug)]
pub(super) struct Known {
    names: HashMap<Box<str>, Holders>,
    /// Bytes of memory that it takes, about.
    pub(super) weight: usize,
}

/// Who may use the image under one name.
#[derive(Debug)]
pub(super) struct Holders {
    access: Access,
    by_hash: HashMap<Box<str>, usize>,
    by_place: HashMap<SecretCoordinates, usize>,
}

/// Whether a pod may use an image by what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Held {
    /// It may.
    Yes,
    /// It may, and this is to be remembered.
    Learn(RecordedSecret),
    /// Nothing that it holds is known.
    No,
}

impl Known {
    pub(super) fn new(record: &PulledRecord) -> Known {
        let names: HashMap<_, _> = record
            .names
            .iter()
            .map(|(name, access)| (name.as_str().into(), Holders::new(access.clone())))
            .collect();
        let weight =
            200 + record.names.iter().map(|(name, access)| name.len() + weight(access)).sum::<usize>();
        Known { names, weight }
    }

    /// Those who may use it under this name: the text of a pod without tag and digest.
    pub(super) fn under(&self, name: &str) -> Option<&Holders> {
        self.names.get(name)
    }
}

/// Each text is there about twice, and each allocation has a cost of its own.
fn weight(access: &Access) -> usize {
    let secret = |secret: &RecordedSecret| {
        300 + 2 * (secret.at.uid.len() + secret.at.namespace.len() + secret.at.name.len() + secret.hash.len())
    };
    let account = |at: &ServiceAccountCoordinates| 100 + at.uid.len() + at.namespace.len() + at.name.len();
    200 + access.secrets.iter().map(secret).sum::<usize>()
        + access.service_accounts.iter().map(account).sum::<usize>()
}

impl Holders {
    fn new(access: Access) -> Holders {
        let (mut by_hash, mut by_place) = (HashMap::new(), HashMap::new());
        for (number, secret) in access.secrets.iter().enumerate() {
            if !secret.hash.is_empty() {
                by_hash.entry(secret.hash.as_str().into()).or_insert(number);
            }
            by_place.entry(secret.at.clone()).or_insert(number);
        }
        Holders { access, by_hash, by_place }
    }

    /// Every pod on the node.
    pub(super) fn are_all(&self) -> bool {
        self.access.node_pods
    }

    pub(super) fn are_none(&self) -> bool {
        self.access.is_empty()
    }

    /// Whether a pod with these pull secrets (each with its hash) and this service account is one of them.
    ///
    /// A secret counts that holds the same as a recorded one. So does a recorded one that holds something else by now,
    /// as in kubelet, while fewer than [`LEARNED_SECRETS`] are known; but not without a uid: then nothing says that it is
    /// the same.
    pub(super) fn include<'a>(
        &self,
        secrets: impl Iterator<Item = (&'a SecretCoordinates, &'a str)>,
        account: Option<&ServiceAccountCoordinates>,
    ) -> Held {
        let may_learn = self.access.secrets.len() < LEARNED_SECRETS;
        for (at, hash) in secrets {
            let learn = || match self.place(at) {
                Some(recorded) if recorded.hash == hash => Held::Yes,
                _ if may_learn => Held::Learn(RecordedSecret { at: at.clone(), hash: hash.to_owned() }),
                _ => Held::Yes,
            };
            let same_content = !hash.is_empty() && self.by_hash.contains_key(hash);
            let same_secret = may_learn && !at.uid.is_empty() && self.by_place.contains_key(at);
            if same_content || same_secret {
                return learn();
            }
        }
        match account {
            Some(account) if self.access.service_accounts.contains(account) => Held::Yes,
            _ => Held::No,
        }
    }

    fn place(&self, at: &SecretCoordinates) -> Option<&RecordedSecret> {
        self.by_place.get(at).and_then(|number| self.access.secrets.get(*number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(uid: &str) -> SecretCoordinates {
        SecretCoordinates { uid: uid.into(), namespace: "team".into(), name: "pull".into() }
    }

    fn holders(secrets: &[(&str, &str)]) -> Holders {
        let secret = |(uid, hash): &(&str, &str)| RecordedSecret { at: at(uid), hash: (*hash).into() };
        Holders::new(Access { secrets: secrets.iter().map(secret).collect(), ..Access::default() })
    }

    fn asked(holders: &Holders, uid: &str, hash: &str) -> Held {
        holders.include([(&at(uid), hash)].into_iter(), None)
    }

    #[test]
    fn a_secret_without_a_uid_is_known_by_its_content_alone() {
        let known = holders(&[("", "h1")]);
        assert_eq!(asked(&known, "", "h1"), Held::Yes);
        assert_eq!(asked(&known, "", "h2"), Held::No, "anybody can write a manifest with that name");
        let with_uid = holders(&[("u", "h1")]);
        assert!(matches!(asked(&with_uid, "u", "h2"), Held::Learn(_)));
    }

    #[test]
    fn beyond_the_bound_only_content_counts_and_nothing_is_learned() {
        let all: Vec<_> = (0..LEARNED_SECRETS).map(|n| (format!("u{n}"), format!("h{n}"))).collect();
        let all: Vec<_> = all.iter().map(|(uid, hash)| (uid.as_str(), hash.as_str())).collect();
        let full = holders(&all);
        assert_eq!(asked(&full, "u5", "other"), Held::No);
        assert_eq!(asked(&full, "new", "h5"), Held::Yes);
        let nearly = holders(&all[1..]);
        assert!(matches!(asked(&nearly, "u5", "other"), Held::Learn(_)));
        assert!(matches!(asked(&nearly, "new", "h5"), Held::Learn(_)));
    }
}
