//! What garbage collection remembers about one backend, in files of one directory.

mod dir;
mod ensured;
mod keep;
mod recent;

pub use dir::StateDir;
pub(crate) use ensured::EnsuredFile;
pub(crate) use keep::KeepFile;
pub use keep::{ListedRule, ShownRule};
pub(crate) use recent::RecentEnsures;
