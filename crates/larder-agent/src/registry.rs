//! The registry client, for callers that ask a registry themselves: logins, and which credentials it accepts.

pub use larder_store::registry::{Client, FetchError, FetchErrorKind, Login, RegistryConfig, Trial};
