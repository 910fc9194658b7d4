//! Logins to registries, and flags about who may use a present image.

mod login_file;
mod login_registry;
pub(crate) mod terminal;
mod verify;

pub(crate) use login_file::DockerLoginFile;
pub(crate) use login_registry::LoginRegistry;
pub(crate) use verify::VerifyArgs;
