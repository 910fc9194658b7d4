//! Images of pod sandboxes: those that run, and those that a runtime starts sandboxes from.
//!
//! Runtimes that report their sandbox image as pinned (containerd 1.7 and CRI-O 1.28, and later) need none of this.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use larder::backend::{BackendError, Image};
use larder::glob;
use larder::reference::{ImageId, Reference};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;
use tonic::Code;

use crate::client::{CriBackend, STATUS_CALLS_AT_ONCE};
use crate::{proto, status};

/// In [`CriConfig::sandbox_images`](crate::CriConfig::sandbox_images), the image that the runtime's configuration
/// names.
pub const CONFIGURED_SANDBOX_IMAGE: &str = "configured";

/// How long the runtime's configuration is not read again after a success, for it changes with a restart of the
/// runtime, and after a failure, for calls wait for it.
const REREAD_AFTER: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(5));

/// Images of sandboxes that the runtime reports.
#[derive(Default)]
pub(crate) struct SandboxImages {
    /// By ID of a sandbox, its image, which does not change during its life.
    running: Mutex<HashMap<String, ImageId>>,
    /// The names in the runtime's configuration, and when it is read again.
    configured: Mutex<Option<(Instant, Vec<String>)>>,
}

impl CriBackend {
    /// The images of these sandboxes, as far as the runtime reports them. Only sandboxes not seen before cost a call,
    /// some concurrently.
    pub(crate) async fn images_of_sandboxes(
        &self,
        sandboxes: &[proto::PodSandbox],
    ) -> Result<HashMap<String, ImageId>, BackendError> {
        let (mut images, mut calls) = (HashMap::with_capacity(sandboxes.len()), Vec::new());
        for id in sandboxes.iter().map(|sandbox| sandbox.id.clone()) {
            let known = self.sandbox_images().running.lock().get(&id).cloned();
            match known {
                Some(image) => _ = images.insert(id, image),
                None => calls.push(async move { self.image_of(&id).await.map(|image| (id, image)) }),
            }
        }
        let mut answers = stream::iter(calls).buffer_unordered(STATUS_CALLS_AT_ONCE);
        while let Some((id, image)) = answers.try_next().await? {
            images.insert(id, image);
        }
        self.sandbox_images().running.lock().clone_from(&images); // those of vanished sandboxes are forgotten
        Ok(images)
    }

    /// The image of one sandbox; empty if the runtime does not report it or the sandbox has ended. Any other failure is
    /// an error: its image could be in use.
    async fn image_of(&self, sandbox: &str) -> Result<ImageId, BackendError> {
        let message = proto::PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose: true };
        let mut runtime = self.runtime();
        let asked = runtime.pod_sandbox_status(self.request(message));
        match self.operations().observe("podsandbox_status", asked).await {
            Ok(reply) => {
                let info = reply.into_inner().info;
                let named = info.values().find_map(|text| find_text(&parse(text)?, "image"));
                Ok(named.map(in_full).unwrap_or_default().into())
            }
            Err(status) if matches!(status.code(), Code::NotFound | Code::Unimplemented) => {
                Ok(ImageId::default())
            }
            Err(status) => Err(status::call_error(self.endpoint(), &status)),
        }
    }

    /// Marks the images with a name of the settings as pinned, as newer runtimes do.
    pub(crate) async fn pin_sandbox_images(&self, images: &mut [Image]) {
        let mut patterns = self.config().sandbox_images.clone();
        if let Some(at) = patterns.iter().position(|pattern| pattern == CONFIGURED_SANDBOX_IMAGE) {
            patterns.remove(at);
            if images.iter().any(|image| !image.pinned) {
                patterns.extend(self.configured_sandbox_images().await);
            }
        }
        for image in images.iter_mut().filter(|image| !image.pinned) {
            let names = || image.repo_tags.iter().chain(&image.repo_digests);
            image.pinned = patterns.iter().any(|pattern| names().any(|name| glob(pattern, name)));
        }
    }

    /// The sandbox images that the runtime's configuration names; none if it does not report them.
    async fn configured_sandbox_images(&self) -> Vec<String> {
        let known = self.sandbox_images().configured.lock().clone();
        if let Some((reread, names)) = &known
            && Instant::now() < *reread
        {
            return names.clone();
        }
        let request = self.request(proto::StatusRequest { verbose: true });
        let asked = async { Ok(self.operations().observe("status", self.runtime().status(request)).await) };
        let (names, age) = match self.within_limit(&[self.runtime_connection()], asked).await {
            Ok(Ok(reply)) => (names_in(reply.into_inner().info.values()), REREAD_AFTER.0),
            Ok(Err(status)) if status.code() == Code::Unimplemented => (Vec::new(), REREAD_AFTER.0),
            failed => {
                tracing::debug!("cannot read the sandbox image in the runtime's configuration: {failed:?}");
                (known.map(|(_, names)| names).unwrap_or_default(), REREAD_AFTER.1)
            }
        };
        *self.sandbox_images().configured.lock() = Some((Instant::now() + age, names.clone()));
        names
    }
}

