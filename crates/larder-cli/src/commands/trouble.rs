//! What kind of trouble a failed pull had, read from the runtime's text: CRI has no codes for it. Pure.
//!
//! The kind only chooses hints; nothing is decided by it.

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
pub(super) const MAKE_ROOM: &str = "make room and try again: larder df shows what holds the disk";

impl Trouble {
    /// Reads it from the message of a failed pull. Docker Hub's "access denied, repository does not exist" is denied.
    pub(super) fn of(message: &str) -> Trouble {
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
            assert_eq!(Trouble::of(message), trouble, "{message}");
        }
    }
}
