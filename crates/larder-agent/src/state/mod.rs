//! State of garbage collection about one backend, in files of one directory.

mod dir;
mod ensured_file;
mod keep;
mod recent_ensures;

pub use dir::StateDir;
pub(crate) use ensured_file::EnsureLeaseFile;
pub(crate) use keep::KeepRuleFile;
pub use keep::{KeepRuleView, ListedRule};
pub(crate) use recent_ensures::RecentEnsures;
