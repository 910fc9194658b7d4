//! References to content and snapshots other than those of the images that CRI lists: containerd retains what they
//! reference when such an image is removed. Pure.
//!
//! The rules are those of containerd's garbage collector: the roots are images, leases that have not expired, and
//! objects labelled as root; each object retains what its labels name, a snapshot also its parents, and a blob is
//! deleted once no namespace has it.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use larder::backend::Image;

use crate::graph::{ContentGraph, NEEDS_BLOB, NEEDS_SNAPSHOT, SnapshotChains};
use crate::proto::images::Image as ImageRecord;
use crate::proto::leases::{Lease, Resource};

/// The label of an object that containerd retains although nothing references it.
const IS_ROOT: &str = "containerd.io/gc.root";

/// The label of a lease that does not retain what its resources reference.
const IS_FLAT: &str = "containerd.io/gc.flat";

/// The label of a lease with the time at which it expires.
const EXPIRES: &str = "containerd.io/gc.expire";

/// A root, with what it references directly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    /// Name of the holder, such as `lease build-1`.
    pub(crate) by: String,
    /// The digests of blobs.
    pub(crate) blobs: Vec<String>,
    /// The snapshots, by snapshotter and name.
    pub(crate) snapshots: Vec<(String, String)>,
    /// True if the holder retains only the blobs themselves, and not what these reference.
    pub(crate) flat: bool,
}

impl Holder {
    /// The blobs of another namespace.
    pub(crate) fn namespace(name: &str, blobs: Vec<String>) -> Holder {
        Holder { by: format!("namespace {name}"), blobs, snapshots: Vec::new(), flat: true }
    }

    /// A lease; `None` if it has expired.
    pub(crate) fn lease(lease: &Lease, resources: Vec<Resource>, now: Timestamp) -> Option<Holder> {
        // Like containerd: a time that cannot be read does not end the lease.
        let ends = lease.labels.get(EXPIRES).and_then(|text| text.parse::<Timestamp>().ok());
        if ends.is_some_and(|ends| ends < now) {
            return None;
        }
        let mut holder = Holder::labels(format!("lease {}", lease.id), &lease.labels);
        holder.flat = lease.labels.contains_key(IS_FLAT);
        for Resource { id, r#type } in resources {
            match r#type.split_once('/') {
                None if r#type == "content" => holder.blobs.push(id),
                Some(("snapshots", snapshotter)) => holder.snapshots.push((snapshotter.to_owned(), id)),
                _ => {} // partial downloads, and names of images, which a removal deletes whatever the lease
            }
        }
        Some(holder)
    }

    /// Returns the references in the labels of an object.
    fn labels(by: String, labels: &BTreeMap<String, String>) -> Holder {
        let mut holder = Holder { by, blobs: Vec::new(), snapshots: Vec::new(), flat: false };
        for (label, value) in labels {
            if label.starts_with(NEEDS_BLOB) {
                holder.blobs.push(value.clone());
            } else if let Some(snapshotter) = label.strip_prefix(NEEDS_SNAPSHOT) {
                holder.snapshots.push((snapshotter.to_owned(), value.clone()));
            }
        }
        holder
    }
}

/// The image records that lead to none of the images that CRI lists, such as those of another platform.
pub(crate) fn unlisted(records: &[ImageRecord], images: &[Image], content: &ContentGraph) -> Vec<Holder> {
    let listed: HashSet<&str> = images.iter().map(|image| image.id.as_str()).collect();
    let holder = |record: &ImageRecord| {
        let target = record.target.as_ref()?.digest.clone();
        let is_listed = content.below(&target).iter().any(|digest| listed.contains(digest));
        let by = format!("image {}", record.name);
        (!is_listed).then(|| Holder { by, blobs: vec![target], snapshots: Vec::new(), flat: false })
    };
    records.iter().filter_map(holder).collect()
}

