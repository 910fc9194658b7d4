//! Between CRI's messages and larder's types. The rules are those of kubelet's adapter.

use std::collections::BTreeMap;
use std::path::PathBuf;

use larder::backend::{
    BackendError, CallErrorKind, Condition, Container, FilesystemUsage, Filesystems, Image, ImageSpec,
    RuntimeInfo, Sandbox,
};
use larder::credentials::Credential;
use larder::go_format;
use larder::pod::SandboxConfig;
use larder::reference::{ImageId, ImageName};

use crate::proto;

/// Labels that kubelet puts on the containers and sandboxes of a pod.
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// A spec to send; the runtime handler only if the gate is on. A blank name is refused: runtimes accept the prefix of
/// an ID, so an empty one may match, and remove, any image.
pub(crate) fn spec_to_cri(spec: &ImageSpec, with_handler: bool) -> Result<proto::ImageSpec, BackendError> {
    if spec.image.as_str().trim().is_empty() {
        let message = format!("{}: an image name must not be empty", go_format::quote(spec.image.as_str()));
        return Err(BackendError::call(CallErrorKind::Other, message));
    }
    Ok(proto::ImageSpec {
        image: spec.image.to_string(),
        annotations: spec.annotations.clone(),
        user_specified_image: spec.user_specified_image.to_string(),
        runtime_handler: if with_handler { spec.runtime_handler.clone() } else { String::new() },
        image_ref: String::new(),
    })
}

/// A credential to send: only the non-empty fields of user name, password and tokens.
pub(crate) fn credential_to_cri(credential: &Credential) -> proto::AuthConfig {
    proto::AuthConfig {
        username: credential.username.clone(),
        password: credential.password.reveal().to_owned(),
        auth: String::new(),
        server_address: String::new(),
        identity_token: credential.identity_token.reveal().to_owned(),
        registry_token: credential.registry_token.reveal().to_owned(),
    }
}

/// A sandbox to send. It does not exist yet, so this is its first attempt.
pub(crate) fn sandbox_to_cri(sandbox: &SandboxConfig) -> proto::PodSandboxConfig {
    proto::PodSandboxConfig {
        metadata: Some(proto::PodSandboxMetadata {
            name: sandbox.name.clone(),
            uid: sandbox.uid.clone(),
            namespace: sandbox.namespace.clone(),
            attempt: 0,
        }),
        labels: sandbox.labels.clone(),
        annotations: sandbox.annotations.clone(),
    }
}

/// An image as listed. Its spec names the *ID*; the runtime handler is kept only if the gate is on.
pub(crate) fn image(image: proto::Image, with_handler: bool) -> Image {
    let reported = image.spec.unwrap_or_default();
    let id = ImageId::from(image.id);
    Image {
        spec: Some(ImageSpec {
            image: ImageName::from(&id),
            annotations: reported.annotations,
            runtime_handler: if with_handler { reported.runtime_handler } else { String::new() },
            ..ImageSpec::default()
        }),
        id,
        artifact_type: String::new(),
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        size: image.size,
        uid: image.uid.map(|uid| uid.value),
        username: image.username,
        pinned: image.pinned,
        fill: None,
    }
}

/// The image of a status response, which must have an ID and a size.
pub(crate) fn status_reply(
    name: &ImageName,
    reply: Option<proto::Image>,
    with_handler: bool,
) -> Result<Option<Image>, BackendError> {
    match reply {
        Some(found) if found.id.is_empty() || found.size == 0 => Err(BackendError::Incomplete(format!(
            "Id or size of image {} is not set",
            go_format::quote(name.as_str())
        ))),
        found => Ok(found.map(|found| image(found, with_handler))),
    }
}

/// The ID in a pull response, which must be set.
pub(crate) fn pull_reply(name: &ImageName, reply: proto::PullImageResponse) -> Result<ImageId, BackendError> {
    if reply.image_ref.is_empty() {
        return Err(BackendError::Incomplete(format!(
            "imageRef of image {} is not set",
            go_format::quote(name.as_str())
        )));
    }
    Ok(reply.image_ref.into())
}

/// The filesystems of images and containers.
pub(crate) fn filesystems(reply: proto::ImageFsInfoResponse) -> Filesystems {
    let all = |list: Vec<proto::FilesystemUsage>| list.into_iter().map(filesystem).collect();
    Filesystems { image: all(reply.image_filesystems), container: all(reply.container_filesystems) }
}

