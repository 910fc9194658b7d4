//! Helpers that the tests share: quick settings, images, a sink in memory.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use larder::credentials::{Credential, Secret};
use larder::reference::{Digest, Reference};
use larder_registry::manifest::Descriptor;
use larder_registry::{
    BlobSink, FetchError, FetchErrorKind, FetchNotice, FetchWait, Proxy, RegistryClient, RegistryConfig,
    RegistryLoad, RepositorySession,
};
use larder_testkit::fault_registry::{FaultRegistry, LoggedRequest};
use tempfile::TempDir;

/// Settings for registries on loopback: short back-offs, small ranges. The time limits are the usual ones, which a test
/// on a slow machine does not exceed.
pub(crate) fn quick() -> RegistryConfig {
    RegistryConfig {
        config_dirs: Vec::new(),
        range_size: 100_000,
        stall_bytes: 2000,
        retry_initial: Duration::from_millis(2),
        retry_max: Duration::from_millis(20),
        proxy: Proxy::None,
        ..RegistryConfig::default()
    }
}

/// Settings for bodies that stall: their limit is the only one that [`pass_limit`] passes.
pub(crate) fn without_header_timeout() -> RegistryConfig {
    RegistryConfig { header_timeout: Duration::from_secs(365 * 86_400), ..quick() }
}

/// Runs the client's clock ahead; the registry has its own. Not async: a future that is dropped would leave it paused.
pub(crate) fn advance(time: Duration) {
    tokio::time::pause();
    // The first poll runs it ahead.
    tokio::time::advance(time).now_or_never();
    tokio::time::resume();
}

