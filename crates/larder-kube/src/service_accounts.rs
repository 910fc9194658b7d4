//! Service accounts and their tokens, for credential providers.

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1 as core;
use kube::Api;
use kube::api::PostParams;
use larder::credentials::plugin::{ServiceAccount, ServiceAccountClient, ServiceAccountTokenRequest};
use larder::credentials::{Secret, ServiceAccountCoordinates};

use crate::cluster::Cluster;

/// Reads accounts and requests tokens with the identity of the node, which may do so for the pods that are bound to it.
#[derive(Clone)]
pub struct ClusterServiceAccounts {
    cluster: Cluster,
}

impl ClusterServiceAccounts {
    /// Of this cluster.
    pub fn of(cluster: &Cluster) -> ClusterServiceAccounts {
        ClusterServiceAccounts { cluster: cluster.clone() }
    }

    fn accounts(&self, namespace: &str) -> Api<core::ServiceAccount> {
        Api::namespaced(self.cluster.client.clone(), namespace)
    }
}

#[async_trait]
impl ServiceAccountClient for ClusterServiceAccounts {
    async fn get(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String> {
        let (what, accounts) = (format!("service account {namespace}/{name}"), self.accounts(namespace));
        let found = self.cluster.call(what, accounts.get(name)).await.map_err(|error| error.to_string())?;
        let at = ServiceAccountCoordinates {
            uid: found.metadata.uid.unwrap_or_default(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        Ok(ServiceAccount { at, annotations: found.metadata.annotations.unwrap_or_default() })
    }

    async fn token(&self, request: &ServiceAccountTokenRequest) -> Result<Secret, String> {
        let ServiceAccountCoordinates { namespace, name, .. } = &request.account;
        let pod = BoundObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(request.pod_name.clone()),
            uid: Some(request.pod_uid.clone()),
        };
        let spec = TokenRequestSpec {
            audiences: Some(vec![request.audience.clone()]),
            bound_object_ref: Some(pod),
            ..TokenRequestSpec::default()
        };
        let body = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let (what, accounts) =
            (format!("token of service account {namespace}/{name}"), self.accounts(namespace));
        let params = PostParams::default();
        let issued = self.cluster.call(what, accounts.create_token_request(name, &params, &body)).await;
        let issued = issued.map_err(|error| error.to_string())?;
        let token = issued.status.and_then(|status| status.token).filter(|token| !token.is_empty());
        token.map(Secret::new).ok_or_else(|| "the API server issued no token".to_owned())
    }
}
