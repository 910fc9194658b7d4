//! containerd's records of an image: content with the labels that its garbage collector follows, and names. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use larder::reference::Digest;
use serde_json::Value;

use crate::client::NewBlob;
use crate::graph::{NEEDS_BLOB, NEEDS_SNAPSHOT};
use crate::proto::images::{Descriptor, Image as ImageRecord};

/// The label of images that CRI lists.
const MANAGED: &str = "io.cri-containerd.image";

/// The label of names that larder published, with the digest of the document: others may have given the name away
/// since.
const PUBLISHED: &str = "larder.dev/published";

/// The label of names of images that an administrator loaded, or put into containerd: every pod may use them.
const PRELOADED: &str = "larder.dev/preloaded";

/// The types of documents that containerd follows. What else a document says of itself is its registry's text.
const INDEXES: [&str; 2] =
    ["application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"];
const MANIFESTS: [&str; 2] =
    ["application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"];

/// An image of larder's store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedImage {
    /// Digest of its config.
    pub id: Digest,
    /// Its config, as fetched.
    pub config: Vec<u8>,
    /// Its manifests and indexes, as fetched.
    pub documents: Vec<(Digest, Vec<u8>)>,
    /// Its names with tag or digest, each with the digest of the document that it names.
    pub names: Vec<(String, Digest)>,
    /// The chain IDs of its layers, lowest first.
    pub chains: Vec<Digest>,
    /// Whether an administrator loaded it, or put it into containerd.
    pub preloaded: bool,
    /// True if the image has names for other platforms only: containerd does not get it.
    pub for_other_platforms: bool,
}

/// The names of a published image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamesInContainerd {
    /// All that were to be published.
    pub all: BTreeSet<String>,
    /// Published names that containerd had for another image, and keeps.
    pub of_others: BTreeSet<String>,
}

/// Records to write, in this order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ContainerdRecords {
    pub(super) blobs: Vec<NewBlob>,
    pub(super) images: Vec<ImageRecord>,
}

impl PublishedImage {
    /// The names under which containerd has it.
    pub fn record_names(&self) -> Vec<String> {
        let names = self.names.iter().map(|(name, _)| name.clone());
        names.chain([self.id.to_string()]).collect()
    }

    /// Whether a name of containerd stands for this image, or for what larder last published under it.
    pub(super) fn owns(&self, record: &ImageRecord) -> bool {
        is_as_published(record) || self.has_target_of(record)
    }

    /// Whether a name of containerd stands for one of the image's documents.
    pub(super) fn has_target_of(&self, record: &ImageRecord) -> bool {
        let target = record.target.as_ref().map(|target| target.digest.as_str());
        self.documents.iter().any(|(digest, _)| Some(digest.as_str()) == target)
    }

    /// Whether a name of containerd is as larder publishes it for this image.
    fn is_published_as(&self, present: &ImageRecord) -> bool {
        let target = present.target.as_ref().filter(|_| self.has_target_of(present));
        target.is_some_and(|target| covers(present, &self.record(&present.name, target)))
    }

    /// The names of this image in these records, and those that stand for another image.
    pub(super) fn names_in(&self, records: &HashMap<String, ImageRecord>) -> NamesInContainerd {
        let mut names = NamesInContainerd::default();
        for name in self.record_names() {
            match records.get(&name) {
                Some(record) if self.is_published_as(record) => drop(names.all.insert(name)),
                Some(record) if !self.owns(record) => {
                    names.of_others.insert(name.clone());
                    names.all.insert(name);
                }
                _ => {}
            }
        }
        names
    }

    /// The digests of the archives of its layers.
    pub(super) fn archives(&self) -> BTreeSet<String> {
        let documents = self.documents.iter().filter_map(|(_, bytes)| serde_json::from_slice(bytes).ok());
        let of_layer = format!("{NEEDS_BLOB}.l.");
        let labels = documents.flat_map(|document: Value| references(&document));
        labels.filter(|(label, _)| label.starts_with(&of_layer)).map(|(_, digest)| digest).collect()
    }

    /// The record of a name as larder publishes it, for the document that the name stands for if that is one of the
    /// image's: another program may have put an index there with images of other platforms, which containerd would
    /// remove.
    pub(super) fn with_present_target(&self, new: ImageRecord, present: &ImageRecord) -> ImageRecord {
        match present.target.as_ref().filter(|_| self.has_target_of(present)) {
            Some(target) => self.record(&new.name, target),
            None => new,
        }
    }

