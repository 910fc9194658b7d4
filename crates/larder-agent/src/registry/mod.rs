//! The registry client, for callers that ask a registry themselves: logins, and which credentials it accepts.

mod candidates;
mod login_file;
mod login_registry;

pub use candidates::UserCredentials;
pub use larder_registry::manifest::PlatformMatcher;
pub use larder_registry::{
    FetchAttempt, FetchError, FetchErrorKind, ImageDocuments, LoginResult, Referrer, Referrers,
    RegistryClient, RegistryConfig,
};
pub use login_file::{DockerLoginFile, LoginDocument, LoginFileLock};
pub use login_registry::LoginRegistry;
