//! Which hosts serve a registry's images: the registry itself, and mirrors before it.
//!
//! Read from containerd's `certs.d/HOST/hosts.toml`, or from certificates in the same folder as Docker has it. The
//! folder of a registry is `HOST_PORT_`, `HOST:PORT`, or `_default`; the first that exists in the first of the
//! configured folders decides. Files are read for each pull, so changes need no restart.

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

/// The name of the hub in image names, and where it is.
const HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// The hosts of a registry, in the order in which they are asked; the registry itself comes last. `tell` hears of
/// unknown keys.
pub(crate) fn hosts_of(
    registry: &str,
    config: &RegistryConfig,
    tell: &dyn Fn(UnknownKey),
) -> Result<Vec<RegistryHost>, HostsError> {
    let server = server_of(registry, config)?;
    let mut hosts = match folder_of(registry, &config.config_dirs) {
        None => vec![server],
        Some(folder) => match hosts_toml::read(&folder.join("hosts.toml"), server.clone(), tell)? {
            Some(hosts) => hosts,
            None => vec![files::with_certificates(&folder, server)?],
        },
    };
    // The same host twice would only repeat its answer.
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

/// Whether a host's name is the registry's own: credentials for the one are for the other.
pub(crate) fn names_registry(host: &str, registry: &str) -> bool {
    host == registry || (registry == HUB.0 && host == HUB.1)
}

/// Where a registry is when no file says otherwise.
fn server_of(registry: &str, config: &RegistryConfig) -> Result<RegistryHost, HostsError> {
    let host = if registry == HUB.0 { HUB.1 } else { registry };
    let url = |scheme: &str| Url::parse(&format!("{scheme}://{host}/v2"));
    let mut base = url("https")
        .map_err(|error| HostsError::Name { registry: registry.into(), cause: error.to_string() })?;
    let plain = config.plain_http.iter().any(|plain| plain == registry)
        || (is_loopback(&base) && base.port_or_known_default() != Some(443));
    if plain {
        base = url("http")
            .map_err(|error| HostsError::Name { registry: registry.into(), cause: error.to_string() })?;
    }
    Ok(RegistryHost { is_registry: true, ..RegistryHost::new(base) })
}

/// The folder that configures a registry.
fn folder_of(registry: &str, roots: &[PathBuf]) -> Option<PathBuf> {
    // Registry names hold no slash and no `..`: the grammar of references sees to that. This keeps it so.
    if registry.contains('/') || registry.contains("..") {
        return None;
    }
    let with_underscores = registry.rsplit_once(':').map(|(host, port)| format!("{host}_{port}_"));
    let names = [with_underscores.as_deref().unwrap_or(registry), registry, "_default"];
    roots.iter().find_map(|root| names.iter().map(|name| root.join(name)).find(|folder| folder.is_dir()))
}

#[cfg(test)]
mod tests;
