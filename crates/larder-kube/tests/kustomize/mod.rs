//! Output of `kubectl kustomize` for the manifests, as far as they use it, and the fields of their objects.

use std::path::Path;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A `kustomization.yaml`; a field that is not known here is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    config_map_generator: Vec<GeneratedConfigMap>,
    #[serde(default)]
    patches: Vec<Patch>,
    #[serde(default)]
    images: Vec<ImageTag>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GeneratedConfigMap {
    name: String,
    namespace: String,
    behavior: Option<String>,
    files: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Patch {
    path: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ImageTag {
    name: String,
    new_tag: String,
}

/// The objects of a directory. A generated `ConfigMap` has the name without a hash.
pub(crate) fn render(directory: &Path) -> Vec<Value> {
    let read =
        |name: &str| fs_err::read_to_string(directory.join(name)).expect("a file of the kustomization");
    let kustomization: Kustomization =
        serde_saphyr::from_str(&read("kustomization.yaml")).expect("a kustomization");
    let mut objects = Vec::new();
    for name in &kustomization.resources {
        let place = directory.join(name);
        if place.is_dir() {
            objects.extend(render(&place));
        } else {
            objects.extend(serde_saphyr::from_multiple::<Value>(&read(name)).expect("YAML"));
        }
    }
    for config_map in &kustomization.config_map_generator {
        let data: Map<_, _> = config_map.files.iter().map(|file| (file.clone(), read(file).into())).collect();
        let object = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": { "name": config_map.name, "namespace": config_map.namespace },
        });
        let known = objects.iter().position(|known| identity(known) == identity(&object));
        assert_eq!(known.is_some(), config_map.behavior.as_deref() == Some("replace"), "{config_map:?}");
        match known {
            Some(at) => objects[at] = object,
            None => objects.push(object),
        }
    }
    for patch in &kustomization.patches {
        let patch: Value = serde_saphyr::from_str(&read(&patch.path)).expect("a patch");
        let target = objects.iter_mut().find(|object| identity(object) == identity(&patch));
        merge(target.expect("the object of the patch"), &patch);
    }
    for image in &kustomization.images {
        for object in &mut objects {
            set_tag(object, image);
        }
    }
    objects
}

fn identity(object: &Value) -> [&Value; 3] {
    [&object["kind"], &object["metadata"]["namespace"], &object["metadata"]["name"]]
}

/// A strategic merge: elements of these lists are the same if they have the same key.
fn merge(target: &mut Value, patch: &Value) {
    let (Some(fields), Some(patch)) = (target.as_object_mut(), patch.as_object()) else {
        *target = patch.clone();
        return;
    };
    for (name, value) in patch {
        let key = match name.as_str() {
            "containers" | "volumes" => "name",
            "volumeMounts" => "mountPath",
            _ => {
                merge(fields.entry(name).or_insert(Value::Null), value);
                continue;
            }
        };
        let list = fields.get_mut(name).and_then(Value::as_array_mut).expect("a list to merge into");
        // Elements of the patch come first.
        let mut patched = Vec::new();
        for element in value.as_array().expect("a list") {
            let known = list.iter().position(|known| known[key] == element[key]);
            let known = known.map(|at| list.remove(at));
            if element["$patch"] == "delete" {
                assert!(known.is_some(), "there is no {element}");
                continue;
            }
            let mut merged = known.unwrap_or_default();
            merge(&mut merged, element);
            patched.push(merged);
        }
        list.splice(..0, patched);
    }
}

fn set_tag(object: &mut Value, image: &ImageTag) {
    let containers = object.pointer_mut("/spec/template/spec/containers").and_then(Value::as_array_mut);
    for container in containers.into_iter().flatten() {
        if container["image"] == image.name.as_str() {
            container["image"] = format!("{}:{}", image.name, image.new_tag).into();
        }
    }
}

/// Fails if an object has a field that its kind does not have, or a value of another type.
pub(crate) fn check_fields(object: &Value) {
    let kind = object["kind"].as_str().expect("a kind");
    let known = match kind {
        "ClusterRole" => round_trip::<ClusterRole>(object),
        "ClusterRoleBinding" => round_trip::<ClusterRoleBinding>(object),
        "ConfigMap" => round_trip::<ConfigMap>(object),
        "CustomResourceDefinition" => round_trip::<CustomResourceDefinition>(object),
        "DaemonSet" => round_trip::<DaemonSet>(object),
        "Namespace" => round_trip::<Namespace>(object),
        "NetworkPolicy" => round_trip::<NetworkPolicy>(object),
        "Role" => round_trip::<Role>(object),
        "RoleBinding" => round_trip::<RoleBinding>(object),
        "Secret" => round_trip::<Secret>(object),
        "ServiceAccount" => round_trip::<ServiceAccount>(object),
        "ValidatingAdmissionPolicy" => round_trip::<ValidatingAdmissionPolicy>(object),
        "ValidatingAdmissionPolicyBinding" => round_trip::<ValidatingAdmissionPolicyBinding>(object),
        other => panic!("{other}: add its type here"),
    };
    assert_eq!(&known, object, "{kind} {}", object["metadata"]["name"]);
}

fn round_trip<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
    let typed: T =
        serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object:#}"));
    serde_json::to_value(typed).expect("JSON")
}
