//! The real binary against a fake runtime: what it prints, what it asks for, how it ends.

#![allow(clippy::unwrap_used, reason = "a panic is how a test says no")]

mod access;
mod bad_input;
mod bundle;
mod collect;
mod config;
mod default_store;
mod demo;
mod dry_run;
mod ensure;
mod explain_access;
mod filesystems;
mod help;
mod help_screens;
mod images;
mod interrupt;
mod login;
mod registry_hints;
mod secrets;
mod terminal;
#[cfg(feature = "top")]
mod top;
mod world;
