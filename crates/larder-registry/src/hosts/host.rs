//! One host, and properties of URLs.

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};

use crate::tls::TlsSettings;

/// A host that serves a registry's images.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of hosts.toml or follows from one")]
pub(crate) struct RegistryHost {
    /// Base URL of its API: `https://registry.example/v2`. Without credentials, query and final slash.
    pub(crate) base: Url,
    /// Capability `pull`: serves content by digest.
    pub(crate) pull: bool,
    /// Capability `resolve`: resolves tags.
    pub(crate) resolve: bool,
    /// Capability `referrers`: lists what refers to content.
    pub(crate) referrers: bool,
    /// TLS trust and client certificates.
    pub(crate) tls: TlsSettings,
    /// Header fields added to each request.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    /// Whether plain HTTP is used if the server does not speak TLS: on loopback, where nothing says which of them it
    /// is.
    pub(crate) plain_fallback: bool,
    /// True for the registry itself, which the credential for the image belongs to.
    pub(crate) is_registry: bool,
}

impl RegistryHost {
    pub(crate) fn new(base: Url) -> RegistryHost {
        RegistryHost {
            base,
            pull: true,
            resolve: true,
            referrers: true,
            tls: TlsSettings::default(),
            headers: Vec::new(),
            plain_fallback: false,
            is_registry: false,
        }
    }

    /// Whether a client without these settings can reach it: over TLS, with a certificate that this machine trusts.
    pub(crate) fn has_public_tls(&self) -> bool {
        self.base.scheme() == "https" && !self.tls.skip_verify && self.tls.authorities.is_empty()
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

/// Whether a URL's host is a loopback address.
pub(crate) fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
