//! Service accounts and their tokens, from a cluster client.

use std::collections::BTreeMap;

use async_trait::async_trait;

use crate::credentials::{Secret, ServiceAccountCoordinates};

/// A service account, with the fields that concern providers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceAccount {
    /// Where it is.
    pub at: ServiceAccountCoordinates,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
}

/// A token request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ServiceAccountTokenRequest {
    /// Of this account.
    pub account: ServiceAccountCoordinates,
    /// The audience.
    pub audience: String,
    /// The pod that it is bound to.
    pub pod_name: String,
    /// Its uid.
    pub pod_uid: String,
}

/// A client for the service accounts of a cluster. Errors contain no tokens.
#[async_trait]
pub trait ServiceAccountClient: Send + Sync {
    /// The account of this name.
    async fn get(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String>;
    /// A token of it.
    async fn token(&self, request: &ServiceAccountTokenRequest) -> Result<Secret, String>;
}

/// A client without a cluster: every call fails.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoServiceAccountClient;

#[async_trait]
impl ServiceAccountClient for NoServiceAccountClient {
    async fn get(&self, _namespace: &str, _name: &str) -> Result<ServiceAccount, String> {
        Err("no connection to a cluster".to_owned())
    }

    async fn token(&self, _request: &ServiceAccountTokenRequest) -> Result<Secret, String> {
        Err("no connection to a cluster".to_owned())
    }
}
