//! Which hosts serve a registry's images: the registry itself, and mirrors before it.
//!
//! Read from containerd's `certs.d/HOST/hosts.toml`, or from certificates in the same folder as Docker has it. The
//! folder of a registry is `HOST_PORT_`, `HOST:PORT`, or `_default`; the first that exists in the first of the
//! configured folders decides. Files are read for each pull, so changes need no restart.

mod error;
mod files;
mod toml_file;

use std::fmt;
use std::path::{Path, PathBuf};

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};

pub use error::HostsError;

use super::config::RegistryConfig;
use super::tls::TlsSettings;

/// The name of the hub in image names, and where it is.
const HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// A host that serves a registry's images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// Where its API begins: `https://registry.example/v2`. Without credentials, query and final slash.
    pub(crate) base: Url,
    /// Serves content by digest.
    pub(crate) pull: bool,
    /// Says what a tag points at.
    pub(crate) resolve: bool,
    /// How to trust it.
    pub(crate) tls: TlsSettings,
    /// Header fields that each request to it carries.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    /// It is the registry itself, so the credential for the registry's images is for it.
    pub(crate) is_registry: bool,
}

impl Host {
    pub(crate) fn new(base: Url) -> Host {
        Host {
            base,
            pull: true,
            resolve: true,
            tls: TlsSettings::default(),
            headers: Vec::new(),
            is_registry: false,
        }
    }

    /// `HOST` or `HOST:PORT`.
    pub(crate) fn name(&self) -> String {
        authority(&self.base)
    }
}

/// `HOST` or `HOST:PORT` of a URL.
pub(crate) fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}

/// Whether a URL's host is this machine.
pub(crate) fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A key of a `hosts.toml` that larder does not know, and so does not obey.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct UnknownKey {
    file: PathBuf,
    /// Counted from 1.
    line: usize,
    /// The key with its tables.
    key: String,
    /// The known key that it is most like.
    meant: Option<&'static str>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: line {}: unknown key {}, which changes nothing",
            self.file.display(),
            self.line,
            self.key
        )?;
        self.meant.map_or(Ok(()), |meant| write!(f, "; did you mean {meant}?"))
    }
}

/// The hosts of a registry, in the order in which they are asked; the registry itself comes last. `tell` hears of
/// unknown keys.
pub(crate) fn hosts_of(
    registry: &str,
    config: &RegistryConfig,
    tell: &dyn Fn(UnknownKey),
) -> Result<Vec<Host>, HostsError> {
    let server = server_of(registry, config)?;
    let mut hosts = match folder_of(registry, &config.config_dirs) {
        None => vec![server],
        Some(folder) => match toml_file::read(&folder.join("hosts.toml"), server.clone(), tell)? {
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
fn server_of(registry: &str, config: &RegistryConfig) -> Result<Host, HostsError> {
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
    Ok(Host { is_registry: true, ..Host::new(base) })
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

/// Reads a file of a host's configuration, at most 1 MiB of it.
fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read as _;
    const MAX: u64 = 1 << 20;
    let mut content = Vec::new();
    fs_err::File::open(path)?.take(MAX + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX {
        return Err(std::io::Error::other(format!("{}: larger than 1 MiB", path.display())));
    }
    Ok(content)
}

#[cfg(test)]
mod tests;
