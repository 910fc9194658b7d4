//! A private Docker Engine: its own root, containerd and socket; no bridge, and the machine's firewall is left alone.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use larder_testkit::free_address;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::containerd::unmount_below;
use super::packages::{Package, program};
use super::process::{ServerProcess, WAIT_LIMIT};
use super::tls::Certificates;
use super::{PeerError, PeerResult};

const JSON: &str = "application/json";

/// Differences from the usual private engine.
#[derive(Debug, Clone, Default)]
pub struct DockerdOptions {
    /// The directory below which the engine's root is made. Default: the temporary directory.
    pub root_below: Option<PathBuf>,
    /// Also serve on a TCP port of loopback, with this certificate, for clients with one of the same authority.
    pub tls: Option<Certificates>,
}

/// A dockerd and its state. Dropping it ends the process, which ends the containerd that it started, and removes the
/// state.
#[derive(Debug)]
pub struct Dockerd {
    server: Option<ServerProcess>,
    /// Socket, log, and what is in use while it runs.
    dir: TempDir,
    /// Images and containers.
    root: TempDir,
    /// The port, and what is shown there.
    tls: Option<(u16, Certificates)>,
}

impl Dockerd {
    /// Starts an engine with nothing in it, and waits until it answers.
    ///
    /// Registries on loopback use plain HTTP without configuration.
    pub fn start() -> PeerResult<Dockerd> {
        Dockerd::start_with(DockerdOptions::default())
    }

    /// Starts an engine with nothing in it that is not quite the usual one.
    pub fn start_with(options: DockerdOptions) -> PeerResult<Dockerd> {
        // Short: the socket's path is below it, and so are those of the engine's own sockets.
        let dir = tempfile::Builder::new().prefix("larder-dockerd-").tempdir()?;
        let below = options.root_below.unwrap_or_else(std::env::temp_dir);
        let root = tempfile::Builder::new().prefix("larder-docker-root-").tempdir_in(below)?;
        fs_err::create_dir(dir.path().join("tmp"))?;
        // As often as it takes to see that it tries again: the usual five times take more than a minute.
        fs_err::write(dir.path().join("daemon.json"), r#"{"max-download-attempts": 2}"#)?;
        let tls = options.tls.map(|certificates| (free_address().port(), certificates));
        let mut dockerd = Dockerd { server: None, dir, root, tls };
        dockerd.start_again()?;
        Ok(dockerd)
    }

    /// Starts the process again on the same state and socket. Does nothing while it runs.
    pub fn start_again(&mut self) -> PeerResult<()> {
        if self.server.is_some() {
            return Ok(());
        }
        let dir = self.dir.path();
        let log = dir.join("dockerd.log");
        let mut server = ServerProcess::start(
            "dockerd",
            &program(Package::DockerIo)?,
            |command| {
                command
                    .arg("--config-file")
                    .arg(dir.join("daemon.json"))
                    .arg("--data-root")
                    .arg(self.root.path())
                    .arg("--exec-root")
                    .arg(dir.join("exec"))
                    .arg("--pidfile")
                    .arg(dir.join("pid"))
                    .args(["--iptables=false", "--ip6tables=false", "--bridge=none"])
                    .arg("--host")
                    .arg(self.host())
                    .env("TMPDIR", dir.join("tmp"));
                if let Some((port, made)) = &self.tls {
                    command.args(["--host", &format!("tcp://127.0.0.1:{port}"), "--tlsverify"]);
                    command.arg("--tlscacert").arg(&made.ca);
                    command.arg("--tlscert").arg(&made.certificate).arg("--tlskey").arg(&made.key);
                }
            },
            &log,
            &log,
        )?;
        server.wait_ready(|| self.get("/_ping").is_ok())?;
        self.server = Some(server);
        Ok(())
    }

    /// Ends the process; state and configuration stay.
    pub fn stop(&mut self) {
        self.server = None;
        unmount_below(self.dir.path());
        unmount_below(self.root.path());
    }

    /// Process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(ServerProcess::pid)
    }

