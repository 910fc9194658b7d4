//! Layers for the treemap: those that several images share, and those of one image alone. A pure function.

use larder_api::v1 as api;
use serde::Serialize;

use super::data::cut;

/// How many layers of a group are listed; the rest is one sum.
const LISTED: usize = 150;
const NAME: usize = 200;

/// All layers in two groups.
#[derive(Debug, Default, Serialize)]
pub(super) struct LayerMap {
    shared: LayerGroup,
    unique: LayerGroup,
}

/// Layers of one kind.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct LayerGroup {
    count: usize,
    size_bytes: u64,
    /// The largest ones, the largest first.
    layers: Vec<LayerTile>,
    /// Number of the layers that are left out; their size follows.
    rest_count: usize,
    rest_bytes: u64,
}

/// One layer.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LayerTile {
    id: String,
    size_bytes: u64,
    estimated: bool,
    /// How many images have it.
    images: u32,
    /// A name of one of them.
    image: String,
}

/// The layers of a listing with details. Layers without an image count as unique.
pub(super) fn layer_map(listing: &api::ImagesResponse) -> LayerMap {
    let mut owners: Vec<(u32, &str)> = vec![(0, ""); listing.layers.len()];
    for image in &listing.images {
        let name = image.repo_tags.first().or(image.repo_digests.first()).unwrap_or(&image.id);
        for &layer in image.details.iter().flat_map(|details| &details.layers) {
            if let Some((images, first)) = owners.get_mut(layer as usize) {
                *images += 1;
                if first.is_empty() {
                    *first = name;
                }
            }
        }
    }
    let tile = |(layer, &(images, image)): (&api::ImageLayer, &(u32, &str))| LayerTile {
        id: cut(layer.id.clone(), NAME),
        size_bytes: layer.size_bytes,
        estimated: layer.estimated,
        images,
        image: cut(image.to_owned(), NAME),
    };
    let (shared, unique): (Vec<_>, Vec<_>) =
        listing.layers.iter().zip(&owners).map(tile).partition(|layer| layer.images > 1);
    LayerMap { shared: group(shared), unique: group(unique) }
}

fn group(mut layers: Vec<LayerTile>) -> LayerGroup {
    let sum =
        |layers: &[LayerTile]| layers.iter().fold(0, |sum: u64, layer| sum.saturating_add(layer.size_bytes));
    let (count, size_bytes) = (layers.len(), sum(&layers));
    layers.sort_by(|a, b| (b.size_bytes, &a.id).cmp(&(a.size_bytes, &b.id)));
    let rest = layers.split_off(count.min(LISTED));
    LayerGroup { count, size_bytes, layers, rest_count: rest.len(), rest_bytes: sum(&rest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, layers: &[u32]) -> api::Image {
        let details = api::ImageListDetails { layers: layers.to_vec(), ..api::ImageListDetails::default() };
        api::Image { repo_tags: vec![name.into()], details: Some(details), ..api::Image::default() }
    }

    fn layer(id: u64, size_bytes: u64) -> api::ImageLayer {
        api::ImageLayer { id: format!("l{id}"), size_bytes, estimated: false }
    }

    #[test]
    fn layers_of_several_images_are_shared() {
        let listing = api::ImagesResponse {
            images: vec![image("a:1", &[0, 1]), image("b:1", &[0, 2, 77])],
            layers: vec![layer(0, 10), layer(1, 5), layer(2, 7), layer(3, 1)],
            warnings: Vec::new(),
        };
        let map = layer_map(&listing);
        assert_eq!((map.shared.count, map.shared.size_bytes), (1, 10));
        assert_eq!((map.shared.layers[0].images, map.shared.layers[0].image.as_str()), (2, "a:1"));
        let unique: Vec<_> = map.unique.layers.iter().map(|layer| layer.id.as_str()).collect();
        assert_eq!(unique, ["l2", "l1", "l3"]);
        assert_eq!(map.unique.layers[2].image, "", "no image has it");
    }

    #[test]
    fn the_map_is_bounded_and_its_sums_are_complete() {
        let count = 20_000;
        let listing = api::ImagesResponse {
            images: (0..count).map(|number| image("n", &[0, number])).collect(),
            layers: (0..u64::from(count)).map(|number| layer(number, number + 1)).collect(),
            warnings: Vec::new(),
        };
        let map = layer_map(&listing);
        assert_eq!((map.shared.count, map.unique.count, map.unique.layers.len()), (1, 19_999, LISTED));
        let listed: u64 = map.unique.layers.iter().map(|layer| layer.size_bytes).sum();
        assert_eq!(listed + map.unique.rest_bytes, map.unique.size_bytes);
        assert_eq!(map.unique.layers[0].size_bytes, 20_000);
        assert!(super::super::json(&map).len() < 100_000);
    }
}
