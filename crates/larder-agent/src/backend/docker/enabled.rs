//! A larder with Docker.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder::backend::Backend;
use larder::error_chain;
use larder::gc::{Collector, CollectorBuilder, SpaceReclaimer};
use larder_docker::{DockerBackend, DockerCliEnvironment, EngineConfig, EngineHost, HostError, TlsFiles};
use rustix::fs::Access;

use super::{HOST, PODMAN_HOST};
use crate::Error;
use crate::backend::handle::BackendHandle;
use crate::backend::target::{DOCKER, PODMAN};
use crate::environment::variable;

/// Says that TCP is encrypted.
const TLS: &str = "DOCKER_TLS_VERIFY";
/// The directory with the files for it.
const CERTIFICATES: &str = "DOCKER_CERT_PATH";

/// Where the engine is that a text names, as text.
pub(crate) fn place(text: &str, by: &str) -> Result<String, Error> {
    host(text, by).map(|host| host.to_string())
}

/// The engine that a text names. It is not spoken to yet.
pub(crate) fn open(
    text: &str,
    by: &str,
    request: Option<Duration>,
    connect: Option<Duration>,
) -> Result<BackendHandle, Error> {
    let host = host(text, by)?;
    let mut config = EngineConfig::default();
    if let EngineHost::Tcp { tls: true, .. } = host {
        config.tls = Some(TlsFiles(certificates()?));
    }
    config.request_timeout = request.unwrap_or(config.request_timeout);
    config.connect_timeout = connect.unwrap_or(config.connect_timeout).min(config.request_timeout);
    let engine = DockerBackend::new(host, config).map_err(|error| {
        Error::bad_input(format!("{by} {text}: {}", error_chain(&error)))
            .hint(format!("{TLS} enables TLS, with the files in {CERTIFICATES}"))
    })?;
    Ok(BackendHandle::Docker(Arc::new(engine)))
}

/// Returns the problem of a text that names an engine.
pub(crate) fn check(text: &str) -> Result<(), String> {
    if matches!(text, DOCKER | PODMAN) {
        // Which one that is depends on who asks.
        return Ok(());
    }
    EngineHost::parse(text, false).map(drop).map_err(|error| error.to_string())
}

/// The engine as a backend, and a collector's builder that knows how to ask it.
pub(crate) fn parts(engine: &Arc<DockerBackend>) -> (Arc<dyn Backend>, CollectorBuilder) {
    let backend: Arc<dyn Backend> = engine.clone();
    let builder = Collector::builder(backend.clone()).layers(engine.layers()).feed(Arc::new(engine.feed()));
    (backend, builder)
}

/// The cache of the engine's builder, where it is an engine.
pub(crate) fn builder_cache(handle: &BackendHandle) -> Option<Arc<dyn SpaceReclaimer>> {
    match handle {
        BackendHandle::Docker(engine) => Some(Arc::new(engine.builder_cache())),
        _ => None,
    }
}

fn host(text: &str, by: &str) -> Result<EngineHost, Error> {
    parse(text, variable).map_err(|error| {
        let by = match text {
            DOCKER if variable(HOST).is_some() => HOST,
            PODMAN if variable(PODMAN_HOST).is_some() => PODMAN_HOST,
            _ => by,
        };
        Error::bad_input(format!("{by}: {error}")).hints(error.hint())
    })
}

fn parse(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<EngineHost, HostError> {
    if text == DOCKER {
        return EngineHost::from_environment(&DockerCliEnvironment {
            variable: &variable,
            is_usable: &is_usable,
            read: &read,
        });
    }
    if text == PODMAN {
        return podman(variable, is_usable);
    }
    EngineHost::parse(text, variable(TLS).is_some())
}

/// Where Podman's own client finds its service: `CONTAINER_HOST`, else the socket of this user, else that of root.
fn podman(
    variable: impl Fn(&str) -> Option<String>,
    is_usable: impl Fn(&Path) -> bool,
) -> Result<EngineHost, HostError> {
    if let Some(text) = variable(PODMAN_HOST) {
        return EngineHost::parse(&text, false);
    }
    let default = PathBuf::from("/run/podman/podman.sock");
    let own = variable("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("podman/podman.sock"));
    Ok(EngineHost::Unix(match own {
        Some(own) if is_usable(&own) || !is_usable(&default) => own,
        _ => default,
    }))
}

fn is_usable(path: &Path) -> bool {
    rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK).is_ok()
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs_err::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some),
    }
}

fn certificates() -> Result<PathBuf, Error> {
    if let Some(dir) = variable(CERTIFICATES) {
        return Ok(dir.into());
    }
    let home = variable("HOME").map(|home| Path::new(&home).join(".docker"));
    home.ok_or_else(|| {
        Error::bad_input(format!("{TLS}: no files for TLS: neither {CERTIFICATES} nor HOME is set"))
            .hint(format!("name their directory with {CERTIFICATES}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn podman_is_found_where_its_own_client_finds_it() {
        let found = |variables: &[(&str, &str)], usable: &[&str]| {
            let variable = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            podman(variable, |path| usable.contains(&path.to_str().unwrap_or_default())).unwrap().to_string()
        };
        let (own, root) = ("/u/podman/podman.sock", "/run/podman/podman.sock");
        assert_eq!(found(&[], &[]), format!("unix://{root}"));
        let dir = ("XDG_RUNTIME_DIR", "/u");
        assert_eq!(found(&[dir], &[]), format!("unix://{own}"));
        assert_eq!(found(&[dir], &[own, root]), format!("unix://{own}"));
        assert_eq!(found(&[dir], &[root]), format!("unix://{root}"));
        assert_eq!(found(&[dir, (PODMAN_HOST, "unix:///x.sock")], &[own]), "unix:///x.sock");
        let ssh = |name: &str| (name == PODMAN_HOST).then(|| "ssh://core@host/run/podman.sock".to_owned());
        assert!(matches!(podman(ssh, |_| true), Err(HostError::Ssh(_))));
    }
}
