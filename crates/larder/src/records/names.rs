//! Compares image names. Pure.

use crate::backend::Image;
use crate::reference::ImageName;

/// Minimum number of digits of a short ID.
const SHORTEST_ID: usize = 4;

/// Whether the runtime lists an image under exactly this name, as kubelet compares after a restart. An intent of
/// another spelling stays, and restricts access to all that it [may name](may_name_same_image).
pub(super) fn has_name(image: &Image, name: &ImageName) -> bool {
    image.repo_tags.iter().chain(&image.repo_digests).any(|known| name == known)
}

/// Whether two image texts of pods may refer to the same image. A digest may refer to any image of its repository
/// before it was pulled; an ID may refer to any image.
pub(super) fn may_name_same_image(one: &ImageName, other: &ImageName) -> bool {
    if one == other || is_id(one) || is_id(other) {
        return true;
    }
    let (Ok(one), Ok(other)) = (one.reference(), other.reference()) else { return false };
    let by_digest = one.digest().is_some() || other.digest().is_some();
    one.name() == other.name() && (by_digest || one.tag_or_default() == other.tag_or_default())
}

fn is_id(name: &ImageName) -> bool {
    let digits = name.as_str();
    let digits = digits.strip_prefix("sha256:").unwrap_or(digits);
    digits.len() >= SHORTEST_ID && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_image_has_many_spellings() {
        let digest = format!("@sha256:{}", "a".repeat(64));
        for (one, other, same) in [
            ("busybox", "docker.io/library/busybox:latest", true),
            ("busybox", "index.docker.io/library/busybox", true),
            ("busybox:1", "busybox:2", false),
            ("r.example/a:1", &format!("r.example/a{digest}"), true),
            ("r.example/a:1", &format!("r.example/b{digest}"), false),
            ("r.example/a:1", &"a".repeat(64), true),
            ("r.example/a:1", &format!("sha256:{}", "a".repeat(64)), true),
            ("r.example/a:1", "no name at all", false),
        ] {
            let (one, other) = (&ImageName::from(one), &ImageName::from(other));
            assert_eq!(may_name_same_image(one, other), same, "{one} {other}");
            assert_eq!(may_name_same_image(other, one), same, "{other} {one}");
        }
    }
}
