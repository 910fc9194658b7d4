//! A private docker-registry: plain or TLS, anonymous or with one user, with its log of requests.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use larder_testkit::free_address;
use tempfile::TempDir;

use super::packages::{Package, program};
use super::process::{ServerProcess, WAIT_LIMIT, poll};
use super::tls::{Certificates, certificates, self_signed};
use super::{PeerError, PeerResult};

/// Who may use a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RegistryAccess {
    /// All clients.
    #[default]
    None,
    /// [`USER`] with [`PASSWORD`], by HTTP basic authentication.
    Basic,
}

/// How a registry is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// Plain HTTP.
    #[default]
    None,
    /// HTTPS with a certificate of an authority that was made for this registry.
    PrivateCa,
    /// HTTPS with a certificate that is its own authority (`CA:TRUE`), as `openssl req -x509` makes it.
    SelfSigned,
}

/// The user that a registry with [`RegistryAccess::Basic`] knows.
pub const USER: &str = "puller";
/// The password of [`USER`].
pub const PASSWORD: &str = "test-password";
/// bcrypt of [`PASSWORD`], the cheapest kind: each request is checked against it.
const PASSWORD_HASH: &str = "$2y$05$abcdefghijklmnopqrstuu34chBxBG/k9ApCErH1wl/WrV4FVTS/q";

/// The password of [`USER`] after [`RegistryProcess::change_password`].
pub const NEW_PASSWORD: &str = "changed-password";
/// bcrypt of [`NEW_PASSWORD`].
const NEW_PASSWORD_HASH: &str = "$2y$05$abcdefghijklmnopqrstuu93uq1Bm7ApGwMROR/kWpFJ4Odmof4ky";

/// Options of a registry.
#[derive(Debug, Clone, Copy, Default)]
pub struct RegistryOptions {
    /// Who may use it.
    pub auth: RegistryAccess,
    /// How it is reached.
    pub tls: TlsMode,
    /// Its port on 127.0.0.1; `None` takes a free one.
    pub port: Option<u16>,
}

/// A request that a registry answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLogLine {
    /// `GET`, `HEAD`, ...
    pub method: String,
    /// Path and query, such as `/v2/shop/web/manifests/1`.
    pub path: String,
    /// HTTP status of the answer.
    pub status: u16,
    /// How the client names itself.
    pub user_agent: String,
}

impl AccessLogLine {
    /// Returns true if the request fetched a blob (a layer or an image's config) and got it.
    pub fn is_blob_fetch(&self) -> bool {
        self.method == "GET" && self.path.contains("/blobs/sha256:") && self.status == 200
    }

    /// Returns true if the request fetched a manifest and got it. Asking for its digest (`HEAD`) does not count.
    pub fn is_manifest_fetch(&self) -> bool {
        self.method == "GET" && self.path.contains("/manifests/") && self.status == 200
    }
}

/// A docker-registry process and its storage. Dropping it ends the process and removes the storage.
#[derive(Debug)]
pub struct RegistryProcess {
    server: Option<ServerProcess>,
    port: u16,
    options: RegistryOptions,
    certificates: Option<Certificates>,
    forgotten: AtomicUsize,
    dir: TempDir,
}

impl RegistryProcess {
    /// Starts an empty registry on 127.0.0.1 and waits until it serves.
    pub fn start(options: RegistryOptions) -> PeerResult<RegistryProcess> {
        let dir = tempfile::Builder::new().prefix("larder-registry-").tempdir()?;
        fs_err::create_dir_all(dir.path().join("storage"))?;
        write_password(dir.path(), PASSWORD_HASH)?;
        let certificates = match options.tls {
            TlsMode::None => None,
            TlsMode::PrivateCa => Some(certificates(dir.path())?),
            TlsMode::SelfSigned => Some(self_signed(dir.path())?),
        };
        let mut registry = RegistryProcess {
            server: None,
            port: options.port.unwrap_or_else(|| free_address().port()),
            options,
            certificates,
            forgotten: AtomicUsize::new(0),
            dir,
        };
        registry.start_again()?;
        Ok(registry)
    }

