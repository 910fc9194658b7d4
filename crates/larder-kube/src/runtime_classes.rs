//! Runtime handlers of pods, by the name of their runtime class.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;

use crate::cluster::Cluster;
use crate::error::ClusterError;

/// Reads runtime classes with the identity of the node, each once: the handler of a class never changes.
pub struct RuntimeClasses {
    cluster: Cluster,
    handlers: Mutex<BTreeMap<String, String>>,
}

impl RuntimeClasses {
    /// Of this cluster.
    pub fn of(cluster: &Cluster) -> RuntimeClasses {
        RuntimeClasses { cluster: cluster.clone(), handlers: Mutex::default() }
    }

    /// The handler of this class; of no class the default one, which is empty.
    pub async fn handler(&self, class: &str) -> Result<String, ClusterError> {
        let handlers = || self.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        if class.is_empty() {
            return Ok(String::new());
        }
        if let Some(known) = handlers().get(class) {
            return Ok(known.clone());
        }
        let classes: Api<RuntimeClass> = Api::all(self.cluster.client.clone());
        let found = self.cluster.call(format!("runtime class {class}"), classes.get(class)).await?;
        handlers().insert(class.to_owned(), found.handler.clone());
        Ok(found.handler)
    }
}
