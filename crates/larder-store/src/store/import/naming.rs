//! The names of imported images. Pure.
//!
//! An OCI layout may have names that are only tags. Only the caller knows their repository.

use larder::reference::Reference;

use super::entries::each_once;
use super::error::ImportError;
use super::image::ImportImage;

/// Gives images that have no name in full those that `base` makes: its repository with each of their tags, or with its
/// own tag, which but one image can have.
pub(super) fn name(images: &mut [ImportImage], base: Option<&Reference>) -> Result<(), ImportError> {
    let nameless = |image: &ImportImage| image.names.is_empty();
    if let Some(base) = base {
        let several = images.iter().filter(|image| nameless(image) && image.bare_tags.is_empty()).count() > 1
            || (base.tag().is_some() && images.iter().filter(|image| nameless(image)).count() > 1);
        if several {
            return Err(ImportError::OneName { name: base.to_string() });
        }
        for image in images.iter_mut() {
            // A tag beside a name in full says nothing that is missed.
            let tags = std::mem::take(&mut image.bare_tags);
            if nameless(image) {
                image.names = names(base, &tags)?;
            }
        }
    }
    for image in images {
        image.names = each_once(std::mem::take(&mut image.names));
        image.bare_tags = each_once(std::mem::take(&mut image.bare_tags));
    }
    Ok(())
}

fn names(base: &Reference, tags: &[String]) -> Result<Vec<Reference>, ImportError> {
    if base.tag().is_some() || tags.is_empty() {
        return Ok(vec![base.clone()]);
    }
    let tagged = |tag: &String| {
        let name = format!("{}:{tag}", base.name());
        Reference::parse(&name).map_err(|cause| ImportError::Name { name, cause })
    };
    tags.iter().map(tagged).collect()
}
