//! Next steps after a failed pull, by the kind of the failure. Pure.

use larder::backend::CallErrorKind;
use larder::hint::Hint;
use larder::pull::{EnsureError, EnsureReason};
use larder::reference::ImageName;

/// The next step, as the backend gives it, else the one for most failures of the kind. `denied` describes the
/// credentials, of which the backend knows only the one that it got.
pub(super) fn next_step(error: &EnsureError, denied: impl FnOnce() -> Hint) -> Option<Hint> {
    let failure = error.failure.as_ref()?;
    if failure.kind == CallErrorKind::Denied {
        return Some(denied());
    }
    failure.hint.clone().or_else(|| match failure.kind {
        CallErrorKind::InsufficientSpace { .. } => {
            Some(Hint::from("free disk space and retry: ").command(["df"]).text(" shows disk usage"))
        }
        CallErrorKind::NotFound => Some("check the name and the tag, and that it was pushed".into()),
        _ => None,
    })
}

/// Whether the pull may succeed later without a change of the image, its credentials or the disk.
pub(super) fn is_transient(error: &EnsureError) -> bool {
    let kind = error.failure.as_ref().map(|failure| failure.kind);
    !matches!(
        kind,
        Some(CallErrorKind::Denied | CallErrorKind::NotFound | CallErrorKind::InsufficientSpace { .. })
    )
}

/// Why an image that is present is not for this pod, with the ways out; `None` for any other failure.
pub(super) fn access_denied_hint(image: &ImageName, error: &EnsureError) -> Option<Hint> {
    let not_shown = error.reason == EnsureReason::ErrImageNeverPull
        || error.failure.as_ref().is_some_and(|failure| failure.kind == CallErrorKind::Denied);
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

#[cfg(test)]
mod tests {
    use larder::pull::BackendFailure;

    use super::*;

    fn error(reason: EnsureReason, kind: Option<CallErrorKind>) -> EnsureError {
        EnsureError {
            reason,
            message: String::new(),
            retry_in: None,
            failure: kind.map(|kind| BackendFailure { kind, hint: None }),
            access_denied: true,
            credentials_withheld: false,
        }
    }

    #[test]
    fn only_a_denial_reports_missing_credentials() {
        let hint =
            |error: &EnsureError| access_denied_hint(&"r/a:1".into(), error).unwrap_or_default().to_string();
        let not_shown = "do not allow this pod to use it";
        for (reason, kind) in [
            (EnsureReason::ErrImageNeverPull, None),
            (EnsureReason::ErrImagePull, Some(CallErrorKind::Denied)),
            (EnsureReason::ImagePullBackOff, Some(CallErrorKind::Denied)),
        ] {
            assert!(hint(&error(reason, kind)).contains(not_shown), "{kind:?}");
        }
        for (reason, kind) in [
            (EnsureReason::ErrImagePull, Some(CallErrorKind::Other)),
            (EnsureReason::ImagePullBackOff, Some(CallErrorKind::RegistryUnavailable)),
            (EnsureReason::ErrImagePull, Some(CallErrorKind::NotFound)),
        ] {
            let text = hint(&error(reason, kind));
            assert!(!text.contains(not_shown) && text.contains("cannot verify"), "{text}");
        }
        let permitted = EnsureError {
            access_denied: false,
            credentials_withheld: false,
            ..error(EnsureReason::ErrImagePull, Some(CallErrorKind::Denied))
        };
        assert_eq!(hint(&permitted), "");
    }

    #[test]
    fn the_next_step_is_the_backend_s_or_that_of_the_kind() {
        let step = |kind, hint: Option<&'static str>| {
            let failure = BackendFailure { kind, hint: hint.map(Hint::from) };
            let error = EnsureError { failure: Some(failure), ..error(EnsureReason::ErrImagePull, None) };
            next_step(&error, || "log in".into()).map(|hint| hint.to_string())
        };
        assert_eq!(step(CallErrorKind::Denied, Some("retry")).as_deref(), Some("log in"));
        assert_eq!(step(CallErrorKind::NotFound, Some("push it")).as_deref(), Some("push it"));
        assert!(step(CallErrorKind::NotFound, None).is_some_and(|step| step.contains("check the name")));
        let full = CallErrorKind::InsufficientSpace { reclaim_bytes: None };
        assert!(step(full, None).is_some_and(|step| step.contains("free disk space")));
        assert_eq!(step(CallErrorKind::Other, None), None);
    }
}
