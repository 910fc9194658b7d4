//! Random lives of a store against a naive model: which names mean what, which layers are kept, what they add up to.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use larder_store::store::{LayerHandle, LeaseRecord, LeaseResources, RemoveOptions};
use proptest::prelude::*;

use crate::help::*;

const NAMES: [&str; 4] =
    ["docker.io/library/a:1", "docker.io/library/a:2", "docker.io/library/b:1", "docker.io/library/c:1"];
const LAYERS: [&str; 5] = ["l0", "l1", "l2", "l3", "l4"];

/// Which layers an image has: an image is known by them.
type LayerSet = BTreeSet<usize>;

#[derive(Debug, Clone)]
enum StoreStep {
    Commit { name: usize, layers: LayerSet },
    RemoveName(usize),
    RemoveImage(LayerSet),
    Lease { id: usize, layers: LayerSet, seconds: u64 },
    EndLease(usize),
    Hold(usize),
    LetGo,
    Wait(u64),
    Sweep,
    Reopen,
}

fn layers() -> impl Strategy<Value = LayerSet> {
    prop::collection::btree_set(0..LAYERS.len(), 1..4)
}

fn step() -> impl Strategy<Value = StoreStep> {
    prop_oneof![
        5 => (0..NAMES.len(), layers()).prop_map(|(name, layers)| StoreStep::Commit { name, layers }),
        2 => (0..NAMES.len()).prop_map(StoreStep::RemoveName),
        1 => layers().prop_map(StoreStep::RemoveImage),
        2 => (0..3_usize, layers(), 1..100_u64)
            .prop_map(|(id, layers, seconds)| StoreStep::Lease { id, layers, seconds }),
        1 => (0..3_usize).prop_map(StoreStep::EndLease),
        1 => (0..LAYERS.len()).prop_map(StoreStep::Hold),
        1 => Just(StoreStep::LetGo),
        1 => (1..80_u64).prop_map(StoreStep::Wait),
        2 => Just(StoreStep::Sweep),
        1 => Just(StoreStep::Reopen),
    ]
}

/// Expected state of the store.
#[derive(Debug, Default)]
struct StoreModel {
    /// Tags of each image.
    images: BTreeMap<LayerSet, BTreeSet<usize>>,
    /// Layers that are there, with what they take.
    present: BTreeMap<usize, u64>,
    leases: BTreeMap<usize, (LayerSet, u64)>,
    held: BTreeSet<usize>,
    now: u64,
}

impl StoreModel {
    fn needed(&self) -> BTreeSet<usize> {
        let leased = self.leases.values().flat_map(|(layers, _)| layers);
        self.images.keys().flatten().chain(leased).chain(&self.held).copied().collect()
    }

    /// Removes the layers of this set that are not needed.
    fn drop_unneeded(&mut self, of: &LayerSet) {
        let needed = self.needed();
        self.present.retain(|layer, _| needed.contains(layer) || !of.contains(layer));
    }

    fn remove(&mut self, image: &LayerSet) -> bool {
        if self.images.remove(image).is_none() {
            return false;
        }
        self.drop_unneeded(image);
        true
    }

    fn sweep(&mut self) {
        let now = self.now;
        self.leases.retain(|_, (_, ends)| *ends > now);
        self.drop_unneeded(&(0..LAYERS.len()).collect());
    }
}

/// A store beside its model.
struct StoreWithModel {
    scratch: TempStore,
    model: StoreModel,
    held: Option<LayerHandle>,
}

impl StoreWithModel {
    fn id(layers: &LayerSet) -> larder::reference::Digest {
        // The id of an image follows from its layers alone, so that it need not be there.
        let names: Vec<_> = layers.iter().map(|layer| diff_id(LAYERS[*layer])).collect();
        let config = serde_json::json!({
            "os": "linux", "architecture": "amd64",
            "config": { "User": "1000:1000" },
            "rootfs": { "type": "layers", "diff_ids": names.iter().map(larder::reference::Digest::as_str).collect::<Vec<_>>() },
        });
        digest(config.to_string())
    }

    fn now(&self) -> std::time::SystemTime {
        noon() + Duration::from_secs(self.model.now)
    }

