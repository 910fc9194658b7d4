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
//! [`DockerConfig::request_timeout`]; an engine that went away is found again by the next call after it is back; no
//! image that a container uses, running or stopped, is removed, and nothing is ever removed by force.

mod answers;
mod backend;
mod builder;
mod context;
mod convert;
mod course;
mod engine;
mod error;
mod events;
mod feed;
mod files;
mod gathered;
mod here;
mod history;
mod host;
mod inspections;
mod layers;
mod listed;
mod measure;
mod names;
mod remove;
mod stream;
mod tls;
mod usage;

pub use backend::DockerBackend;
pub use builder::BuilderCache;
pub use engine::DockerConfig;
pub use feed::EngineFeed;
pub use host::{EngineHost, HostError, Surroundings};
pub use layers::EngineLayers;
pub use tls::{TlsError, TlsFiles};
pub use usage::{EngineCounts, EngineUsage, Part};
