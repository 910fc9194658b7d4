//! Settings of the registry client.

use std::path::PathBuf;
use std::time::Duration;

/// How registries are found, and how patient larder is with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Folders with one folder for each registry, which holds a `hosts.toml` (containerd's format) or certificates
    /// (Docker's way). The first folder that knows a registry decides. Default `/etc/containerd/certs.d`, then
    /// `/etc/docker/certs.d`.
    pub config_dirs: Vec<PathBuf>,
    /// Registries (`HOST` or `HOST:PORT`) that are spoken to over plain HTTP. Those on loopback need no entry.
    pub plain_http: Vec<String>,
    /// Connections to one registry that carry blobs, shared by all pulls; manifests have two more. Default 8.
    pub connections: usize,
    /// Connections that one blob may use at a time. Default 4.
    pub connections_per_blob: usize,
    /// Larger blobs are fetched in ranges of this size, several at a time. Bytes; default 16 MiB.
    pub range_size: u64,
    /// Until a connection stands, TLS included. Default 10 s.
    pub connect_timeout: Duration,
    /// From the request to the headers of its reply, connecting included. Default 30 s.
    pub header_timeout: Duration,
    /// A body that gives fewer than `stall_bytes` in this time is given up and tried again. Default 30 s.
    pub stall_window: Duration,
    /// See `stall_window`. Bytes; default 16 KiB. Also what counts as progress between two failures.
    pub stall_bytes: u64,
    /// How often one request is tried when the registry is at fault. Default 5.
    pub tries: u32,
    /// The same for a mirror while others are left to ask. Default 2.
    pub tries_of_mirror: u32,
    /// First wait between two tries; each further one doubles it. Default 250 ms.
    pub retry_initial: Duration,
    /// Longest wait between two tries. Default 10 s.
    pub retry_max: Duration,
    /// A registry that asks for a longer wait than this fails the pull instead. Default 1 min.
    pub longest_hold: Duration,
    /// Whether to go through a proxy.
    pub proxy: Proxy,
}

/// Which proxy leads to the registries. Hosts on loopback are never reached through one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Proxy {
    /// What `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` say, in upper or lower case.
    #[default]
    FromEnvironment,
    /// None.
    None,
    /// This one.
    Fixed {
        /// Its URL.
        url: String,
        /// Hosts not to reach through it, as in `NO_PROXY`.
        except: String,
    },
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
