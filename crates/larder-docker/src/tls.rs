//! TLS for connections to an engine, from the three files that the Docker CLI reads.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// A directory with `ca.pem` (the engine's CA certificate), and with `cert.pem` and `key.pem` if the engine requires a
/// client certificate. As `DOCKER_CERT_PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles(pub PathBuf);

/// Why TLS files cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DockerTlsError {
    /// One cannot be read; the error names it.
    #[error("{0}; set DOCKER_CERT_PATH to a directory with ca.pem, cert.pem and key.pem")]
    File(#[from] std::io::Error),
    /// A file has invalid content.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Reason why the file is invalid.
        problem: String,
    },
    /// The files do not match.
    #[error("{0}")]
    Rustls(#[from] rustls::Error),
}

/// The rustls configuration that trusts this engine only.
pub(crate) fn client_config(files: &TlsFiles) -> Result<ClientConfig, DockerTlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(&files.0.join("ca.pem"))? {
        roots.add(authority)?;
    }
    let builder = builder()?.with_root_certificates(roots);
    let (certificate, key) = (files.0.join("cert.pem"), files.0.join("key.pem"));
    if !certificate.exists() && !key.exists() {
        return Ok(builder.with_no_client_auth());
    }
    let private = PrivateKeyDer::from_pem_slice(&fs_err::read(&key)?)
        .map_err(|error| DockerTlsError::Content { path: key, problem: error.to_string() })?;
    Ok(builder.with_client_auth_cert(certificates(&certificate)?, private)?)
}

/// A configuration that trusts no certificate, for connections without TLS.
pub(crate) fn no_tls() -> Result<ClientConfig, DockerTlsError> {
    Ok(builder()?.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
}

fn builder() -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>, DockerTlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, DockerTlsError> {
    let pem = fs_err::read(path)?;
    let content = |problem: String| DockerTlsError::Content { path: path.to_owned(), problem };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let all = all.map_err(|error| content(error.to_string()))?;
    if all.is_empty() { Err(content("contains no certificate".into())) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_empty_authority_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let files = TlsFiles(dir.path().to_owned());
        let missing = client_config(&files).unwrap_err().to_string();
        assert!(missing.contains("ca.pem") && missing.contains("DOCKER_CERT_PATH"), "{missing}");
        fs_err::write(dir.path().join("ca.pem"), "junk").unwrap();
        let empty = client_config(&files).unwrap_err().to_string();
        assert!(empty.ends_with("ca.pem: contains no certificate"), "{empty}");
    }
}
