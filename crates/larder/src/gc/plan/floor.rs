//! The floor of a collection for space: the most recently used candidates that are retained.

use std::collections::HashSet;

use super::{GcImage, GcSnapshot};
use crate::gc::disk_space::DiskSpace;

/// The most recently used of these candidates, until the next one would exceed `keep_bytes`. `order` has the candidates,
/// least recently used first. Layers count once, and not at all if an image that is retained anyway has them.
pub(super) fn recent_images(
    snapshot: &GcSnapshot,
    order: &[usize],
    is_retained: impl Fn(usize) -> bool,
    keep_bytes: u64,
) -> Vec<usize> {
    let layers_of =
        |image: &GcImage| snapshot.layers.layers_of(&image.id).map_or(&[][..], |known| &known.layers);
    let retained = snapshot.images.iter().enumerate().filter(|(index, _)| is_retained(*index));
    let mut counted: HashSet<u32> = retained.flat_map(|(_, image)| layers_of(image)).copied().collect();
    let (mut kept, mut left) = (Vec::new(), keep_bytes);
    for &index in order.iter().rev() {
        let image = &snapshot.images[index];
        let bytes = match snapshot.layers.layers_of(&image.id) {
            None => image.size,
            Some(known) => {
                let new = known.layers.iter().filter(|layer| !counted.contains(layer));
                let new: DiskSpace = new.map(|&layer| snapshot.layers.all()[layer as usize].amount).sum();
                (new + known.own).bytes
            }
        };
        let Some(rest) = left.checked_sub(bytes) else { break };
        left = rest;
        counted.extend(layers_of(image));
        kept.push(index);
    }
    kept
}
