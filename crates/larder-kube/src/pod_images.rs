//! From a pod to the images it needs.

use k8s_openapi::api::core::v1::{self as core, ImageVolumeSource, LocalObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use larder::pod::Pod;
use larder::pull::{PullPolicy, default_policy};
use larder::reference::{ImageName, names_platform};
use serde::Deserialize;

/// A pod as the API server sends it, with the fields that are read. All of them would be decoded at each change of a
/// pod, and would add 0.6 MB to the program.
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = core::Pod)]
#[serde(default)]
pub(crate) struct PodObject {
    metadata: ObjectMeta,
    spec: Option<PodSpec>,
    status: Option<PodStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    volumes: Option<Vec<Volume>>,
    ephemeral_containers: Option<Vec<PodContainer>>,
    init_containers: Option<Vec<PodContainer>>,
    containers: Option<Vec<PodContainer>>,
    image_pull_secrets: Option<Vec<LocalObjectReference>>,
    service_account_name: Option<String>,
    runtime_class_name: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Volume {
    name: String,
    image: Option<ImageVolumeSource>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodContainer {
    name: String,
    image: Option<String>,
    image_pull_policy: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    phase: Option<String>,
}

/// A pod that is bound to this node and not finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundPod {
    /// The pod, as back-off, events and the runtime know it.
    pub pod: Pod,
    /// Names of its pull secrets, in its order; they are in its namespace.
    pub pull_secrets: Vec<String>,
    /// The images to pull, in the order in which kubelet needs them: of volumes, then of ephemeral, init and other
    /// containers.
    pub images: Vec<PodImage>,
    /// `spec.runtimeClassName`; empty if none.
    pub runtime_class: String,
    /// Whether its containers have been started.
    pub is_running: bool,
}

/// One image of a pod that may be pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodImage {
    /// As the pod has it.
    pub image: ImageName,
    /// `Always` or `IfNotPresent`.
    pub policy: PullPolicy,
    /// Such as `spec.containers{web}`; empty for image volumes.
    pub field_path: String,
    /// Name of the container or volume.
    pub part: String,
}

/// Returns the images that a pod needs, or `None` if it is finished or being deleted.
pub(crate) fn bound_pod(pod: &PodObject) -> Option<BoundPod> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    if pod.metadata.deletion_timestamp.is_some() || ["Succeeded", "Failed"].contains(&phase) {
        return None;
    }
    let spec = pod.spec.as_ref()?;
    let metadata = &pod.metadata;
    let identity = Pod {
        uid: metadata.uid.clone().unwrap_or_default(),
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        annotations: metadata.annotations.clone().unwrap_or_default(),
        service_account: spec.service_account_name.clone().unwrap_or_default(),
    };
    let lists = [
        ("ephemeralContainers", &spec.ephemeral_containers),
        ("initContainers", &spec.init_containers),
        ("containers", &spec.containers),
    ];
    let of_volumes = spec.volumes.iter().flatten().filter_map(volume_image);
    let of_containers = lists.into_iter().flat_map(|(list, containers)| {
        containers.iter().flatten().filter_map(move |container| container_image(list, container))
    });
    let secrets = spec.image_pull_secrets.iter().flatten();
    Some(BoundPod {
        pod: identity,
        pull_secrets: secrets.map(|secret| secret.name.clone()).filter(|name| !name.is_empty()).collect(),
        images: of_volumes.chain(of_containers).collect(),
        runtime_class: spec.runtime_class_name.clone().unwrap_or_default(),
        is_running: phase == "Running",
    })
}

fn container_image(
    list: &str,
    PodContainer { name, image: reference, image_pull_policy }: &PodContainer,
) -> Option<PodImage> {
    image(reference.as_deref(), image_pull_policy.as_deref(), format!("spec.{list}{{{name}}}"), name)
}

fn volume_image(volume: &Volume) -> Option<PodImage> {
    let source = volume.image.as_ref()?;
    image(source.reference.as_deref(), source.pull_policy.as_deref(), String::new(), &volume.name)
}

/// `None` without an image, where the policy is never to pull it, and for a name with a platform: kubelet knows none.
fn image(name: Option<&str>, policy: Option<&str>, field_path: String, part: &str) -> Option<PodImage> {
    let image = ImageName::from(name.filter(|name| !name.is_empty() && !names_platform(name))?);
    let policy = match policy {
        Some("Never") => return None,
        Some("Always") => PullPolicy::Always,
        Some("IfNotPresent") => PullPolicy::IfNotPresent,
        _ => default_policy(&image),
    };
    Some(PodImage { image, policy, field_path, part: part.to_owned() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: &serde_json::Value) -> PodObject {
        let pod = json!({ "metadata": { "name": "web", "namespace": "shop", "uid": "u1" }, "spec": spec });
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn every_kind_of_image_is_found_in_the_order_of_kubelet() {
        let spec = json!({
            "serviceAccountName": "puller", "runtimeClassName": "kata",
            "imagePullSecrets": [{ "name": "a" }, { "name": "" }, { "name": "b" }],
            "initContainers": [{ "name": "init", "image": "r.example/init:1" }],
            "containers": [
                { "name": "app", "image": "r.example/app" },
                { "name": "local", "image": "r.example/local:1", "imagePullPolicy": "Never" },
                { "name": "other", "image": "r.example/other:1#linux/s390x" },
            ],
            "ephemeralContainers": [{ "name": "debug", "image": "r.example/debug:1", "imagePullPolicy": "Always" }],
            "volumes": [
                { "name": "data", "image": { "reference": "r.example/data:1", "pullPolicy": "IfNotPresent" } },
                { "name": "scratch", "emptyDir": {} },
            ],
        });
        let found = bound_pod(&pod(&spec)).unwrap();
        let images = found.images.iter();
        let images: Vec<_> =
            images.map(|of| format!("{} {} {}", of.image, of.policy, of.field_path)).collect();
        assert_eq!(
            images,
            [
                "r.example/data:1 IfNotPresent ",
                "r.example/debug:1 Always spec.ephemeralContainers{debug}",
                "r.example/init:1 IfNotPresent spec.initContainers{init}",
                "r.example/app Always spec.containers{app}",
            ]
        );
        assert_eq!(found.pull_secrets, ["a", "b"]);
        assert_eq!((found.pod.service_account.as_str(), found.runtime_class.as_str()), ("puller", "kata"));
    }

    #[test]
    fn a_pod_that_is_finished_or_deleted_needs_nothing() {
        let spec = json!({ "containers": [{ "name": "app", "image": "r.example/app:1" }] });
        for (phase, needs) in [("Pending", true), ("Running", true), ("Succeeded", false), ("Failed", false)]
        {
            let mut pod = pod(&spec);
            pod.status = serde_json::from_value(json!({ "phase": phase })).unwrap();
            assert_eq!(bound_pod(&pod).is_some(), needs, "{phase}");
        }
        let mut deleted = pod(&spec);
        deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(bound_pod(&deleted), None);
    }
}
