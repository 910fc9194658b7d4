//! Which credentials a pull may use: pull secrets of the pod, docker config files of the node, and (later) plugins.
//!
//! Read [`Sources::lookup`] first.

mod types;

pub use types::{
    Credential, CredentialsError, LazyLookup, Provider, PullSecret, Secret, SecretCoordinates, ServiceAccountCoordinates,
    Source, Sources,
};
