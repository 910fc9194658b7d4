//! Labels of images' configs, for keep rules and requests that select by label.
//!
//! A config may have megabytes of labels. They are read only where they are asked for, and of a config only the labels
//! with the keys asked for are kept, each cut at [`MAX_LABEL_VALUE`].

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use futures_util::stream::{self, StreamExt as _};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use tokio::sync::Mutex;

use crate::backend::{Backend, BackendError, Image, ImageDetails, ImageSpec};
use crate::reference::ImageId;

/// Bytes of a label's value that are compared; the rest is cut off.
pub const MAX_LABEL_VALUE: usize = 1024;
/// Number of concurrent calls. Each may have a config of some megabytes in memory.
const CALLS_AT_ONCE: usize = 2;
/// Bytes of labels that are kept between rounds. An image beyond them is read again in each round.
const CACHE_BYTES: usize = 4 << 20;
/// Bytes of a cached label or image beside its text, about.
const ENTRY_BYTES: usize = 128;

/// Of each image the labels with the keys that were asked for. An image with an unknown config is missing.
pub type ImageLabels = HashMap<ImageId, BTreeMap<String, String>>;

/// Labels that keep rules have asked for. The config of an image never changes.
#[derive(Debug, Default)]
pub(super) struct LabelCache(Mutex<CachedLabels>);

#[derive(Debug, Default)]
struct CachedLabels {
    keys: BTreeSet<String>,
    images: ImageLabels,
    bytes: usize,
}

impl CachedLabels {
    /// Drops the labels of other keys and of absent images.
    fn retain(&mut self, keys: &BTreeSet<String>, images: &[Image]) {
        if self.keys != *keys {
            *self = CachedLabels { keys: keys.clone(), ..CachedLabels::default() };
        }
        let present: HashSet<&ImageId> = images.iter().map(|image| &image.id).collect();
        self.images.retain(|id, _| present.contains(id));
        self.bytes = self.images.values().map(bytes_of).sum();
    }

    fn add(&mut self, id: &ImageId, labels: &BTreeMap<String, String>) {
        let bytes = self.bytes + bytes_of(labels);
        if bytes <= CACHE_BYTES {
            self.bytes = bytes;
            self.images.insert(id.clone(), labels.clone());
        }
    }
}

fn bytes_of(labels: &BTreeMap<String, String>) -> usize {
    labels.iter().map(|(key, value)| key.len() + value.len() + ENTRY_BYTES).sum::<usize>() + ENTRY_BYTES
}

impl LabelCache {
    /// The labels of these images with these keys. Reads what it does not have.
    pub(super) async fn labels(
        &self,
        backend: &dyn Backend,
        images: &[Image],
        keys: &BTreeSet<String>,
    ) -> Result<ImageLabels, BackendError> {
        let mut cache = self.0.lock().await;
        cache.retain(keys, images);
        let new = images.iter().filter(|image| !cache.images.contains_key(&image.id));
        let read = read_labels(backend, new, keys).await?;
        let mut labels = cache.images.clone();
        for (id, labels) in &read {
            cache.add(id, labels);
        }
        labels.extend(read);
        Ok(labels)
    }
}

/// Reads the labels of these images with these keys.
pub(super) async fn read_labels(
    backend: &dyn Backend,
    images: impl IntoIterator<Item = &Image>,
    keys: &BTreeSet<String>,
) -> Result<ImageLabels, BackendError> {
    if keys.is_empty() {
        return Ok(ImageLabels::new());
    }
    let ids: BTreeSet<&ImageId> = images.into_iter().map(|image| &image.id).collect();
    let calls = ids.into_iter().map(async |id| match backend.inspect(&ImageSpec::named(id)).await {
        Ok(details) => Ok(details.and_then(|details| Some((id.clone(), labels_of(&details, keys)?)))),
        Err(error @ BackendError::Unreachable { .. }) => Err(error),
        // One damaged image must not prevent the removal of others.
        Err(error) => {
            tracing::debug!("cannot read the labels of {id}: {error}");
            Ok(None)
        }
    });
    let mut answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
    let mut labels = ImageLabels::new();
    while let Some(answer) = answers.next().await {
        labels.extend(answer?);
    }
    Ok(labels)
}

