//! A real API server: etcd and kube-apiserver as processes of the test, which listen on loopback.
//!
//! Clients reach it through a forwarder, so that the test can close and open the port at once. Users are known by
//! token: the server asks the test about each one, by its webhook for tokens. Rules become roles and bindings.

mod client;
mod process;
mod requests;
mod users;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::ApiRequest;
use super::authorization::PolicyRule;
use super::thread::ServingThread;
use crate::free_address;
use client::AdminClient;
use process::{Process, run};
use users::Users;

/// The programs, their files, and what is in front of them.
#[derive(Debug)]
pub(super) struct RealServer {
    /// Stopped before etcd.
    apiserver: Mutex<Process>,
    _etcd: Process,
    etcd_client: AdminClient,
    client: AdminClient,
    users: Users,
    address: SocketAddr,
    forwarder: Option<ServingThread>,
    backend: SocketAddr,
    directory: TempDir,
}

impl RealServer {
    pub(super) fn start(program: &Path) -> RealServer {
        let directory =
            tempfile::Builder::new().prefix("kube-apiserver-").tempdir().expect("a private directory");
        let (etcd_address, backend) = (free_address(), free_address());
        let etcd = start_etcd(directory.path(), etcd_address);
        make_certificates(directory.path());
        let users = Users::start(&directory.path().join("users.json"));
        fs_err::write(directory.path().join("audit.yaml"), requests::POLICY).expect("an audit policy");
        let arguments = apiserver_arguments(directory.path(), etcd_address, backend);
        let apiserver = Process::start(program, arguments, directory.path().join("kube-apiserver.log"));
        let client = AdminClient::over_tls(backend, &directory.path().join("ca.crt"));
        let (forwarder, address) = forward((Ipv4Addr::LOCALHOST, 0).into(), backend);
        let server = RealServer {
            apiserver: Mutex::new(apiserver),
            _etcd: etcd,
            etcd_client: AdminClient::plain(etcd_address),
            client,
            users,
            address,
            forwarder: Some(forwarder),
            backend,
            directory,
        };
        server.wait_until_ready();
        server
    }

    pub(super) fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    pub(super) fn backend(&self) -> SocketAddr {
        self.backend
    }

    /// The certificate authority of the server, in PEM.
    pub(super) fn authority(&self) -> PathBuf {
        self.directory.path().join("ca.crt")
    }

    pub(super) fn close(&mut self) {
        self.forwarder = None;
    }

    pub(super) fn open(&mut self) {
        self.close();
        self.forwarder = Some(forward(self.address, self.backend).0);
    }

    /// kube-apiserver answers watches of old versions from its memory as well, so it has to forget with etcd.
    pub(super) fn compact(&self) {
        let key = json!({ "key": "AA==" });
        let (_, answer) = self.etcd_client.call("POST", "/v3/kv/range", &key).expect("etcd answers");
        let revision = &answer["header"]["revision"];
        let request = json!({ "revision": revision, "physical": true });
        let (status, answer) =
            self.etcd_client.call("POST", "/v3/kv/compaction", &request).expect("etcd answers");
        assert_eq!(status, 200, "{answer}");
        self.process().restart();
        self.wait_until_ready();
    }

    pub(super) fn administer(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let path = match method {
            "DELETE" if path.contains('?') => format!("{path}&gracePeriodSeconds=0"),
            "DELETE" => format!("{path}?gracePeriodSeconds=0"),
            _ => path.to_owned(),
        };
        match self.client.call(method, &path, body)? {
            (200..300, answer) => Ok(answer),
            (_, answer) => Err(answer["message"].as_str().unwrap_or("no message").to_owned()),
        }
    }

    pub(super) fn authorize(&self, token: &str, user: &str, rules: &[PolicyRule]) {
        self.users.authorize(self, token, user, rules);
    }

    pub(super) fn revoke(&self, token: &str) {
        self.users.revoke(self, token);
    }

    fn is_refused(&self, token: &str) -> bool {
        self.client.call_as(token, "GET", "/version", &Value::Null).is_ok_and(|(status, _)| status == 401)
    }

