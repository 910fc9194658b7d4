//! `larder kube check` against the API server of the testkit.

use std::path::Path;

use larder_testkit::kube_api::{ADMINISTRATOR, KubeApi};
use larder_testkit_peers::RegistryOptions;
use serde_json::{Value, json};

use crate::world::{LarderProcess, RuntimeFixture, larder_in};

/// A node `n1`, larder's namespace and the definitions of its resources.
pub(crate) fn create_cluster(api: &KubeApi) {
    api.create("/api/v1/nodes", &json!({ "metadata": { "name": "n1" } }));
    api.create("/api/v1/namespaces", &json!({ "metadata": { "name": "larder-system" } }));
    let names = |kind: &str, plural: &str| {
        json!({
            "metadata": { "name": format!("{plural}.images.larder.dev") },
            "spec": {
                "group": "images.larder.dev", "scope": "Cluster", "names": { "kind": kind, "plural": plural },
                "versions": [{ "name": "v1alpha1", "served": true, "subresources": { "status": {} } }],
            },
        })
    };
    for (kind, plural) in [("ImageSet", "imagesets"), ("NodeImages", "nodeimages")] {
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &names(kind, plural));
    }
}

/// The settings `kubernetes` of the node `n1`, with all rights.
pub(crate) fn cluster_settings(api: &KubeApi) -> Value {
    let kubeconfig = api.kubeconfig(ADMINISTRATOR);
    json!({ "enabled": true, "nodeName": "n1", "nodeKubeconfig": kubeconfig, "kubeconfig": kubeconfig })
}

#[test]
fn a_check_names_what_is_missing_and_fails_until_nothing_is() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let api = KubeApi::in_process();
    let cluster = cluster_settings(&api);
    let head = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";
    let settings = world.file("cluster.yaml", &format!("{head}kubernetes: {cluster}\n"));
    let run = world.larder(&["kube", "check", "--config", &settings]).expect(1);
    assert_eq!(run.lines_with(&["failed", "node n1 does not exist"]), 1, "{run:?}");
    assert_eq!(run.lines_with(&["failed", "custom resources", "not installed"]), 1, "{run:?}");
    assert_eq!(run.lines_with(&["failed", "lease", "namespace larder-system does not exist"]), 1, "{run:?}");
    assert_eq!(run.lines_with(&["kubectl apply -k"]), 2, "{run:?}");
    assert_eq!(run.lines_with(&["ok", "API server", "v1.36.2"]), 1, "{run:?}");
    create_cluster(&api);
    let run = world.larder_with(&settings, &["kube", "check", "-o", "json"]).expect(0);
    let checks = run.json();
    assert!(checks.as_array().unwrap().iter().all(|check| check["ok"] == true), "{checks:#}");
    assert_eq!(checks.as_array().unwrap().iter().filter(|check| check["name"] == "prefetch").count(), 0);
    let settings =
        world.file("runtime.yaml", &format!("{head}backend: unix:///absent.sock\nkubernetes: {cluster}\n"));
    // Not `larder_with`: its --root selects larder's own store.
    let mut command = larder_in(Path::new(&settings).parent().unwrap());
    command.env("LARDER_CONFIG", &settings).args(["kube", "check"]);
    let run = LarderProcess::start(command).finish().expect(0);
    assert_eq!(
        run.lines_with(&["ok", "prefetch", "without credentials", "cri.kubelet: runtime"]),
        1,
        "{run:?}"
    );
    let node = json!({ "enabled": true, "nodeName": "n1", "nodeKubeconfig": api.kubeconfig(ADMINISTRATOR) });
    let settings = world.file("node.yaml", &format!("{head}kubernetes: {node}\n"));
    let run = world.larder_with(&settings, &["kube", "check"]).expect(1);
    assert_eq!(run.lines_with(&["failed", "larder's identity", "no image sets and events"]), 1, "{run:?}");
    let settings = world.file("none.yaml", &format!("{head}kubernetes: {{ enabled: false }}\n"));
    let run = world.larder_with(&settings, &["kube", "check"]).expect(1);
    assert_eq!(run.lines_with(&["failed", "settings", "kubernetes.enabled: false"]), 1, "{run:?}");
}
