//! Layers are read back by an independent reader, checked by `fsck.erofs`, mounted by the kernel, and compared with
//! what `umoci` unpacks.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

#[path = "../support/tar_source.rs"]
mod tar_source;

mod contents;
mod kernel;
mod model;
mod product_reader;
mod properties;
mod reader;
mod rejections;
mod replacing;
mod script;
mod tools;
mod umoci;
