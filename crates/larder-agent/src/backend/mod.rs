//! The image backend that the settings name: found, opened, and wired to garbage collection.
//!
//! ```text
//! Config -> target (where) -> open (BackendHandle) -> collecting (CollectorBuilder)
//! ```

pub mod docker;
pub(crate) mod gc_wiring;
mod handle;
mod open;
pub mod providers;
pub mod target;

pub use handle::BackendHandle;
pub(crate) use open::store_backend;
pub use open::{OpenMode, RuntimeRequirement, cannot_open, open, target_of};
pub use target::{BackendTarget, is_docker};
