//! The registry client, for callers that ask a registry themselves: logins, and which credentials it accepts.

pub use larder_registry::manifest::PlatformMatcher;
pub use larder_registry::{
    FetchAttempt, FetchError, FetchErrorKind, ImageDocuments, LoginResult, RegistryClient, RegistryConfig,
};
