//! Which images `larder images` lists, and in which order.

#![allow(clippy::doc_markdown, reason = "these comments are the text of --help")]

use clap::ValueEnum;

/// One filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ImageFilter {
    /// Selects images without a tag.
    Dangling(bool),
    /// Whether a container or a mount uses it.
    InUse(bool),
    /// A pattern for repository or repository:tag.
    Reference(String),
    /// A type, in a word or as artifact type; may be a pattern.
    Type(String),
    /// Built before this image.
    Before(String),
    /// Built after this image.
    Since(String),
    /// A label, with any value or with this one.
    Label(String, Option<String>),
}

/// Values of `--filter`, for messages.
const KEYS: &str = "dangling=true|false, in-use=true|false, reference=PATTERN, type=TYPE, before=IMAGE, since=IMAGE or label=KEY[=VALUE]";

impl ImageFilter {
    /// `KEY=VALUE`.
    pub(crate) fn parse(text: &str) -> Result<ImageFilter, String> {
        let Some((key, value)) = text.split_once('=').filter(|(_, value)| !value.is_empty()) else {
            return Err(format!("expected {KEYS}"));
        };
        let truth = || match value {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            _ => Err(format!("expected {key}=true or {key}=false")),
        };
        Ok(match key {
            "dangling" => ImageFilter::Dangling(truth()?),
            "in-use" => ImageFilter::InUse(truth()?),
            "reference" => ImageFilter::Reference(value.to_owned()),
            "type" => ImageFilter::Type(value.to_owned()),
            "before" => ImageFilter::Before(value.to_owned()),
            "since" | "after" => ImageFilter::Since(value.to_owned()),
            "label" => match value.split_once('=') {
                Some((label, value)) => ImageFilter::Label(label.to_owned(), Some(value.to_owned())),
                None => ImageFilter::Label(value.to_owned(), None),
            },
            _ => return Err(format!("expected {KEYS}")),
        })
    }

    /// Returns true if the filter needs more than names and IDs.
    pub(crate) fn needs_details(&self) -> bool {
        !matches!(self, ImageFilter::Dangling(_) | ImageFilter::Reference(_) | ImageFilter::Type(_))
    }
}

/// The order of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum SortKey {
    /// By name and tag.
    #[default]
    #[value(alias = "repository")]
    Name,
    /// The newest first.
    Created,
    /// The most recently used first.
    #[value(alias = "last-used")]
    Used,
    /// The largest first.
    Size,
    /// The image whose removal frees most first.
    Unique,
    /// By tag.
    Tag,
    /// By ID.
    Id,
}

impl SortKey {
    /// Returns true if the order needs more than names, IDs and sizes.
    pub(crate) fn needs_details(self) -> bool {
        matches!(self, SortKey::Created | SortKey::Used | SortKey::Unique)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_not_known_is_answered_with_the_known_ones() {
        for text in ["dangling", "dangling=", "dangling=maybe", "until=24h", "label"] {
            assert!(ImageFilter::parse(text).unwrap_err().starts_with("expected "), "{text}");
        }
    }
}
