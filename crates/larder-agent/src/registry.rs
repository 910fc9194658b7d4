//! The registry client, for callers that ask a registry themselves: logins, and which credentials it accepts.

pub use larder_registry::{
    FetchAttempt, FetchError, FetchErrorKind, LoginResult, RegistryClient, RegistryConfig,
};
