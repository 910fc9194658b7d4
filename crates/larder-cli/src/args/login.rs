//! What can be typed after `login` and `logout`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::Args;

/// Log in to a registry: check a user and a password, and write them down where docker, podman and larder find them.
///
/// The registry is asked first; what it refuses is not written. The password goes into docker's config.json, readable by
/// its owner alone, or to the credential helper that this file names (credsStore, credHelpers). Without
/// --password-stdin it is asked for on the terminal, without echo.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder login registry.example:5000
  echo $TOKEN | larder login -u me --password-stdin registry.example
  larder login                                        Docker Hub

Exit code: 0 logged in, 1 refused or not reached, 2 bad input, 130 interrupted.")]
pub(crate) struct LoginArgs {
    /// The registry: HOST or HOST:PORT.
    #[arg(value_name = "REGISTRY", default_value = "docker.io")]
    pub(crate) registry: String,

    /// The user. Without it, it is asked for on the terminal.
    #[arg(short, long, value_name = "USER")]
    pub(crate) username: Option<String>,

    /// Read the password from standard input. There is no flag with the password itself: every user of the machine
    /// could see it in the list of processes.
    #[arg(long, requires = "username")]
    pub(crate) password_stdin: bool,

    #[command(flatten)]
    pub(crate) file: AuthFileArg,
}

/// Log out of a registry: take its credential out of docker's config.json, or out of the credential helper.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder logout registry.example:5000
  larder logout                          Docker Hub

Exit code: 0 logged out, or was not logged in; 1 it could not be done, 2 bad input.")]
pub(crate) struct LogoutArgs {
    /// The registry: HOST or HOST:PORT.
    #[arg(value_name = "REGISTRY", default_value = "docker.io")]
    pub(crate) registry: String,

    #[command(flatten)]
    pub(crate) file: AuthFileArg,
}

/// Where logins are written down.
#[derive(Debug, Args)]
pub(crate) struct AuthFileArg {
    /// A docker config.json other than the usual one [default: $DOCKER_CONFIG/config.json, else
    /// ~/.docker/config.json].
    #[arg(long, value_name = "FILE")]
    pub(crate) authfile: Option<PathBuf>,
}
