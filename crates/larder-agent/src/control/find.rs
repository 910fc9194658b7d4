//! Finds the present image that a text selects, for commands on present images: a pull and an ensure take names as
//! kubelet does.
//!
//! A command that changes or uses an image takes an exact name, shortened as docker does, or its ID from four digits,
//! if that is unambiguous. A command that only describes an image also takes the end of a name, and any start of an ID.

use std::collections::BTreeSet;

use larder::backend::{Backend, Image, ImageSpec};
use larder::reference::{DEFAULT_TAG, Reference};
use larder::retention::nearest_names;

use super::images::{absent, image_error};
use crate::error::Error;
use crate::image_name::digits_of_id;

/// Candidates that an error lists.
const LISTED: usize = 8;

/// How a hint with similar images starts.
pub(super) const SIMILAR: &str = "similar images";

/// An image, and what of it a text selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FoundImage {
    pub(super) image: Image,
    /// The selected name, as the backend lists it; `None` if the text selects the image by its ID, or as the backend
    /// alone understands.
    pub(super) name: Option<String>,
}

impl FoundImage {
    /// Returns the key by which the backend finds the image: its name, or its ID.
    pub(super) fn key(&self) -> &str {
        self.name.as_deref().unwrap_or(self.image.id.as_str())
    }
}

/// The image that a text selects to be described, also by a part of a name.
pub(super) async fn find_to_describe(text: &str, backend: &dyn Backend) -> Result<FoundImage, Error> {
    let images = backend.list().await.map_err(|error| image_error(text, error))?;
    let mut found = select(text, NameMatch::Part, &images);
    found.dedup_by(|next, before| next.image.id == before.image.id);
    found_one(text, found, &images, backend).await
}

/// The image that an exact name or an ID selects.
pub(super) async fn find(text: &str, backend: &dyn Backend) -> Result<FoundImage, Error> {
    let images = backend.list().await.map_err(|error| image_error(text, error))?;
    find_among(text, &images, backend).await
}

/// The name, or the image, that an exact name or an ID selects among these images of the backend.
pub(super) async fn find_among(
    text: &str,
    images: &[Image],
    backend: &dyn Backend,
) -> Result<FoundImage, Error> {
    found_one(text, select(text, NameMatch::Exact, images), images, backend).await
}

async fn found_one(
    text: &str,
    mut found: Vec<FoundImage>,
    images: &[Image],
    backend: &dyn Backend,
) -> Result<FoundImage, Error> {
    if found.len() > 1 {
        return Err(ambiguous(text, &found));
    }
    if let Some(found) = found.pop() {
        return Ok(found);
    }
    // A runtime may complete short names in its own way.
    match backend.status(&ImageSpec::named(text)).await {
        Ok(found) => found.and_then(|image| completed(text, image)).ok_or_else(|| unknown(text, images)),
        Err(error) => Err(image_error(text, error)),
    }
}

/// An image that a runtime found by this text, if by a longer name with the same tag or digest, or by enough of its ID.
fn completed(text: &str, image: Image) -> Option<FoundImage> {
    if digits_of_id(text).is_some_and(|digits| digits.len() >= SHORTEST_ID && is_id_start(digits, &image)) {
        return Some(FoundImage { image, name: None });
    }
    let wanted = Reference::parse(text).ok()?;
    let tag = wanted.tag_or_default().map(str::to_owned);
    let is_meant = |name: &&String| {
        Reference::parse(name).is_ok_and(|name| {
            is_part_of(&wanted, &name) && (wanted.digest().is_some() || name.tag() == tag.as_deref())
        })
    };
    let name = image.repo_tags.iter().chain(&image.repo_digests).find(is_meant)?.clone();
    Some(FoundImage { image, name: Some(name) })
}

/// How a text selects names of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameMatch {
    /// The name, shortened as docker does: `latest` if it has no tag.
    Exact,
    /// Also any end of the repository, at a slash, and any tag if the text has none.
    Part,
}

/// How many digits select an image by its ID where the text has to be exact.
const SHORTEST_ID: usize = 4;

fn is_id_start(digits: &str, image: &Image) -> bool {
    image.id.as_str().rsplit(':').next().is_some_and(|id| id.starts_with(digits))
}

