//! State of garbage collection about one backend, in files of one directory.

mod dir;
mod keep;

pub use dir::StateDir;
pub(crate) use keep::KeepRuleFile;
