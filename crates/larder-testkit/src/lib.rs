//! Fakes for tests.

pub mod archive;
pub mod backend_suite;
pub mod fake_backend;
pub mod fake_cri;
pub mod fault_registry;
pub mod faulty_disk;
pub mod fuzz;
pub mod peers;
pub mod private_state;
pub mod wire;
