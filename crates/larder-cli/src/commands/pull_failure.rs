//! The kind of a failed pull. Larder's own store returns it; for a runtime it is read from the text, since CRI has no
//! codes for it. Pure.
//!
//! The kind only chooses hints; nothing is decided by it.

use larder::backend::CallErrorKind;
use larder::hint::Hint;
use larder::pull::{BackendAdvice, EnsureError, EnsureReason};
use larder::reference::ImageName;

/// The kind of a failed pull, as far as hints differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PullFailureKind {
    /// The registry wants other credentials.
    Denied,
    /// The registry has no such image.
    NotFound,
    /// The disk is full.
    InsufficientSpace,
    /// Anything else; time may help.
    Other,
}

/// Texts of containerd, CRI-O and registries about credentials, in lower case.
const DENIED: [&str; 7] = [
    "401 unauthorized",
    "403 forbidden",
    "unauthorized:",
    "authorization failed",
    "authentication required",
    "access denied",
    "access to the resource is denied",
];

/// What they say of images that are not there.
const NOT_FOUND: [&str; 4] = [": not found", "404 not found", "manifest unknown", "name unknown"];

/// What the system says when a disk has no blocks or no inodes left, or a user's quota is used up.
const NO_ROOM: [&str; 2] = ["no space left on device", "disk quota exceeded"];

/// What to do about a full disk.
fn make_room() -> Hint {
    Hint::from("free disk space and retry: ").command(["df"]).text(" shows disk usage")
}

/// What to do about a name that the registry does not know.
const CHECK_NAME: &str = "check the name and the tag, and that it was pushed";

/// Texts of systems and Go programs for causes with a specific next step, in lower case, and that step.
const CAUSES: [(&str, &str); 7] = [
    ("connection refused", "check the host and the port, and that the registry is running"),
    ("no such host", NO_HOST),
    ("name or service not known", NO_HOST),
    ("temporary failure in name resolution", NO_HOST),
    (
        "read-only file system",
        "the runtime's filesystem is read-only: find the cause with dmesg, then remount it read-write",
    ),
    ("x509:", "set the registry's CA certificate as ca in the runtime's certs.d/REGISTRY/hosts.toml"),
    (
        "server gave http response to https client",
        "the registry uses plain HTTP: set server = \"http://REGISTRY\" in the runtime's certs.d/REGISTRY/hosts.toml",
    ),
];

/// What to do about a registry whose name leads nowhere.
const NO_HOST: &str =
    "check the registry's name, and the DNS configuration of this machine (/etc/resolv.conf)";

/// What to try next, by what a runtime says of the cause.
fn cause(message: &str) -> Option<&'static str> {
    let message = message.to_lowercase();
    CAUSES.iter().find(|(says, _)| message.contains(says)).map(|(_, step)| *step)
}

/// Of an image that is here and not for this pod: why, and the ways out.
pub(super) fn access_denied_hint(image: &ImageName, error: &EnsureError) -> Option<Hint> {
    let not_shown = error.reason == EnsureReason::ErrImageNeverPull
        || PullFailureKind::of(error) == PullFailureKind::Denied;
    match (error.access_denied, not_shown) {
        (false, _) => None,
        (true, true) => Some(Hint::from(format!(
            "{image} is present, but larder's pull records do not allow this pod to use it: \
             use a secret that it was pulled with ('larder explain {image}' names them, \
             'larder explain access {image}' tests credentials), or relax the policy: \
             imagePullCredentialsVerificationPolicy in the daemon's settings, --verify without a daemon"
        ))),
        (true, false) => Some(Hint::from(format!(
            "{image} is present, but larder cannot verify the pod's access: the registry must accept its \
             credentials, and the pull failed ('larder explain {image}' shows the pull record)"
        ))),
    }
}

impl PullFailureKind {
    /// What the backend says, else a guess.
    pub(super) fn of(error: &EnsureError) -> PullFailureKind {
        PullFailureKind::known(error.advice.as_ref(), &error.message)
    }

    fn known(advice: Option<&BackendAdvice>, message: &str) -> PullFailureKind {
        match advice.map(|advice| advice.kind) {
            None => PullFailureKind::guess(message),
            Some(CallErrorKind::Denied) => PullFailureKind::Denied,
            Some(CallErrorKind::NotFound) => PullFailureKind::NotFound,
            Some(CallErrorKind::InsufficientSpace) => PullFailureKind::InsufficientSpace,
            Some(_) => PullFailureKind::Other,
        }
    }