fn parse(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok()
}

/// The text at this key of an object.
fn find_text(object: &Value, key: &str) -> Option<String> {
    object.get(key)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

/// The names of sandbox images in a verbose status: `sandboxImage` in containerd 1 and CRI-O, `pinnedImages.sandbox` in
/// containerd 2.
fn names_in<'a>(info: impl Iterator<Item = &'a String>) -> Vec<String> {
    let parsed: Vec<Value> = info.filter_map(|text| parse(text)).collect();
    let of_object = |object: &Value| {
        let pinned = object.get("pinnedImages").and_then(|pinned| find_text(pinned, "sandbox"));
        find_text(object, "sandboxImage").into_iter().chain(pinned).collect::<Vec<_>>()
    };
    let mut names: Vec<String> = parsed.iter().flat_map(of_object).map(|name| full_name(&name)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// An image as a sandbox has it, as runtimes list it: an ID unchanged, a name in full.
fn in_full(image: String) -> String {
    let hex = image.strip_prefix("sha256:").unwrap_or(&image);
    let is_id = hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_id { image } else { full_name(&image) }
}

/// The name as a runtime lists it: with registry, and with tag or digest.
fn full_name(name: &str) -> String {
    let Ok(reference) = Reference::parse(name) else { return name.to_owned() };
    match (reference.digest(), reference.tag_or_default()) {
        (Some(digest), _) => format!("{}@{digest}", reference.name()),
        (None, Some(tag)) => format!("{}:{tag}", reference.name()),
        (None, None) => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_images_are_found_in_the_status_of_each_runtime() {
        let cases = [
            // containerd 1.6
            (
                r#"{"sandboxImage":"registry.k8s.io/pause:3.6","maxContainerLogSize":16384}"#,
                "registry.k8s.io/pause:3.6",
            ),
            // containerd 2
            (r#"{"pinnedImages":{"sandbox":"registry.k8s.io/pause:3.10"}}"#, "registry.k8s.io/pause:3.10"),
            // CRI-O
            (r#"{"sandboxImage":"pause"}"#, "docker.io/library/pause:latest"),
            (
                r#"{"sandboxImage":"r.example/pause:3@sha256:7031c1b283388d2c2e09b57badb803c05ebed362dc88d84b480cc47f72a21097"}"#,
                "r.example/pause@sha256:7031c1b283388d2c2e09b57badb803c05ebed362dc88d84b480cc47f72a21097",
            ),
        ];
        for (status, name) in cases {
            assert_eq!(names_in([status.to_owned()].iter()), [name]);
        }
        let none = ["not JSON", "{}", "[]", r#"{"sandboxImage":""}"#].map(str::to_owned);
        assert_eq!(names_in(none.iter()), [""; 0]);
    }
}
