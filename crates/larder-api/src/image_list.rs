//! Lists of images as messages of bounded size.

use prost::Message as _;

use crate::v1::ImagesResponse;

/// Most bytes of one part of a list; a larger image has a part of its own.
const PART_BYTES: usize = 1 << 20;

impl ImagesResponse {
    /// Splits a list into messages of bounded size, at least one. [`ImagesResponse::join`] reverses it.
    pub fn into_parts(self) -> Vec<ImagesResponse> {
        let mut parts = Vec::new();
        let mut part = ImagesResponse { warnings: self.warnings, ..ImagesResponse::default() };
        let mut room = PART_BYTES;
        let mut begin_part_for = |bytes: usize, part: &mut ImagesResponse| {
            if bytes > room {
                parts.push(std::mem::take(part));
                room = PART_BYTES;
            }
            room = room.saturating_sub(bytes);
        };
        for layer in self.layers {
            begin_part_for(layer.encoded_len(), &mut part);
            part.layers.push(layer);
        }
        for image in self.images {
            begin_part_for(image.encoded_len(), &mut part);
            part.images.push(image);
        }
        parts.push(part);
        parts
    }

    /// Appends the next part of a list.
    pub fn join(&mut self, part: ImagesResponse) {
        self.images.extend(part.images);
        self.layers.extend(part.layers);
        self.warnings.extend(part.warnings);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{Image, ImageLayer};

    #[test]
    fn parts_are_bounded_and_join_to_the_list() {
        let sized = |n: usize, bytes: usize| Image {
            id: n.to_string(),
            repo_tags: vec!["t".repeat(bytes)],
            ..Image::default()
        };
        let list = ImagesResponse {
            images: (0..40).map(|n| sized(n, n * 9_999)).chain([sized(40, 2 * PART_BYTES)]).collect(),
            layers: (0..30_000)
                .map(|n| ImageLayer { id: format!("{n:064}"), ..ImageLayer::default() })
                .collect(),
            warnings: vec!["w".into()],
        };
        let parts = list.clone().into_parts();
        assert!(parts.len() > 8, "{}", parts.len());
        for part in &parts {
            let records = part.images.len() + part.layers.len();
            assert!(
                records == 1 || part.encoded_len() < PART_BYTES + (64 << 10),
                "{records} in {}",
                part.encoded_len()
            );
        }
        let mut joined = ImagesResponse::default();
        for part in parts {
            joined.join(part);
        }
        assert_eq!(joined, list);
        assert_eq!(
            ImagesResponse::default().into_parts(),
            [ImagesResponse::default()],
            "an empty list has one part"
        );
    }
}
