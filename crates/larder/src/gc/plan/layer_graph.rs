//! Computes which removals free which layers.
//!
//! A layer is as young as the youngest image that references it, and is freed when the last image that references it is
//! removed. Layers are freed oldest first, and freeing a layer removes exactly the images that still reference it. Of
//! the layers that the same image frees, the one with the fewest remaining images comes first. So no group of removals
//! frees what a smaller group would have freed, and every removal frees something.

use crate::gc::disk_space::DiskSpace;
use crate::gc::layers::LayerUsageIndex;

use super::GcImage;

/// One removal, by the image's index in the snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemovalStep {
    pub(super) image: usize,
    pub(super) frees: DiskSpace,
    pub(super) estimated: bool,
    /// The layer that this step frees together with others, and the number of these steps; `None` for a single removal.
    pub(super) shared: Option<(u32, usize)>,
}

/// The graph of images and layers without the images removed so far.
pub(super) struct LayerGraph<'a> {
    images: &'a [GcImage],
    layers: &'a LayerUsageIndex,
    /// Images in removal order.
    order: &'a [usize],
    is_removed: Vec<bool>,
    /// For each layer, how many removable images still reference it; not counted for retained layers.
    references: Vec<u32>,
    is_retained: Vec<bool>,
    /// For each layer, the removable images that reference it, as ranks, oldest first.
    users: Vec<Vec<u32>>,
}

/// For each image, what removing it alone frees: the layers that nothing else references.
pub(super) fn exclusive_space(images: &[GcImage], layers: &LayerUsageIndex) -> Vec<DiskSpace> {
    let mut users = vec![0_u32; layers.all().len()];
    for image in images {
        for &layer in layers_of(layers, image) {
            users[layer as usize] += 1;
        }
    }
    for layer in layers_of_other_images(images, layers) {
        users[layer as usize] += 1;
    }
    let frees = |image: &GcImage| {
        let Some(known) = layers.layers_of(&image.id) else { return DiskSpace::estimate(image.size) };
        let only = known.layers.iter().map(|&layer| (&layers.all()[layer as usize], users[layer as usize]));
        let only = only.filter(|(layer, users)| *users == 1 && layer.referenced_by.is_none());
        only.map(|(layer, _)| layer.amount).sum::<DiskSpace>() + known.own
    };
    images.iter().map(frees).collect()
}

/// Layers of images that are not in the snapshot; they are retained.
fn layers_of_other_images(images: &[GcImage], layers: &LayerUsageIndex) -> Vec<u32> {
    layers.layers_of_other_images(images.iter().map(|image| &image.id))
}

fn layers_of<'a>(layers: &'a LayerUsageIndex, image: &GcImage) -> &'a [u32] {
    layers.layers_of(&image.id).map_or(&[], |known| &known.layers)
}

