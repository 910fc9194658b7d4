//! The version of a containerd, and what its configuration has. Pure.

use std::fmt;

/// The version of a containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerdVersion {
    /// 1 or 2.
    pub major: u32,
    /// Such as 6 in 1.6.32.
    pub minor: u32,
    /// Such as 32 in 1.6.32.
    pub patch: u32,
}

impl fmt::Display for ContainerdVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl ContainerdVersion {
    /// The first word of a text that is a version: the whole answer of the API, or a line of `containerd --version`.
    pub fn find(text: &str) -> Option<ContainerdVersion> {
        text.split_whitespace().find_map(|word| {
            let mut parts = word.strip_prefix('v').unwrap_or(word).splitn(3, '.');
            let mut number = || {
                let part = parts.next()?;
                let digits = part.split(|next: char| !next.is_ascii_digit()).next()?;
                Some((part, digits.parse().ok()?))
            };
            let ((major_text, major), (minor_text, minor), (_, patch)) = (number()?, number()?, number()?);
            let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
            (is_plain(major_text) && is_plain(minor_text)).then_some(ContainerdVersion {
                major,
                minor,
                patch,
            })
        })
    }

    /// Whether a proxy plugin has `exports`, from which CRI takes the filesystem of images.
    pub(super) fn has_exports(self) -> bool {
        match (self.major, self.minor) {
            (1, 6) => self.patch >= 32,
            (1, 7) => self.patch >= 16,
            (1, _) => false,
            _ => true,
        }
    }

    /// Whether CRI and its transfer service have plugins of their own, as from configuration version 3 on.
    pub(super) fn has_split_cri(self) -> bool {
        self.major >= 2
    }

    /// Whether larder works with it.
    pub(super) fn is_supported(self) -> bool {
        self >= ContainerdVersion { major: 1, minor: 6, patch: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_programs_print() {
        let cases = [
            ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", "1.6.20"),
            ("containerd github.com/containerd/containerd/v2 2.4.0-beta+unknown ", "2.4.0"),
            ("containerd containerd.io v1.7.25 bcc810d6b9066471b0b6fa75f557a15a1cbf31bb", "1.7.25"),
            ("v2.0.5-k3s1.32", "2.0.5"),
        ];
        for (text, version) in cases {
            assert_eq!(ContainerdVersion::find(text).expect(text).to_string(), version);
        }
        for text in ["", "containerd", "git.a.b", "10.0", "a2.0.0"] {
            assert_eq!(ContainerdVersion::find(text), None, "{text}");
        }
    }

    #[test]
    fn exports_came_with_patch_releases() {
        let has = |text| ContainerdVersion::find(text).expect("a version").has_exports();
        assert_eq!(
            ["1.6.20", "1.6.32", "1.7.15", "1.7.16", "2.0.0"].map(has),
            [false, true, false, true, true]
        );
    }
}
