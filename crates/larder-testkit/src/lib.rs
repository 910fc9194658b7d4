//! Fakes for tests that need nothing but [`larder`], and the contract suite of its backends.
//!
//! Real servers, and fakes that speak a backend's protocol, are in `larder-testkit-peers`.

pub mod archive;
pub mod backend_suite;
pub mod chunked_layer;
pub mod fake_backend;
pub mod fault_registry;
mod free_address;
pub mod kube_api;
pub mod one_worker;
pub mod private_state;

pub use free_address::free_address;
