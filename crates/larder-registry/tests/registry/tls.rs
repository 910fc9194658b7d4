//! Client certificates, shown to whom they are for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_registry::{RegistryClient, RegistryConfig};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::tls::{CertificateRequest, certificates};
use larder_testkit_peers::{Availability, Package, require};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::support::*;

/// A certificate for a client, of the CA in `dir`.
fn client_certificate(dir: &Path) -> (PathBuf, PathBuf) {
    CertificateRequest {
        subject: "node",
        issuer: Some((&dir.join("trust/ca.crt"), &dir.join("ca.key"))),
        extensions: &["basicConstraints=critical,CA:FALSE", "extendedKeyUsage=clientAuth"],
        ..CertificateRequest::default()
    }
    .make(dir, "client")
    .unwrap()
}

/// A registry with an image, and what stands before it.
struct TlsFixture {
    dir: TempDir,
    registry: FaultRegistry,
    /// A certificate for a client, and its key.
    client: (PathBuf, PathBuf),
    /// Where it speaks TLS, to clients with such a certificate.
    secure: String,
}

impl TlsFixture {
    /// `None` where openssl is missing.
    async fn start() -> Option<TlsFixture> {
        if let Availability::Skip(_) = require(&[Package::Openssl]) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        certificates(dir.path()).unwrap();
        let client = client_certificate(dir.path());
        let registry = FaultRegistry::start();
        registry.put_image("shop/web", "1", LAYER, &[content(10)], &[]);
        let secure = front(dir.path(), registry.address()).await;
        Some(TlsFixture { dir, registry, client, secure })
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("trust/ca.crt")
    }
}

/// Speaks TLS before a registry, to clients with a certificate of the CA in `dir`; its address.
async fn front(dir: &Path, behind: String) -> String {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join("trust/ca.crt")).unwrap()).unwrap();
    let verifier =
        WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone()).build().unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            vec![CertificateDer::from_pem_file(dir.join("server.crt")).unwrap()],
            PrivateKeyDer::from_pem_file(dir.join("server.key")).unwrap(),
        )
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, behind) = (acceptor.clone(), behind.clone());
            tokio::spawn(async move {
                if let Ok(mut secure) = acceptor.accept(stream).await {
                    let mut plain = TcpStream::connect(behind).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut secure, &mut plain).await;
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn a_client_certificate_is_shown_in_each_of_the_ways_to_name_it() {
    let Some(fixture) = TlsFixture::start().await else { return };
    let ((certificate, key), ca, address) = (&fixture.client, fixture.ca(), &fixture.secure);
    let both = fixture.dir.path().join("both.pem");
    let text = fs_err::read_to_string(certificate).unwrap() + &fs_err::read_to_string(key).unwrap();
    fs_err::write(&both, text).unwrap();
    let name = format!("{address}/shop/web:1");
    for (client, good) in [
        (format!("client = [[{certificate:?}, {key:?}]]"), true),
        (format!("client = {both:?}"), true),
        (format!("client = [{both:?}]"), true),
        (String::new(), false),
    ] {
        let toml = format!("server = \"https://{address}\"\nca = {ca:?}\n{client}");
        let (_root, config) = with_hosts(address, &toml);
        let outcome = session(config, &name).resolve().await;
        assert_eq!(outcome.is_ok(), good, "{client}: {outcome:?}");
        if let Err(error) = outcome {
            assert_eq!(kind(&error), "tls", "{error}");
            assert!(error.to_string().contains("the server requires a client certificate"), "{error}");
        }
    }
    // Docker's way.
    let (root, config) = with_hosts(address, "");
    let theirs = root.path().join(address);
    fs_err::remove_file(theirs.join("hosts.toml")).unwrap();
    for (from, to) in [(&ca, "ca.crt"), (certificate, "client.cert"), (key, "client.key")] {
        fs_err::copy(from, theirs.join(to)).unwrap();
    }
    session(config, &name).resolve().await.unwrap();
}

#[tokio::test]
async fn a_redirect_from_tls_to_plain_http_on_another_host_is_refused() {
    let Some(fixture) = TlsFixture::start().await else { return };
    let ((certificate, key), ca, address) = (&fixture.client, fixture.ca(), &fixture.secure);
    let elsewhere = ResponseFault::Redirect("http://storage.invalid/x".into());
    fixture.registry.fault(FaultTrigger::path("/"), elsewhere);
    let toml = format!("server = \"https://{address}\"\nca = {ca:?}\nclient = [[{certificate:?}, {key:?}]]");
    let (_root, config) = with_hosts(address, &toml);
    let error = session(config, &format!("{address}/shop/web:1")).resolve().await.unwrap_err();
    assert!(error.to_string().contains("from TLS to plain HTTP at storage.invalid"), "{error}");
}

/// The text and the next step of a failed resolution.
async fn failure(config: RegistryConfig, name: &str) -> String {
    let error = session(config, name).resolve().await.unwrap_err();
    format!("{error}\n{}", error.hint().unwrap_or_default())
}

#[tokio::test]
async fn without_verification_any_certificate_and_plain_http_are_accepted_for_one_call() {
    let Some(fixture) = TlsFixture::start().await else { return };
    let (certificate, key) = &fixture.client;
    for server in [fixture.secure, fixture.registry.address()] {
        let toml = format!("server = \"https://{server}\"\nclient = [[{certificate:?}, {key:?}]]");
        let (_root, config) = with_hosts(&server, &toml);
        let name = reference(&format!("{server}/shop/web:1"));
        let client = RegistryClient::new(RegistryConfig { tries: 1, ..config });
        client.session(&name, None).unwrap().resolve().await.unwrap_err();
        let insecure = client.without_tls_verify();
        insecure.session(&name, None).unwrap().resolve().await.unwrap();
        insecure.log_in(&server, &login("u", "p")).await.unwrap();
        client.session(&name, None).unwrap().resolve().await.unwrap_err();
    }
}

/// A server that answers what is no HTTP as most do; its address.
async fn answers_bad_request() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").await;
        }
    });
    address
}

