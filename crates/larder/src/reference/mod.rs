//! Image names: parse, normalise, default tag, digest, registry.

/// First draft, replaced by the real one.
pub fn apply_default_tag(image: &str) -> Result<String, ReferenceError> {
    Ok(image.to_owned())
}

/// Why a text is no image name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReferenceError(pub String);

/// First draft, replaced by the real one.
pub struct ImageName {
    /// Tag.
    pub tag: Option<String>,
}

/// First draft, replaced by the real one.
pub fn parse_image_name(_image: &str) -> Result<ImageName, ReferenceError> {
    Ok(ImageName { tag: None })
}
