//! The backend's answers as CRI messages.

use std::collections::BTreeMap;

use larder::backend::{Condition, FilesystemUsage, Filesystems, Image, ImageSpec};
use larder::reference::{self, Digest};
use prost::Message as _;
use serde_json::{Value, json};

use crate::{MAX_MESSAGE_BYTES, proto};

/// Most bytes of images in one message of a streamed list; a larger image has a message of its own.
const PART_BYTES: usize = 1 << 20;
/// Most bytes of images in an unstreamed list: kubelet and crictl refuse larger messages.
const LIST_BYTES: usize = MAX_MESSAGE_BYTES - (64 << 10);
/// Most bytes of the tag and the length before an image or a name.
const FRAME_BYTES: usize = 6;

/// Version of kubelet's runtime API, as runtimes report it.
const KUBE_API_VERSION: &str = "0.1.0";

/// The image. Names of images for other platforms are no names of CRI: kubelet has such an image by its ID only.
pub(super) fn image(image: Image) -> proto::Image {
    let named =
        |names: Vec<String>| names.into_iter().filter(|name| !reference::names_platform(name)).collect();
    proto::Image {
        id: image.id.into(),
        repo_tags: named(image.repo_tags),
        repo_digests: named(image.repo_digests),
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

/// A list that fits one message, as `ListImages` has no pages: if it does not, names are left out, so many of each
/// image that the others fit, tags last. kubelet collects and pins images by ID. `StreamImages` leaves nothing out.
pub(super) fn fitted(mut images: Vec<proto::Image>) -> Vec<proto::Image> {
    let bytes: usize = images.iter().map(|image| image.encoded_len() + FRAME_BYTES).sum();
    if bytes <= LIST_BYTES {
        return images;
    }
    let names: usize = images.iter().flat_map(names_of).map(|name| name.len() + FRAME_BYTES).sum();
    let room = LIST_BYTES.saturating_sub(bytes.saturating_sub(names)) / images.len().max(1);
    let mut left_out = 0;
    for image in &mut images {
        let mut room = room;
        for names in [&mut image.repo_tags, &mut image.repo_digests] {
            let before = names.len();
            names.retain(|name| match room.checked_sub(name.len() + FRAME_BYTES) {
                Some(rest) => {
                    room = rest;
                    true
                }
                None => false,
            });
            left_out += before - names.len();
        }
    }
    tracing::warn!(
        "a list of {} images does not fit one CRI message: {left_out} names left out",
        images.len()
    );
    images
}

fn names_of(image: &proto::Image) -> impl Iterator<Item = &String> {
    image.repo_tags.iter().chain(&image.repo_digests)
}

/// Splits a list into messages of bounded size. An empty list has none.
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

/// The verbose information of a backend: JSON under each key. An image's config is under `info`, with the fields of
/// containerd's response.
pub(super) fn info(information: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut info: BTreeMap<_, _> = information
        .into_iter()
        .map(|(key, text)| match serde_json::from_str::<Value>(&text) {
            Ok(_) => (key, text),
            Err(_) => (key, Value::String(text).to_string()),
        })
        .collect();
    if !info.contains_key("info")
        && let Some(config) = info.remove("config")
    {
        let chain_id = Value::String(chain_id(&config));
        info.insert("info".into(), format!("{{\"chainID\":{chain_id},\"imageSpec\":{config}}}"));
    }
    info
}

/// The chain ID of all layers of a config, as the OCI image specification defines it; empty without layers.
fn chain_id(config: &str) -> String {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    let diff_ids = config["rootfs"]["diff_ids"].as_array().into_iter().flatten();
    let layers = diff_ids.filter_map(|id| id.as_str().map(str::to_owned));
    let chain = |below: String, layer: String| Digest::sha256(format!("{below} {layer}")).as_str().to_owned();
    layers.reduce(chain).unwrap_or_default()
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

/// The conditions of a backend. A backend that answers without the two required conditions satisfies both.
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

/// The verbose information of a status: the server, and its backend if that answers.
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
        let information = [("config", "{\"os\":\"linux\"}"), ("note", "plain \"text\"")];
        let information = information.map(|(key, text)| (key.to_owned(), text.to_owned()));
        let info = info(information.into());
        for text in info.values() {
            serde_json::from_str::<Value>(text).expect("JSON");
        }
        assert_eq!(info["info"], "{\"chainID\":\"\",\"imageSpec\":{\"os\":\"linux\"}}");
        assert!(!info.contains_key("config"), "containerd has it in one place");
        assert_eq!(info["note"], "\"plain \\\"text\\\"\"");
    }

    #[test]
    fn the_chain_id_covers_all_layers() {
        let (a, b) = ("sha256:aa", "sha256:bb");
        assert_eq!(chain_id("{\"os\":\"linux\"}"), "");
        assert_eq!(chain_id(&json!({ "rootfs": { "diff_ids": [a] } }).to_string()), a);
        // printf '%s' 'sha256:aa sha256:bb' | sha256sum
        let both = chain_id(&json!({ "rootfs": { "diff_ids": [a, b] } }).to_string());
        assert_eq!(both, "sha256:b68ad689d6d1ec110ea1c13617437ad6f3766d4b3b309f6a603a222e07a0164f");
    }

    #[test]
    fn reported_conditions_are_kept() {
        let own =
            Condition { kind: "NetworkReady".into(), reason: "NoPlugin".into(), ..Condition::default() };
        let statuses: Vec<_> =
            conditions(vec![own]).into_iter().map(|condition| (condition.r#type, condition.status)).collect();
        assert_eq!(statuses, [("RuntimeReady".into(), true), ("NetworkReady".into(), false)]);
    }
}
