//! Layers that are mounted before their data is complete.
//!
//! A partial layer is an EROFS file whose metadata is complete and whose data has holes. `group` receives an event of
//! the kernel for each read of its data, and answers it once the data is there. Readers wait for that answer, also
//! while larder restarts: `keeper` keeps the group open in another process, `journal` the events that the kernel has
//! handed out.

#[allow(dead_code, reason = "the fill of partial layers will use it")]
pub(crate) mod group;
#[allow(dead_code, reason = "the fill of partial layers will use it")]
pub(crate) mod journal;
mod keeper;
#[allow(dead_code, unused_imports, reason = "read by the fill of partial layers")]
pub(crate) mod toc;

pub use keeper::{GroupKeeper, KeptGroup};
