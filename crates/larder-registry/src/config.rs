//! Settings of the registry client.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

/// How registries are found, and which limits requests to them have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Directories with one directory for each registry, which holds a `hosts.toml` (containerd's format) or
    /// certificates (Docker's layout). The first directory that has the registry decides. Default
    /// `/etc/containerd/certs.d`, then `/etc/docker/certs.d`.
    pub config_dirs: Vec<PathBuf>,
    /// Registries (`HOST` or `HOST:PORT`) that use plain HTTP. Those on loopback need no entry.
    pub plain_http: Vec<String>,
    /// Connections to one registry that carry blobs, shared by all pulls; manifests have two more. Default 8.
    pub connections: usize,
    /// Connections that one blob may use at a time. Default 4.
    pub connections_per_blob: usize,
    /// Larger blobs are fetched in ranges of this size, several at a time. Bytes; default 16 MiB.
    pub range_size: u64,
    /// Time limit for opening a connection, TLS included. Default 10 s.
    pub connect_timeout: Duration,
    /// Time limit from the request to the response headers, connecting included. Default 30 s.
    pub header_timeout: Duration,
    /// A body that receives fewer than `stall_bytes` in this time is aborted and retried. Default 30 s.
    pub stall_window: Duration,
    /// See `stall_window`. Bytes; default 16 KiB. Also the progress that resets the count of failed attempts.
    pub stall_bytes: u64,
    /// Attempts of one request after errors of the registry. Default 5.
    pub tries: u32,
    /// Attempts at a mirror while other hosts are left. Default 2.
    pub tries_of_mirror: u32,
    /// First back-off between two attempts; it doubles each time. Default 250 ms.
    pub retry_initial: Duration,
    /// Longest back-off between two attempts. Default 10 s.
    pub retry_max: Duration,
    /// If a registry requests a longer wait than this, the pull fails instead, and after this time the next one tries.
    /// Default 1 min.
    pub longest_hold: Duration,
    /// Whether to go through a proxy.
    pub proxy: Proxy,
}

/// Which proxy is used for registries. Hosts on loopback are never reached through one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Proxy {
    /// From `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, in upper or lower case.
    #[default]
    FromEnvironment,
    /// No proxy.
    None,
    /// This one.
    Fixed {
        /// Its URL.
        url: String,
        /// Hosts that bypass it, as in `NO_PROXY`.
        except: String,
    },
}

impl Proxy {
    /// Returns true if there may be a proxy for some hosts.
    pub(crate) fn is_configured(&self) -> bool {
        const VARIABLES: [&str; 3] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
        match self {
            Proxy::None => false,
            Proxy::Fixed { .. } => true,
            Proxy::FromEnvironment => VARIABLES
                .iter()
                .any(|name| env::var_os(name).is_some() || env::var_os(name.to_lowercase()).is_some()),
        }
    }
}

impl Default for RegistryConfig {
    fn default() -> Self {
        RegistryConfig {
            config_dirs: vec!["/etc/containerd/certs.d".into(), "/etc/docker/certs.d".into()],
            plain_http: Vec::new(),
            connections: 8,
            connections_per_blob: 4,
            range_size: 16 << 20,
            connect_timeout: Duration::from_secs(10),
            header_timeout: Duration::from_secs(30),
            stall_window: Duration::from_secs(30),
            stall_bytes: 16 << 10,
            tries: 5,
            tries_of_mirror: 2,
            retry_initial: Duration::from_millis(250),
            retry_max: Duration::from_secs(10),
            longest_hold: Duration::from_secs(60),
            proxy: Proxy::FromEnvironment,
        }
    }
}