    pub(super) fn requests(&self) -> Vec<ApiRequest> {
        requests::read(&self.directory.path().join("audit.log"), &self.users)
    }

    fn wait_until_ready(&self) {
        let is_ready = || {
            self.process().assert_running();
            let is_there = |path: &str| self.administer("GET", path, &Value::Null).is_ok();
            is_there("/readyz")
                && is_there("/api/v1/namespaces/default")
                && is_there("/api/v1/namespaces/kube-system")
        };
        wait_for("kube-apiserver", is_ready, || self.process().last_lines());
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.apiserver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start_etcd(directory: &Path, address: SocketAddr) -> Process {
    let (url, peer) = (format!("http://{address}"), format!("http://{}", free_address()));
    let data = directory.join("etcd");
    let arguments = vec![
        format!("--data-dir={}", data.display()),
        format!("--listen-client-urls={url}"),
        format!("--advertise-client-urls={url}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        "--unsafe-no-fsync".to_owned(),
    ];
    let process = Process::start(Path::new("etcd"), arguments, directory.join("etcd.log"));
    let client = AdminClient::plain(address);
    let is_ready =
        || client.call("GET", "/health", &Value::Null).is_ok_and(|(_, answer)| answer["health"] == "true");
    wait_for("etcd", is_ready, || process.last_lines());
    process
}

/// An authority, and a certificate of 127.0.0.1; its key signs the tokens of service accounts as well.
fn make_certificates(directory: &Path) {
    let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    let request = [&["req", "-x509"], new_key.as_slice()].concat();
    let authority = ["-subj", "/CN=testkit-ca", "-keyout", "ca.key", "-out", "ca.crt"];
    run("openssl", &[&request, authority.as_slice()].concat(), directory);
    let server = ["-CA", "ca.crt", "-CAkey", "ca.key", "-subj", "/CN=kube-apiserver"];
    let names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"];
    let files = ["-keyout", "server.key", "-out", "server.crt"];
    run("openssl", &[&request, server.as_slice(), names.as_slice(), files.as_slice()].concat(), directory);
}

fn apiserver_arguments(directory: &Path, etcd: SocketAddr, address: SocketAddr) -> Vec<String> {
    let file = |name: &str| directory.join(name).display().to_string();
    vec![
        format!("--etcd-servers=http://{etcd}"),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={}", address.port()),
        format!("--cert-dir={}", file("certificates")),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
        format!("--client-ca-file={}", file("ca.crt")),
        format!("--authentication-token-webhook-config-file={}", file("users.json")),
        "--authentication-token-webhook-version=v1".to_owned(),
        "--authentication-token-webhook-cache-ttl=1ms".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        // No controller makes the accounts that it requires.
        "--disable-admission-plugins=ServiceAccount".to_owned(),
        format!("--service-account-key-file={}", file("server.crt")),
        format!("--service-account-signing-key-file={}", file("server.key")),
        "--service-account-issuer=https://testkit.invalid".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
        format!("--audit-policy-file={}", file("audit.yaml")),
        format!("--audit-log-path={}", file("audit.log")),
    ]
}

/// Forwards connections, each way, until the thread is dropped.
fn forward(from: SocketAddr, to: SocketAddr) -> (ServingThread, SocketAddr) {
    ServingThread::start(from, async move |listener| {
        let mut connections = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            connections.spawn(async move {
                if let Ok(mut server) = TcpStream::connect(to).await {
                    _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
            while connections.try_join_next().is_some() {}
        }
    })
}

#[expect(clippy::disallowed_methods, reason = "a program is waited for, without a runtime")]
fn pause() {
    std::thread::sleep(Duration::from_millis(200));
}

fn wait_for(what: &str, mut is_ready: impl FnMut() -> bool, log: impl Fn() -> String) {
    // Two cores that compile may make a start slow.
    for _ in 0..600 {
        if is_ready() {
            return;
        }
        pause();
    }
    panic!("{what} is not ready after two minutes:\n{}", log());
}
