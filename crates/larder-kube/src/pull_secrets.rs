//! Pull secrets of pods, by name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use larder::credentials::{PullSecret, SecretCoordinates};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::error::ClusterError;
use crate::timed_cache::FAILURE;

/// Reads pull secrets with the identity of the node, which may read those of its pods.
#[derive(Clone)]
pub struct PullSecrets {
    cluster: Cluster,
    shared_for: Duration,
    known_for: Duration,
    cache: Arc<Mutex<Cache>>,
}

type SecretResult = Result<PullSecret, ClusterError>;
/// Locked while it is being read, so that each secret is read once at a time.
type CachedSecret = Arc<tokio::sync::Mutex<Option<SecretRead>>>;
/// Secrets by namespace and name.
type Cache = BTreeMap<(String, String), CachedSecret>;

/// A secret as it was read.
struct SecretRead {
    result: SecretResult,
    /// When it is read again.
    next: Instant,
    /// Until when it serves while the API server is unavailable.
    known_until: Instant,
}

/// A secret that could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct UnreadSecret {
    /// Its name.
    pub name: String,
    /// Why.
    pub error: ClusterError,
}

impl PullSecrets {
    /// Of this cluster. Pulls that begin within `shared_for` share one read of a secret. While the API server is
    /// unavailable, a secret that was read serves for `known_for`.
    pub fn of(cluster: &Cluster, shared_for: Duration, known_for: Duration) -> PullSecrets {
        PullSecrets { cluster: cluster.clone(), shared_for, known_for, cache: Arc::default() }
    }

    /// The secret of this name.
    ///
    /// # Errors
    /// As the API server answers; [`ClusterError::NotFound`] if there is none.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<PullSecret, ClusterError> {
        let cached = cached_secret(&self.cache, namespace, name);
        let mut cached = cached.lock().await;
        if let Some(known) = &*cached
            && known.next > Instant::now()
        {
            return known.result.clone();
        }
        let (result, now) = (self.read(namespace, name).await, Instant::now());
        let after_error = now + self.shared_for.min(FAILURE);
        if let (Err(error), Some(known)) = (&result, &mut *cached)
            && error.is_temporary()
            && known.result.is_ok()
            && known.known_until > now
        {
            known.next = after_error;
            return known.result.clone();
        }
        let next = if result.is_ok() { now + self.shared_for } else { after_error };
        let known_until = if result.is_ok() { now + self.known_for } else { next };
        *cached = Some(SecretRead { result: result.clone(), next, known_until });
        result
    }

    async fn read(&self, namespace: &str, name: &str) -> SecretResult {
        let secrets: Api<Secret> = Api::namespaced(self.cluster.client.clone(), namespace);
        let found = self.cluster.call(format!("secret {namespace}/{name}"), secrets.get(name)).await?;
        Ok(pull_secret(found))
    }

    /// The secrets that a pod names, in its order. Those that do not exist are left out, as in kubelet, and returned
    /// beside the others.
    pub async fn of_pod(&self, namespace: &str, names: &[String]) -> (Vec<PullSecret>, Vec<UnreadSecret>) {
        let (mut secrets, mut unread) = (Vec::new(), Vec::new());
        let results = join_all(names.iter().map(|name| self.get(namespace, name))).await;
        for (name, result) in names.iter().cloned().zip(results) {
            match result {
                Ok(secret) => secrets.push(secret),
                Err(error) => unread.push(UnreadSecret { name, error }),
            }
        }
        (secrets, unread)
    }
}

/// The place for a secret. Others that are of no use any more are dropped.
fn cached_secret(cache: &Mutex<Cache>, namespace: &str, name: &str) -> CachedSecret {
    let (mut cache, now) = (cache.lock(), Instant::now());
    let is_useful = |read: &SecretRead| read.next.max(read.known_until) > now;
    // One that is locked is being read.
    cache.retain(|_, cached| cached.try_lock().map_or(true, |read| read.as_ref().is_some_and(is_useful)));
    Arc::clone(cache.entry((namespace.to_owned(), name.to_owned())).or_default())
}

fn pull_secret(secret: Secret) -> PullSecret {
    let metadata = secret.metadata;
    let coordinates = SecretCoordinates {
        uid: metadata.uid.unwrap_or_default(),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
    };
    let data = secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect();
    PullSecret { kind: secret.type_.unwrap_or_default(), coordinates, data }
}

#[cfg(test)]
mod tests {
    use larder_testkit::kube_api::{ApiFault, KubeApi};
    use serde_json::json;
    use tokio::time;

    use super::*;

    /// A cluster that has the secret `here`.
    fn cluster_with_secret(api: &KubeApi) -> Cluster {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": { "name": "here", "namespace": "default" }, "data": {},
        });
        api.create("/api/v1/namespaces/default/secrets", &secret);
        let kubeconfig = Some(api.kubeconfig(larder_testkit::kube_api::ADMINISTRATOR));
        Cluster::open(&crate::ClusterOptions { kubeconfig, node: "n1".into() })
    }

    #[tokio::test]
    async fn while_the_api_server_is_unavailable_a_secret_is_as_it_was_read_last() {
        let mut api = KubeApi::start();
        let cluster = cluster_with_secret(&api);
        let secrets = PullSecrets::of(&cluster, Duration::ZERO, Duration::from_secs(3600));
        let get = || secrets.get("default", "here");
        let known = get().await.expect("it exists");
        api.stop();
        assert_eq!(get().await, Ok(known.clone()));
        assert!(secrets.get("default", "other").await.expect_err("never read").is_temporary());
        api.delete("/api/v1/namespaces/default/secrets/here");
        assert_eq!(get().await, Ok(known), "the server is unavailable");
        api.restart();
        let missing = ClusterError::NotFound { what: "secret default/here".into() };
        assert_eq!(get().await, Err(missing));
    }

    #[tokio::test]
    async fn while_the_api_server_hangs_many_pulls_wait_for_one_read_of_a_secret() {
        let api = KubeApi::in_process();
        let cluster = cluster_with_secret(&api);
        let secrets = PullSecrets::of(&cluster, Duration::from_secs(60), Duration::from_secs(3600));
        secrets.get("default", "here").await.expect("it exists");
        api.fault("/secrets/", 100, ApiFault::Delay(Duration::from_secs(3600)));
        time::pause();
        time::advance(Duration::from_secs(61)).await;
        let before = cluster.requests().requests;
        let pulls = join_all((0..50).map(|_| secrets.get("default", "here"))).await;
        assert!(pulls.iter().all(Result::is_ok), "as it was read last");
        assert_eq!(cluster.requests().requests - before, 1);
    }

    #[tokio::test]
    async fn many_pulls_read_each_secret_once_in_a_minute() {
        let api = KubeApi::start();
        let cluster = cluster_with_secret(&api);
        let secrets = PullSecrets::of(&cluster, Duration::from_secs(60), Duration::ZERO);
        let names = ["here".to_owned(), "missing".to_owned()];
        let pulls = async || {
            for (found, missing) in join_all((0..100).map(|_| secrets.of_pod("default", &names))).await {
                assert_eq!((found.len(), missing.len()), (1, 1));
            }
            cluster.requests().requests
        };
        assert_eq!(pulls().await, 2);
        assert_eq!(pulls().await, 2, "both answers are known");
        let wait = async |seconds| {
            time::pause();
            time::advance(Duration::from_secs(seconds)).await;
            time::resume();
        };
        wait(11).await;
        assert_eq!(pulls().await, 3, "the missing one may exist now");
        wait(61).await;
        assert_eq!(pulls().await, 5);
    }
}
