//! Layers unpacked into EROFS images: archives of all kinds, hostile ones among them, and whole images.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]
#![allow(dead_code, reason = "some helpers are for directories only")]

/// What these tests unpack layers into.
pub(crate) const LAYERS: larder_store::store::LayerFormat = larder_store::store::LayerFormat::Erofs;

#[path = "../unpack/hostile/mod.rs"]
mod hostile;
mod lowers;
#[path = "../unpack/oracle.rs"]
mod oracle;
#[path = "../unpack/support.rs"]
mod support;
