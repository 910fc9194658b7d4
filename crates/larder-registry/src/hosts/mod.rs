//! The hosts that serve a registry's images: mirrors first, then the registry itself.
//!
//! Read from containerd's `certs.d/HOST/hosts.toml`, or from certificates in that directory as in Docker's layout. The
//! directory of a registry is `HOST_PORT_`, `HOST:PORT`, or `_default`; the first that exists in the first of the
//! configured directories decides. Files are read for each pull, so changes need no restart.

mod error;
mod files;
mod host;
mod hosts_toml;

use std::path::PathBuf;

use reqwest::Url;

pub use error::HostsError;
pub(crate) use host::{RegistryHost, authority, is_loopback};
pub(crate) use hosts_toml::UnknownKey;

use crate::config::RegistryConfig;
use crate::tls::TlsSettings;

/// Docker Hub: the registry of image names, and its host.
const HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// The hosts of a registry, in the order of the requests; the registry itself is last. `report` receives unknown keys.
pub(crate) fn hosts_of(
    registry: &str,
    config: &RegistryConfig,
    report: &dyn Fn(UnknownKey),
) -> Result<Vec<RegistryHost>, HostsError> {
    let server = server_of(registry, config)?;
    let mut hosts = match dir_of(registry, &config.config_dirs) {
        None => vec![server],
        Some(dir) => match hosts_toml::read(&dir.join("hosts.toml"), server.clone(), report)? {
            Some(hosts) => hosts,
            None => vec![files::with_certificates(&dir, server)?],
        },
    };
    // A second request to the same host would only repeat the answer.
    let mut seen: Vec<Url> = Vec::new();
    let last = hosts.len() - 1;
    let mut number = 0;
    hosts.retain(|host| {
        let again = number != last && seen.contains(&host.base);
        seen.push(host.base.clone());
        number += 1;
        !again
    });
    for host in &mut hosts {
        host.is_registry |= names_registry(&host.name(), registry);
    }
    Ok(hosts)
}

/// Whether a host is the registry's own: then credentials for the registry apply to it.
pub(crate) fn names_registry(host: &str, registry: &str) -> bool {
    host == registry || (registry == HUB.0 && host == HUB.1)
}

/// The host of a registry without configuration. As containerd does, on loopback any certificate is accepted, and plain
/// HTTP is tried after TLS unless the port is that of HTTPS.
fn server_of(registry: &str, config: &RegistryConfig) -> Result<RegistryHost, HostsError> {
    let host = if registry == HUB.0 { HUB.1 } else { registry };
    let url = |scheme: &str| {
        Url::parse(&format!("{scheme}://{host}/v2"))
            .map_err(|error| HostsError::Name { registry: registry.into(), cause: error.to_string() })
    };
    let secure = url("https")?;
    let (is_local, port) = (is_loopback(&secure), secure.port_or_known_default());
    if config.plain_http.iter().any(|plain| plain == registry) || (is_local && port == Some(80)) {
        return Ok(RegistryHost { is_registry: true, ..RegistryHost::new(url("http")?) });
    }
    let tls = TlsSettings { skip_verify: is_local, skip_is_implied: is_local, ..TlsSettings::default() };
    let plain_fallback = is_local && port != Some(443);
    Ok(RegistryHost { is_registry: true, tls, plain_fallback, ..RegistryHost::new(secure) })
}

/// The configuration of a registry's hosts, to be named to the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HostsConfig {
    /// This directory configures them.
    Found(PathBuf),
    /// There is none; one could be here.
    Missing(Option<PathBuf>),
}

impl HostsConfig {
    pub(crate) fn of(registry: &str, config: &RegistryConfig) -> HostsConfig {
        match dir_of(registry, &config.config_dirs) {
            Some(dir) => HostsConfig::Found(dir),
            None => HostsConfig::Missing(config.config_dirs.first().map(|root| root.join(registry))),
        }
    }
}

/// The directory that configures a registry.
fn dir_of(registry: &str, roots: &[PathBuf]) -> Option<PathBuf> {
    // The reference grammar excludes slashes and `..`; this check keeps the path safe if the grammar changes.
    if registry.contains('/') || registry.contains("..") {
        return None;
    }
    let with_underscores = registry.rsplit_once(':').map(|(host, port)| format!("{host}_{port}_"));
    let names = [with_underscores.as_deref().unwrap_or(registry), registry, "_default"];
    roots.iter().find_map(|root| names.iter().map(|name| root.join(name)).find(|dir| dir.is_dir()))
}

#[cfg(test)]
mod tests;
