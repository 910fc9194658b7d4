//! Pull secrets of pods, by name.

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use larder::credentials::{PullSecret, SecretCoordinates};

use crate::cluster::Cluster;
use crate::error::ClusterError;

/// Reads pull secrets with the identity of the node, which may read those of its pods.
#[derive(Clone)]
pub struct PullSecrets {
    cluster: Cluster,
}

impl PullSecrets {
    /// Of this cluster.
    pub fn of(cluster: &Cluster) -> PullSecrets {
        PullSecrets { cluster: cluster.clone() }
    }

    /// The secret of this name.
    ///
    /// # Errors
    /// As the API server answers; [`ClusterError::NotFound`] if there is none.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<PullSecret, ClusterError> {
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
