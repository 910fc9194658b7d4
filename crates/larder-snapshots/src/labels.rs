//! Labels of snapshots: containerd's limit of their size, and the field mask of an update. Pure.

use std::collections::BTreeMap;

/// Most bytes of a label's name and value together, as in containerd.
const LONGEST_LABEL: usize = 4096;

/// Labels by name.
pub(crate) type Labels = BTreeMap<String, String>;

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
    fn a_label_has_a_limit() {
        assert_eq!(check_labels(&labels(&[("a", &"x".repeat(4095))])), Ok(()));
        assert!(check_labels(&labels(&[("a", &"x".repeat(4096))])).is_err());
    }
}
