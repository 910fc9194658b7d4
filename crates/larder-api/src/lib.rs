//! The control API, `larder.control.v1`: messages, generated client and server, and conversions to the domain
//! types of [`larder`].
//!
//! The definitions are in `proto/larder/control/v1/control.proto`, which is also the documentation. Any gRPC
//! library can make a client from it. `larder-agent` implements it, `larder-cli` calls it. Start with [`Error`] and
//! [`convert`].

pub mod convert;
mod enum_words;
mod error;
mod image_list;
mod status_text;

pub use enum_words::EnumWord;
pub use error::{Error, ErrorKind, is_gone};

/// Version `v1`, the first one. Numbers of fields are never reused in it.
pub mod v1 {
    #![allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications, reason = "generated code")]

    use std::fmt;

    tonic::include_proto!("larder.control.v1");

    impl fmt::Debug for PullSecret {
        /// Shows which secret it is and hides what is in it.
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let PullSecret { namespace, name, r#type, .. } = self;
            write!(f, "PullSecret({namespace}/{name}, {})", r#type)
        }
    }
}

/// Serializes an empty string as `null`.
pub fn or_null<S: serde::Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    use serde::Serialize as _;

    Some(text).filter(|text| !text.is_empty()).serialize(serializer)
}

/// Deserializes `null` as an empty string.
fn or_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    use serde::Deserialize as _;

    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Largest message in either direction, in bytes: 16 MiB, as of CRI.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
