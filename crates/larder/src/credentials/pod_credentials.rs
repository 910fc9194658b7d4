//! What the check of the pull records wants to know of a lookup.

use super::credential::{Credential, CredentialSource, SecretCoordinates, ServiceAccountCoordinates};

/// The credentials of a lookup that belong to the pod. Those of the node do not count for the records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodCredentials {
    /// Secrets with the hash of what they hold, in lookup order. One secret may be there twice.
    pub secrets: Vec<(SecretCoordinates, String)>,
    /// The first service account.
    pub service_account: Option<ServiceAccountCoordinates>,
}

impl PodCredentials {
    /// Picks them out of a lookup's answer.
    pub fn from_lookup(found: &[Credential]) -> Self {
        let mut pod = PodCredentials::default();
        for credential in found {
            match &credential.source {
                Some(CredentialSource::Secret(secret)) => {
                    pod.secrets.push((secret.clone(), credential.hash.clone()));
                }
                Some(CredentialSource::ServiceAccount(account)) => {
                    pod.service_account.get_or_insert_with(|| account.clone());
                }
                None => {}
            }
        }
        pod
    }
}
