//! Estimates layer sizes where a runtime reports only layer IDs and one size per image.
//!
//! Image sizes do not determine how much is shared. The estimate assumes the largest possible shared part, as if the
//! smallest image on each base had no layers of its own, because bases are large and what is added to them is small.
//! The result is scaled so that the sum equals the runtime's total for images, because image sizes may be those of
//! compressed archives.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::disk_space::DiskSpace;
use super::layers::{LayerUsageIndex, MeasuredLayer};
use crate::backend::Image;
use crate::reference::LayerId;

impl LayerUsageIndex {
    /// Estimates layer sizes. `images` have the IDs of their layers; `used` is the total of all images, if known.
    pub(crate) fn estimated(images: &[(&Image, &[LayerId])], used: Option<DiskSpace>) -> LayerUsageIndex {
        let mut layers = LayerUsageIndex::unknown();
        let mut stacks: Vec<LayerStack<'_>> = shared(images).into_iter().collect();
        stacks.sort_by(|(a, _), (b, _)| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
        for (ids, bytes) in stacks {
            layers.share_out(&ids, bytes);
        }
        let mut order: Vec<_> = images.iter().collect();
        order.sort_by(|(a, of_a), (b, of_b)| of_a.len().cmp(&of_b.len()).then_with(|| a.id.cmp(&b.id)));
        for (image, ids) in order {
            layers.share_out(&ids.iter().collect::<Vec<_>>(), image.size);
            layers.add_image(&image.id, *ids, DiskSpace::ZERO);
        }
        if let Some(used) = used {
            layers.stretch_to(used);
        }
        layers
    }

    /// Distributes the bytes beyond the known layers evenly over the new ones.
    fn share_out(&mut self, ids: &[&LayerId], bytes: u64) {
        let mut new: Vec<&LayerId> = Vec::new();
        let mut known = 0_u64;
        let mut seen = HashSet::new();
        for &id in ids.iter().filter(|id| seen.insert(**id)) {
            match self.get(id) {
                Some(layer) => known = known.saturating_add(layer.amount.bytes),
                None => new.push(id),
            }
        }
        let each = bytes.saturating_sub(known) / (new.len() as u64).max(1);
        for id in new {
            let amount = DiskSpace::estimate(each);
            self.add(MeasuredLayer { id: id.clone(), amount, estimated: true, referenced_by: None });
        }
    }

    /// Scales the amounts to these sums, unless these are zero.
    fn stretch_to(&mut self, used: DiskSpace) {
        let sum: DiskSpace = self.all().iter().map(|layer| layer.amount).sum();
        let stretch = |amount: u64, sum: u64, used: u64| {
            if sum == 0 || used == 0 {
                return amount;
            }
            let stretched = u128::from(amount) * u128::from(used) / u128::from(sum);
            u64::try_from(stretched).unwrap_or(u64::MAX)
        };
        for amount in self.amounts_mut() {
            amount.bytes = stretch(amount.bytes, sum.bytes, used.bytes);
            amount.inodes = stretch(amount.inodes, sum.inodes, used.inodes);
        }
    }
}

/// IDs of layers, and their total size.
type LayerStack<'a> = (Vec<&'a LayerId>, u64);

/// The layers that images share with any other image, with the size of the smallest image that shares exactly these.
fn shared<'a>(images: &[(&Image, &'a [LayerId])]) -> BTreeMap<Vec<&'a LayerId>, u64> {
    let mut users: HashMap<&LayerId, usize> = HashMap::new();
    for (_, ids) in images {
        let once: HashSet<&LayerId> = ids.iter().collect();
        for id in once {
            *users.entry(id).or_default() += 1;
        }
    }
    let mut stacks: BTreeMap<Vec<&LayerId>, u64> = BTreeMap::new();
    for (image, ids) in images {
        let shared = ids.iter().filter(|id| users[id] > 1).collect();
        let smallest = stacks.entry(shared).or_insert(image.size);
        *smallest = image.size.min(*smallest);
    }
    stacks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str, size: u64) -> Image {
        Image { id: id.into(), size, ..Image::default() }
    }

    fn ids(ids: &[&str]) -> Vec<LayerId> {
        ids.iter().copied().map(LayerId::from).collect()
    }

    fn sizes(layers: &LayerUsageIndex) -> Vec<(&str, u64)> {
        let mut sizes: Vec<_> =
            layers.all().iter().map(|layer| (layer.id.as_str(), layer.amount.bytes)).collect();
        sizes.sort_unstable();
        sizes
    }

    #[test]
    fn sizes_of_stacked_images_give_those_of_layers() {
        let (a, b, c) = (image("a", 300), image("b", 500), image("c", 580));
        let (of_a, of_b, of_c) = (ids(&["l1"]), ids(&["l1", "l2"]), ids(&["l1", "l2", "l2", "l3"]));
        let layers = LayerUsageIndex::estimated(&[(&c, &of_c), (&a, &of_a), (&b, &of_b)], None);
        assert_eq!(sizes(&layers), [("l1", 300), ("l2", 200), ("l3", 80)]);
        assert!(layers.all().iter().all(|layer| layer.estimated));
    }

    #[test]
    fn images_on_one_base_have_unique_bytes() {
        let (a, b, c) = (image("a", 1000), image("b", 1100), image("c", 1300));
        let of = |own: &str| ids(&["base", own]);
        let (of_a, of_b, of_c) = (of("a"), of("b"), of("c"));
        let layers = LayerUsageIndex::estimated(&[(&a, &of_a), (&b, &of_b), (&c, &of_c)], None);
        assert_eq!(sizes(&layers), [("a", 0), ("b", 100), ("base", 1000), ("c", 300)]);
    }

    #[test]
    fn guesses_add_up_to_what_is_known_of_the_whole() {
        let (a, b) = (image("a", 1000), image("b", 1100));
        let (of_a, of_b) = (ids(&["base", "a"]), ids(&["base", "b"]));
        let used = DiskSpace { bytes: 3300, inodes: 60 };
        let layers = LayerUsageIndex::estimated(&[(&a, &of_a), (&b, &of_b)], Some(used));
        assert_eq!(sizes(&layers), [("a", 0), ("b", 300), ("base", 3000)]);
        assert_eq!(layers.all().iter().map(|layer| layer.amount.inodes).sum::<u64>(), 60);
        let unknown = LayerUsageIndex::estimated(&[(&a, &of_a), (&b, &of_b)], Some(DiskSpace::ZERO));
        assert_eq!(sizes(&unknown), [("a", 0), ("b", 100), ("base", 1000)]);
    }
}
