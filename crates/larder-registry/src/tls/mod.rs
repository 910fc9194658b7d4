//! TLS: rustls with ring, the system's CA certificates, private ones, client certificates.
//!
//! The only module that depends on the cryptography provider.

use std::fmt;
use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

/// The TLS settings of a host: trust and client certificates.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct TlsSettings {
    /// CA certificates to trust besides the system's; PEM.
    pub(crate) authorities: Vec<Vec<u8>>,
    /// Client certificates with their keys; PEM.
    pub(crate) client: Vec<ClientPem>,
    /// Accept any server certificate.
    pub(crate) skip_verify: bool,
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
            .finish()
    }
}

impl TlsSettings {
    /// Returns this trust without client certificates: for hosts that this one redirects to.
    pub(crate) fn default_tls(&self) -> TlsSettings {
        TlsSettings { client: Vec::new(), ..self.clone() }
    }
}

/// Why TLS settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsSettingsError {
    /// A file of certificates contains none.
    #[error("contains no certificate")]
    NoCertificate,
    /// Not PEM, or not of the right kind.
    #[error("not PEM: {0}")]
    Pem(String),
    /// Certificate or key is unusable.
    #[error("{0}")]
    Rustls(#[from] rustls::Error),
}

/// All certificates of a PEM file.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsSettingsError> {
    let certificates = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| TlsSettingsError::Pem(error.to_string()))?;
    if certificates.is_empty() { Err(TlsSettingsError::NoCertificate) } else { Ok(certificates) }
}

/// A client certificate with its key.
pub(crate) fn identity(pem: &ClientPem) -> Result<CertifiedKey, TlsSettingsError> {
    let key =
        PrivateKeyDer::from_pem_slice(&pem.key).map_err(|error| TlsSettingsError::Pem(error.to_string()))?;
    Ok(CertifiedKey::from_der(certificates(&pem.certificate)?, key, &provider())?)
}

/// The rustls configuration for these settings.
pub(crate) fn client_config(settings: &TlsSettings) -> Result<ClientConfig, TlsSettingsError> {
    let verifier: Arc<dyn ServerCertVerifier> = if settings.skip_verify {
        Arc::new(SkipVerify(provider()))
    } else {
        let mut own = Vec::new();
        for pem in &settings.authorities {
            own.extend(certificates(pem)?);
        }
        Arc::new(rustls_platform_verifier::Verifier::new_with_extra_roots(own, provider())?)
    };
    let identities =
        settings.client.iter().map(|pem| identity(pem).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
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
    Ok(ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?)
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

/// For `skip_verify`: any server certificate is accepted. Digests still verify the content.
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
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
