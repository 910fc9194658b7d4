//! One host, and what URLs say about hosts.

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};

use crate::tls::TlsSettings;

/// A host that serves a registry's images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RegistryHost {
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

impl RegistryHost {
    pub(crate) fn new(base: Url) -> RegistryHost {
        RegistryHost {
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