    fn run(mut self, step: &StoreStep) -> StoreWithModel {
        let store = &self.scratch.store;
        match step {
            StoreStep::Commit { name, layers } => {
                let taken: Vec<LayerHandle> =
                    layers.iter().map(|number| layer(store, LAYERS[*number])).collect();
                let record = store.commit(&image(&[NAMES[*name]], &taken), self.now()).unwrap();
                assert_eq!(record.id, StoreWithModel::id(layers));
                for tags in self.model.images.values_mut() {
                    tags.remove(name);
                }
                self.model.images.entry(layers.clone()).or_default().insert(*name);
                for (number, layer) in layers.iter().zip(taken) {
                    self.model.present.insert(*number, layer.record().usage.bytes);
                }
            }
            StoreStep::RemoveName(name) => {
                let image = self.model.images.iter().find(|(_, tags)| tags.contains(name));
                let image = image.map(|(image, _)| image.clone());
                let removed = store.remove(NAMES[*name], &RemoveOptions::default()).unwrap();
                let expected = image.is_some_and(|image| self.model.remove(&image));
                assert_eq!(removed.is_some(), expected);
            }
            StoreStep::RemoveImage(layers) => {
                let removed = store.remove(StoreWithModel::id(layers).as_str(), &RemoveOptions::default());
                assert_eq!(removed.unwrap().is_some(), self.model.remove(layers));
            }
            StoreStep::Lease { id, layers, seconds } => {
                let ends = self.model.now + seconds;
                let leased = LeaseResources {
                    layers: layers.iter().map(|layer| key(LAYERS[*layer])).collect(),
                    ingests: Vec::new(),
                };
                let time = Duration::from_secs(*seconds);
                let now = noon() + Duration::from_secs(self.model.now);
                let lease = LeaseRecord::granted(format!("lease/{id}"), leased, time, &now.into());
                store.lease(&lease).unwrap();
                self.model.leases.insert(*id, (layers.clone(), ends));
            }
            StoreStep::EndLease(id) => {
                store.end_lease(&format!("lease/{id}")).unwrap();
                self.model.leases.remove(id);
            }
            StoreStep::Hold(number) => {
                let held = store.layer(&key(LAYERS[*number])).unwrap();
                assert_eq!(held.is_some(), self.model.present.contains_key(number));
                self.model.held = held.iter().map(|_| *number).collect();
                self.held = held;
            }
            StoreStep::LetGo => {
                self.held = None;
                self.model.held.clear();
            }
            StoreStep::Wait(seconds) => self.model.now += seconds,
            StoreStep::Sweep => {
                store.sweep(&self.now().into()).unwrap();
                self.model.sweep();
            }
            StoreStep::Reopen => {
                self.held = None;
                self.model.held.clear();
                self.scratch = self.scratch.reopen();
                // Opening removes unused content; leases expire only when an operation passes the time.
                self.model.drop_unneeded(&(0..LAYERS.len()).collect());
            }
        }
        self
    }

    fn check(&self) {
        let store = &self.scratch.store;
        let images: BTreeMap<_, _> =
            store.images().unwrap().into_iter().map(|image| (image.id, image.tags)).collect();
        let expected: BTreeMap<_, _> = self
            .model
            .images
            .iter()
            .map(|(layers, tags)| {
                let tags: Vec<String> = tags.iter().map(|tag| NAMES[*tag].to_owned()).collect();
                (StoreWithModel::id(layers), tags)
            })
            .collect();
        assert_eq!(images, expected);
        for (number, name) in NAMES.iter().enumerate() {
            let found = store.image(*name).unwrap().map(|image| image.id);
            let expected = self.model.images.iter().find(|(_, tags)| tags.contains(&number));
            assert_eq!(found, expected.map(|(layers, _)| StoreWithModel::id(layers)), "{name}");
        }
        let kept: BTreeSet<String> = entries(&self.scratch.root().join("layers")).into_iter().collect();
        let expected: BTreeSet<String> =
            self.model.present.keys().map(|layer| key(LAYERS[*layer]).as_str().to_owned()).collect();
        assert_eq!(kept, expected, "layers on disk");
        self.check_sums();
    }

    fn check_sums(&self) {
        let store = &self.scratch.store;
        let dir = larder_store::disk::measure(&self.scratch.root().join("layers")).unwrap().bytes;
        let sum: u64 = self.model.present.values().sum();
        let usage = store.usage().unwrap();
        assert_eq!(usage.layers.bytes, sum);
        // The directory of the layers is counted with the store's own things.
        assert!(dir >= sum && dir - sum <= 64 << 10, "{dir} {sum}");
        for usage in store.image_usages().unwrap() {
            let image = store.image(usage.id.as_str()).unwrap().unwrap();
            let layers: Vec<usize> = (0..LAYERS.len())
                .filter(|layer| image.layers.iter().any(|has| has.key == key(LAYERS[*layer])))
                .collect();
            let users =
                |layer: &usize| self.model.images.keys().filter(|image| image.contains(layer)).count();
            let leased = |layer: &usize| self.model.leases.values().any(|(layers, _)| layers.contains(layer));
            let needed_otherwise =
                |layer: &&usize| users(layer) > 1 || leased(layer) || self.model.held.contains(layer);
            let shared: u64 =
                layers.iter().filter(needed_otherwise).map(|layer| self.model.present[layer]).sum();
            assert_eq!(usage.shared.bytes, shared);
            let total: u64 = layers.iter().map(|layer| self.model.present[layer]).sum();
            assert_eq!(usage.total.bytes, total + usage.own.bytes);
            assert_eq!(usage.unique.bytes, total - shared + usage.own.bytes);
            assert!(store.to_image(&image).size.abs_diff(usage.total.bytes) <= 4096, "{usage:?}");
        }
        let sizes = |of: Vec<larder::backend::Image>| of.iter().map(|image| image.size).collect::<Vec<_>>();
        let images = store.images().unwrap();
        assert_eq!(
            sizes(store.list().unwrap()),
            sizes(images.iter().map(|image| store.to_image(image)).collect())
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_history_ends_as_the_model_predicts(steps in prop::collection::vec(step(), 1..25)) {
        let mut pair = StoreWithModel { scratch: TempStore::new(), model: StoreModel::default(), held: None };
        for step in &steps {
            pair = pair.run(step);
            pair.check();
        }
    }
}
