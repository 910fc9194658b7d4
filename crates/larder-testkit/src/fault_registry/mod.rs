//! A registry inside the test's process that misbehaves on demand.
//!
//! It serves manifests and blobs from memory over plain HTTP on loopback. [`FaultRegistry::fault`] says which requests
//! go wrong, and how; [`FaultRegistry::requests`] has the requests and how many bytes of each body were sent, so
//! that a test can assert what was downloaded again.
//!
//! It implements HTTP itself, on its own thread: a server library would not let a test cut, stretch and falsify
//! answers, and a test may block its own thread or pause its own clock.

mod auth;
mod fault;
mod http;
mod log;
mod referrers;
mod serve;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;

pub use auth::FaultRegistryAuth;
pub use fault::{FaultTrigger, ResponseFault};
pub use log::LoggedRequest;

/// A running registry. Dropping it closes its port and all its connections.
#[derive(Debug)]
pub struct FaultRegistry {
    shared: Arc<SharedContents>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the server's tasks and the test.
#[derive(Debug, Default)]
struct SharedContents {
    state: Mutex<RegistryContents>,
}

#[derive(Debug, Default)]
struct RegistryContents {
    /// By digest.
    blobs: HashMap<String, Arc<[u8]>>,
    /// By `REPOSITORY:REFERENCE`.
    manifests: HashMap<String, StoredManifest>,
    /// How many referrers a page has; `None` without the API of referrers.
    referrers_page: Option<usize>,
    faults: Vec<fault::InjectedFault>,
    auth: auth::IssuedTokens,
    log: Vec<LoggedRequest>,
    /// Where the present page of the log begins.
    page: usize,
    open_now: usize,
    open_most: usize,
}

#[derive(Debug)]
struct StoredManifest {
    media_type: String,
    digest: String,
    content: Arc<[u8]>,
}

impl SharedContents {
    fn lock(&self) -> MutexGuard<'_, RegistryContents> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of [`FaultRegistry::put_image`].
#[derive(Debug, Clone)]
pub struct PutImage {
    /// Digest of the manifest.
    pub manifest: String,
    /// Digest of the config, the image's id.
    pub config: String,
    /// Digests of the layers as they are stored.
    pub layers: Vec<String>,
}

impl FaultRegistry {
    /// Starts an empty registry on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// When the machine has no free port or thread.
    pub fn start() -> FaultRegistry {
        let shared = Arc::new(SharedContents::default());
        let (stop, stopped) = oneshot::channel();
        let (ready, address) = std::sync::mpsc::channel();
        let serving = shared.clone();
        let thread = std::thread::Builder::new()
            .name("fault-registry".into())
            .spawn(move || {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                runtime.block_on(async {
                    let listener = listen().expect("a free port");
                    let address = listener.local_addr().expect("an address");
                    let _ = ready.send(address);
                    serve::serve(listener, serving, stopped).await;
                });
            })
            .expect("a thread");
        let address = address.recv().expect("the registry starts");
        FaultRegistry { shared, address, stop: Some(stop), thread: Some(thread) }
    }

    /// `127.0.0.1:PORT`, the host part of its images' names.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The name of an image in it: `127.0.0.1:PORT/NAME`.
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Holds a blob in every repository; its digest.
    pub fn put_blob(&self, content: impl Into<Vec<u8>>) -> String {
        let content = content.into();
        let digest = digest(&content);
        self.shared.lock().blobs.insert(digest.clone(), content.into());
        digest
    }

    /// Returns the bytes of a blob.
    ///
    /// # Panics
    ///
    /// If the registry does not have it.
    pub fn blob(&self, digest: &str) -> Vec<u8> {
        self.shared.lock().blobs[digest].to_vec()
    }

    /// Returns the bytes of the manifest of a name, `REPOSITORY:TAG`.
    ///
    /// # Panics
    ///
    /// If the registry does not have it.
    pub fn manifest(&self, name: &str) -> Vec<u8> {
        self.shared.lock().manifests[name].content.to_vec()
    }

    /// Serves these bytes under a digest: theirs by another algorithm, or that of another blob, as a registry does that
    /// claims to have that blob.
    pub fn put_blob_as(&self, digest: &str, content: impl Into<Vec<u8>>) {
        self.shared.lock().blobs.insert(digest.to_owned(), content.into().into());
    }

