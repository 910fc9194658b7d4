//! The image backend that the settings name: found, opened, and wired to garbage collection.
//!
//! ```text
//! Config -> target (where) -> open (BackendHandle) -> collecting (CollectorBuilder)
//! ```

pub(crate) mod collecting;
pub mod docker;
mod handle;
mod open;
pub mod providers;
pub mod target;

pub use handle::BackendHandle;
pub(crate) use open::store_backend;
pub use open::{OpenMode, RuntimeMode, cannot_open, open, target_of};
pub use target::{Target, is_docker};