/// The labels in a verbose answer: its config is wrapped as in containerd and CRI-O, or plain.
fn labels_of(details: &ImageDetails, keys: &BTreeSet<String>) -> Option<BTreeMap<String, String>> {
    let config = Member("config", Member("Labels", LabelsWithKeys(keys)));
    let wrapped =
        details.info.get("info").and_then(|text| parse(text, Member("imageSpec", config)).flatten());
    let labels = wrapped.or_else(|| parse(details.info.get("config")?, config))?;
    Some(labels.flatten().unwrap_or_default())
}

fn parse<'de, S: DeserializeSeed<'de>>(text: &'de str, seed: S) -> Option<S::Value> {
    seed.deserialize(&mut serde_json::Deserializer::from_str(text)).ok()
}

/// Reads one member of an object, and skips the others without keeping them. `None` if it or the object is missing.
#[derive(Clone, Copy)]
struct Member<S>(&'static str, S);

impl<'de, S: DeserializeSeed<'de> + Copy> DeserializeSeed<'de> for Member<S> {
    type Value = Option<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de, S: DeserializeSeed<'de> + Copy> Visitor<'de> for Member<S> {
    type Value = Option<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with {}", self.0)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(name) = members.next_key::<Cow<'de, str>>()? {
            if name == self.0 {
                found = Some(members.next_value_seed(self.1)?);
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Reads the labels with these keys, and skips the others without keeping them.
#[derive(Clone, Copy)]
struct LabelsWithKeys<'a>(&'a BTreeSet<String>);

impl<'de> DeserializeSeed<'de> for LabelsWithKeys<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for LabelsWithKeys<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of strings")
    }

    /// Go writes a nil map so.
    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut labels: A) -> Result<Self::Value, A::Error> {
        let mut found = BTreeMap::new();
        while let Some(key) = labels.next_key::<Cow<'de, str>>()? {
            if self.0.contains(&*key) {
                let mut value = labels.next_value::<Option<String>>()?.unwrap_or_default();
                let end = (0..=MAX_LABEL_VALUE.min(value.len())).rfind(|at| value.is_char_boundary(*at));
                value.truncate(end.unwrap_or_default());
                value.shrink_to_fit();
                found.insert(key.into_owned(), value);
            } else {
                labels.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(key: &str, text: &str) -> Option<BTreeMap<String, String>> {
        let info = BTreeMap::from([(key.to_owned(), text.to_owned())]);
        let details = ImageDetails { info, ..ImageDetails::default() };
        labels_of(&details, &BTreeSet::from(["keep".to_owned()]))
    }

    #[test]
    fn labels_are_found_in_the_answers_of_runtimes_and_in_plain_configs() {
        let keep = Some(BTreeMap::from([("keep".to_owned(), "yes".to_owned())]));
        let config = r#"{"config":{"User":"0","Labels":{"team":"a","keep":"yes"}},"rootfs":{"diff_ids":[]}}"#;
        assert_eq!(labels("config", config), keep);
        assert_eq!(labels("info", &format!(r#"{{"chainID":"","imageSpec":{config}}}"#)), keep);
        for none in ["{}", r#"{"config":null}"#, r#"{"config":{"Labels":null}}"#] {
            assert_eq!(labels("config", none), Some(BTreeMap::new()), "{none}");
        }
        for unknown in [("info", "{}"), ("config", "[]"), ("config", "{"), ("other", config)] {
            assert_eq!(labels(unknown.0, unknown.1), None, "{unknown:?}");
        }
    }

    #[test]
    fn values_are_cut_at_a_character() {
        let value = "é".repeat(MAX_LABEL_VALUE);
        let found = labels("config", &format!(r#"{{"config":{{"Labels":{{"keep":"a{value}"}}}}}}"#)).unwrap();
        assert_eq!(found["keep"].len(), MAX_LABEL_VALUE - 1);
    }

    #[test]
    fn a_cache_holds_so_many_bytes_whatever_the_number_of_images() {
        let labels = BTreeMap::from([("keep".to_owned(), "v".repeat(MAX_LABEL_VALUE))]);
        let mut cache = CachedLabels::default();
        for image in 0..10_000 {
            cache.add(&ImageId::from(format!("sha256:{image}")), &labels);
        }
        assert!(
            (3000..CACHE_BYTES / MAX_LABEL_VALUE).contains(&cache.images.len()),
            "{}",
            cache.images.len()
        );
    }
}