/// Every name or image that a text selects: one if it is a whole name or ID. Pure.
fn select(text: &str, matching: NameMatch, images: &[Image]) -> Vec<FoundImage> {
    let wanted = Reference::parse(text).ok();
    let whole = wanted.as_ref().map(Reference::stored);
    let by_name = |is_meant: &dyn Fn(&Reference) -> bool| {
        let mut found = Vec::new();
        for image in images {
            for name in image.repo_tags.iter().chain(&image.repo_digests) {
                if Reference::parse(name).is_ok_and(|parsed| is_meant(&parsed)) {
                    found.push(FoundImage { image: image.clone(), name: Some(name.clone()) });
                }
            }
        }
        found
    };
    let by_id = |digits: &str| -> Vec<FoundImage> {
        let found = images.iter().filter(|image| is_id_start(digits, image)).cloned();
        found.map(|image| FoundImage { image, name: None }).collect()
    };
    let digits = digits_of_id(text);
    if let Some(image) = images.iter().find(|image| image.id.as_str() == text) {
        return vec![FoundImage { image: image.clone(), name: None }];
    }
    let mut found = by_name(&|name| whole.as_ref() == Some(&name.stored()));
    if !found.is_empty() {
        found.truncate(1); // the same name cannot be two images'
        return found;
    }
    let shortest = match matching {
        NameMatch::Exact => SHORTEST_ID,
        NameMatch::Part => 1,
    };
    if let (Some(wanted), NameMatch::Part) = (wanted, matching) {
        found = by_name(&|name| is_part_of(&wanted, name));
        prefer(&mut found, |name| name.tag().is_some());
        prefer(&mut found, |name| name.tag() == Some(DEFAULT_TAG));
        prefer(&mut found, |name| name.platform().is_none());
    }
    if let Some(digits) = digits.filter(|digits| digits.len() >= shortest) {
        let mut by_id = by_id(digits);
        by_id.retain(|image| found.iter().all(|named| named.image.id != image.image.id));
        found.extend(by_id);
    }
    found
}

/// Drops the other names of each repository that has a preferred one.
fn prefer(found: &mut Vec<FoundImage>, is_preferred: impl Fn(&Reference) -> bool) {
    let parsed = |found: &FoundImage| Reference::parse(found.name.as_deref()?).ok();
    let repositories: BTreeSet<String> =
        found.iter().filter_map(parsed).filter(&is_preferred).map(|name| name.name().to_owned()).collect();
    found.retain(|found| {
        parsed(found).is_none_or(|name| is_preferred(&name) || !repositories.contains(name.name()))
    });
}

/// Whether `wanted` is the end of the name's repository, at a slash, with the same tag, digest and platform if it has
/// any.
fn is_part_of(wanted: &Reference, name: &Reference) -> bool {
    let part = wanted.familiar();
    let ends =
        name.name().strip_suffix(part).is_some_and(|before| before.is_empty() || before.ends_with('/'));
    let is_for = wanted.platform().is_none() || wanted.platform() == name.platform();
    ends && is_for
        && match (wanted.tag(), wanted.digest()) {
            (_, Some(digest)) => name.digest() == Some(digest),
            (Some(tag), None) => name.tag() == Some(tag),
            (None, None) => true,
        }
}

/// Whether two names mean the same one.
pub(super) fn is_same_name(a: &str, b: &str) -> bool {
    matches!((Reference::parse(a), Reference::parse(b)), (Ok(a), Ok(b)) if a.stored() == b.stored())
}

/// There is no such image; perhaps another name was meant.
pub(super) fn unknown(text: &str, images: &[Image]) -> Error {
    if names_content(text) {
        return absent(text);
    }
    match names_like(text, images).as_slice() {
        [] => absent(text),
        near => absent(text).hint(format!("{SIMILAR}: {}", near.join(", "))),
    }
}

/// Names, or IDs, that a text may mean: those that it is a part of, else similar ones.
fn names_like(text: &str, images: &[Image]) -> Vec<String> {
    let parts = select(text, NameMatch::Part, images);
    if parts.is_empty() {
        return nearest_names(text, images.iter().flat_map(|image| &image.repo_tags));
    }
    parts.iter().take(LISTED).map(listed).collect()
}

