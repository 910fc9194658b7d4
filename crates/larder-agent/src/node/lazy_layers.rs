//! Layers of larder's own store whose data comes while containers read them.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use larder::backend::Container;
use larder::error_chain;
use larder_store::backend::StoreBackend;
use larder_store::pull::GuardPlan;
use larder_store::store::Suspect;

use super::Node;
use crate::group_keeper;

impl Node {
    /// Lets containers read layers before they are complete, and verifies what they read of complete ones, if that is
    /// set. Without selected images and layers of an earlier process, that begins when a pod or an image set asks for
    /// it. `program` keeps the guard of their reads while no larder runs. Before anything is mounted.
    pub(crate) async fn guard_reads(&self, program: &Path) {
        let Some(store) = self.storage.store() else { return };
        let config = self.settings.now();
        let (program, root) = (program.to_owned(), store.store().root().to_owned());
        let events = Arc::clone(&self.observability);
        let puller = store.puller();
        puller.use_node_keyring(Arc::clone(self.pulls.manager().credentials()));
        puller.guard_reads_on_demand(GuardPlan {
            keeper: Box::new(move || group_keeper::choose(&program, &root).map(Arc::from)),
            longest_wait: config.lazy.read_timeout,
            guarded: Box::new(move |before| events.record_lost_guard(&before)),
        });
        let has_incomplete = has_incomplete(store).await.unwrap_or_else(|reason| {
            tracing::warn!(reason, "cannot list incomplete layers");
            true
        });
        if !has_incomplete && config.lazy.images.is_empty() && !config.store.verify_reads {
            return;
        }
        puller.open_guard().await;
        if let Some(reason) = store.store().unguarded().filter(|_| config.store.verify_reads) {
            tracing::warn!(reason, "reads of layers are not verified");
        }
    }

    /// Warnings about each pod, container and mount that may have read zeros and is still there.
    pub(crate) async fn suspect_warnings(&self) -> Vec<String> {
        let Some(store) = self.storage.store().map(|store| store.store().clone()) else { return Vec::new() };
        let suspects = match tokio::task::spawn_blocking(move || store.suspects()).await {
            Ok(Ok(suspects)) if suspects.is_empty() => return Vec::new(),
            Ok(Ok(suspects)) => suspects,
            Ok(Err(error)) => return vec![error_chain(&error)],
            // It fails only when the runtime stops.
            Err(_) => return Vec::new(),
        };
        // Without a runtime that answers, containers are named by their IDs.
        let inventory = self.storage.backend().container_inventory().await.unwrap_or_default();
        let named: BTreeSet<String> =
            suspects.iter().map(|suspect| name_suspect(suspect, &inventory.containers)).collect();
        let warning = |name| format!("{name} may have read zeros: the guard of incomplete layers was killed");
        named.into_iter().map(warning).collect()
    }

    /// Ends the guard of reads when the process ends, unless a layer is incomplete.
    pub(crate) async fn end_guard_of_reads(&self) {
        let Some(store) = self.storage.store().map(|store| store.store().clone()) else { return };
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || store.end_guard()).await {
            tracing::warn!("{}", error_chain(&error));
        }
    }
}

/// A suspect and the next step, in words. Volumes of images are views of a sandbox, and have its ID in their keys.
fn name_suspect(suspect: &Suspect, containers: &[Container]) -> String {
    let key = match suspect {
        Suspect::Mount(_, target) => return format!("mount {} (unmount it)", target.display()),
        Suspect::Snapshot(_, key) => key,
    };
    let of_suspect = |id: &str| !id.is_empty() && key.split('/').any(|part| part == id);
    let is_owner = |found: &&Container| of_suspect(&found.id) || of_suspect(&found.sandbox_id);
    match containers.iter().find(is_owner) {
        Some(Container { pod, .. }) if !pod.is_empty() => format!("pod {pod} (delete it)"),
        _ => format!("snapshot {key} (remove its container)"),
    }
}

async fn has_incomplete(store: &StoreBackend) -> Result<bool, String> {
    let store = store.store().clone();
    let asked = tokio::task::spawn_blocking(move || store.has_incomplete_layers()).await;
    asked.map_err(|error| error.to_string())?.map_err(|error| error_chain(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspects_are_named_by_their_pods() {
        let of_pod = |id: &str, pod: &str| Container {
            id: id.into(),
            sandbox_id: "5a".into(),
            pod: pod.into(),
            ..Container::default()
        };
        let containers = [of_pod("c1", "default/web"), of_pod("c2", "")];
        let name = |key: &str| name_suspect(&Suspect::Snapshot(1, key.into()), &containers);
        assert_eq!(name("k8s.io/7/c1"), "pod default/web (delete it)");
        assert_eq!(name("k8s.io/7//run/image-volumes/5a/9f"), "pod default/web (delete it)", "its volume");
        assert_eq!(name("k8s.io/7/c2"), "snapshot k8s.io/7/c2 (remove its container)", "no pod");
        assert_eq!(name("k8s.io/7/c"), "snapshot k8s.io/7/c (remove its container)", "not a part of an ID");
        let mount = Suspect::Mount("m1".into(), "/mnt".into());
        assert_eq!(name_suspect(&mount, &containers), "mount /mnt (unmount it)");
    }
}
