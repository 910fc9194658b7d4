//! A private certificate authority with one server certificate for 127.0.0.1, made with the openssl program.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::PeerResult;
use super::packages::{Package, program};
use super::process::run;

/// Certificates in a directory.
#[derive(Debug, Clone)]
pub struct Certificates {
    /// The authority's certificate: what a client must trust. It is alone in its directory, because some clients are
    /// configured with a directory and use all its files.
    pub ca: PathBuf,
    /// The server's certificate.
    pub certificate: PathBuf,
    /// The server's private key.
    pub key: PathBuf,
}

/// A certificate to make, with a new key.
#[derive(Debug, Clone, Copy, Default)]
pub struct CertificateRequest<'a> {
    /// The common name.
    pub subject: &'a str,
    /// As `openssl req -newkey` takes it, `ed25519`, or a curve's name; empty for P-256.
    pub key: &'a str,
    /// Certificate and key of the issuer; `None` for a self-signed certificate.
    pub issuer: Option<(&'a Path, &'a Path)>,
    /// Extensions as in openssl's configuration: `subjectAltName=DNS:a`.
    pub extensions: &'a [&'a str],
    /// Validity; 0 for one day.
    pub days: u32,
    /// Digest of the signature; empty for SHA-256.
    pub digest: &'a str,
}

impl CertificateRequest<'_> {
    /// Makes `NAME.crt` and `NAME.key` in a directory.
    pub fn make(&self, dir: &Path, name: &str) -> PeerResult<(PathBuf, PathBuf)> {
        let (certificate, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
        // The usual one adds extensions.
        let config = dir.join("openssl.cnf");
        fs_err::write(&config, "[req]\ndistinguished_name = dn\n[dn]\n")?;
        let mut command = Command::new(program(Package::Openssl)?);
        command.args(["req", "-x509", "-nodes", "-config"]).arg(&config);
        match self.key {
            "" => command.args(["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]),
            kind if kind == "ed25519" || kind.starts_with("rsa") => command.args(["-newkey", kind]),
            curve => command.args(["-newkey", "ec", "-pkeyopt"]).arg(format!("ec_paramgen_curve:{curve}")),
        };
        command
            .arg("-days")
            .arg(self.days.max(1).to_string())
            .arg("-subj")
            .arg(format!("/CN={}", self.subject));
        for extension in self.extensions {
            command.args(["-addext", extension]);
        }
        if let Some((issuer, issuer_key)) = self.issuer {
            command.arg("-CA").arg(issuer).arg("-CAkey").arg(issuer_key);
        }
        if !self.digest.is_empty() {
            command.arg(format!("-{}", self.digest));
        }
        run(command.arg("-keyout").arg(&key).arg("-out").arg(&certificate))?;
        Ok((certificate, key))
    }
}

/// Makes an authority and a server certificate for 127.0.0.1 and localhost in `directory`, valid for a day.
pub fn certificates(dir: &Path) -> PeerResult<Certificates> {
    fs_err::create_dir_all(dir.join("trust"))?;
    let (issuer, issuer_key) = CertificateRequest {
        subject: "larder test authority",
        extensions: &["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"],
        ..CertificateRequest::default()
    }
    .make(dir, "ca")?;
    let ca = dir.join("trust/ca.crt");
    fs_err::rename(issuer, &ca)?;
    let (certificate, key) = CertificateRequest {
        subject: "127.0.0.1",
        issuer: Some((&ca, &issuer_key)),
        extensions: &[
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "basicConstraints=critical,CA:FALSE",
            "extendedKeyUsage=serverAuth,clientAuth",
        ],
        ..CertificateRequest::default()
    }
    .make(dir, "server")?;
    Ok(Certificates { ca, certificate, key })
}

/// Makes a server certificate for 127.0.0.1 that is its own authority, as `openssl req -x509` makes it.
pub fn self_signed(dir: &Path) -> PeerResult<Certificates> {
    let (certificate, key) = CertificateRequest {
        subject: "127.0.0.1",
        extensions: &["basicConstraints=critical,CA:TRUE", "subjectAltName=IP:127.0.0.1"],
        ..CertificateRequest::default()
    }
    .make(dir, "server")?;
    // Alone in its directory: some clients use all its files.
    let ca = dir.join("trust/ca.crt");
    fs_err::create_dir_all(dir.join("trust"))?;
    fs_err::copy(&certificate, &ca)?;
    Ok(Certificates { ca, certificate, key })
}
