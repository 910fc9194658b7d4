//! Labels of snapshots: containerd's limit of their size, the field mask of an update, and what they announce. Pure.

use std::collections::BTreeMap;

use larder::reference::{Digest, Reference};

/// The chain ID of the layer that containerd wants to unpack into a snapshot.
const CHAIN: &str = "containerd.io/snapshot.ref";

/// The image of the layer: its name, and the digest of its manifest.
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";

/// The digest of the layer's archive.
const ARCHIVE: &str = "containerd.io/snapshot/cri.layer-digest";

/// Most bytes of a label's name and value together, as in containerd.
const LONGEST_LABEL: usize = 4096;

/// Labels by name.
pub(crate) type Labels = BTreeMap<String, String>;

/// The chain ID of the layer that is to be unpacked into a snapshot with these labels.
pub(crate) fn chain_of(labels: &Labels) -> Option<Digest> {
    Digest::parse(labels.get(CHAIN)?).ok()
}

/// Where the layer comes from that is to be unpacked into a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AnnouncedLayer {
    /// By the digest of its manifest, if that is known.
    pub(crate) image: Reference,
    pub(crate) archive: Digest,
}

impl AnnouncedLayer {
    /// As containerd's CRI and transfer service announce it, where that is turned on.
    pub(crate) fn of(labels: &Labels) -> Option<AnnouncedLayer> {
        let archive = Digest::parse(labels.get(ARCHIVE)?).ok()?;
        let image = Reference::parse(labels.get(IMAGE)?).ok()?;
        let image = match labels.get(MANIFEST) {
            Some(digest) => Reference::parse(&format!("{}@{digest}", image.name())).ok()?,
            None => image,
        };
        Some(AnnouncedLayer { image, archive })
    }
}

/// Refuses a label that is longer than containerd allows.
pub(crate) fn check_labels(labels: &Labels) -> Result<(), String> {
    match labels.iter().find(|(name, value)| name.len() + value.len() > LONGEST_LABEL) {
        None => Ok(()),
        Some((name, _)) => {
            let start: String = name.chars().take(64).collect();
            Err(format!("label {start:?}: name and value exceed {LONGEST_LABEL} bytes"))
        }
    }
}

/// The labels after an update with these field paths. Everything but labels is immutable.
pub(crate) fn updated(mut old: Labels, mut new: Labels, paths: &[String]) -> Result<Labels, String> {
    if paths.is_empty() {
        return Ok(new);
    }
    for path in paths {
        if let Some(name) = path.strip_prefix("labels.") {
            match new.remove(name) {
                Some(value) => drop(old.insert(name.to_owned(), value)),
                None => drop(old.remove(name)),
            }
        } else if path == "labels" {
            old.clone_from(&new);
        } else {
            return Err(format!("cannot update field {path:?} of a snapshot"));
        }
    }
    Ok(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn a_mask_changes_the_labels_that_it_names() {
        let old = labels(&[("a", "1"), ("b.c", "2")]);
        let new = labels(&[("a", "3"), ("d", "4")]);
        let paths = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect::<Vec<_>>();
        let update = |mask: &[&str]| updated(old.clone(), new.clone(), &paths(mask));
        assert_eq!(update(&[]), Ok(new.clone()));
        assert_eq!(update(&["labels"]), Ok(new.clone()));
        assert_eq!(update(&["labels.a", "labels.b.c"]), Ok(labels(&[("a", "3")])));
        assert!(update(&["labels.a", "parent"]).unwrap_err().contains("parent"));
    }

    #[test]
    fn a_layer_is_announced_with_its_image_by_digest() {
        let digest = |digit: &str| format!("sha256:{}", digit.repeat(64));
        let image = (IMAGE, "r.example:5000/app:1");
        let (archive, manifest) = (digest("a"), digest("b"));
        let found =
            AnnouncedLayer::of(&labels(&[image, (ARCHIVE, &archive), (MANIFEST, &manifest)])).unwrap();
        assert_eq!(found.image.to_string(), format!("r.example:5000/app@{manifest}"));
        assert_eq!(found.archive.as_str(), archive);
        let found = AnnouncedLayer::of(&labels(&[image, (ARCHIVE, &archive)])).unwrap();
        assert_eq!(found.image.to_string(), "r.example:5000/app:1");
        for incomplete in [
            &[image][..],
            &[(ARCHIVE, &archive)],
            &[image, (ARCHIVE, "sha256:a")],
            &[image, (ARCHIVE, &archive), (MANIFEST, "latest")],
            &[(IMAGE, "r.example/A B"), (ARCHIVE, &archive)],
        ] {
            assert_eq!(AnnouncedLayer::of(&labels(incomplete)), None, "{incomplete:?}");
        }
    }

    #[test]
    fn a_label_has_a_limit() {
        assert_eq!(check_labels(&labels(&[("a", &"x".repeat(4095))])), Ok(()));
        assert!(check_labels(&labels(&[("a", &"x".repeat(4096))])).is_err());
    }
}