/// How a message names an image.
fn listed(found: &FoundImage) -> String {
    match (&found.name, found.image.repo_tags.first()) {
        (Some(name), _) => name.clone(),
        (None, Some(name)) => format!("{} ({name})", found.image.id),
        (None, None) => found.image.id.to_string(),
    }
}

/// Whether a text is a digest, or has one: no similar name is meant by it.
fn names_content(text: &str) -> bool {
    let is_id = digits_of_id(text).is_some_and(|digits| digits.len() == 64);
    is_id || Reference::parse(text).is_ok_and(|name| name.digest().is_some())
}

fn ambiguous(text: &str, found: &[FoundImage]) -> Error {
    let mut listed: Vec<String> = found.iter().take(LISTED).map(listed).collect();
    if found.len() > LISTED {
        listed.push(format!("and {} more", found.len() - LISTED));
    }
    Error::bad_input(format!("{text}: ambiguous: it could be {}", listed.join(", ")))
        .hint("write a whole name, or more digits of the ID")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(digit: &str, names: &[&str]) -> Image {
        let (digests, tags) =
            names.iter().map(|name| (*name).to_owned()).partition(|name| name.contains('@'));
        Image {
            id: format!("sha256:{digit:0<64}").into(),
            repo_tags: tags,
            repo_digests: digests,
            ..Image::default()
        }
    }

    fn selected(text: &str, matching: NameMatch, images: &[Image]) -> Vec<String> {
        select(text, matching, images).iter().map(|found| found.key().to_owned()).collect()
    }

    fn keys(text: &str, images: &[Image]) -> Vec<String> {
        selected(text, NameMatch::Part, images)
    }

    #[test]
    fn an_exact_text_selects_no_part_of_a_name_or_id() {
        let digest = format!("sha256:{}", "d".repeat(64));
        let by_digest = format!("r.example/team/tiny@{digest}");
        let images = [
            image("deb1", &["docker.io/library/tiny:1", "docker.io/team/app:latest"]),
            image("deb1a2", &["r.example/team/tiny:latest", &by_digest]),
        ];
        let ids = [images[0].id.as_str(), images[1].id.as_str()];
        for (text, expected) in [
            ("tiny", &[][..]),
            ("tiny:1", &["docker.io/library/tiny:1"]),
            ("library/tiny:1", &["docker.io/library/tiny:1"]),
            ("docker.io/tiny:1", &["docker.io/library/tiny:1"]),
            ("team/app", &["docker.io/team/app:latest"]),
            ("app", &[]),
            ("team/tiny", &[]),
            ("r.example/team/tiny", &["r.example/team/tiny:latest"]),
            (&by_digest, &[by_digest.as_str()]),
            ("d", &[]),
            ("deb", &[]),
            ("sha256:deb", &[]),
            ("deb1", &ids),
            ("deb1a", &ids[1..]),
            ("sha256:deb1a2", &ids[1..]),
            (&ids[0][7..], &ids[..1]),
            (&digest, &[]),
        ] {
            assert_eq!(selected(text, NameMatch::Exact, &images), expected, "{text}");
        }
        let steps = format!("{:?}", unknown("tiny", &images).next_steps());
        assert!(
            steps.contains("similar images: docker.io/library/tiny:1, r.example/team/tiny:latest"),
            "{steps}"
        );
        let steps = format!("{:?}", unknown("de", &images).next_steps());
        assert!(steps.contains(ids[1]), "{steps}");
    }

    #[test]
    fn what_a_runtime_completes_has_the_same_tag_or_enough_of_the_id() {
        let built = image("deb1", &["localhost/tiny:latest", "localhost/tiny:1"]);
        let found = |text: &str| completed(text, built.clone()).map(|found| found.key().to_owned());
        assert_eq!(found("tiny").as_deref(), Some("localhost/tiny:latest"));
        assert_eq!(found("tiny:1").as_deref(), Some("localhost/tiny:1"));
        assert_eq!(found("deb1").as_deref(), Some(built.id.as_str()));
        for text in ["tiny:2", "d", "deb", "other"] {
            assert_eq!(found(text), None, "{text}");
        }
    }

    #[test]
    fn a_whole_name_or_id_selects_one_image_whatever_else_is_similar() {
        let images = [
            image("cafe1", &["docker.io/library/cafe:latest"]),
            image("cafe2", &["r.example/cafe:latest"]),
            image("cafe", &[]),
        ];
        assert_eq!(keys("cafe", &images), ["docker.io/library/cafe:latest"]);
        assert_eq!(keys("docker.io/cafe", &images), ["docker.io/library/cafe:latest"]);
        let id = images[2].id.as_str();
        assert_eq!(keys(id, &images), [id]);
        assert_eq!(keys(&id[7..], &images), [id], "without the algorithm");
    }

    #[test]
    fn a_part_of_a_name_selects_what_ends_with_it_at_a_slash() {
        let images = [
            image("1", &["r.example:5000/team/tiny:1"]),
            image("2", &["r.example:5000/not-tiny:1", "r.example:5000/team/app:2"]),
        ];
        for text in ["tiny", "tiny:1", "team/tiny", "r.example:5000/team/tiny"] {
            assert_eq!(keys(text, &images), ["r.example:5000/team/tiny:1"], "{text}");
        }
        for text in ["tiny:2", "iny", "m/tiny", "other/tiny"] {
            assert_eq!(keys(text, &images), [""; 0], "{text}");
        }
    }

    #[test]
    fn without_a_tag_latest_comes_first_and_else_every_tag_is_a_candidate() {
        let mut images = [image("1", &["r.example/a:1"]), image("2", &["r.example/a:2", "s.example/a:2"])];
        assert_eq!(keys("a", &images), ["r.example/a:1", "r.example/a:2", "s.example/a:2"]);
        assert_eq!(keys("a:2", &images).len(), 2, "in two registries");
        images[0].repo_tags.push("r.example/a:latest".into());
        assert_eq!(keys("a", &images), ["r.example/a:latest", "s.example/a:2"], "one of each repository");
        assert_eq!(keys("r.example/a", &images), ["r.example/a:latest"]);
    }

    #[test]
    fn digests_are_candidates_where_no_tag_is() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let name = format!("r.example/a@{digest}");
        let mut images = [image("1", &[&name])];
        assert_eq!(keys("a", &images), [name.as_str()]);
        assert_eq!(keys(&format!("a@{digest}"), &images), [name.as_str()]);
        images[0].repo_tags.push("r.example/a:1".into());
        assert_eq!(keys("a", &images), ["r.example/a:1"]);
        assert_eq!(keys(&format!("a:1@{digest}"), &images), [name.as_str()]);
        let other = format!("s.example/a@{digest}");
        images[0].repo_digests.push(other.clone());
        assert_eq!(keys("a", &images), ["r.example/a:1", &other], "in another repository");
    }

    #[test]
    fn starts_of_ids_of_any_length_are_candidates_beside_names() {
        let images = [image("cafe", &["r.example/a:1"]), image("c0", &["r.example/cafe:1"])];
        assert_eq!(keys("caf", &images), [images[0].id.as_str()]);
        assert_eq!(keys("sha256:c0", &images), [images[1].id.as_str()]);
        assert_eq!(keys("c", &images).len(), 2);
        assert_eq!(keys("cafe", &images), ["r.example/cafe:1", images[0].id.as_str()]);
        let error = ambiguous("cafe", &select("cafe", NameMatch::Part, &images));
        for part in ["cafe: ambiguous", "r.example/cafe:1", &format!("{} (r.example/a:1)", images[0].id)] {
            assert!(error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn an_unknown_name_is_reported_with_similar_ones() {
        let images = [image("1", &["r.example/shop/web:1"])];
        for text in ["r.example/shop/wob:1", "shop/wob:1", "wob:1", "wob"] {
            let steps = format!("{:?}", unknown(text, &images).next_steps());
            assert!(steps.contains("similar images: r.example/shop/web:1"), "{text}: {steps}");
        }
        let digest = "0".repeat(64);
        for text in
            [format!("r.example/shop/web@sha256:{digest}"), format!("sha256:{digest}"), digest.clone()]
        {
            let steps = format!("{:?}", unknown(&text, &images).next_steps());
            assert!(!steps.contains("similar"), "{text}: {steps}");
        }
    }
}
