//! Kind and hint of a failed pull from the runtime's text, since CRI has no fields for them. Pure.

use larder::backend::{BackendError, CallErrorKind};
use larder::hint::Hint;

/// Names that runtimes put at the start of the text for kubelet.
const NAMES: [(&str, CallErrorKind); 2] = [
    ("RegistryUnavailable", CallErrorKind::RegistryUnavailable),
    ("SignatureValidationFailed", CallErrorKind::SignatureInvalid),
];

/// Texts of the system for a disk without free blocks or inodes, or an exceeded quota, in lower case.
const NO_SPACE: [&str; 2] = ["no space left on device", "disk quota exceeded"];

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

/// Texts for absent images.
const NOT_FOUND: [&str; 4] = [": not found", "404 not found", "manifest unknown", "name unknown"];

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

const NO_HOST: &str =
    "check the registry's name, and the DNS configuration of this machine (/etc/resolv.conf)";

/// The error with the kind and the hint that the runtime's message implies. A kind that its code gave is not changed.
pub(crate) fn classify(mut error: BackendError, message: &str) -> BackendError {
    if let BackendError::Call { kind, hint, .. } = &mut error {
        if *kind == CallErrorKind::Other {
            *kind = kind_of(message);
        }
        if matches!(
            kind,
            CallErrorKind::Other | CallErrorKind::RegistryUnavailable | CallErrorKind::Unavailable
        ) {
            *hint = step(message).map(Hint::from);
        }
    }
    error
}

/// Docker Hub's "access denied, repository does not exist" is a denial.
fn kind_of(message: &str) -> CallErrorKind {
    if let Some((_, kind)) = NAMES.iter().find(|(name, _)| message.starts_with(name)) {
        return *kind;
    }
    let message = message.to_lowercase();
    let has = |phrases: &[&str]| phrases.iter().any(|phrase| message.contains(phrase));
    match () {
        () if has(&NO_SPACE) => CallErrorKind::InsufficientSpace { reclaim_bytes: None },
        () if has(&DENIED) => CallErrorKind::Denied,
        () if has(&NOT_FOUND) => CallErrorKind::NotFound,
        () => CallErrorKind::Other,
    }
}

fn step(message: &str) -> Option<&'static str> {
    let message = message.to_lowercase();
    CAUSES.iter().find(|(text, _)| message.contains(text)).map(|(_, step)| *step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_texts_have_kinds() {
        for (message, kind) in [
            ("failed to resolve reference \"r/a:1\": r/a:1: not found", CallErrorKind::NotFound),
            ("reading manifest 9 in r/a: manifest unknown", CallErrorKind::NotFound),
            (
                "unexpected status from HEAD request to http://r/v2/a/manifests/1: 401 Unauthorized",
                CallErrorKind::Denied,
            ),
            (
                "pull access denied, repository does not exist or may require authorization",
                CallErrorKind::Denied,
            ),
            ("unauthorized: authentication required", CallErrorKind::Denied),
            ("dial tcp 127.0.0.1:5000: connect: connection refused", CallErrorKind::Other),
            ("mkdir /var/lib/x: permission denied", CallErrorKind::Other),
            (
                "write /var/lib/x: no space left on device",
                CallErrorKind::InsufficientSpace { reclaim_bytes: None },
            ),
            ("lookup r.example: no such host", CallErrorKind::Other),
            ("RegistryUnavailable: 401 unauthorized", CallErrorKind::RegistryUnavailable),
            ("SignatureValidationFailed: no key", CallErrorKind::SignatureInvalid),
        ] {
            assert_eq!(kind_of(message), kind, "{message}");
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
            let hint = classify(BackendError::call(CallErrorKind::Other, message), message).hint();
            assert!(hint.is_some_and(|hint| hint.to_string().contains(step)), "{message}");
        }
        let other = BackendError::call(CallErrorKind::Other, "something else");
        assert_eq!(classify(other.clone(), "something else"), other);
    }

    #[test]
    fn the_kind_of_a_code_is_not_read_from_the_text() {
        let error = BackendError::call(CallErrorKind::Unavailable, "no space left on device");
        assert_eq!(classify(error.clone(), "no space left on device"), error);
    }
}
