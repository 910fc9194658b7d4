//! The image backend that the settings name: found, opened, and wired to garbage collection.
//!
//! ```text
//! Config -> target (where) -> open (BackendHandle) -> collecting (CollectorBuilder)
//! ```

pub mod docker;
pub(crate) mod gc_wiring;
mod handle;
pub(crate) mod layer_fetcher;
mod open;
pub mod providers;
mod published_layers;
pub(crate) mod publishing;
pub mod target;

pub use handle::BackendHandle;
pub use open::{OpenMode, RuntimeRequirement, cannot_open, open, target_of};
pub(crate) use open::{open_error, store_backend};
pub use target::{BackendTarget, is_docker};
