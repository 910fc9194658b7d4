//! Input and output of [`ImageManager::ensure`](super::ImageManager::ensure).

use std::fmt;
use std::time::Duration;

use super::policy::PullPolicy;
use crate::backend::{CallErrorKind, Image, ImageFill, PullOptions};
use crate::credentials::PullSecret;
use crate::go_format;
use crate::hint::Hint;
use crate::pod::{ObjectRef, Pod, SandboxConfig};
use crate::reference::{ImageId, ImageName};

/// A pod's request for an image.
#[derive(Debug, Clone)]
pub struct EnsureRequest {
    /// The image as the pod wrote it.
    pub image: ImageName,
    /// When to pull.
    pub policy: PullPolicy,
    /// The requesting pod.
    pub pod: Pod,
    /// Back-off counts for each pod and this text. Empty in kubelet; a command has one for each run.
    pub run: String,
    /// The object of events; without it they go to the log.
    pub target: Option<ObjectRef>,
    /// The pod's pull secrets, in the pod's order.
    pub secrets: Vec<PullSecret>,
    /// The sandbox that the pull is for, as far as it is known.
    pub sandbox: Option<SandboxConfig>,
    /// Runtime handler; empty unless `RuntimeClassInImageCriApi` is on.
    pub runtime_handler: String,
    /// Options of the pull.
    pub options: PullOptions,
    /// How long the caller waits. A pull that other callers wait for continues without it.
    pub time_limit: Option<Duration>,
    /// Its priority in the pull queue.
    pub priority: Priority,
    /// Whether larder fetches the image before kubelet asks for it: fetched with credentials, it is
    /// [hidden](crate::hidden) from kubelet.
    pub ahead_of_kubelet: bool,
    /// Whether the last attempt failed, which was reported: of this one, only a success is an event.
    pub is_retry: bool,
}

/// Priority in the pull queue. A running pull is not stopped for one with a higher priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Priority {
    /// A caller waits for it.
    #[default]
    Pod,
    /// No caller waits for it yet. A pull that a pod joins gets the pod's priority.
    Prefetch,
}

impl EnsureRequest {
    /// A request of a pod for an image, without secrets, sandbox or event target.
    pub fn new(image: impl Into<ImageName>, policy: PullPolicy, pod: Pod) -> Self {
        EnsureRequest {
            image: image.into(),
            policy,
            pod,
            run: String::new(),
            target: None,
            secrets: Vec::new(),
            sandbox: None,
            runtime_handler: String::new(),
            options: PullOptions::default(),
            time_limit: None,
            priority: Priority::default(),
            ahead_of_kubelet: false,
            is_retry: false,
        }
    }

    /// Returns true if a container of the pod is started from the image: it is no image volume.
    pub fn is_for_container(&self) -> bool {
        self.target.as_ref().is_some_and(ObjectRef::is_container)
    }

    /// Why a present image is not used although the pod may: a container cannot be started from an artifact.
    pub(super) fn refusal(&self, present: &Image) -> Option<EnsureError> {
        let is_refused = self.is_for_container() && !present.artifact_type.is_empty();
        is_refused.then(|| EnsureError::artifact(&present.artifact_type))
    }
}

/// The plan of [`ImageManager::ensure`](super::ImageManager::ensure) for a request without back-off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnsurePlan {
    /// The image is present and is used.
    Present(ImageId),
    /// The image is pulled.
    Pull {
        /// True if the image is present, and its pull record does not allow the use.
        access_denied: bool,
    },
    /// The policy forbids the pull that is necessary.
    Refused(EnsureError),
}

impl EnsurePlan {
    /// `present` is the image that a policy that looks for one finds, and whether its pull record allows the use.
    pub fn of(request: &EnsureRequest, present: Option<(Image, bool)>) -> EnsurePlan {
        let present = present.filter(|_| request.policy.checks_presence_first());
        let access_denied = matches!(&present, Some((_, false)));
        match (present, &request.policy) {
            (Some((image, true)), _) => {
                request.refusal(&image).map_or(EnsurePlan::Present(image.id), EnsurePlan::Refused)
            }
            (_, PullPolicy::Never) => {
                let error = EnsureError::never_pull(&request.image);
                EnsurePlan::Refused(EnsureError { access_denied, ..error })
            }
            _ => EnsurePlan::Pull { access_denied },
        }
    }
}

/// The image is present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnsuredImage {
    /// The runtime's id of it.
    pub image_ref: ImageId,
    /// The text of the event when it was present; empty when it was pulled.
    pub message: String,
    /// Presence of the image before the request.
    pub outcome: ImagePresence,
}

/// How an image became present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImagePresence {
    /// It was present.
    Present,
    /// It was pulled.
    Pulled {
        /// Size in bytes as the runtime counts it; 0 when it did not say.
        size_bytes: u64,
        /// Time of the pull itself.
        pull_duration: Duration,
        /// Time including the wait in the queue.
        total_duration: Duration,
        /// Data that is still to come; `None` if it is complete.
        fill: Option<ImageFill>,
    },
}

/// Why the image is not present, or may not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnsureError {
    /// The container's state in `kubectl get pods`.
    pub reason: EnsureReason,
    /// The text beside it in `kubectl describe pod`.
    pub message: String,
    /// When the back-off would allow the next try; `None` when this failure counts none.
    pub retry_in: Option<Duration>,
    /// The backend's details; `None` if the backend was not reached or did not fail.
    pub failure: Option<BackendFailure>,
    /// Whether the image is present, but its pull record requires other credentials than the pod's, or requires the
    /// registry to accept these first. Reason and message do not say so, because a pod's status must not reveal which
    /// images are present.
    pub access_denied: bool,
    /// Whether the pull was tried without the pod's credentials, which may not be used ahead of kubelet: it may fail
    /// until kubelet has pulled the image. Not sent over the control API.
    pub credentials_withheld: bool,
}

