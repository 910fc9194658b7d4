//! What a backend knows, as CRI says it.

use std::collections::BTreeMap;

use larder::backend::{Condition, FilesystemUsage, Filesystems, Image, ImageSpec};
use prost::Message as _;
use serde_json::{Value, json};

use crate::proto;

/// Most bytes of images in one part of a streamed list; an image that is larger has a part of its own.
const PART_BYTES: usize = 1 << 20;

/// Version of the API, as runtimes report it for that of kubelet.
const KUBE_API_VERSION: &str = "0.1.0";

pub(super) fn image(image: Image) -> proto::Image {
    proto::Image {
        id: image.id.into(),
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        size: image.size,
        uid: image.uid.map(|value| proto::Int64Value { value }),
        username: image.username,
        spec: image.spec.map(spec),
        pinned: image.pinned,
    }
}

fn spec(spec: ImageSpec) -> proto::ImageSpec {
    proto::ImageSpec {
        image: spec.image.into(),
        annotations: spec.annotations,
        user_specified_image: spec.user_specified_image.into(),
        runtime_handler: spec.runtime_handler,
        image_ref: String::new(),
    }
}

/// A list in parts that are not large. An empty list is no part.
pub(super) fn parts(images: Vec<proto::Image>) -> Vec<proto::StreamImagesResponse> {
    let mut parts: Vec<proto::StreamImagesResponse> = Vec::new();
    let mut room = 0;
    for image in images {
        let bytes = image.encoded_len();
        match parts.last_mut() {
            Some(part) if bytes <= room => {
                room -= bytes;
                part.images.push(image);
            }
            _ => {
                room = PART_BYTES.saturating_sub(bytes);
                parts.push(proto::StreamImagesResponse { images: vec![image] });
            }
        }
    }
    parts
}

/// What a backend tells only when asked for everything: JSON under each key. Where it tells an image's config,
/// `info` has it at the place where readers of containerd's answer look for it.
pub(super) fn info(told: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut info: BTreeMap<_, _> = told
        .into_iter()
        .map(|(key, text)| match serde_json::from_str::<Value>(&text) {
            Ok(_) => (key, text),
            Err(_) => (key, Value::String(text).to_string()),
        })
        .collect();
    if let Some(config) = info.get("config") {
        let spec = format!("{{\"imageSpec\":{config}}}");
        info.entry("info".into()).or_insert(spec);
    }
    info
}

pub(super) fn filesystems(filesystems: &Filesystems) -> proto::ImageFsInfoResponse {
    let all = |list: &[FilesystemUsage]| list.iter().map(filesystem).collect();
    proto::ImageFsInfoResponse {
        image_filesystems: all(&filesystems.image),
        container_filesystems: all(&filesystems.container),
    }
}

fn filesystem(usage: &FilesystemUsage) -> proto::FilesystemUsage {
    let count = |value| proto::UInt64Value { value };
    proto::FilesystemUsage {
        timestamp: usage.timestamp_ns,
        fs_id: Some(proto::FilesystemIdentifier {
            mountpoint: usage.mountpoint.to_string_lossy().into_owned(),
        }),
        used_bytes: usage.used_bytes.map(count),
        inodes_used: usage.inodes_used.map(count),
    }
}

pub(super) fn version(about: &super::ServerVersion) -> proto::VersionResponse {
    proto::VersionResponse {
        version: KUBE_API_VERSION.into(),
        runtime_name: about.name.clone(),
        runtime_version: about.version.clone(),
        runtime_api_version: "v1".into(),
    }
}

/// The conditions of a backend. One that answers and does not speak of the two that every runtime has is fit in both.
pub(super) fn conditions(own: Vec<Condition>) -> Vec<proto::RuntimeCondition> {
    let needed = ["RuntimeReady", "NetworkReady"].map(|kind| Condition {
        kind: kind.into(),
        ok: true,
        ..Condition::default()
    });
    let missing = needed.into_iter().filter(|needed| own.iter().all(|own| own.kind != needed.kind));
    let missing: Vec<_> = missing.collect();
    missing.into_iter().chain(own).map(condition).collect()
}

/// The condition of a backend that does not answer.
pub(super) fn not_ready(text: String) -> proto::RuntimeCondition {
    condition(Condition {
        kind: "RuntimeReady".into(),
        ok: false,
        reason: "BackendFailed".into(),
        message: text,
    })
}

fn condition(condition: Condition) -> proto::RuntimeCondition {
    proto::RuntimeCondition {
        r#type: condition.kind,
        status: condition.ok,
        reason: condition.reason,
        message: condition.message,
    }
}

/// What a verbose status tells: the server, and what is behind it if that answers.
pub(super) fn status_info(
    about: &super::ServerVersion,
    backend: Option<&larder::backend::RuntimeInfo>,
) -> BTreeMap<String, String> {
    let backend = backend.map(|info| {
        json!({
            "endpoint": info.endpoint,
            "name": info.name,
            "version": info.version,
            "apiVersion": info.api_version,
        })
    });
    let server = json!({ "name": about.name, "version": about.version, "backend": backend });
    BTreeMap::from([("larder".to_owned(), server.to_string())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(id: &str, bytes: usize) -> proto::Image {
        proto::Image { id: id.into(), username: "u".repeat(bytes), ..proto::Image::default() }
    }

    #[test]
    fn a_streamed_list_has_each_image_in_one_part_of_bounded_size() {
        assert_eq!(parts(Vec::new()), []);
        let images: Vec<_> =
            [10, PART_BYTES / 2, PART_BYTES / 2, 2 * PART_BYTES, 10, 10].map(|n| sized("a", n)).into();
        let parts = parts(images.clone());
        let counts: Vec<_> = parts.iter().map(|part| part.images.len()).collect();
        assert_eq!(counts, [2, 1, 1, 2]);
        let joined: Vec<_> = parts.into_iter().flat_map(|part| part.images).collect();
        assert_eq!(joined, images);
    }

    #[test]
    fn verbose_info_is_json_under_each_key() {
        let told = [("config", "{\"os\":\"linux\"}"), ("note", "plain \"text\"")];
        let told = told.map(|(key, text)| (key.to_owned(), text.to_owned()));
        let info = info(told.into());
        for text in info.values() {
            serde_json::from_str::<Value>(text).expect("JSON");
        }
        assert_eq!(info["info"], "{\"imageSpec\":{\"os\":\"linux\"}}");
        assert_eq!(info["note"], "\"plain \\\"text\\\"\"");
    }

    #[test]
    fn a_backend_that_tells_its_conditions_keeps_them() {
        let own =
            Condition { kind: "NetworkReady".into(), reason: "NoPlugin".into(), ..Condition::default() };
        let told: Vec<_> = conditions(vec![own]).into_iter().map(|told| (told.r#type, told.status)).collect();
        assert_eq!(told, [("RuntimeReady".into(), true), ("NetworkReady".into(), false)]);
    }
}