    fn record(&self, name: &str, target: &Descriptor) -> ImageRecord {
        let preloaded = self.preloaded.then_some((PRELOADED, "true"));
        let labels = [(MANAGED, "managed"), (PUBLISHED, target.digest.as_str())].into_iter().chain(preloaded);
        ImageRecord {
            name: name.to_owned(),
            labels: labels.map(|(label, value)| (label.to_owned(), value.to_owned())).collect(),
            target: Some(target.clone()),
        }
    }

    pub(super) fn records(&self, snapshotter: &str) -> Result<ContainerdRecords, String> {
        let mut config_labels = BTreeMap::new();
        if let Some(top) = self.chains.last() {
            config_labels.insert(format!("{NEEDS_SNAPSHOT}{snapshotter}"), top.to_string());
        }
        let mut blobs =
            vec![NewBlob { digest: self.id.to_string(), data: self.config.clone(), labels: config_labels }];
        let mut targets = BTreeMap::new();
        for (digest, bytes) in &self.documents {
            let document: Value =
                serde_json::from_slice(bytes).map_err(|error| format!("{digest}: {error}"))?;
            let descriptor = Descriptor {
                media_type: media_type(&document),
                digest: digest.to_string(),
                size: i64::try_from(bytes.len()).unwrap_or(i64::MAX),
            };
            targets.insert(digest, descriptor);
            blobs.push(NewBlob {
                digest: digest.to_string(),
                data: bytes.clone(),
                labels: references(&document),
            });
        }
        let mut images = Vec::new();
        let mut first = None;
        for (name, digest) in &self.names {
            let target = targets.get(digest).ok_or_else(|| format!("{digest} of {name} is missing"))?;
            first.get_or_insert(target);
            images.push(self.record(name, target));
        }
        let unnamed = || self.documents.last().and_then(|(digest, _)| targets.get(digest));
        let target = first.or_else(unnamed).ok_or_else(|| format!("{} has no manifest", self.id))?;
        images.push(self.record(self.id.as_str(), target));
        Ok(ContainerdRecords { blobs, images })
    }
}

/// Whether a record of containerd has all that a new one has.
pub(super) fn covers(present: &ImageRecord, new: &ImageRecord) -> bool {
    let digest = |record: &ImageRecord| record.target.as_ref().map(|target| target.digest.clone());
    let has = |(label, value): (&String, &String)| present.labels.get(label) == Some(value);
    digest(present) == digest(new) && new.labels.iter().all(has)
}

/// Whether a name stands for what larder last published under it.
pub(crate) fn is_as_published(record: &ImageRecord) -> bool {
    let target = record.target.as_ref().map(|target| target.digest.as_str()).unwrap_or_default();
    record.labels.get(PUBLISHED).is_some_and(|published| published == target)
}

/// Whether a name stands for an image that larder pulled, maybe for some pods only.
pub(crate) fn is_pulled(record: &ImageRecord) -> bool {
    is_as_published(record) && !record.labels.contains_key(PRELOADED)
}

/// The type of a document: the one that it has by its shape where it names none, as the specification of OCI allows, or
/// one that it cannot be.
fn media_type(document: &Value) -> String {
    let known = if document.get("manifests").is_some() { INDEXES } else { MANIFESTS };
    let named = document.get("mediaType").and_then(Value::as_str);
    named.filter(|named| known.contains(named)).unwrap_or(known[0]).to_owned()
}

