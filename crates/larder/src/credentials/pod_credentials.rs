//! The part of a credential lookup that the pull records check.

use super::credential::{Credential, CredentialSource, SecretCoordinates, ServiceAccountCoordinates};

/// The credentials of a lookup that belong to the pod. The node's do not count for the records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodCredentials {
    /// Secrets with the hash of their content, in lookup order. A secret may occur twice.
    pub secrets: Vec<(SecretCoordinates, String)>,
    /// The first service account.
    pub service_account: Option<ServiceAccountCoordinates>,
}

impl PodCredentials {
    /// Selects them from the result of a lookup.
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