fn filesystem(usage: proto::FilesystemUsage) -> FilesystemUsage {
    FilesystemUsage {
        mountpoint: usage.fs_id.map(|id| PathBuf::from(id.mountpoint)).unwrap_or_default(),
        timestamp_ns: usage.timestamp,
        used_bytes: usage.used_bytes.map(|bytes| bytes.value),
        inodes_used: usage.inodes_used.map(|inodes| inodes.value),
    }
}

/// A container, with its mounted images, which its list entry lacks, or the runtime's error.
pub(crate) fn container(container: proto::Container, mounted: Result<Vec<ImageId>, String>) -> Container {
    let metadata = container.metadata.unwrap_or_default();
    let running = container.state == i32::from(proto::ContainerState::ContainerRunning);
    let (mounted_images, mounts_error) = match mounted {
        Ok(images) => (images, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let name = match container.labels.get(CONTAINER_NAME) {
        Some(name) => name.clone(),
        None => metadata.name,
    };
    Container {
        id: container.id,
        name,
        image_id: if container.image_id.is_empty() { container.image_ref } else { container.image_id }.into(),
        sandbox_id: container.pod_sandbox_id,
        mounts_error,
        mounted_images,
        running,
        pod: pod_of(&container.labels).unwrap_or_default(),
        is_mount: false,
    }
}

/// The images that a container mounts, each once.
pub(crate) fn mounted_images(status: proto::ContainerStatus) -> Vec<ImageId> {
    let mut images: Vec<ImageId> = status
        .mounts
        .into_iter()
        .filter_map(|mount| mount.image)
        .map(|image| ImageId::from(image.image))
        .filter(|image| !image.is_empty())
        .collect();
    images.sort();
    images.dedup();
    images
}

/// A pod sandbox and its image. Its pod is in its metadata, or else in its labels.
pub(crate) fn sandbox(sandbox: proto::PodSandbox, image: ImageId) -> Sandbox {
    let named = sandbox.metadata.filter(|metadata| !metadata.name.is_empty());
    let pod = named.map(|metadata| format!("{}/{}", metadata.namespace, metadata.name));
    Sandbox {
        id: sandbox.id,
        pod: pod.or_else(|| pod_of(&sandbox.labels)).unwrap_or_default(),
        runtime_handler: sandbox.runtime_handler,
        ready: sandbox.state == i32::from(proto::PodSandboxState::SandboxReady),
        image,
    }
}

fn pod_of(labels: &BTreeMap<String, String>) -> Option<String> {
    Some(format!("{}/{}", labels.get(POD_NAMESPACE)?, labels.get(POD_NAME)?))
}

/// The status that the runtime reports.
pub(crate) fn runtime_info(
    endpoint: String,
    version: proto::VersionResponse,
    status: Option<proto::RuntimeStatus>,
) -> RuntimeInfo {
    RuntimeInfo {
        endpoint,
        name: version.runtime_name,
        version: version.runtime_version,
        api_version: version.runtime_api_version,
        conditions: status.unwrap_or_default().conditions.into_iter().map(condition).collect(),
    }
}

fn condition(condition: proto::RuntimeCondition) -> Condition {
    Condition {
        kind: condition.r#type,
        ok: condition.status,
        reason: condition.reason,
        message: condition.message,
    }
}

#[cfg(test)]
mod tests {
    use larder::credentials::Secret;

    use super::*;

    #[test]
    fn a_credential_sends_its_parts_and_not_its_email() {
        let credential = Credential {
            username: "user".into(),
            password: Secret::new("pw"),
            email: "user@example.com".into(),
            identity_token: Secret::new("identity"),
            registry_token: Secret::new("registry"),
            ..Credential::default()
        };
        let sent = credential_to_cri(&credential);
        let expected = proto::AuthConfig {
            username: "user".into(),
            password: "pw".into(),
            auth: String::new(),
            server_address: String::new(),
            identity_token: "identity".into(),
            registry_token: "registry".into(),
        };
        assert!(sent == expected);
        let printed = format!("{sent:?}");
        assert!(
            printed.contains("user") && !printed.contains("pw") && !printed.contains("identity\""),
            "{printed}"
        );
    }

    #[test]
    fn image_mounts_are_named_once_and_host_mounts_not_at_all() {
        let of = |image: Option<&str>| proto::Mount {
            image: image.map(|image| proto::ImageSpec { image: image.into(), ..Default::default() }),
            ..Default::default()
        };
        let status = proto::ContainerStatus {
            mounts: vec![
                of(Some("sha256:b")),
                of(None),
                of(Some("sha256:a")),
                of(Some("sha256:b")),
                of(Some("")),
            ],
            ..Default::default()
        };
        assert_eq!(mounted_images(status), ["sha256:a", "sha256:b"]);
    }
}
