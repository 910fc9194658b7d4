//! Docker Engine as a larder backend, over its own API.
//!
//! ```text
//! EngineHost (DOCKER_HOST, the chosen context, or where engines usually listen)
//!   -> Engine: one HTTP client, an API version that both ends know
//!        -> DockerBackend: list, inspect, pull, remove, who uses what
//!        -> EngineLayers: which layers there are, and what each takes on disk
//!        -> EngineFeed: what came and what was used between two looks
//!        -> EngineUsage: who takes room, and what `docker system df` says of it
//! ```
//!
//! Read [`DockerBackend`] first; `answers.rs` has the few fields of the API that larder reads.
//!
//! Promises: nothing is done before the first call; every call to the engine but a pull ends within
//! [`EngineConfig::request_timeout`]; an engine that went away is found again by the next call after it is back; no
//! image that a container uses, running or stopped, is removed, and nothing is ever removed by force.

mod activity;
mod api;
mod backend;
mod build_cache;
mod context;
mod convert;
mod dir_size;
mod engine;
mod error;
mod events;
mod files;
mod history;
mod host;
mod image_index;
mod inspect_cache;
mod layers;
mod locality;
mod names;
mod pending_activity;
mod pull_messages;
mod remove;
mod stream;
mod tls;
mod usage;

pub use activity::EngineActivityFeed;
pub use backend::DockerBackend;
pub use build_cache::BuildCachePruner;
pub use engine::EngineConfig;
pub use host::{DockerCliEnvironment, EngineHost, HostError};
pub use layers::EngineLayers;
pub use tls::{DockerTlsError, TlsFiles};
pub use usage::{EngineCounts, EngineUsage, LayerStoreShare};
