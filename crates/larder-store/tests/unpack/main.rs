//! Layers unpacked from archives of all kinds: good ones, hostile ones, and those that only other layers complete.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

/// What these tests unpack layers into. `tests/unpack_erofs` runs some of them with images.
pub(crate) const LAYERS: larder_store::store::LayerFormat = larder_store::store::LayerFormat::Directory;

mod forms;
mod hostile;
mod oracle;
mod settling;
mod support;
mod threads;
mod trees;
mod unprivileged;
mod verifying;
