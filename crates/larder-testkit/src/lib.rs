//! Fakes for tests.

pub mod backend_suite;
pub mod fake_backend;
pub mod fake_cri;
pub mod fault_registry;
pub mod peers;