    /// Starts the process again on the same port and storage. Does nothing while it runs.
    pub fn start_again(&mut self) -> PeerResult<()> {
        if self.server.is_some() {
            return Ok(());
        }
        if TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            return Err(PeerError::new("start docker-registry", format!("port {} is in use", self.port)));
        }
        let dir = self.dir.path();
        fs_err::write(dir.join("config.yml"), self.config())?;
        let mut server = ServerProcess::start(
            "docker-registry",
            &program(Package::DockerRegistry)?,
            |command| {
                command.arg("serve").arg(dir.join("config.yml"));
            },
            &dir.join("access.log"),
            &dir.join("registry.log"),
        )?;
        let port = self.port;
        server.wait_ready(|| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok())?;
        self.server = Some(server);
        Ok(())
    }

    /// Ends the process; storage, port and log stay.
    pub fn stop(&mut self) {
        self.server = None;
    }

    /// From now on [`USER`] has [`NEW_PASSWORD`] and no other. The registry notices the changed file.
    pub fn change_password(&self) -> PeerResult<()> {
        write_password(self.dir.path(), NEW_PASSWORD_HASH)
    }

    /// The users that it refused, in order; repeated refusals of one user appear once.
    pub fn refused_users(&self) -> Vec<String> {
        self.settle();
        let log = fs_err::read_to_string(self.dir.path().join("registry.log")).unwrap_or_default();
        let mut users: Vec<String> = log.lines().filter_map(refused_user).map(str::to_owned).collect();
        users.dedup();
        users
    }

    /// Process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(ServerProcess::pid)
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `127.0.0.1:PORT`, the host part of its images' names.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The name of an image in it: `127.0.0.1:PORT/NAME`.
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address())
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        match self.options.tls {
            TlsMode::None => "http",
            TlsMode::PrivateCa | TlsMode::SelfSigned => "https",
        }
    }

    /// The certificate of its authority, when it has one.
    pub fn ca(&self) -> Option<&Path> {
        self.certificates.as_ref().map(|certificates| certificates.ca.as_path())
    }

    /// Returns whether the registry asks for a password.
    pub fn auth(&self) -> RegistryAccess {
        self.options.auth
    }

    /// Returns the requests answered since it was first started, or since [`forget_requests`](Self::forget_requests),
    /// oldest
    /// first. A request that is still being answered is not in it.
    pub fn requests(&self) -> Vec<AccessLogLine> {
        self.settle();
        self.all_requests().split_off(self.forgotten.load(Ordering::SeqCst))
    }

    /// Begins a new page: requests up to now (those that pushed a test's images, say) are not reported any more.
    pub fn forget_requests(&self) {
        self.settle();
        self.forgotten.store(self.all_requests().len(), Ordering::SeqCst);
    }

    fn all_requests(&self) -> Vec<AccessLogLine> {
        self.log_text().lines().filter_map(parse_access_line).filter(|request| !is_marker(request)).collect()
    }

    fn log_text(&self) -> String {
        fs_err::read_to_string(self.dir.path().join("access.log")).unwrap_or_default()
    }

    /// Waits until the log has caught up: a line is written only after the client has its answer, so a request of
    /// our own that shows up in the log means that the earlier ones are there too.
    fn settle(&self) {
        static MARKERS: AtomicUsize = AtomicUsize::new(0);
        if self.server.is_none() || self.options.tls != TlsMode::None {
            return;
        }
        let marker = format!("{MARKER}{}", MARKERS.fetch_add(1, Ordering::SeqCst));
        if get(self.port, &marker).is_ok() {
            poll(WAIT_LIMIT, || self.log_text().contains(&format!("{marker} ")).then_some(()));
        }
    }

    fn config(&self) -> String {
        let dir = self.dir.path().display();
        let port = self.port;
        let tls = self.certificates.as_ref().map_or_else(String::new, |made| {
            format!("  tls: {{certificate: {}, key: {}}}\n", made.certificate.display(), made.key.display())
        });
        let auth = match self.options.auth {
            RegistryAccess::None => String::new(),
            RegistryAccess::Basic => {
                format!("auth: {{htpasswd: {{realm: larder, path: {dir}/htpasswd}}}}\n")
            }
        };
        format!(
            "version: 0.1\n\
             log: {{level: warn, accesslog: {{disabled: false}}}}\n\
             storage: {{filesystem: {{rootdirectory: {dir}/storage}}, delete: {{enabled: true}}}}\n\
             http:\n  addr: 127.0.0.1:{port}\n{tls}{auth}"
        )
    }

    /// Where its blobs and manifests lie, for tests that damage them.
    pub fn storage(&self) -> PathBuf {
        self.dir.path().join("storage")
    }
}

const MARKER: &str = "/v2/?log-has-caught-up=";

fn is_marker(request: &AccessLogLine) -> bool {
    request.path.starts_with(MARKER)
}

/// The file is replaced as a whole: the registry may read it at any moment.
fn write_password(dir: &Path, hash: &str) -> PeerResult<()> {
    let new = dir.join("htpasswd.new");
    fs_err::write(&new, format!("{USER}:{hash}\n"))?;
    Ok(fs_err::rename(new, dir.join("htpasswd"))?)
}

/// The user in a log line about a refused request.
fn refused_user(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("error authenticating user \\\"")?;
    rest.split_once("\\\"").map(|(user, _)| user)
}

fn get(port: u16, path: &str) -> std::io::Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")?;
    stream.read_to_end(&mut Vec::new()).map(drop)
}

/// A line of the "combined" log format: `HOST - USER [TIME] "METHOD PATH HTTP/1.1" STATUS SIZE ...`.
fn parse_access_line(line: &str) -> Option<AccessLogLine> {
    let (_, rest) = line.split_once("] \"")?;
    let (request, rest) = rest.split_once("\" ")?;
    let mut words = request.split(' ');
    Some(AccessLogLine {
        method: words.next()?.to_owned(),
        path: words.next()?.to_owned(),
        status: rest.split(' ').next()?.parse().ok()?,
        user_agent: rest.rsplit('"').nth(1)?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_lines_are_understood() {
        let line =
            r#"127.0.0.1 - - [21/Nov/2026:10:34:07 +0000] "GET /v2/x/manifests/1 HTTP/1.1" 404 91 "" "curl""#;
        let request = parse_access_line(line).unwrap();
        assert_eq!(
            request,
            AccessLogLine {
                method: "GET".into(),
                path: "/v2/x/manifests/1".into(),
                status: 404,
                user_agent: "curl".into()
            }
        );
        assert!(!request.is_manifest_fetch(), "it was not found");
        assert_eq!(parse_access_line("time=... level=info msg=\"listening\""), None);
    }
}
