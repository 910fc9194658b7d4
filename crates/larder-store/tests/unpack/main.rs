//! Layers unpacked from archives of all kinds: good ones, hostile ones, and those that only other layers complete.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod exporting;
mod extracting;
mod forms;
mod hostile;
mod lowers;
mod oracle;
mod round_trip;
mod support;
mod threads;
mod trees;
mod unprivileged;
