//! Fakes for tests.

pub mod fake_backend;
pub mod peers;