#[tokio::test]
async fn a_scheme_that_the_server_does_not_speak_is_named() {
    let Some(TlsFixture { registry, secure, dir: _dir, .. }) = TlsFixture::start().await else { return };
    for (plain, expected) in [
        (answers_bad_request().await, "TLS: the server speaks plain HTTP on this port, not TLS"),
        (registry.address(), "the server closed the connection during the TLS handshake"),
    ] {
        let (_root, config) = with_hosts(&plain, &format!("server = \"https://{plain}\""));
        let text = failure(RegistryConfig { tries: 1, ..config }, &format!("{plain}/shop/web:1")).await;
        assert!(text.contains(expected), "{text}");
        assert!(text.contains(&format!("write server = \"http://{plain}\" to ")), "{text}");
    }

    let (_root, config) = with_hosts(&secure, &format!("server = \"http://{secure}\""));
    let config = RegistryConfig { tries: 1, ..config };
    let text = failure(config.clone(), &format!("{secure}/shop/web:1")).await;
    assert!(text.contains("the server speaks TLS on this port, not plain HTTP"), "{text}");
    assert!(text.contains(&format!("write server = \"https://{secure}\" to ")), "{text}");
    let refused = RegistryClient::new(config).log_in(&secure, &login("u", "p")).await.unwrap_err();
    assert!(refused.to_string().contains("the server speaks TLS on this port"), "{refused}");
}

#[tokio::test]
async fn on_loopback_tls_is_tried_before_plain_http() {
    let Some(fixture) = TlsFixture::start().await else { return };
    let (TlsFixture { registry, secure, .. }, (certificate, key)) = (&fixture, &fixture.client);
    // The certificate is not trusted: on loopback, any is accepted.
    let (_root, config) = with_hosts(secure, &format!("client = [[{certificate:?}, {key:?}]]"));
    session(config, &format!("{secure}/shop/web:1")).resolve().await.unwrap();
    // Without TLS, the first request finds that out.
    let plain = format!("{}/shop/web:1", registry.address());
    let client = RegistryClient::new(quick());
    for _ in 0..2 {
        client.session(&reference(&plain), None).unwrap().resolve().await.unwrap();
    }
}