    /// Where it serves, such as `unix:///tmp/larder-dockerd-x/d.sock`.
    pub fn host(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// `127.0.0.1:PORT`, where it serves with TLS, if it does.
    pub fn tcp_address(&self) -> Option<String> {
        self.tls.as_ref().map(|(port, _)| format!("127.0.0.1:{port}"))
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("d.sock")
    }

    /// Its data root.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Returns its log so far.
    pub fn log(&self) -> String {
        fs_err::read_to_string(self.dir.path().join("dockerd.log")).unwrap_or_default()
    }

    /// Makes a container of this image that is not started, and returns its id.
    pub fn create_container(&self, image: &str, name: &str) -> PeerResult<String> {
        let body = json!({"Image": image, "Cmd": ["/nothing"], "HostConfig": {"NetworkMode": "none"}});
        let path = format!("/containers/create?name={name}");
        let answer = self.call("POST", &path, JSON, body.to_string().as_bytes())?;
        answer["Id"].as_str().map(str::to_owned).ok_or_else(|| PeerError::new("create a container", answer))
    }

    /// Removes a container.
    pub fn remove_container(&self, container: &str) -> PeerResult<()> {
        self.call("DELETE", &format!("/containers/{container}?force=1"), JSON, b"").map(drop)
    }

    /// Makes an image of what a container is now, whose parent is the container's image.
    pub fn commit(&self, container: &str, repository: &str, tag: &str) -> PeerResult<()> {
        let path = format!("/commit?container={container}&repo={repository}&tag={tag}");
        self.call("POST", &path, JSON, b"{}").map(drop)
    }

    /// Gives an image one more name.
    pub fn tag(&self, image: &str, repository: &str, tag: &str) -> PeerResult<()> {
        let path = format!("/images/{image}/tag?repo={repository}&tag={tag}");
        self.call("POST", &path, JSON, b"").map(drop)
    }

    /// Takes one name off an image, or removes it.
    pub fn remove_image(&self, name: &str) -> PeerResult<()> {
        self.call("DELETE", &format!("/images/{name}"), JSON, b"").map(drop)
    }

    /// Names of its images, with tags and with digests, sorted.
    pub fn image_names(&self) -> PeerResult<Vec<String>> {
        let images = self.get("/images/json")?;
        let names = images.as_array().into_iter().flatten().flat_map(|image| {
            let of = |key: &str| image[key].as_array().cloned().unwrap_or_default();
            [of("RepoTags"), of("RepoDigests")].concat()
        });
        let mut names: Vec<String> = names.filter_map(|name| name.as_str().map(str::to_owned)).collect();
        names.retain(|name| !name.starts_with("<none>"));
        names.sort();
        Ok(names)
    }

    /// Makes an image of one layer from a tar archive of its files, as `docker import` does.
    pub fn import(&self, archive: &[u8], repository: &str, tag: &str) -> PeerResult<()> {
        let path = format!("/images/create?fromSrc=-&repo={repository}&tag={tag}");
        self.call("POST", &path, "application/x-tar", archive).map(drop)
    }

    /// Loads images from an archive as `docker save` writes it.
    pub fn load(&self, archive: &[u8]) -> PeerResult<()> {
        self.call("POST", "/images/load?quiet=1", "application/x-tar", archive).map(drop)
    }

    /// An answer to another client than larder's: what tests compare with.
    pub fn get(&self, path: &str) -> PeerResult<Value> {
        self.call("GET", path, JSON, b"")
    }

    /// One call, in HTTP/1.0: then the answer ends with the connection.
    fn call(&self, method: &str, path: &str, content_type: &str, body: &[u8]) -> PeerResult<Value> {
        let doing = || format!("{method} {path} of dockerd");
        let exchange = || -> std::io::Result<String> {
            let mut stream = UnixStream::connect(self.socket())?;
            stream.set_read_timeout(Some(WAIT_LIMIT))?;
            let length = body.len();
            write!(stream, "{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Type: {content_type}\r\n")?;
            write!(stream, "Content-Length: {length}\r\n\r\n")?;
            stream.write_all(body)?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer)?;
            Ok(String::from_utf8_lossy(&answer).into_owned())
        };
        let answer = exchange().map_err(|error| PeerError::new(doing(), error))?;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        if head.split(' ').nth(1).is_none_or(|code| !code.starts_with('2')) {
            return Err(PeerError::new(doing(), format!("{head} {body}")));
        }
        Ok(serde_json::from_str(body).unwrap_or(Value::Null))
    }
}

impl Drop for Dockerd {
    fn drop(&mut self) {
        self.stop();
    }
}
