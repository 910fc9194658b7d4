//! State on disk: JSON with the version of its form.

use std::io;
use std::path::Path;

use larder::files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Replaces a file with this document. Durable when it returns. May block.
pub(crate) fn replace(path: &Path, document: &impl Serialize) -> io::Result<()> {
    files::replace(path, &serde_json::to_vec_pretty(document)?)
}

/// A document of this version, or why it is none. The version is read first, because another one may have other fields.
pub(crate) fn decode<T: DeserializeOwned>(text: &[u8], expected: u32) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let Versioned { version } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if version != expected {
        return Err(format!("unsupported version {version}: expected {expected}"));
    }
    serde_json::from_slice(text).map_err(|error| error.to_string())
}
