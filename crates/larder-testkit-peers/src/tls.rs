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

/// Makes an authority and a server certificate for 127.0.0.1 and localhost in `directory`, valid for a day.
pub fn certificates(dir: &Path) -> PeerResult<Certificates> {
    let made = Certificates {
        ca: dir.join("trust/ca.crt"),
        certificate: dir.join("server.crt"),
        key: dir.join("server.key"),
    };
    fs_err::create_dir_all(dir.join("trust"))?;
    let ca_key = dir.join("ca.key");
    let openssl = program(Package::Openssl)?;
    run(Command::new(&openssl)
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
        ])
        .args(["-subj", "/CN=larder test authority", "-addext", "keyUsage=critical,keyCertSign"])
        .arg("-keyout")
        .arg(&ca_key)
        .arg("-out")
        .arg(&made.ca))?;
    run(Command::new(&openssl)
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
        ])
        .args(["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"])
        .args([
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-addext",
            "extendedKeyUsage=serverAuth,clientAuth",
        ])
        .arg("-CA")
        .arg(&made.ca)
        .arg("-CAkey")
        .arg(&ca_key)
        .arg("-keyout")
        .arg(&made.key)
        .arg("-out")
        .arg(&made.certificate))?;
    Ok(made)
}
