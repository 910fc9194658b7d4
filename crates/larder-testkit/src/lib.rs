//! Fakes for tests.

pub mod fake_backend;
