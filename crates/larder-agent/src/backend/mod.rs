//! The image backend that the settings name: found, opened, and wired to garbage collection.
//!
//! ```text
//! Config -> target (where) -> open (BackendHandle) -> gc_wiring (CollectorBuilder)
//! ```

mod admitted_runtime;
mod adopt;
pub mod docker;
pub(crate) mod gc_wiring;
mod handle;
pub(crate) mod layer_fetcher;
mod open;
pub(crate) mod piece_reader;
pub mod providers;
pub(crate) mod published_layers;
pub(crate) mod publisher;
pub mod target;

pub use handle::BackendHandle;
pub use open::{OpenMode, RuntimeRequirement, open, open_error, store_backend, target_of};
pub use target::{BackendTarget, is_docker};