/// The backend's details of a failed pull, in addition to the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendFailure {
    /// The class of the failure.
    pub kind: CallErrorKind,
    /// The next step, if the backend knows one.
    pub hint: Option<Hint>,
}

impl fmt::Display for EnsureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            // Kubelet's text has the error in both.
            EnsureReason::Other(text) if self.message.contains(text) => f.write_str(&self.message),
            reason => write!(f, "{reason}: {}", self.message),
        }
    }
}

impl std::error::Error for EnsureError {}

impl EnsureError {
    /// The error of a pull that failed with this text. Only its start counts: runtimes say `RegistryUnavailable` and
    /// `SignatureValidationFailed` there. `image` is the name as requested.
    pub(crate) fn of_failed_pull(image: &str, error: &str) -> EnsureError {
        let known = [
            ("RegistryUnavailable", EnsureReason::RegistryUnavailable, "the registry is unavailable"),
            (
                "SignatureValidationFailed",
                EnsureReason::SignatureValidationFailed,
                "the signature validation failed",
            ),
        ];
        for (name, reason, because) in known {
            if let Some(rest) = error.strip_prefix(name) {
                let message = format!("image pull failed for {image} because {because}{rest}");
                return EnsureError::new(reason, message);
            }
        }
        EnsureError::new(EnsureReason::ErrImagePull, error.to_owned())
    }

    pub(super) fn new(reason: EnsureReason, message: impl Into<String>) -> Self {
        EnsureError {
            reason,
            message: message.into(),
            retry_in: None,
            failure: None,
            access_denied: false,
            credentials_withheld: false,
        }
    }

    /// The caller waits no longer.
    pub(super) fn time_limit(limit: Duration) -> Self {
        let message = format!("not finished within {}", go_format::duration(limit));
        let hint = Hint::from("wait longer with ")
            .setting("pull-timeout", "")
            .text("; the next pull continues with what was downloaded, where the store is larder's own");
        let failure = BackendFailure { kind: CallErrorKind::DeadlineExceeded, hint: Some(hint) };
        EnsureError { failure: Some(failure), ..EnsureError::new(EnsureReason::ErrImagePull, message) }
    }

    /// A container cannot be started from an artifact.
    fn artifact(artifact_type: &str) -> Self {
        let message = format!("not a container image, but an artifact of the type {artifact_type:?}");
        let hint = Hint::from("mount it in the pod as an image volume");
        let failure = BackendFailure { kind: CallErrorKind::Other, hint: Some(hint) };
        EnsureError { failure: Some(failure), ..EnsureError::new(EnsureReason::ErrImagePull, message) }
    }

    /// One text for an absent image and for one that is not permitted: presence is not revealed.
    pub(super) fn never_pull(image: &ImageName) -> Self {
        let quoted = go_format::quote(image.as_str());
        let message = format!("Container image {quoted} is not present with pull policy of Never");
        EnsureError::new(EnsureReason::ErrImageNeverPull, message)
    }

    /// An error whose text is both reason and message, as in kubelet for errors before the pull.
    pub(super) fn free(error: &impl fmt::Display) -> Self {
        let text = error.to_string();
        EnsureError::new(EnsureReason::Other(text.clone()), text)
    }
}

/// Why an image is not present. The texts are kubelet's container waiting reasons.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EnsureReason {
    /// No pull was tried, because one failed not long ago.
    ImagePullBackOff,
    /// The runtime could not determine whether the image is present.
    ImageInspectError,
    /// The pull failed.
    ErrImagePull,
    /// It is absent (or not for this pod) and must not be pulled.
    ErrImageNeverPull,
    /// The name is bad.
    InvalidImageName,
    /// The runtime could not reach the registry.
    RegistryUnavailable,
    /// The image's signature is not acceptable.
    SignatureValidationFailed,
    /// An error of credentials or records, with its text.
    Other(String),
}

impl fmt::Display for EnsureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            EnsureReason::ImagePullBackOff => "ImagePullBackOff",
            EnsureReason::ImageInspectError => "ImageInspectError",
            EnsureReason::ErrImagePull => "ErrImagePull",
            EnsureReason::ErrImageNeverPull => "ErrImageNeverPull",
            EnsureReason::InvalidImageName => "InvalidImageName",
            EnsureReason::RegistryUnavailable => "RegistryUnavailable",
            EnsureReason::SignatureValidationFailed => "SignatureValidationFailed",
            EnsureReason::Other(text) => text,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_follows_from_the_policy_and_the_present_image() {
        let image = Image { id: "sha256:1".into(), ..Image::default() };
        let present = |allowed| Some((image.clone(), allowed));
        let request = |policy| EnsureRequest::new("a:1", PullPolicy::parse(policy), Pod::default());
        let of = |policy, present| EnsurePlan::of(&request(policy), present);
        let used = EnsurePlan::Present("sha256:1".into());
        let pull = |access_denied| EnsurePlan::Pull { access_denied };
        for (policy, present, plan) in [
            ("IfNotPresent", present(true), used.clone()),
            ("IfNotPresent", present(false), pull(true)),
            ("IfNotPresent", None, pull(false)),
            ("Never", present(true), used),
            ("Always", present(true), pull(false)),
            ("sometimes", present(true), pull(false)),
        ] {
            assert_eq!(of(policy, present.clone()), plan, "{policy} {present:?}");
        }
        for (present, denied) in [(None, false), (present(false), true)] {
            let EnsurePlan::Refused(error) = of("Never", present) else { panic!("not refused") };
            assert_eq!((error.reason, error.access_denied), (EnsureReason::ErrImageNeverPull, denied));
        }
    }
}