    /// The next step, as the backend gives it; for a runtime, that for most failures of this kind. `denied`
    /// describes the credentials, of which the backend knows only the one that it got.
    pub(super) fn advice(error: &EnsureError, denied: impl FnOnce() -> Hint) -> Option<Hint> {
        match (PullFailureKind::of(error), &error.advice) {
            (PullFailureKind::Denied, _) => Some(denied()),
            (_, Some(advice)) => Some(advice.hint.clone()),
            (PullFailureKind::InsufficientSpace, None) => Some(make_room()),
            (PullFailureKind::NotFound, None) => Some(CHECK_NAME.into()),
            (PullFailureKind::Other, None) => cause(&error.message).map(Hint::from),
        }
    }

    /// Reads it from the message of a failed pull. Docker Hub's "access denied, repository does not exist" is denied.
    fn guess(message: &str) -> PullFailureKind {
        let message = message.to_lowercase();
        let says = |phrases: &[&str]| phrases.iter().any(|phrase| message.contains(phrase));
        match () {
            () if says(&NO_ROOM) => PullFailureKind::InsufficientSpace,
            () if says(&DENIED) => PullFailureKind::Denied,
            () if says(&NOT_FOUND) => PullFailureKind::NotFound,
            () => PullFailureKind::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_words_are_understood() {
        for (message, kind) in [
            ("failed to resolve reference \"r/a:1\": r/a:1: not found", PullFailureKind::NotFound),
            ("reading manifest 9 in r/a: manifest unknown", PullFailureKind::NotFound),
            (
                "unexpected status from HEAD request to http://r/v2/a/manifests/1: 401 Unauthorized",
                PullFailureKind::Denied,
            ),
            (
                "pull access denied, repository does not exist or may require authorization",
                PullFailureKind::Denied,
            ),
            ("unauthorized: authentication required", PullFailureKind::Denied),
            ("dial tcp 127.0.0.1:5000: connect: connection refused", PullFailureKind::Other),
            ("mkdir /var/lib/x: permission denied", PullFailureKind::Other),
            ("write /var/lib/x: no space left on device", PullFailureKind::InsufficientSpace),
            ("lookup r.example: no such host", PullFailureKind::Other),
        ] {
            assert_eq!(PullFailureKind::guess(message), kind, "{message}");
        }
    }

    #[test]
    fn the_cause_that_a_runtime_reports_has_a_hint() {
        for (message, step) in [
            ("dial tcp 127.0.0.1:5000: connect: connection refused", "registry is running"),
            ("dial tcp: lookup r.example: no such host", "check the registry's name"),
            ("mkdir /var/lib/x: Read-only file system", "remount it read-write"),
            ("x509: certificate signed by unknown authority", "as ca in"),
        ] {
            assert!(cause(message).is_some_and(|said| said.contains(step)), "{message}");
        }
        assert_eq!(cause("something else"), None);
    }

    #[test]
    fn only_a_denial_reports_missing_credentials() {
        let error = |reason, message: &str, withheld| EnsureError {
            reason,
            message: message.to_owned(),
            retry_in: None,
            advice: None,
            access_denied: withheld,
        };
        let hint =
            |error: &EnsureError| access_denied_hint(&"r/a:1".into(), error).unwrap_or_default().to_string();
        let not_shown = "do not allow this pod to use it";
        for (reason, message) in [
            (EnsureReason::ErrImageNeverPull, "Container image \"r/a:1\" is not present"),
            (EnsureReason::ErrImagePull, "401 Unauthorized"),
            (EnsureReason::ImagePullBackOff, "Back-off pulling image \"r/a:1\": ErrImagePull: 403 Forbidden"),
        ] {
            assert!(hint(&error(reason, message, true)).contains(not_shown), "{message}");
        }
        for (reason, message) in [
            (EnsureReason::ErrImagePull, "dial tcp 127.0.0.1:5000: connect: connection refused"),
            (EnsureReason::ImagePullBackOff, "Back-off pulling image \"r/a:1\": ErrImagePull: no such host"),
            (EnsureReason::ErrImagePull, "r/a:1: not found"),
        ] {
            let text = hint(&error(reason, message, true));
            assert!(!text.contains(not_shown) && text.contains("cannot verify"), "{text}");
        }
        assert_eq!(hint(&error(EnsureReason::ErrImagePull, "401 Unauthorized", false)), "");
    }

    #[test]
    fn the_failure_kind_of_the_backend_is_not_guessed() {
        let text = "mirror.example: 401 unauthorized: ... no space left on device";
        let known = |kind| PullFailureKind::known(Some(&BackendAdvice { kind, hint: "so".into() }), text);
        assert_eq!(known(CallErrorKind::Other), PullFailureKind::Other);
        assert_eq!(known(CallErrorKind::NotFound), PullFailureKind::NotFound);
        assert_eq!(known(CallErrorKind::Denied), PullFailureKind::Denied);
        assert_eq!(PullFailureKind::known(None, text), PullFailureKind::InsufficientSpace);
    }
}