/// The image records under other names than these.
pub(crate) fn other_names(records: &[ImageRecord], names: &HashSet<&str>) -> Vec<Holder> {
    let others = records.iter().filter(|record| !names.contains(record.name.as_str()));
    let holder = |record: &ImageRecord| {
        let blobs = vec![record.target.as_ref()?.digest.clone()];
        Some(Holder { by: format!("image {}", record.name), blobs, snapshots: Vec::new(), flat: false })
    };
    others.filter_map(holder).collect()
}

/// The blobs and snapshots that are labelled as root.
pub(crate) fn labelled_roots(content: &ContentGraph, chains: &[SnapshotChains]) -> Vec<Holder> {
    let by = || format!("label {IS_ROOT}");
    let blobs = content.labelled(IS_ROOT).map(str::to_owned).collect();
    let snapshots = chains.iter().flat_map(|chains| chains.labelled(IS_ROOT)).collect();
    vec![Holder { by: by(), blobs, snapshots, flat: false }]
}

/// Marks everything that these roots retain.
pub(crate) fn mark(holders: &[Holder], content: &mut ContentGraph, chains: &mut [SnapshotChains]) {
    for holder in holders {
        let mut snapshots = holder.snapshots.clone();
        for digest in &holder.blobs {
            let blobs = if holder.flat { vec![digest.as_str()] } else { content.below(digest) };
            let blobs: Vec<String> = blobs.into_iter().map(str::to_owned).collect();
            for digest in blobs {
                if !holder.flat {
                    snapshots.extend(content.top_snapshots(&digest));
                }
                content.hold(digest, &holder.by);
            }
        }
        for (snapshotter, name) in &snapshots {
            for chains in chains.iter_mut().filter(|chains| chains.is_of(snapshotter)) {
                chains.hold(name, &holder.by);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::images::Descriptor;

    fn labels(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
        labels.iter().map(|&(label, value)| (label.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn a_name_that_larder_did_not_give_retains_what_it_stands_for() {
        let record = |name: &str, digest: &str| ImageRecord {
            name: name.into(),
            target: Some(Descriptor { digest: digest.into(), ..Descriptor::default() }),
            ..ImageRecord::default()
        };
        let records = [record("r.example/app:1", "d1"), record("r.example/alias:1", "d1")];
        let found = other_names(&records, &HashSet::from(["r.example/app:1"]));
        let [alias] = &found[..] else { panic!("{found:?}") };
        assert_eq!((alias.by.as_str(), &alias.blobs), ("image r.example/alias:1", &vec!["d1".to_owned()]));
    }

    fn resource(kind: &str, id: &str) -> Resource {
        Resource { id: id.into(), r#type: kind.into() }
    }

    #[test]
    fn a_lease_has_its_resources_and_what_its_labels_name_until_it_expires() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        let lease = |more: &[(&str, &str)]| {
            let named =
                [("containerd.io/gc.ref.content.0", "b2"), ("containerd.io/gc.ref.snapshot.native", "s2")];
            Lease { id: "x".into(), labels: labels(&[&named, more].concat()) }
        };
        let resources = || {
            vec![
                resource("content", "b1"),
                resource("snapshots/overlayfs", "s1"),
                resource("ingests", "i1"),
                resource("images", "registry.example/app:1"),
            ]
        };
        let mut expected = Holder {
            by: "lease x".into(),
            blobs: vec!["b2".into(), "b1".into()],
            snapshots: vec![("native".into(), "s2".into()), ("overlayfs".into(), "s1".into())],
            flat: false,
        };
        assert_eq!(Holder::lease(&lease(&[]), resources(), now), Some(expected.clone()));
        for (label, value) in
            [(EXPIRES, "2026-01-02T00:00:01Z"), (EXPIRES, "2026-01-02T01:00:01+01:00"), (EXPIRES, "?")]
        {
            assert_eq!(
                Holder::lease(&lease(&[(label, value)]), resources(), now),
                Some(expected.clone()),
                "{value}"
            );
        }
        assert_eq!(Holder::lease(&lease(&[(EXPIRES, "2026-01-01T23:59:59Z")]), resources(), now), None);
        expected.flat = true;
        assert_eq!(Holder::lease(&lease(&[(IS_FLAT, "")]), resources(), now), Some(expected));
    }
}
