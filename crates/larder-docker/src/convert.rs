//! Converts the engine's responses to larder's types.

use std::collections::BTreeMap;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use larder::backend::{BackendError, Image, ImageDetails};
use larder::credentials::Credential;
use larder::reference::{ImageName, Reference};
use reqwest::header::HeaderValue;
use serde_json::{Value, json};

use crate::api::{EngineInfo, ImageInspect, ImageSummary, count};
use crate::host::EngineHost;
use crate::{error, locality, names};

/// Sockets of a containerd that the engine did not start itself, and its default root.
const SYSTEM_CONTAINERD: [&str; 2] =
    ["/run/containerd/containerd.sock", "/var/run/containerd/containerd.sock"];
const SYSTEM_CONTAINERD_ROOT: &str = "/var/lib/containerd";

/// The filesystem of images, as far as the engine reports it: a containerd that the engine started has its root in that
/// of the engine, any other one is assumed to have the default root.
pub(crate) fn image_root(host: &EngineHost, info: &EngineInfo, is_here: bool) -> PathBuf {
    let is_of_system = SYSTEM_CONTAINERD.contains(&info.containerd.address.as_str());
    let root = if info.is_containerd_store() && is_of_system {
        SYSTEM_CONTAINERD_ROOT
    } else {
        &info.docker_root_dir
    };
    locality::qualify_path(host, info, is_here, root.into())
}

pub(crate) fn image_from_summary(found: ImageSummary) -> Image {
    Image {
        id: found.id,
        repo_tags: names::without_placeholders(found.repo_tags),
        repo_digests: names::without_placeholders(found.repo_digests),
        size: count(found.size),
        ..Image::default()
    }
}

pub(crate) fn image_from_inspect(found: &ImageInspect) -> Image {
    let user = found.config.user.split(':').next().unwrap_or_default();
    let uid = user.parse().ok();
    Image {
        id: found.id.clone(),
        repo_tags: names::without_placeholders(found.repo_tags.clone()),
        repo_digests: names::without_placeholders(found.repo_digests.clone()),
        size: count(found.size),
        uid,
        username: if uid.is_none() { user.to_owned() } else { String::new() },
        ..Image::default()
    }
}

/// The engine's response unchanged, and the fields that other backends have, in OCI's format.
pub(crate) fn details(answer: Value) -> Result<ImageDetails, BackendError> {
    let config = json!({
        "architecture": answer["Architecture"], "os": answer["Os"], "created": answer["Created"],
        "config": answer["Config"],
        "rootfs": {"type": "layers", "diff_ids": answer["RootFS"]["Layers"]},
    });
    let info = BTreeMap::from([
        ("config".to_owned(), config.to_string()),
        ("docker".to_owned(), answer.to_string()),
    ]);
    let found = serde_json::from_value(answer).map_err(|why| error::unreadable("an image", why))?;
    Ok(ImageDetails { image: image_from_inspect(&found), info })
}

/// The Docker CLI's name for Docker Hub in credentials.
const HUB: &str = "https://index.docker.io/v1/";

/// The header that carries a credential for the registry of an image. An engine with containerd's store sends it only
/// to the registry named in it.
pub(crate) fn auth(credential: &Credential, image: &ImageName) -> HeaderValue {
    let registry = image.reference().map_or("", Reference::registry);
    let registry = if registry == "docker.io" { HUB } else { registry };
    let mut fields = BTreeMap::new();
    for (name, value) in [
        ("serveraddress", registry),
        ("username", credential.username.as_str()),
        ("password", credential.password.reveal()),
        ("identitytoken", credential.identity_token.reveal()),
        ("registrytoken", credential.registry_token.reveal()),
    ] {
        if !value.is_empty() {
            fields.insert(name, value);
        }
    }
    let text = URL_SAFE.encode(json!(fields).to_string());
    // Base64 is always a header value.
    let mut value = HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static(""));
    value.set_sensitive(true);
    value
}

#[cfg(test)]
mod tests {
    use larder::credentials::Secret;

    use super::*;

    fn info(json: Value) -> EngineInfo {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_image_directory_depends_on_the_image_store() {
        let unix = EngineHost::Unix("/d.sock".into());
        let graph = json!({"DockerRootDir": "/data", "Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]});
        assert_eq!(image_root(&unix, &info(graph), true), PathBuf::from("/data"));
        let containerd = |address: &str| {
            let status = json!([["driver-type", "io.containerd.snapshotter.v1"]]);
            info(
                json!({"DockerRootDir": "/data", "Driver": "overlayfs", "DriverStatus": status, "Containerd": {"Address": address}}),
            )
        };
        let system = containerd("/run/containerd/containerd.sock");
        assert_eq!(image_root(&unix, &system, true), PathBuf::from("/var/lib/containerd"));
        let own = containerd("/var/run/docker/containerd/containerd.sock");
        assert_eq!(image_root(&unix, &own, true), PathBuf::from("/data"), "only root can look below it");
    }

    #[test]
    fn an_image_without_names_has_none_and_users_are_numbers_or_names() {
        let listed = json!({"Id": "sha256:a", "RepoTags": ["<none>:<none>"], "RepoDigests": null, "Size": 5});
        let image = image_from_summary(serde_json::from_value(listed).unwrap());
        assert_eq!((image.repo_tags.len(), image.repo_digests.len(), image.size), (0, 0, 5));
        for (user, uid, name) in [("", None, ""), ("1000:5", Some(1000), ""), ("web:web", None, "web")] {
            let found = json!({"Id": "a", "Config": {"User": user}});
            let image = image_from_inspect(&serde_json::from_value(found).unwrap());
            assert_eq!((image.uid, image.username.as_str()), (uid, name));
        }
    }

    #[test]
    fn answers_without_what_newer_engines_leave_out_can_be_read() {
        let bare = json!({"Id": "sha256:a", "RepoTags": null, "Config": null, "GraphDriver": null, "Metadata": null});
        let details = details(bare).unwrap();
        assert_eq!(details.image.id, "sha256:a");
    }

    #[test]
    fn a_credential_is_sent_in_docker_s_words_and_never_printed() {
        let credential =
            Credential { username: "u".into(), password: Secret::new("pass>>word"), ..Credential::default() };
        let header = auth(&credential, &"h:5000/shop/web:1".into());
        assert!(!format!("{header:?}").contains("cGFzcz"), "{header:?}");
        let sent: Value = serde_json::from_slice(&URL_SAFE.decode(header.as_bytes()).unwrap()).unwrap();
        assert_eq!(sent, json!({"serveraddress": "h:5000", "username": "u", "password": "pass>>word"}));
        let hub = auth(&credential, &"shop/web".into());
        let sent: Value = serde_json::from_slice(&URL_SAFE.decode(hub.as_bytes()).unwrap()).unwrap();
        assert_eq!(sent["serveraddress"], HUB);
    }
}
