//! In which way a text names an image: by a name, or by the start of its id. Pure.
//!
//! A runtime takes a name first and then the start of an id, however short, and answers with the image either way.
//! What is removed with it depends on which of the two was meant.

use larder::reference::ImageId;
use std::collections::BTreeSet;

use larder::backend::Image;
use larder::reference::Reference;

use crate::image_name;

/// The fewest digits that are taken for the start of an id.
const FEWEST_DIGITS: usize = 4;

/// In which way a text names an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ImageNameForm {
    /// By a name in this repository.
    Repository(String),
    /// By its id, or enough digits of it.
    Id,
    /// By so few digits of its id that something else may have been meant.
    PartOfId,
}

/// In which way `text` names the image that the runtime found for it.
pub(super) fn name_form(text: &str, image: &Image) -> ImageNameForm {
    let name = Reference::parse(text).ok();
    let repository = name.as_ref().map(Reference::name);
    if let Some(repository) = repository.filter(|name| repositories(image).contains(*name)) {
        return ImageNameForm::Repository(repository.to_owned());
    }
    if let Some(digits) = image_name::digits_of_id(text)
        && digits_of(&image.id).starts_with(digits)
    {
        return if digits.len() < FEWEST_DIGITS { ImageNameForm::PartOfId } else { ImageNameForm::Id };
    }
    // A short name that the runtime completed in its own way.
    ImageNameForm::Repository(repository.unwrap_or(text).to_owned())
}

/// Whether the image has names in repositories that were not asked for. An id stands for all names of one
/// repository, and not for those of several.
pub(super) fn has_other_names(image: &Image, ways: &[ImageNameForm]) -> bool {
    let mut others = repositories(image);
    if others.len() <= 1 {
        // Also where the runtime completed a short name: what it found has no other name.
        return false;
    }
    for way in ways {
        if let ImageNameForm::Repository(asked) = way {
            others.remove(asked);
        }
    }
    !others.is_empty()
}

/// All names of an image: tags, then digests.
pub(super) fn all_names(image: &Image) -> Vec<&str> {
    image.repo_tags.iter().chain(&image.repo_digests).map(String::as_str).collect()
}

fn repositories(image: &Image) -> BTreeSet<String> {
    let parsed = all_names(image).into_iter().filter_map(|name| Reference::parse(name).ok());
    parsed.map(|name| name.name().to_owned()).collect()
}

fn digits_of(id: &ImageId) -> &str {
    id.as_str().split_once(':').map_or(id.as_str(), |(_, digits)| digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(names: &[&str]) -> Image {
        let repo_tags = names.iter().map(|name| (*name).to_owned()).collect();
        Image { id: format!("sha256:{}", "cafe".repeat(16)).into(), repo_tags, ..Image::default() }
    }

    #[test]
    fn names_take_precedence_over_ids_and_ids_need_four_digits() {
        let image = image(&["docker.io/library/cafe:1", "r.example/app:2"]);
        assert_eq!(name_form("cafe:1", &image), ImageNameForm::Repository("docker.io/library/cafe".into()));
        assert_eq!(name_form("cafe", &image), ImageNameForm::Repository("docker.io/library/cafe".into()));
        assert_eq!(name_form("r.example/app:2", &image), ImageNameForm::Repository("r.example/app".into()));
        assert_eq!(name_form("cafeca", &image), ImageNameForm::Id);
        assert_eq!(name_form("sha256:cafeca", &image), ImageNameForm::Id);
        assert_eq!(name_form(image.id.as_str(), &image), ImageNameForm::Id);
        for short in ["c", "caf", "sha256:caf"] {
            assert_eq!(name_form(short, &image), ImageNameForm::PartOfId, "{short}");
        }
    }

    #[test]
    fn names_of_other_repositories_are_more_than_was_asked_for() {
        let repository = |name: &str| ImageNameForm::Repository(name.into());
        let one = image(&["r.example/app:1", "r.example/app:2"]);
        assert!(!has_other_names(&one, &[ImageNameForm::Id]));
        assert!(!has_other_names(&one, &[repository("r.example/app")]));
        let two = image(&["r.example/app:1", "mirror.example/app:1"]);
        assert!(has_other_names(&two, &[ImageNameForm::Id]));
        assert!(has_other_names(&two, &[repository("r.example/app")]));
        assert!(!has_other_names(&two, &[repository("r.example/app"), repository("mirror.example/app")]));
        assert!(!has_other_names(&image(&[]), &[ImageNameForm::Id]), "an image without names has no others");
    }
}