    /// Holds a manifest under a tag and under its digest; the digest.
    pub fn put_manifest(
        &self,
        repository: &str,
        tag: &str,
        media_type: &str,
        content: impl Into<Vec<u8>>,
    ) -> String {
        let content = content.into();
        let digest = digest(&content);
        self.put_manifest_as(repository, tag, media_type, &digest, content);
        digest
    }

    /// Holds a manifest under a tag and under this digest, by which it is known as well.
    pub fn put_manifest_as(
        &self,
        repository: &str,
        tag: &str,
        media_type: &str,
        digest: &str,
        content: impl Into<Vec<u8>>,
    ) {
        let content: Arc<[u8]> = content.into().into();
        let mut state = self.shared.lock();
        for reference in [tag, digest] {
            let (media_type, digest, content) = (media_type.to_owned(), digest.to_owned(), content.clone());
            let manifest = StoredManifest { media_type, digest, content };
            state.manifests.insert(format!("{repository}:{reference}"), manifest);
        }
    }

    /// Holds an image of the given layers, which are stored as they are. The diff ids of its config are those of
    /// `diff_ids`, or the layers' own digests (right for plain tar archives) where it has none.
    pub fn put_image(
        &self,
        repository: &str,
        tag: &str,
        media_type: &str,
        layers: &[Vec<u8>],
        diff_ids: &[String],
    ) -> PutImage {
        let stored: Vec<String> = layers.iter().map(|layer| self.put_blob(layer.clone())).collect();
        let diff_ids = if diff_ids.is_empty() { &stored } else { diff_ids };
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = json!({"architecture": architecture, "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids}})
        .to_string();
        let config_size = config.len();
        let config = self.put_blob(config);
        let described: Vec<Value> = stored
            .iter()
            .zip(layers)
            .map(|(digest, layer)| json!({"mediaType": media_type, "digest": digest, "size": layer.len()}))
            .collect();
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": manifest_type,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": config_size},
            "layers": described});
        let manifest = self.put_manifest(repository, tag, manifest_type, manifest.to_string());
        PutImage { manifest, config, layers: stored }
    }

    /// From now on, the registry lists manifests by their `subject`, so many on a page.
    pub fn serve_referrers(&self, page: usize) {
        self.shared.lock().referrers_page = Some(page);
    }

    /// From now on, answers to requests that match go wrong. Of several rules that match, the one given first acts.
    pub fn fault(&self, on: FaultTrigger, fault: ResponseFault) {
        self.shared.lock().faults.push(fault::InjectedFault::new(on, fault));
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.shared.lock().faults.clear();
    }

    /// From now on, requests must authenticate as `auth` requires.
    pub fn require(&self, auth: FaultRegistryAuth) {
        self.shared.lock().auth.require(auth);
    }

    /// Tokens given out so far are not accepted any more.
    pub fn expire_tokens(&self) {
        self.shared.lock().auth.expire();
    }

    /// The requests since the start or since [`forget_requests`](Self::forget_requests), in the order of arrival. Bytes
    /// of answers that are still under way count as far as they were sent.
    pub fn requests(&self) -> Vec<LoggedRequest> {
        let state = self.shared.lock();
        state.log[state.page..].to_vec()
    }

    /// Begins a new page of the log.
    pub fn forget_requests(&self) {
        let mut state = self.shared.lock();
        state.page = state.log.len();
    }

    /// Requests whose path contains `part`.
    pub fn requests_for(&self, part: &str) -> Vec<LoggedRequest> {
        self.requests().into_iter().filter(|request| request.path.contains(part)).collect()
    }

    /// Bytes of a blob that were sent, over all requests.
    pub fn bytes_sent(&self, digest: &str) -> u64 {
        self.requests_for(&format!("/blobs/{digest}")).iter().map(|request| request.sent).sum()
    }

    /// The most connections that were open at the same time.
    pub fn most_connections(&self) -> usize {
        self.shared.lock().open_most
    }
}

/// A free port. What is sent and not yet taken by the client is kept small, so that [`LoggedRequest::sent`] is close to
/// what the client got even when it hangs up.
fn listen() -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_send_buffer_size(64 * 1024)?;
    socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
    socket.listen(128)
}

impl Drop for FaultRegistry {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// `sha256:...` of a content.
pub fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().fold("sha256:".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
