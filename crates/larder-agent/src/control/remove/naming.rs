//! Which names of an image a removal takes, and which names others lose by it. Pure.

use std::collections::BTreeSet;

use larder::backend::Image;
use larder::reference::{Platform, Reference};

/// Extent of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RemovalScope {
    /// These names, and the image if it has no others.
    Names(Vec<String>),
    /// The image with all its names.
    Image,
}

/// Selected parts of an image: names with a tag, and whether the image itself, by its ID or digest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Selection {
    pub(super) tags: Vec<String>,
    pub(super) whole: bool,
}

impl Selection {
    /// Adds a selected name; `None` and a name with a digest stand for the image.
    pub(super) fn add(&mut self, name: Option<String>) {
        match name {
            Some(tag) if !tag.contains('@') => self.tags.push(tag),
            _ => self.whole = true,
        }
    }
}

/// Returns the extent of a removal; `None` if it would remove names that were not selected. `single` says whether the
/// backend can remove single names.
pub(super) fn scope(image: &Image, selected: &Selection, single: bool, force: bool) -> Option<RemovalScope> {
    let rest = names_left(image, &selected.tags);
    if single && !selected.whole {
        let removed = all_names(image).into_iter().filter(|name| !rest.contains(name));
        return Some(RemovalScope::Names(removed.map(str::to_owned).collect()));
    }
    let may_lose = force || rest.is_empty() || (selected.whole && is_one_name(&rest));
    may_lose.then_some(RemovalScope::Image)
}

/// The names that are left without these tags. A digest is removed with the last tag of its repository.
pub(super) fn names_left<'a>(image: &'a Image, removed: &[String]) -> Vec<&'a str> {
    let kept = |name: &&str| !removed.iter().any(|removed| removed == name);
    let tags: Vec<&str> = image.repo_tags.iter().map(String::as_str).filter(kept).collect();
    let of_tags =
        |names: &mut dyn Iterator<Item = &str>| names.filter_map(repository).collect::<BTreeSet<_>>();
    let kept_in = of_tags(&mut tags.iter().copied());
    let removed_in = of_tags(&mut removed.iter().map(String::as_str));
    let stays = |name: &&str| {
        repository(name)
            .is_none_or(|repository| kept_in.contains(&repository) || !removed_in.contains(&repository))
    };
    let digests = image.repo_digests.iter().map(String::as_str).filter(stays);
    tags.iter().copied().chain(digests).collect()
}

/// All names of an image: tags, then digests.
pub(super) fn all_names(image: &Image) -> Vec<&str> {
    image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str).collect()
}

/// Whether these are names of one repository with one tag, as `docker rmi` counts for an ID, or digests alone.
fn is_one_name(names: &[&str]) -> bool {
    let repositories: BTreeSet<_> = names.iter().filter_map(|name| repository(name)).collect();
    match names.iter().filter(|name| !name.contains('@')).count() {
        0 => true,
        tags => tags == 1 && repositories.len() == 1,
    }
}

/// The repository of a name, with its platform.
fn repository(name: &str) -> Option<(String, Option<Platform>)> {
    Reference::parse(name).ok().map(|name| (name.name().to_owned(), name.platform().cloned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(names: &[&str]) -> Image {
        let (digests, tags) =
            names.iter().map(|name| (*name).to_owned()).partition(|name| name.contains('@'));
        Image { id: "sha256:1".into(), repo_tags: tags, repo_digests: digests, ..Image::default() }
    }

    fn selected(names: &[&str]) -> Selection {
        let mut selection = Selection::default();
        for name in names {
            selection.add(Some((*name).to_owned()));
        }
        selection
    }

    const WHOLE: Selection = Selection { tags: Vec::new(), whole: true };

    fn names(names: &[&str]) -> RemovalScope {
        RemovalScope::Names(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn the_digest_of_another_platform_stays_with_its_tag() {
        let digest = format!("a.example/a@sha256:{}", "f".repeat(64));
        let other = format!("{digest}#linux/s390x");
        let image = image(&["a.example/a:1", "a.example/a:1#linux/s390x", &digest, &other]);
        for (tag, of_tag) in [("a.example/a:1", &digest), ("a.example/a:1#linux/s390x", &other)] {
            assert_eq!(scope(&image, &selected(&[tag]), true, false), Some(names(&[tag, of_tag])));
        }
    }

    #[test]
    fn a_name_removes_itself_and_the_digest_of_its_repository_with_the_last_tag() {
        let digest = format!("a.example/a@sha256:{}", "f".repeat(64));
        let image = image(&["a.example/a:1", "a.example/a:2", "b.example/a:1", &digest]);
        assert_eq!(
            scope(&image, &selected(&["a.example/a:1"]), true, false),
            Some(names(&["a.example/a:1"]))
        );
        let both = selected(&["a.example/a:1", "a.example/a:2"]);
        assert_eq!(
            scope(&image, &both, true, false),
            Some(names(&["a.example/a:1", "a.example/a:2", &digest]))
        );
        assert_eq!(names_left(&image, &both.tags), ["b.example/a:1"]);
        assert_eq!(
            scope(&image, &selected(&["b.example/a:1"]), true, true),
            Some(names(&["b.example/a:1"])),
            "also forced"
        );
    }

    #[test]
    fn an_id_or_digest_stands_for_one_name_and_for_several_by_force_only() {
        let digest = format!("a.example/a@sha256:{}", "f".repeat(64));
        for single in [true, false] {
            let one = image(&["a.example/a:1", &digest]);
            assert_eq!(scope(&one, &WHOLE, single, false), Some(RemovalScope::Image));
            assert_eq!(scope(&one, &selected(&[&digest]), single, false), Some(RemovalScope::Image));
            for other in ["a.example/a:2", "b.example/a:1"] {
                let several = image(&["a.example/a:1", other, &digest]);
                assert_eq!(scope(&several, &WHOLE, single, false), None, "{other}");
                assert_eq!(scope(&several, &WHOLE, single, true), Some(RemovalScope::Image));
                let rest = Selection { tags: vec![other.to_owned()], whole: true };
                assert_eq!(scope(&several, &rest, single, false), Some(RemovalScope::Image), "one is left");
            }
            assert_eq!(scope(&image(&[]), &WHOLE, single, false), Some(RemovalScope::Image));
        }
    }

    #[test]
    fn a_runtime_that_removes_all_names_is_asked_only_if_all_were_selected() {
        let several = image(&["a.example/a:1", "a.example/a:2"]);
        assert_eq!(scope(&several, &selected(&["a.example/a:1"]), false, false), None);
        assert_eq!(scope(&several, &selected(&["a.example/a:1"]), false, true), Some(RemovalScope::Image));
        let both = selected(&["a.example/a:1", "a.example/a:2"]);
        assert_eq!(scope(&several, &both, false, false), Some(RemovalScope::Image));
    }
}
