//! Layers whose data comes after their containers have started.
//!
//! A partial layer is an EROFS file whose metadata is complete and whose data has holes. `group` receives an event of
//! the kernel for each read of its data, and answers it once the data is there. Readers wait for that answer, also
//! while larder restarts: `keeper` keeps the group open in another process, `journal` the events that the kernel has
//! handed out.
#![allow(dead_code, reason = "the pull of layers will use it")]

pub(crate) mod group;
pub(crate) mod journal;
mod keeper;
pub(crate) mod partial_layer;
pub(crate) mod skeleton;
pub(crate) mod toc;

pub use keeper::{GroupKeeper, KeptGroup};
pub use partial_layer::FillProgress;
