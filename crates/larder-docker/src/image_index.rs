//! Finds an image among those that the engine lists, by the name a user wrote.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use larder::backend::Image;
use larder::reference::ImageId;

use crate::names;

/// Images by their names and IDs.
pub(crate) struct ImageNameIndex<'a> {
    by_name: HashMap<&'a str, &'a ImageId>,
    ids: BTreeMap<&'a str, &'a ImageId>,
}

impl<'a> ImageNameIndex<'a> {
    pub(crate) fn of(images: &'a [Image]) -> ImageNameIndex<'a> {
        let mut by_name = HashMap::new();
        for image in images {
            for name in image.repo_tags.iter().chain(&image.repo_digests) {
                by_name.insert(name.as_str(), &image.id);
            }
        }
        ImageNameIndex { by_name, ids: images.iter().map(|image| (image.id.as_str(), &image.id)).collect() }
    }

    /// The ID of an image, resolved as the engine does: by name, then by a unique prefix of the ID.
    pub(crate) fn find(&self, name: &str) -> Option<&'a ImageId> {
        if let Some(id) = self.ids.get(name) {
            return Some(*id);
        }
        let by_name = |name: &str| self.by_name.get(name).copied();
        by_name(name).or_else(|| by_name(&names::familiar(name))).or_else(|| self.by_start(name))
    }

    fn by_start(&self, name: &str) -> Option<&'a ImageId> {
        let digits = name.strip_prefix("sha256:").unwrap_or(name);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let start = format!("sha256:{digits}");
        let from = (Bound::Included(start.as_str()), Bound::Unbounded);
        let mut found = self.ids.range::<str, _>(from).take_while(|(id, _)| id.starts_with(&start));
        found.next().filter(|_| found.next().is_none()).map(|(_, id)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images() -> [Image; 3] {
        let image = |id: &str, tag: &str, digest: &str| Image {
            id: id.into(),
            repo_tags: vec![tag.into()],
            repo_digests: vec![digest.into()],
            ..Image::default()
        };
        [
            image("sha256:6985800", "busybox:latest", "busybox@sha256:ff"),
            image("sha256:6985811", "h:5000/shop/web:2", "h:5000/shop/web@sha256:ee"),
            image("sha256:7777777", "6985811:latest", "x@sha256:dd"),
        ]
    }

    #[test]
    fn an_image_is_found_by_every_name() {
        let images = images();
        let listed = ImageNameIndex::of(&images);
        for name in [
            "busybox",
            "docker.io/library/busybox",
            "index.docker.io/library/busybox:latest",
            "docker.io/busybox:latest",
            "busybox@sha256:ff",
            "busybox:1.36@sha256:ff",
            "sha256:6985800",
            "6985800",
            "698580",
            "sha256:698580",
        ] {
            assert_eq!(listed.find(name).map(ImageId::as_str), Some("sha256:6985800"), "{name}");
        }
        for name in ["h:5000/shop/web:2", "h:5000/shop/web:9@sha256:ee", "698581"] {
            assert_eq!(listed.find(name).map(ImageId::as_str), Some("sha256:6985811"), "{name}");
        }
    }

    #[test]
    fn a_name_takes_precedence_over_an_id_and_an_ambiguous_one_matches_none() {
        let images = images();
        let listed = ImageNameIndex::of(&images);
        assert_eq!(listed.find("6985811").map(ImageId::as_str), Some("sha256:7777777"), "as the engine does");
        for name in ["6985", "sha256:69858", "busybox:2", "h:5000/shop/web", "", "sha256:", "zz"] {
            assert_eq!(listed.find(name), None, "{name:?}");
        }
    }
}
