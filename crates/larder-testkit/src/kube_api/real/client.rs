//! Calls of the test itself, which wait for their answer without a runtime.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;

/// The token of the test itself, whose requests are not recorded.
pub(super) const OWN_TOKEN: &str = "testkit";

/// A server that the test calls by itself.
#[derive(Debug)]
pub(super) struct AdminClient {
    address: SocketAddr,
    tls: Option<Arc<ClientConfig>>,
}

impl AdminClient {
    pub(super) fn plain(address: SocketAddr) -> AdminClient {
        AdminClient { address, tls: None }
    }

    pub(super) fn over_tls(address: SocketAddr, authority: &Path) -> AdminClient {
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_file(authority).expect("a certificate");
        roots.add(authority).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = builder.expect("versions of TLS").with_root_certificates(roots).with_no_client_auth();
        AdminClient { address, tls: Some(Arc::new(config)) }
    }

    /// The status and the answer; a text says why there is none.
    pub(super) fn call(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value), String> {
        self.call_as(OWN_TOKEN, method, path, body)
    }

    /// Sends a request with the token of a user.
    pub(super) fn call_as(
        &self,
        token: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<(u16, Value), String> {
        // An answer to HTTP/1.0 is not chunked and ends with the connection.
        let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let length = body.len();
        // etcd refuses tokens.
        let authorization =
            self.tls.as_ref().map(|_| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: {}\r\n{authorization}Accept: application/json\r\n\
             Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n{body}",
            self.address
        );
        let answer = self.exchange(&request).map_err(|error| error.to_string())?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or("no status")?;
        Ok((status, serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned()))))
    }

    fn exchange(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut answer = Vec::new();
        let read = if let Some(config) = &self.tls {
            let name = ServerName::from(self.address.ip());
            let connection =
                ClientConnection::new(Arc::clone(config), name).map_err(std::io::Error::other)?;
            let mut stream = StreamOwned::new(connection, stream);
            stream.write_all(request.as_bytes())?;
            stream.read_to_end(&mut answer)
        } else {
            stream.write_all(request.as_bytes())?;
            stream.read_to_end(&mut answer)
        };
        read?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}
