//! TLS: rustls with ring, the system's CA certificates, private ones, client certificates.
//!
//! The only module that depends on the cryptography provider.

mod problem;
mod verifier;

use std::fmt;
use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

pub use problem::{CertificateProblem, TlsProblem};
use verifier::GoVerifier;

/// The TLS settings of a host: trust and client certificates.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct TlsSettings {
    /// CA certificates to trust besides the system's; PEM.
    pub(crate) authorities: Vec<Vec<u8>>,
    /// Client certificates with their keys; PEM.
    pub(crate) client: Vec<ClientPem>,
    /// Accept any server certificate.
    pub(crate) skip_verify: bool,
    /// That follows from a registry on loopback, and was set by nobody: it holds for servers on loopback only.
    pub(crate) skip_is_implied: bool,
}

/// A client certificate and its private key; one file may hold both.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ClientPem {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

/// Keys are never printed.
impl fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSettings")
            .field("authorities", &self.authorities.len())
            .field("client", &self.client.len())
            .field("skip_verify", &self.skip_verify)
            .field("skip_is_implied", &self.skip_is_implied)
            .finish()
    }
}

impl TlsSettings {
    /// Returns this trust without client certificates, for another server: one that this host redirects to, or that
    /// gives tokens for it.
    pub(crate) fn for_other(&self, on_loopback: bool) -> TlsSettings {
        let skip_verify = self.skip_verify && (!self.skip_is_implied || on_loopback);
        TlsSettings { client: Vec::new(), skip_verify, ..self.clone() }
    }
}

/// Why certificates or keys cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TlsSettingsError {
    /// The file has no content.
    #[error("is empty")]
    Empty,
    /// A file of certificates has a private key only.
    #[error("contains a private key and no certificate")]
    OnlyKey,
    /// A file of certificates is not PEM but DER.
    #[error("is DER, not PEM: openssl x509 -inform der converts it")]
    Der,
    /// A file of certificates contains none.
    #[error("contains no PEM certificate (BEGIN CERTIFICATE)")]
    NoCertificate,
    /// All certificates of a file are damaged.
    #[error("contains no certificate that can be parsed")]
    Damaged,
    /// A file of private keys contains none.
    #[error("contains no PEM private key (BEGIN PRIVATE KEY)")]
    NoKey,
    /// The private key needs a password.
    #[error("contains a private key that is encrypted: openssl pkey removes the password")]
    EncryptedKey,
    /// The private key is of an unsupported kind.
    #[error("contains a private key of a kind that is not supported: use RSA, P-256, P-384 or Ed25519")]
    UnsupportedKey,
    /// The private key belongs to another certificate.
    #[error("contains a private key that is not the one of the certificate")]
    OtherKey,
    /// The TLS library cannot be set up.
    #[error("TLS is not available")]
    Unavailable,
}

/// The certificates of a PEM file that can be parsed, as Go reads it.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsSettingsError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect();
    let is_damaged = found.is_empty();
    let usable: Vec<_> =
        found.into_iter().filter(|der| webpki::anchor_from_trusted_cert(der).is_ok()).collect();
    if !usable.is_empty() {
        return Ok(usable);
    }
    Err(match pem {
        _ if pem.trim_ascii().is_empty() => TlsSettingsError::Empty,
        _ if !is_damaged => TlsSettingsError::Damaged,
        [0x30, 0x81 | 0x82, ..] => TlsSettingsError::Der,
        _ if PrivateKeyDer::from_pem_slice(pem).is_ok() => TlsSettingsError::OnlyKey,
        _ if String::from_utf8_lossy(pem).contains("-----BEGIN CERTIFICATE") => TlsSettingsError::Damaged,
        _ => TlsSettingsError::NoCertificate,
    })
}

/// Reads a client certificate with its key.
pub(crate) fn identity(pem: &ClientPem) -> Result<CertifiedKey, ClientPemError> {
    let certificates = certificates(&pem.certificate).map_err(ClientPemError::Certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&pem.key).map_err(|_| {
        let text = String::from_utf8_lossy(&pem.key);
        ClientPemError::Key(match &*text {
            text if text.trim().is_empty() => TlsSettingsError::Empty,
            text if text.contains("ENCRYPTED") => TlsSettingsError::EncryptedKey,
            _ => TlsSettingsError::NoKey,
        })
    })?;
    let key = provider().key_provider.load_private_key(key);
    let key = key.map_err(|_| ClientPemError::Key(TlsSettingsError::UnsupportedKey))?;
    let certified = CertifiedKey::new(certificates, key);
    match certified.keys_match() {
        Err(rustls::Error::InconsistentKeys(_)) => Err(ClientPemError::Key(TlsSettingsError::OtherKey)),
        // The key of some certificates cannot be read, as of X.509 version 1; the server decides.
        _ => Ok(certified),
    }
}

/// Which file of a client certificate cannot be used.
pub(crate) enum ClientPemError {
    Certificate(TlsSettingsError),
    Key(TlsSettingsError),
}

impl From<ClientPemError> for TlsSettingsError {
    fn from(error: ClientPemError) -> Self {
        match error {
            ClientPemError::Certificate(error) | ClientPemError::Key(error) => error,
        }
    }
}

/// The rustls configuration for these settings.
pub(crate) fn client_config(settings: &TlsSettings) -> Result<ClientConfig, TlsSettingsError> {
    let verifier: Arc<dyn ServerCertVerifier> = if settings.skip_verify {
        Arc::new(SkipVerify(provider()))
    } else {
        let mut trusted = Vec::new();
        for pem in &settings.authorities {
            trusted.extend(certificates(pem)?);
        }
        let system = rustls_native_certs::load_native_certs();
        for error in system.errors {
            tracing::warn!("cannot read the CA certificates of the system: {error}");
        }
        trusted.extend(system.certs);
        Arc::new(GoVerifier::new(trusted, provider()))
    };
    let mut identities = Vec::new();
    for pem in &settings.client {
        identities.push(Arc::new(identity(pem)?));
    }
    let builder = builder()?.dangerous().with_custom_certificate_verifier(verifier);
    Ok(if identities.is_empty() {
        builder.with_no_client_auth()
    } else {
        builder.with_client_cert_resolver(Arc::new(ClientCertificates(identities)))
    })
}

/// A configuration that trusts no certificate, for clients that use plain HTTP only: loading the system's CA
/// certificates takes time and memory.
pub(crate) fn no_tls() -> Result<ClientConfig, TlsSettingsError> {
    Ok(builder()?.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
}

fn builder() -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>, TlsSettingsError> {
    let builder = ClientConfig::builder_with_provider(provider());
    builder.with_safe_default_protocol_versions().map_err(|_| TlsSettingsError::Unavailable)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Presents the first certificate whose key the server can verify.
#[derive(Debug)]
struct ClientCertificates(Vec<Arc<CertifiedKey>>);

impl ResolvesClientCert for ClientCertificates {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.iter().find(|identity| identity.key.choose_scheme(schemes).is_some()).cloned()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// For `skip_verify`: any server is accepted, with any certificate. Digests still verify the content.
#[derive(Debug)]
struct SkipVerify(Arc<CryptoProvider>);

impl ServerCertVerifier for SkipVerify {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify_tls13_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // A key that nobody vouches for proves nothing, and some certificates have keys that cannot be read.
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let mut schemes = self.0.signature_verification_algorithms.supported_schemes();
        schemes.push(SignatureScheme::ECDSA_NISTP521_SHA512);
        schemes
    }
}

#[cfg(test)]
mod tests;
