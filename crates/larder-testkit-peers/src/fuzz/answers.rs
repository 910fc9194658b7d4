//! A registry and its token server, as an input says they answer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use larder::credentials::{Credential, Secret};
use larder::reference::{Digest, Reference};
use larder_registry::manifest::{Descriptor, PlatformMatcher};
use larder_registry::{BlobSink, ByteRanges, Proxy, RegistryClient, RegistryConfig, fetch_blob};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Between two responses of an input.
const SEPARATOR: &[u8] = b"\n--\n";
/// The password that the registry may be sent. It must not be in an error, whatever a response says.
const PASSWORD: &str = "hunter2-secret";
/// Text of a response in whose place the password is sent back, if the registry was sent it.
const ECHO: &[u8; PASSWORD.len()] = b"echoed-by-them";
/// Text of a response in whose place the registry's own address is sent.
const REGISTRY: &[u8] = b"registry.example:5000";
/// Size of the blob that is fetched, in bytes.
const BLOB_SIZE: u64 = 100;
/// Virtual time: a pull waits as long as a registry requests, up to its own limits.
const ENDS_WITHIN: Duration = Duration::from_secs(7 * 86_400);

/// Responses of whole HTTP messages, one for each connection; the last one is repeated.
pub(super) fn answers(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime starts").block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = tokio::spawn(serve(listener, data.to_vec()));
        let address = address.to_string();
        let pull = tokio::time::timeout(ENDS_WITHIN, pull(&address));
        pull.await.expect("a pull ends, whatever its registry answers");
        server.abort();
    });
}

async fn serve(listener: TcpListener, data: Vec<u8>) {
    let mut rest = data.as_slice();
    while let Ok((mut connection, _)) = listener.accept().await {
        let end = find(rest, SEPARATOR);
        let response = end.map_or(rest, |end| &rest[..end]);
        // A client that has closed its side fails only this exchange.
        let _ = exchange(&mut connection, response).await;
        if let Some(end) = end {
            rest = &rest[end + SEPARATOR.len()..];
        }
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

fn replaced(bytes: &[u8], text: &[u8], by: &[u8]) -> Vec<u8> {
    let (mut result, mut rest) = (Vec::new(), bytes);
    while let Some(at) = find(rest, text) {
        result.extend_from_slice(&rest[..at]);
        result.extend_from_slice(by);
        rest = &rest[at + text.len()..];
    }
    result.extend_from_slice(rest);
    result
}

async fn exchange(connection: &mut TcpStream, response: &[u8]) -> io::Result<()> {
    let mut request = [0; 8192];
    let length = connection.read(&mut request).await?;
    let knows_password = String::from_utf8_lossy(&request[..length]).contains("Basic ");
    let address = connection.local_addr()?.to_string();
    let mut response = replaced(response, REGISTRY, address.as_bytes());
    if knows_password {
        response = replaced(&response, ECHO, PASSWORD.as_bytes());
    }
    connection.write_all(&response).await?;
    connection.shutdown().await
}

async fn pull(registry: &str) {
    // Hosts that a response names are not looked up.
    let proxy = Proxy::Fixed { url: "http://127.0.0.1:1".into(), except: String::new() };
    let config =
        RegistryConfig { config_dirs: Vec::new(), proxy, range_size: 40, ..RegistryConfig::default() };
    let name = Reference::parse(&format!("{registry}/team/app:1")).expect("a name");
    let login = Credential { username: "u".into(), password: Secret::new(PASSWORD), ..Credential::default() };
    let client = RegistryClient::new(config);
    let session = client.session(&name, Some(&login)).expect("a registry without settings");
    let refused = |text: String| assert!(!text.contains(PASSWORD), "{text}");
    if let Err(error) = session.documents(&PlatformMatcher::host()).await {
        refused(format!("{error} {error:?} {:?}", error.hint()));
    }
    let descriptor =
        Descriptor::new("application/vnd.oci.image.layer.v1.tar", Digest::sha256(b""), BLOB_SIZE);
    if let Err(error) = fetch_blob(&session, &descriptor, &ByteRanges::default(), Arc::new(BoundedSink)).await
    {
        refused(format!("{error} {error:?} {:?}", error.hint()));
    }
}

/// Takes no byte behind the end of the blob.
struct BoundedSink;

impl BlobSink for BoundedSink {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset.checked_add(data.len() as u64);
        assert!(end.is_some_and(|end| end <= BLOB_SIZE), "{} bytes at {offset}", data.len());
        Ok(())
    }
}
