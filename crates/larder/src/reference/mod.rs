//! Image names: parse, normalise, default tag, digest, registry.

/// First draft, replaced by the real one.
pub fn apply_default_tag(image: &str) -> Result<String, ReferenceError> {
    Ok(image.to_owned())
}

/// Why a text is no image name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReferenceError(pub String);
