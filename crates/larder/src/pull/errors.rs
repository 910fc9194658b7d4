//! Maps the text of a failed pull to the reason in a pod's status. Pure.

use super::ensure::EnsureReason;

/// A failed pull as the caller sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerStateWaiting {
    /// The container's waiting reason.
    pub(crate) reason: EnsureReason,
    /// The container's waiting message.
    pub(crate) message: String,
}

/// Maps the error text of a pull. Only its start counts: runtimes say `RegistryUnavailable` and
/// `SignatureValidationFailed` there. `image` is the name as requested.
pub(crate) fn evaluate_pull_error(image: &str, error: &str) -> ContainerStateWaiting {
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
            return ContainerStateWaiting {
                reason,
                message: format!("image pull failed for {image} because {because}{rest}"),
            };
        }
    }
    ContainerStateWaiting { reason: EnsureReason::ErrImagePull, message: error.to_owned() }
}
