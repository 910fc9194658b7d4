//! The node agent: keeps the container images of one node, as the daemon `larder serve` or inside another program.
//!
//! ```text
//! config::load -> Node::open -> control::ControlApi -> client::Client (in process)
//!                           \-> serve::Daemon (socket: CRI, control API, HTTP; background work)
//! ```
//!
//! Everything that touches images goes through the control API ([`larder_api`]): over a socket where a daemon or
//! another command has the images open, else through the same service in this process. Read [`node::Node::open`]
//! first, then [`control`]. A program that only wants images begins with [`LocalNode`].

pub mod backend;
pub mod client;
pub mod config;
pub mod control;
#[cfg(feature = "dashboard")]
mod dashboard;
pub mod environment;
mod error;
pub mod group_keeper;
pub mod image_name;
mod local_node;
pub mod log;
pub mod manifest;
pub mod node;
pub mod quantity;
pub mod registry;
pub mod serve;
pub mod state;
pub mod traces;

pub use error::{Error, ErrorKind, NodeOpenError};
pub use local_node::{LocalNode, LocalNodeOptions};
