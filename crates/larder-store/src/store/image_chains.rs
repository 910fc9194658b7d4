//! Which image has a layer in which place, without decoding all images.

use std::collections::BTreeMap;

use larder::reference::Digest;
use parking_lot::Mutex;

/// The chain IDs of the layers of each image, by its ID, which determines them: no record is read for them twice.
#[derive(Debug, Default)]
pub(crate) struct ImageChains(Mutex<BTreeMap<String, Vec<Digest>>>);

impl ImageChains {
    /// The images with this chain ID, and the layer's place in each. `images` are the IDs of all images, in order.
    pub(crate) fn find<E>(
        &self,
        chain: &Digest,
        images: &[String],
        read: impl Fn(&str) -> Result<Option<Vec<Digest>>, E>,
    ) -> Result<Vec<(String, usize)>, E> {
        let mut known = self.0.lock();
        known.retain(|id, _| images.binary_search(id).is_ok());
        for id in images {
            if !known.contains_key(id)
                && let Some(chains) = read(id)?
            {
                known.insert(id.clone(), chains);
            }
        }
        let place = |own: &Vec<Digest>| own.iter().position(|own| own == chain);
        Ok(known.iter().filter_map(|(id, own)| Some((id.clone(), place(own)?))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_ids_of_an_image_are_read_once() {
        let digest = |text: &str| Digest::sha256(text);
        let chains = ImageChains::default();
        let reads = std::cell::RefCell::new(Vec::new());
        let find = |chain: &str, images: &[&str]| {
            let images: Vec<String> = images.iter().map(|id| (*id).to_owned()).collect();
            let read = |id: &str| {
                reads.borrow_mut().push(id.to_owned());
                Ok::<_, ()>(Some(vec![digest("lowest"), digest(id)]))
            };
            chains.find(&digest(chain), &images, read).unwrap()
        };
        assert_eq!(find("b", &["a", "b"]), [("b".to_owned(), 1)]);
        assert_eq!(find("c", &["a", "b"]), []);
        assert_eq!(find("c", &["a", "b", "c"]), [("c".to_owned(), 1)]);
        assert_eq!(find("b", &["a", "c"]), [], "it was removed");
        assert_eq!(find("lowest", &["a", "c"]), [("a".to_owned(), 0), ("c".to_owned(), 0)]);
        assert_eq!(*reads.borrow(), ["a", "b", "c"]);
    }
}
