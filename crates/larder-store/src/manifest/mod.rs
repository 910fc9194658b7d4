//! See the crate's header.
