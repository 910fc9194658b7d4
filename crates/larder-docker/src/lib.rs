//! Docker Engine as a larder backend, over its own API.
//!
//! ```text
//! EngineHost (DOCKER_HOST, the selected context, or the default sockets)
//!   -> Engine: one HTTP client, the API version that both ends support
//!        -> DockerBackend: list, inspect, pull, remove, uses
//!        -> EngineLayers: the layers and their disk usage
//!        -> EngineFeed: images added and used since the last query
//!        -> EngineUsage: disk usage by kind, and the figures of `docker system df`
//! ```
//!
//! Read [`DockerBackend`] first; `api.rs` has the few fields of the API that larder reads.
//!
//! Promises: nothing is opened before the first call; every call to the engine except a pull ends within
//! [`EngineConfig::request_timeout`]; after an engine has restarted, the next call reconnects; no
//! image that a container uses, running or stopped, is removed, and removals never use force.

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
