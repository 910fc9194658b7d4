//! A daemon under test, and a client of its socket that asks as kubelet does.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use larder::backend::{Backend as _, BackendError, Image, ImageSpec, ProgressReporter, RemoveOptions};
use larder::credentials::Credential;
use larder::reference::ImageId;
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::process::{WAIT_LIMIT, poll};
use larder_testkit_peers::wire::RawConnection;
use tokio::runtime::Runtime;

use crate::world::{LarderOutput, LarderProcess, RuntimeFixture};

/// A daemon, and a client of its socket.
pub(crate) struct CriDaemon {
    pub(crate) running: LarderProcess,
    pub(crate) socket: PathBuf,
    pub(crate) client: CriBackend,
    pub(crate) runtime: Runtime,
}

impl CriDaemon {
    /// On the backend of a world.
    pub(crate) fn of(world: &RuntimeFixture) -> CriDaemon {
        CriDaemon::with(world, &[])
    }

    /// Starts a daemon with more arguments.
    pub(crate) fn with(world: &RuntimeFixture, arguments: &[&str]) -> CriDaemon {
        let socket = PathBuf::from(world.path("larder.sock"));
        let serve = ["serve", "--socket", &socket.to_string_lossy()];
        CriDaemon::at(socket.clone(), world.start_larder(&[&serve, arguments].concat()))
    }

    /// One that was started, and will listen there.
    pub(crate) fn at(socket: PathBuf, mut running: LarderProcess) -> CriDaemon {
        let listens = || (running.is_finished() || UnixStream::connect(&socket).is_ok()).then_some(());
        let up = poll(WAIT_LIMIT, listens).is_some() && !running.is_finished();
        assert!(up, "larder serve does not serve: {}", running.stderr());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        CriDaemon { running, client: client_of(socket.clone()), socket, runtime }
    }

    pub(crate) fn pull(&self, name: &str) -> Result<ImageId, BackendError> {
        self.pull_as(name, None)
    }

    pub(crate) fn pull_as(
        &self,
        name: &str,
        credential: Option<&Credential>,
    ) -> Result<ImageId, BackendError> {
        let progress = ProgressReporter::unwatched();
        self.runtime.block_on(self.client.pull(&ImageSpec::named(name), credential, None, &progress))
    }

    #[track_caller]
    pub(crate) fn status(&self, name: &str) -> Option<Image> {
        self.runtime.block_on(self.client.status(&ImageSpec::named(name))).unwrap()
    }

    #[track_caller]
    pub(crate) fn remove(&self, name: &str) {
        self.runtime
            .block_on(self.client.remove(&ImageSpec::named(name), &RemoveOptions::default()))
            .unwrap();
    }

    pub(crate) fn list(&self) -> Vec<Image> {
        self.runtime.block_on(self.client.list()).unwrap()
    }

    /// Bytes that images take, as `ImageFsInfo` says.
    pub(crate) fn used(&self) -> u64 {
        let filesystems = self.runtime.block_on(self.client.filesystems()).unwrap();
        filesystems.image[0].used_bytes.expect("a number of bytes")
    }

    pub(crate) fn metrics(&self) -> String {
        self.get("/metrics")
    }

    /// The sum of a metric over all its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let page = self.metrics();
        let of_it = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            rest.starts_with([' ', '{']).then(|| rest.rsplit(' ').next()?.parse::<f64>().ok()).flatten()
        });
        of_it.sum()
    }

    /// Status line, headers and page of a plain request.
    pub(crate) fn get(&self, path: &str) -> String {
        self.get_as(path, "*/*")
    }

    /// Requests a path in one of these formats.
    pub(crate) fn get_as(&self, path: &str, accept: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: larder\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.get("/readyz").starts_with("HTTP/1.1 200")
    }

    /// Waits until its log has so many lines with this text.
    #[track_caller]
    pub(crate) fn wait_for_log(&self, text: &str, lines: usize) {
        let found = poll(WAIT_LIMIT, || (self.logged(text) >= lines).then_some(()));
        assert!(found.is_some(), "waited for {lines} x {text:?} in:\n{}", self.running.stderr());
    }

    /// How many lines of its log have this text.
    pub(crate) fn logged(&self, text: &str) -> usize {
        self.running.stderr().lines().filter(|line| line.contains(text)).count()
    }

    /// Stops it as a service manager does, and waits for its end.
    pub(crate) fn stop(self) -> LarderOutput {
        self.running.terminate();
        self.running.finish()
    }

    /// A connection that adds nothing to requests.
    pub(crate) fn wire(&self) -> RawConnection {
        self.runtime.block_on(RawConnection::connect(&self.socket))
    }
}

pub(crate) fn client_of(socket: PathBuf) -> CriBackend {
    CriBackend::new(Endpoint::at(socket), CriConfig::default())
}
