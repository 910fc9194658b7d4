//! Merges a pull or a check into a record. Pure.

use super::document::{ImagePullCredentials, ImagePulledRecord, RecordedSecret};
use crate::credentials::ServiceAccountCoordinates;

/// Adds the credentials of `new` under this name. Returns whether the record changed.
///
/// Access for every pod on the node is never revoked. Secrets are identified by their coordinates, and the later hash
/// replaces the earlier. If `new` has secrets, its service accounts are ignored, as in kubelet.
pub fn merge(record: &mut ImagePulledRecord, name: &str, new: Option<&ImagePullCredentials>) -> bool {
    let Some(new) = new.filter(|new| !new.is_empty()) else { return false };
    let Some(access) = record.names.get_mut(name) else {
        record.names.insert(name.to_owned(), new.clone());
        return true;
    };
    if access.node_pods {
        return false;
    }
    if new.node_pods {
        *access = ImagePullCredentials::node();
        return true;
    }
    if new.secrets.is_empty() {
        merge_accounts(&mut access.service_accounts, &new.service_accounts)
    } else {
        merge_secrets(&mut access.secrets, &new.secrets)
    }
}

fn merge_secrets(known: &mut Vec<RecordedSecret>, new: &[RecordedSecret]) -> bool {
    let mut merged = known.clone();
    for secret in new {
        match merged.iter_mut().find(|other| other.at == secret.at) {
            Some(other) => other.hash.clone_from(&secret.hash),
            None => merged.push(secret.clone()),
        }
    }
    if merged == *known {
        return false;
    }
    merged.sort_by(|a, b| {
        (&a.at.namespace, &a.at.name, &a.at.uid).cmp(&(&b.at.namespace, &b.at.name, &b.at.uid))
    });
    *known = merged;
    true
}

fn merge_accounts(known: &mut Vec<ServiceAccountCoordinates>, new: &[ServiceAccountCoordinates]) -> bool {
    let before = known.len();
    for account in new {
        if !known.contains(account) {
            known.push(account.clone());
        }
    }
    known.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    known.len() > before
}
