//! What kind of trouble a failed pull had. Larder's own store says it; of a runtime it is read from the text, since CRI
//! has no codes for it. Pure.
//!
//! The kind only chooses hints; nothing is decided by it.

use larder::backend::CallErrorKind;
use larder::pull::{Advice, EnsureError};

/// What kind of trouble it is, as far as hints differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The registry wants other credentials.
    Denied,
    /// The registry has no such image.
    NotFound,
    /// The disk is full.
    NoRoom,
    /// Anything else; time may help.
    Other,
}

/// What containerd, CRI-O and registries say of credentials, in lower case.
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
const MAKE_ROOM: &str = "make room and try again: larder df shows what holds the disk";

impl Trouble {
    /// What the backend says, else a guess.
    pub(super) fn of(error: &EnsureError) -> Trouble {
        Trouble::known(error.advice, &error.message)
    }

    fn known(advice: Option<Advice>, message: &str) -> Trouble {
        match advice.map(|advice| advice.kind) {
            None => Trouble::guess(message),
            Some(CallErrorKind::Denied) => Trouble::Denied,
            Some(CallErrorKind::NotFound) => Trouble::NotFound,
            Some(CallErrorKind::NoRoom) => Trouble::NoRoom,
            Some(_) => Trouble::Other,
        }
    }

    /// What to try next, as the backend says it; for a runtime, what helps against most trouble of this kind. `denied`
    /// tells of the credentials, of which the backend knows only the one that it was given.
    pub(super) fn advice(error: &EnsureError, denied: impl FnOnce() -> String) -> Option<String> {
        match (Trouble::of(error), error.advice) {
            (Trouble::Denied, _) => Some(denied()),
            (_, Some(advice)) => Some(advice.hint.to_owned()),
            (Trouble::NoRoom, None) => Some(MAKE_ROOM.to_owned()),
            (Trouble::NotFound | Trouble::Other, None) => None,
        }
    }

    /// Reads it from the message of a failed pull. Docker Hub's "access denied, repository does not exist" is denied.
    fn guess(message: &str) -> Trouble {
        let message = message.to_lowercase();
        let says = |phrases: &[&str]| phrases.iter().any(|phrase| message.contains(phrase));
        match () {
            () if says(&NO_ROOM) => Trouble::NoRoom,
            () if says(&DENIED) => Trouble::Denied,
            () if says(&NOT_FOUND) => Trouble::NotFound,
            () => Trouble::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_words_are_understood() {
        for (message, trouble) in [
            ("failed to resolve reference \"r/a:1\": r/a:1: not found", Trouble::NotFound),
            ("reading manifest 9 in r/a: manifest unknown", Trouble::NotFound),
            (
                "unexpected status from HEAD request to http://r/v2/a/manifests/1: 401 Unauthorized",
                Trouble::Denied,
            ),
            ("pull access denied, repository does not exist or may require authorization", Trouble::Denied),
            ("unauthorized: authentication required", Trouble::Denied),
            ("dial tcp 127.0.0.1:5000: connect: connection refused", Trouble::Other),
            ("mkdir /var/lib/x: permission denied", Trouble::Other),
            ("write /var/lib/x: no space left on device", Trouble::NoRoom),
            ("lookup r.example: no such host", Trouble::Other),
        ] {
            assert_eq!(Trouble::guess(message), trouble, "{message}");
        }
    }

    #[test]
    fn what_the_backend_says_is_not_guessed_again() {
        let text = "mirror.example: 401 unauthorized: ... no space left on device";
        let trouble = |kind| Trouble::known(Some(Advice { kind, hint: "so" }), text);
        assert_eq!(trouble(CallErrorKind::Other), Trouble::Other);
        assert_eq!(trouble(CallErrorKind::NotFound), Trouble::NotFound);
        assert_eq!(trouble(CallErrorKind::Denied), Trouble::Denied);
        assert_eq!(Trouble::known(None, text), Trouble::NoRoom);
    }
}