/// The labels that a manifest or an index has in containerd. References to blobs that are missing are harmless.
fn references(document: &Value) -> BTreeMap<String, String> {
    let digest = |descriptor: &Value| descriptor.get("digest").and_then(Value::as_str).map(str::to_owned);
    let list = |key: &str| document.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let numbered = |key: &str, short: &str| -> Vec<(String, String)> {
        let items = list(key).into_iter().enumerate();
        items.filter_map(|(at, item)| Some((format!("{NEEDS_BLOB}.{short}.{at}"), digest(&item)?))).collect()
    };
    let mut labels: BTreeMap<String, String> = numbered("layers", "l").into_iter().collect();
    labels.extend(numbered("manifests", "m"));
    if let Some(config) = document.get("config").and_then(digest) {
        labels.insert(format!("{NEEDS_BLOB}.config"), config);
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> PublishedImage {
        let digest =
            |digit: char| Digest::parse(&format!("sha256:{}", digit.to_string().repeat(64))).unwrap();
        let manifest = format!(
            r#"{{"config": {{"digest": "{}"}}, "layers": [{{"digest": "{}"}}]}}"#,
            digest('c'),
            digest('1')
        );
        let index =
            format!(r#"{{"mediaType": "some/index", "manifests": [{{"digest": "{}"}}]}}"#, digest('a'));
        PublishedImage {
            id: digest('c'),
            config: b"{}".to_vec(),
            documents: vec![(digest('a'), manifest.into_bytes()), (digest('b'), index.into_bytes())],
            names: vec![("r.example/app:1".into(), digest('b'))],
            chains: vec![digest('2'), digest('3')],
            preloaded: false,
            for_other_platforms: false,
        }
    }

    #[test]
    fn labels_lead_from_the_names_to_the_top_snapshot() {
        let image = image();
        let records = image.records("larder").unwrap();
        let labels = |digest: char| {
            let name = format!("sha256:{}", digest.to_string().repeat(64));
            let found = records.blobs.iter().find(|blob| blob.digest == name).unwrap();
            found.labels.iter().map(|(label, value)| format!("{label} {}", &value[7..8])).collect::<Vec<_>>()
        };
        assert_eq!(labels('b'), ["containerd.io/gc.ref.content.m.0 a"]);
        assert_eq!(
            labels('a'),
            ["containerd.io/gc.ref.content.config c", "containerd.io/gc.ref.content.l.0 1"]
        );
        assert_eq!(labels('c'), ["containerd.io/gc.ref.snapshot.larder 3"]);
        let names: Vec<_> = records.images.iter().map(|image| image.name.clone()).collect();
        assert_eq!(names, image.record_names());
        for record in &records.images {
            let target = record.target.as_ref().unwrap();
            assert_eq!(target.media_type, INDEXES[0], "not what the registry wrote");
            assert_eq!(record.labels["io.cri-containerd.image"], "managed");
        }
    }

    #[test]
    fn a_name_is_larders_while_it_stands_for_what_larder_published() {
        let image = image();
        let mut record = image.records("larder").unwrap().images.remove(0);
        assert!(image.owns(&record));
        let other = |digit: &str| format!("sha256:{}", digit.repeat(64));
        record.target.as_mut().unwrap().digest = other("9");
        assert!(!image.owns(&record), "another program moved it");
        record.labels.insert(PUBLISHED.to_owned(), other("9"));
        assert!(image.owns(&record), "larder moves it");
    }

    #[test]
    fn a_name_keeps_the_document_of_the_image_that_it_stands_for() {
        let image = image();
        let new = image.records("larder").unwrap().images.remove(0);
        let with_target = |digit: &str| {
            let mut record = new.clone();
            record.target.as_mut().unwrap().digest = format!("sha256:{}", digit.repeat(64));
            record.labels.clear();
            record
        };
        let kept = image.with_present_target(new.clone(), &with_target("a"));
        assert_eq!(kept.target, with_target("a").target);
        assert!(image.owns(&kept) && kept.labels.len() == 2);
        assert_eq!(image.with_present_target(new.clone(), &with_target("9")), new);
    }

    #[test]
    fn an_image_without_a_name_is_published_by_its_id() {
        let image = PublishedImage { names: Vec::new(), ..image() };
        let records = image.records("larder").unwrap();
        let names: Vec<_> = records.images.iter().map(|image| image.name.as_str()).collect();
        assert_eq!(names, [image.id.as_str()]);
    }

    #[test]
    fn only_types_that_fit_the_document_are_believed() {
        let of = |text: &str| media_type(&serde_json::from_str(text).unwrap());
        assert_eq!(of(r#"{"config": {}}"#), MANIFESTS[0]);
        for known in MANIFESTS {
            assert_eq!(of(&format!(r#"{{"mediaType": "{known}"}}"#)), known);
            assert_eq!(of(&format!(r#"{{"mediaType": "{known}", "manifests": []}}"#)), INDEXES[0]);
        }
        for known in INDEXES {
            assert_eq!(of(&format!(r#"{{"mediaType": "{known}", "manifests": []}}"#)), known);
        }
    }

    #[test]
    fn a_name_of_a_missing_document_is_refused() {
        let mut image = image();
        image.documents.pop();
        assert!(image.records("larder").is_err());
    }
}
