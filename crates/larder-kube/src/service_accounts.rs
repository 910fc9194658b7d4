//! Service accounts and their tokens, for credential providers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1 as core;
use kube::Api;
use kube::api::PostParams;
use larder::credentials::plugin::{ServiceAccount, ServiceAccountClient, ServiceAccountTokenRequest};
use larder::credentials::{Secret, ServiceAccountCoordinates};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::timed_cache::{FAILURE, Timed, TimedCache};

/// How long an account is known before it is read again.
const ACCOUNT: Duration = Duration::from_secs(60);
/// The longest time for which a token is used, as in kubelet.
const TOKEN: Duration = Duration::from_secs(24 * 3600);

/// Reads accounts and requests tokens with the identity of the node, which may do so for the pods that are bound to it.
/// Both are cached, as are failures: a pull that fails is tried often.
#[derive(Clone)]
pub struct ClusterServiceAccounts {
    cluster: Cluster,
    cache: Arc<Mutex<AccountCache>>,
}

#[derive(Default)]
struct AccountCache {
    /// By namespace and name.
    accounts: TimedCache<(String, String), Result<ServiceAccount, String>>,
    tokens: TimedCache<ServiceAccountTokenRequest, Result<Secret, String>>,
}

impl ClusterServiceAccounts {
    /// Of this cluster.
    pub fn of(cluster: &Cluster) -> ClusterServiceAccounts {
        ClusterServiceAccounts { cluster: cluster.clone(), cache: Arc::default() }
    }

    fn accounts(&self, namespace: &str) -> Api<core::ServiceAccount> {
        Api::namespaced(self.cluster.client.clone(), namespace)
    }

    async fn read(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String> {
        let (what, accounts) = (format!("service account {namespace}/{name}"), self.accounts(namespace));
        let found =
            self.cluster.call(what, accounts.get_metadata(name)).await.map_err(|error| error.to_string())?;
        let at = ServiceAccountCoordinates {
            uid: found.metadata.uid.unwrap_or_default(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        Ok(ServiceAccount { at, annotations: found.metadata.annotations.unwrap_or_default() })
    }

    /// A new token, and how long it is valid.
    async fn request(&self, request: &ServiceAccountTokenRequest) -> Result<(Secret, Duration), String> {
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
        let seconds = issued.spec.and_then(|spec| spec.expiration_seconds).unwrap_or_default();
        let lifetime = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
        let token = token.map(Secret::new).ok_or("the API server issued no token")?;
        Ok((token, lifetime))
    }
}

#[async_trait]
impl ServiceAccountClient for ClusterServiceAccounts {
    async fn get(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String> {
        let (key, now) = ((namespace.to_owned(), name.to_owned()), Instant::now());
        if let Some(known) = self.cache.lock().accounts.get(&key, now) {
            return known.value;
        }
        let account = self.read(namespace, name).await;
        // A server that is slow fails after as long as a failure is remembered.
        let expires = Instant::now() + if account.is_ok() { ACCOUNT } else { FAILURE };
        let known = Timed { value: account.clone(), refresh: expires, expires };
        self.cache.lock().accounts.put(key, known, now);
        account
    }

    /// As in kubelet, a token is replaced after 80 % of its lifetime, and used until its end if that fails.
    async fn token(&self, request: &ServiceAccountTokenRequest) -> Result<Secret, String> {
        let now = Instant::now();
        let known = self.cache.lock().tokens.get(request, now);
        if let Some(known) = known.as_ref().filter(|known| now < known.refresh) {
            return known.value.clone();
        }
        let answer = match (self.request(request).await, known) {
            (Ok((token, lifetime)), _) => {
                let refresh = now + (lifetime * 4 / 5).min(TOKEN);
                Timed { value: Ok(token), refresh, expires: now + lifetime }
            }
            (Err(error), Some(known)) => {
                let ServiceAccountCoordinates { namespace, name, .. } = &request.account;
                tracing::warn!(
                    "kubernetes: service account {namespace}/{name}: using the last token: {error}"
                );
                Timed { refresh: Instant::now() + FAILURE, ..known }
            }
            (Err(error), None) => {
                let expires = Instant::now() + FAILURE;
                Timed { value: Err(error), refresh: expires, expires }
            }
        };
        self.cache.lock().tokens.put(request.clone(), answer.clone(), now);
        answer.value
    }
}
