//! Arguments of `login` and `logout`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::Args;

use super::TlsFlags;

/// Log in to a registry: verify a user name and password, and store them for larder, docker and podman.
///
/// Credentials are stored only if the registry accepts them: in docker's config.json, readable by its owner only, or in
/// the credential helper that this file names (credsStore, credHelpers). Without --password-stdin, larder prompts for
/// the password.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder login registry.example:5000
  echo $TOKEN | larder login -u me --password-stdin registry.example
  larder login                                        Docker Hub

Exit code: 0 logged in, 1 rejected or registry unreachable, 2 invalid input, 130 interrupted.")]
pub(crate) struct LoginArgs {
    /// The registry: HOST or HOST:PORT.
    #[arg(value_name = "REGISTRY", default_value = "docker.io")]
    pub(crate) registry: String,

    /// User name. Without it, larder prompts for it.
    #[arg(short, long, value_name = "USER")]
    pub(crate) username: Option<String>,

    /// Read the password from standard input. No flag takes the password itself, because every user of the machine
    /// could read it in the process list.
    #[arg(long, requires = "username")]
    pub(crate) password_stdin: bool,

    #[command(flatten)]
    pub(crate) tls: TlsFlags,

    #[command(flatten)]
    pub(crate) file: AuthFileArg,
}

/// Log out of a registry: remove its credentials from docker's config.json and from the credential helper.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder logout                          Docker Hub
  larder logout registry.example:5000
  larder logout --authfile auth.json registry.example

Exit code: 0 logged out or not logged in, 1 failure, 2 invalid input.")]
pub(crate) struct LogoutArgs {
    /// The registry: HOST or HOST:PORT.
    #[arg(value_name = "REGISTRY", default_value = "docker.io")]
    pub(crate) registry: String,

    #[command(flatten)]
    pub(crate) file: AuthFileArg,
}

/// Where credentials are stored.
#[derive(Debug, Args)]
pub(crate) struct AuthFileArg {
    /// Path of the docker config.json [default: $DOCKER_CONFIG/config.json, else ~/.docker/config.json].
    #[arg(long, value_name = "FILE")]
    pub(crate) authfile: Option<PathBuf>,
}
