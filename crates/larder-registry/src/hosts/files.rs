//! Files of a host's configuration. Certificates in a registry's directory follow Docker's naming: `*.crt` are
//! CA certificates, `NAME.cert` and `NAME.key` are a client certificate.

use std::path::{Path, PathBuf};

use super::error::HostsError;
use super::host::RegistryHost;
use crate::tls::{self, ClientPem, ClientPemError};

/// The registry's server with the certificates of its directory. If there are any, it uses TLS.
pub(super) fn with_certificates(dir: &Path, mut server: RegistryHost) -> Result<RegistryHost, HostsError> {
    let mut files: Vec<PathBuf> = fs_err::read_dir(dir)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(HostsError::Read)?;
    files.sort();
    for file in &files {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => server.tls.authorities.push(authority(file, "authority")?),
            Some("cert") => {
                server.tls.client.push(client(file, &file.with_extension("key"), "client certificate")?);
            }
            _ => {}
        }
    }
    if !server.tls.authorities.is_empty() || !server.tls.client.is_empty() {
        server.tls.skip_verify = false;
        server.plain_fallback = false;
    }
    Ok(server)
}

/// Reads a file of CA certificates; `key` is the reference to it.
pub(super) fn authority(file: &Path, key: &str) -> Result<Vec<u8>, HostsError> {
    let pem = read_file(file).map_err(HostsError::Read)?;
    tls::certificates(&pem).map_err(|cause| unusable(file, key, cause))?;
    Ok(pem)
}

/// Reads a client certificate and its key; `key` is the reference to them.
pub(super) fn client(certificate: &Path, private: &Path, key: &str) -> Result<ClientPem, HostsError> {
    let read = |file: &Path| read_file(file).map_err(HostsError::Read);
    let pem = ClientPem { certificate: read(certificate)?, key: read(private)? };
    match tls::identity(&pem) {
        Ok(_) => Ok(pem),
        Err(ClientPemError::Certificate(cause)) => Err(unusable(certificate, key, cause)),
        Err(ClientPemError::Key(cause)) => Err(unusable(private, key, cause)),
    }
}

fn unusable(file: &Path, key: &str, cause: tls::TlsSettingsError) -> HostsError {
    HostsError::Certificate { file: file.to_owned(), key: key.to_owned(), cause }
}

/// Reads a file of a host's configuration, at most 1 MiB of it.
pub(super) fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read as _;
    const MAX: u64 = 1 << 20;
    let mut content = Vec::new();
    fs_err::File::open(path)?.take(MAX + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX {
        return Err(std::io::Error::other(format!("{}: larger than 1 MiB", path.display())));
    }
    Ok(content)
}
