//! Compares image names. Pure.

use crate::backend::Image;
use crate::reference::{ImageName, Reference};

/// Minimum number of digits of a short ID.
const SHORTEST_ID: usize = 4;

/// Whether an image has exactly this name, or has it once both are written in full.
pub(super) fn has_name(image: &Image, name: &ImageName) -> bool {
    let names = || image.repo_tags.iter().chain(&image.repo_digests);
    names().any(|known| name == known)
        || name.reference().is_ok_and(|wanted| {
            names().any(|known| Reference::parse(known).is_ok_and(|known| is(wanted, &known)))
        })
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

/// Runtimes ignore a tag next to a digest.
fn is(wanted: &Reference, known: &Reference) -> bool {
    let same = match wanted.digest() {
        Some(digest) => known.digest() == Some(digest),
        None => known.digest().is_none() && known.tag_or_default() == wanted.tag_or_default(),
    };
    same && wanted.name() == known.name()
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

    #[test]
    fn a_runtime_lists_a_digest_without_the_tag_that_was_asked_for() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let image = Image {
            repo_tags: vec!["docker.io/library/a:1".into()],
            repo_digests: vec![format!("docker.io/library/a@{digest}")],
            ..Image::default()
        };
        for (name, has) in [("a:1", true), (&format!("a:7@{digest}"), true), ("a:2", false), ("a", false)] {
            assert_eq!(has_name(&image, &name.into()), has, "{name}");
        }
    }
}
