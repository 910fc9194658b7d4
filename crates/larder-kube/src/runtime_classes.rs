//! Runtime handlers of pods, by the name of their runtime class.

use std::time::Duration;

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::error::ClusterError;
use crate::timed_cache::{FAILURE, Timed, TimedCache};

/// How long a handler is used before its class is read again, as with service accounts. A class never gets another
/// handler, but it may be deleted and created again with one.
const CLASS: Duration = Duration::from_secs(60);
/// How long a handler is used while the API server is unavailable.
const KNOWN_FOR: Duration = Duration::from_secs(24 * 3600);

/// Reads runtime classes with the identity of the node.
pub struct RuntimeClasses {
    cluster: Cluster,
    handlers: Mutex<TimedCache<String, String>>,
}

impl RuntimeClasses {
    /// Of this cluster.
    pub fn of(cluster: &Cluster) -> RuntimeClasses {
        RuntimeClasses { cluster: cluster.clone(), handlers: Mutex::default() }
    }

    /// The handler of this class; of no class the default one, which is empty.
    pub async fn handler(&self, class: &str) -> Result<String, ClusterError> {
        if class.is_empty() {
            return Ok(String::new());
        }
        let (key, now) = (class.to_owned(), Instant::now());
        let known = self.handlers.lock().get(&key, now);
        if let Some(known) = known.as_ref().filter(|known| now < known.refresh) {
            return Ok(known.value.clone());
        }
        let classes: Api<RuntimeClass> = Api::all(self.cluster.client.clone());
        let found = self.cluster.call(format!("runtime class {class}"), classes.get(class)).await;
        let now = Instant::now();
        let answer = match (found, known) {
            (Ok(found), _) => Timed { value: found.handler, refresh: now + CLASS, expires: now + KNOWN_FOR },
            (Err(error), Some(known)) if error.is_temporary() => {
                tracing::warn!("kubernetes: runtime class {class}: using the last handler: {error}");
                Timed { refresh: now + FAILURE, ..known }
            }
            (Err(error), _) => return Err(error),
        };
        self.handlers.lock().put(key, answer.clone(), now);
        Ok(answer.value)
    }
}

#[cfg(test)]
mod tests {
    use larder_testkit::kube_api::{ADMINISTRATOR, KubeApi};
    use serde_json::json;
    use tokio::time;

    use super::*;
    use crate::ClusterOptions;

    const CLASSES: &str = "/apis/node.k8s.io/v1/runtimeclasses";

    fn create_class(api: &KubeApi, handler: &str) {
        api.create(CLASSES, &json!({ "metadata": { "name": "vm" }, "handler": handler }));
    }

    /// A class is read again after that.
    async fn wait() {
        time::pause();
        time::advance(CLASS).await;
        time::resume();
    }

    #[tokio::test]
    async fn a_class_that_was_created_again_has_another_handler_after_a_minute() {
        let mut api = KubeApi::start();
        create_class(&api, "kata");
        let kubeconfig = Some(api.kubeconfig(ADMINISTRATOR));
        let cluster = Cluster::open(&ClusterOptions { kubeconfig, node: "n1".into() });
        let classes = RuntimeClasses::of(&cluster);
        let handler = || classes.handler("vm");
        assert_eq!(handler().await.as_deref(), Ok("kata"));
        api.delete(&format!("{CLASSES}/vm"));
        create_class(&api, "gvisor");
        assert_eq!(handler().await.as_deref(), Ok("kata"));
        assert_eq!(cluster.requests().requests, 1);
        wait().await;
        assert_eq!(handler().await.as_deref(), Ok("gvisor"));
        api.stop();
        wait().await;
        assert_eq!(handler().await.as_deref(), Ok("gvisor"), "the server is unavailable");
        api.restart();
        api.delete(&format!("{CLASSES}/vm"));
        wait().await;
        assert_eq!(handler().await, Err(ClusterError::NotFound { what: "runtime class vm".into() }));
    }
}
