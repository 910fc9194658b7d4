//! Keeps the group of pre-content events open while no larder runs.
//!
//! When the last descriptor of a group closes, the kernel allows all reads that wait, and all later ones: they return
//! the zeros of holes. So another process holds the group beside larder, for as long as there is a partial layer.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

/// The descriptors that outlive this process.
#[derive(Debug)]
pub struct KeptGroup {
    /// The fanotify group.
    pub group: OwnedFd,
    /// A memory file with the events of the group that are not answered.
    pub journal: OwnedFd,
}

impl KeptGroup {
    /// Copies of the descriptors.
    pub fn try_clone(&self) -> io::Result<KeptGroup> {
        Ok(KeptGroup { group: self.group.try_clone()?, journal: self.journal.try_clone()? })
    }
}

/// Another process that holds the descriptors of a group. Calls may block for a short time.
pub trait GroupKeeper: Send + Sync + fmt::Debug {
    /// Copies of the descriptors that are kept, which stay kept; `None` if there are none, or not both.
    fn take(&self) -> io::Result<Option<KeptGroup>>;

    /// Keeps copies from now on, unless some are kept already. After an error nothing new is kept.
    fn keep(&self, kept: &KeptGroup) -> io::Result<()>;

    /// Closes what is kept; succeeds if that is nothing.
    fn release(&self) -> io::Result<()>;
}