impl<'a> LayerGraph<'a> {
    pub(super) fn new(
        images: &'a [GcImage],
        layers: &'a LayerUsageIndex,
        order: &'a [usize],
    ) -> LayerGraph<'a> {
        let mut is_retained: Vec<bool> =
            layers.all().iter().map(|layer| layer.referenced_by.is_some()).collect();
        let mut removable = vec![false; images.len()];
        for &image in order {
            removable[image] = true;
        }
        for (image, _) in images.iter().zip(&removable).filter(|(_, removable)| !**removable) {
            for &layer in layers_of(layers, image) {
                is_retained[layer as usize] = true;
            }
        }
        for layer in layers_of_other_images(images, layers) {
            is_retained[layer as usize] = true;
        }
        let mut references = vec![0; is_retained.len()];
        let mut users = vec![Vec::new(); is_retained.len()];
        for (rank, &image) in (0_u32..).zip(order) {
            for &layer in layers_of(layers, &images[image]) {
                if !is_retained[layer as usize] {
                    references[layer as usize] += 1;
                    users[layer as usize].push(rank);
                }
            }
        }
        LayerGraph {
            images,
            layers,
            order,
            is_removed: vec![false; images.len()],
            references,
            is_retained,
            users,
        }
    }

    /// Whether removing all removable images would free a layer of this image, not only its metadata.
    pub(super) fn frees_something(&self, image: usize) -> bool {
        let subject = &self.images[image];
        match self.layers.layers_of(&subject.id) {
            None => subject.size > 0,
            Some(known) => known.layers.iter().any(|&layer| {
                !self.is_retained[layer as usize]
                    && self.layers.all()[layer as usize].amount != DiskSpace::ZERO
            }),
        }
    }

    /// Removes all removable images, in their order.
    pub(super) fn remove_all(mut self) -> Vec<RemovalStep> {
        let order = self.order;
        order.iter().map(|&image| self.remove(image, None)).collect()
    }

    /// Removes as few images as needed, oldest layers first, until this much is free; every image with a layer to free
    /// if that is not enough. An image whose removal frees only metadata is retained.
    pub(super) fn remove_until(mut self, need: DiskSpace) -> Vec<RemovalStep> {
        let mut freed_last: Vec<Vec<u32>> = vec![Vec::new(); self.order.len()];
        for (layer, users) in (0_u32..).zip(&self.users) {
            if let Some(&youngest) = users.last() {
                freed_last[youngest as usize].push(layer);
            }
        }
        let mut steps = Vec::new();
        let mut missing = need;
        for (&image, freed_last) in self.order.iter().zip(freed_last) {
            if missing == DiskSpace::ZERO {
                return steps;
            }
            self.free_layers_of(image, freed_last, &mut missing, &mut steps);
        }
        steps
    }

    /// Frees the layers whose youngest image is this one, until enough is free.
    fn free_layers_of(
        &mut self,
        image: usize,
        mut freed_last: Vec<u32>,
        missing: &mut DiskSpace,
        steps: &mut Vec<RemovalStep>,
    ) {
        let unknown = self.layers.layers_of(&self.images[image].id).is_none();
        if unknown && reduces_shortfall(DiskSpace::estimate(self.images[image].size), *missing) {
            let step = self.remove(image, None);
            *missing = step.frees.shortfall_to(*missing);
            steps.push(step);
        }
        loop {
            let all = self.layers.all();
            freed_last.retain(|&layer| {
                self.references[layer as usize] > 0 && reduces_shortfall(all[layer as usize].amount, *missing)
            });
            let fewest = |&layer: &u32| (self.references[layer as usize], &all[layer as usize].id);
            let Some(layer) = freed_last.iter().copied().min_by_key(fewest) else { return };
            let users = std::mem::take(&mut self.users[layer as usize]);
            let group = self.references[layer as usize] as usize;
            let shared = (group > 1).then_some((layer, group));
            for rank in users {
                let image = self.order[rank as usize];
                if !self.is_removed[image] {
                    let step = self.remove(image, shared);
                    *missing = step.frees.shortfall_to(*missing);
                    steps.push(step);
                }
            }
        }
    }

    fn remove(&mut self, image: usize, shared: Option<(u32, usize)>) -> RemovalStep {
        self.is_removed[image] = true;
        let subject = &self.images[image];
        let Some(known) = self.layers.layers_of(&subject.id) else {
            return RemovalStep { image, frees: DiskSpace::estimate(subject.size), estimated: true, shared };
        };
        let (mut frees, mut estimated) = (known.own, false);
        for &layer in &known.layers {
            let at = layer as usize;
            if self.is_retained[at] {
                continue;
            }
            self.references[at] -= 1;
            if self.references[at] == 0 {
                frees += self.layers.all()[at].amount;
                estimated |= self.layers.all()[at].estimated;
            }
        }
        RemovalStep { image, frees, estimated, shared }
    }
}

/// Whether this amount reduces what is still needed.
fn reduces_shortfall(amount: DiskSpace, missing: DiskSpace) -> bool {
    (amount.bytes > 0 && missing.bytes > 0) || (amount.inodes > 0 && missing.inodes > 0)
}
