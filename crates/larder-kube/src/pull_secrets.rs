//! Pull secrets of pods, by name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use larder::credentials::{PullSecret, SecretCoordinates};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::error::ClusterError;

/// Reads pull secrets with the identity of the node, which may read those of its pods.
#[derive(Clone)]
pub struct PullSecrets {
    cluster: Cluster,
    shared_for: Duration,
    cache: Arc<Mutex<Cache>>,
}

/// How long the answer that a secret cannot be read is used at most for further pulls: as long as the first back-off.
const ERROR_SHARED_FOR: Duration = Duration::from_secs(10);
/// For how long a secret serves while the API server is away.
const KNOWN_FOR: Duration = Duration::from_secs(24 * 3600);

type Answer = Result<PullSecret, ClusterError>;
/// Until when an answer is used. Locked while it is being read, so that each secret is read once at a time.
type CachedAnswer = Arc<tokio::sync::Mutex<Option<(Instant, Answer)>>>;
/// Answers by namespace and name.
type Cache = BTreeMap<(String, String), CachedAnswer>;

impl PullSecrets {
    /// Of this cluster. Pulls that begin within `shared_for` share one read of a secret.
    pub fn of(cluster: &Cluster, shared_for: Duration) -> PullSecrets {
        PullSecrets { cluster: cluster.clone(), shared_for, cache: Arc::default() }
    }

    /// The secret of this name; while the API server is away, as it was read last, for a day at most.
    ///
    /// # Errors
    /// As the API server answers; [`ClusterError::NotFound`] if there is none.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<PullSecret, ClusterError> {
        let cached = cached_answer(&self.cache, namespace, name);
        let mut cached = cached.lock().await;
        if let Some((until, answer)) = &*cached
            && *until > Instant::now()
        {
            return answer.clone();
        }
        let answer = self.read(namespace, name).await;
        if let (Err(error), Some((_, Ok(known)))) = (&answer, &*cached)
            && error.is_temporary()
        {
            return Ok(known.clone());
        }
        let error_shared_for = self.shared_for.min(ERROR_SHARED_FOR);
        let shared_for = if answer.is_ok() { self.shared_for } else { error_shared_for };
        *cached = Some((Instant::now() + shared_for, answer.clone()));
        answer
    }

    async fn read(&self, namespace: &str, name: &str) -> Answer {
        let secrets: Api<Secret> = Api::namespaced(self.cluster.client.clone(), namespace);
        let found = self.cluster.call(format!("secret {namespace}/{name}"), secrets.get(name)).await?;
        Ok(pull_secret(found))
    }

    /// The secrets that a pod names, in its order. Those that do not exist are left out, as in kubelet, and reported as
    /// errors beside the others.
    pub async fn of_pod(&self, namespace: &str, names: &[String]) -> (Vec<PullSecret>, Vec<ClusterError>) {
        let (mut secrets, mut errors) = (Vec::new(), Vec::new());
        for answer in join_all(names.iter().map(|name| self.get(namespace, name))).await {
            match answer {
                Ok(secret) => secrets.push(secret),
                Err(error) => errors.push(error),
            }
        }
        (secrets, errors)
    }
}

/// The place for an answer. Answers of other secrets that are of no use any more are dropped.
fn cached_answer(cache: &Mutex<Cache>, namespace: &str, name: &str) -> CachedAnswer {
    let (mut cache, now) = (cache.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
    let is_useful = |(until, answer): &(Instant, Answer)| {
        let known_for = if answer.is_ok() { KNOWN_FOR } else { Duration::ZERO };
        *until + known_for > now
    };
    // One that is locked is being read.
    cache.retain(|_, cached| cached.try_lock().map_or(true, |answer| answer.as_ref().is_some_and(is_useful)));
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
    use larder_testkit::kube_api::KubeApi;
    use serde_json::json;
    use tokio::time;

    use super::*;

    #[tokio::test]
    async fn while_the_api_server_is_away_a_secret_is_as_it_was_read_last() {
        let mut api = KubeApi::start();
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": { "name": "here", "namespace": "default" }, "data": {},
        });
        api.create("/api/v1/namespaces/default/secrets", &secret);
        let kubeconfig = Some(api.kubeconfig(larder_testkit::kube_api::ADMINISTRATOR));
        let cluster = Cluster::open(&crate::ClusterOptions { kubeconfig, node: "n1".into() });
        let secrets = PullSecrets::of(&cluster, Duration::ZERO);
        let get = || secrets.get("default", "here");
        let known = get().await.expect("it exists");
        api.stop();
        assert_eq!(get().await, Ok(known.clone()));
        assert!(secrets.get("default", "other").await.expect_err("never read").is_temporary());
        api.delete("/api/v1/namespaces/default/secrets/here");
        assert_eq!(get().await, Ok(known), "the server does not say so yet");
        api.restart();
        let missing = ClusterError::NotFound { what: "secret default/here".into() };
        assert_eq!(get().await, Err(missing));
    }

    #[tokio::test]
    async fn many_pulls_read_each_secret_once_in_a_minute() {
        let api = KubeApi::start();
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": { "name": "here", "namespace": "default" }, "data": {},
        });
        api.create("/api/v1/namespaces/default/secrets", &secret);
        let kubeconfig = Some(api.kubeconfig(larder_testkit::kube_api::ADMINISTRATOR));
        let cluster = Cluster::open(&crate::ClusterOptions { kubeconfig, node: "n1".into() });
        let secrets = PullSecrets::of(&cluster, Duration::from_secs(60));
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
