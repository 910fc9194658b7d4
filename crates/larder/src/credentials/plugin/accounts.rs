//! Service accounts and their tokens: from whoever can ask the cluster.

use std::collections::BTreeMap;

use async_trait::async_trait;

use crate::credentials::{Secret, ServiceAccountCoordinates};

/// A service account, as far as providers care.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceAccount {
    /// Where it is.
    pub at: ServiceAccountCoordinates,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
}

/// A token to be asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceAccountTokenRequest {
    /// Of this account.
    pub account: ServiceAccountCoordinates,
    /// Whom it is for.
    pub audience: String,
    /// The pod that it is bound to.
    pub pod_name: String,
    /// Its uid.
    pub pod_uid: String,
}

/// Knows the service accounts of a cluster. Errors hold no tokens.
#[async_trait]
pub trait ServiceAccountClient: Send + Sync {
    /// The account of this name.
    async fn get(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String>;
    /// A token of it.
    async fn token(&self, request: &ServiceAccountTokenRequest) -> Result<Secret, String>;
}

/// Where nobody can ask a cluster.
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