/// Runs the client's clock ahead by `limit` while requests hang, so that their time limit passes at once, and that of
/// no other request. Never ends.
pub(crate) async fn pass_limit(
    client: &RegistryClient,
    registry: &FaultRegistry,
    limit: Duration,
    hangs: impl Fn(&[LoggedRequest]) -> bool,
) {
    loop {
        let requests = registry.requests();
        // The client counts a request before it sends it: none is on its way to the registry.
        if load_of(client, registry).requests == requests.len() as u64 && hangs(&requests) {
            advance(limit);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The load of a registry.
pub(crate) fn load_of(client: &RegistryClient, registry: &FaultRegistry) -> RegistryLoad {
    client.loads().into_iter().find(|load| load.host == registry.address()).unwrap()
}

/// Waits until the load of a registry is as wanted, for at most a minute.
pub(crate) async fn load_until(
    client: &RegistryClient,
    registry: &FaultRegistry,
    is_wanted: impl Fn(&RegistryLoad) -> bool,
) -> RegistryLoad {
    let wanted = async {
        loop {
            let load = load_of(client, registry);
            if is_wanted(&load) {
                return load;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let found = tokio::time::timeout(Duration::from_secs(60), wanted).await;
    found.unwrap_or_else(|_| panic!("the load is still {:?}", load_of(client, registry)))
}

/// Settings with a `hosts.toml` for one registry; the directory must live as long as the client is used.
pub(crate) fn with_hosts(registry: &str, hosts_toml: &str) -> (TempDir, RegistryConfig) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join(registry);
    fs_err::create_dir_all(&dir).unwrap();
    fs_err::write(dir.join("hosts.toml"), hosts_toml).unwrap();
    let config = RegistryConfig { config_dirs: vec![root.path().to_owned()], ..quick() };
    (root, config)
}

pub(crate) fn reference(image: &str) -> Reference {
    Reference::parse(image).unwrap()
}

pub(crate) fn session(config: RegistryConfig, image: &str) -> RepositorySession {
    RegistryClient::new(config).session(&reference(image), None).unwrap()
}

pub(crate) fn login(username: &str, password: &str) -> Credential {
    Credential { username: username.into(), password: Secret::new(password), ..Credential::default() }
}

pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Bytes that differ from place to place.
pub(crate) fn content(size: usize) -> Vec<u8> {
    (0..size).map(|at| ((at * 7 + at / 251 + at / 65_537) % 256).try_into().unwrap()).collect()
}

/// A blob of `size` bytes in a registry, and its descriptor.
pub(crate) fn put_blob(registry: &FaultRegistry, size: usize) -> (Vec<u8>, Descriptor) {
    let content = content(size);
    let digest = registry.put_blob(content.clone());
    let descriptor = Descriptor::new(LAYER, Digest::parse(&digest).unwrap(), size as u64);
    (content, descriptor)
}

/// A sink that keeps what it gets.
#[derive(Debug, Default)]
pub(crate) struct MemorySink {
    content: Mutex<Vec<u8>>,
    fail_after: Option<u64>,
}

impl MemorySink {
    pub(crate) fn new() -> Arc<MemorySink> {
        Arc::default()
    }

    /// With what an earlier fetch left.
    pub(crate) fn holding(content: &[u8]) -> Arc<MemorySink> {
        Arc::new(MemorySink { content: Mutex::new(content.to_vec()), fail_after: None })
    }

    /// Full after so many bytes.
    pub(crate) fn full_after(bytes: u64) -> Arc<MemorySink> {
        Arc::new(MemorySink { fail_after: Some(bytes), ..MemorySink::default() })
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        self.content.lock().unwrap().clone()
    }
}

impl BlobSink for MemorySink {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let start = index(offset);
        let end = start + data.len();
        if self.fail_after.is_some_and(|bytes| end as u64 > bytes) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut content = self.content.lock().unwrap();
        if content.len() < end {
            content.resize(end, 0);
        }
        content[start..end].copy_from_slice(data);
        Ok(())
    }
}

/// A session and the notices it sends.
pub(crate) fn watched(session: &RepositorySession) -> (RepositorySession, Arc<Mutex<Vec<FetchNotice>>>) {
    let notices = Arc::new(Mutex::new(Vec::new()));
    let seen = notices.clone();
    (session.with_watcher(move |notice| seen.lock().unwrap().push(notice)), notices)
}

/// Returns the waits among the notices.
pub(crate) fn waits(notices: &Mutex<Vec<FetchNotice>>) -> Vec<FetchWait> {
    let notices = notices.lock().unwrap();
    notices
        .iter()
        .filter_map(|notice| match notice {
            FetchNotice::Waiting(waiting) => Some(waiting.clone()),
            _ => None,
        })
        .collect()
}

/// Returns the hosts among the notices, each once.
pub(crate) fn hosts(notices: &Mutex<Vec<FetchNotice>>) -> Vec<String> {
    let mut hosts = Vec::new();
    for notice in &*notices.lock().unwrap() {
        if let FetchNotice::Host(host) = notice
            && !hosts.contains(host)
        {
            hosts.push(host.clone());
        }
    }
    hosts
}

/// The kind of an error, by name.
pub(crate) fn kind(error: &FetchError) -> &'static str {
    match *error.kind {
        FetchErrorKind::Denied(_) => "denied",
        FetchErrorKind::CredentialRejected(_) => "credential rejected",
        FetchErrorKind::NotFound(_) => "not found",
        FetchErrorKind::RateLimited { .. } => "rate limited",
        FetchErrorKind::Refused(_) => "refused",
        FetchErrorKind::Failing(_) => "failing",
        FetchErrorKind::Unreachable(_) => "unreachable",
        FetchErrorKind::Tls(_) => "tls",
        FetchErrorKind::NoAnswer(_) => "no answer",
        FetchErrorKind::Stalled { .. } => "stalled",
        FetchErrorKind::Truncated { .. } => "truncated",
        FetchErrorKind::DigestMismatch { .. } => "digest mismatch",
        FetchErrorKind::TooLarge { .. } => "too large",
        FetchErrorKind::BadReply(_) => "invalid response",
        FetchErrorKind::Manifest(_) => "manifest",
        _ => "other",
    }
}

pub(crate) fn index(at: u64) -> usize {
    at.try_into().unwrap()
}
