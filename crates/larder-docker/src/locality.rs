//! Whether an engine's files are on this machine.

use std::io;
use std::path::{Path, PathBuf};

use crate::api::EngineInfo;
use crate::files::GraphDriverFiles;
use crate::host::EngineHost;

/// Number of images that are checked: one is enough, and some may just have been removed.
const LOOKED_FOR: usize = 100;

/// The identity of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostIdentity {
    pub(crate) name: String,
    pub(crate) kernel: String,
}

impl HostIdentity {
    /// This machine.
    fn current() -> HostIdentity {
        let uname = rustix::system::uname();
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        HostIdentity { name: text(uname.nodename()), kernel: text(uname.release()) }
    }
}

/// Whether the engine's directories are those of the same name here. A socket may lead to another machine or to a
/// virtual machine; an engine without an identity is trusted. Cloned machines and containers of one pod share a host
/// name, so the files are checked too where they can be read. `images` are IDs that the engine lists.
pub(crate) async fn is_local(host: &EngineHost, info: &EngineInfo, images: &[&str]) -> bool {
    if !is_on(&HostIdentity::current(), host, info) {
        return false;
    }
    let images: Vec<String> = images.iter().take(LOOKED_FOR).map(|id| (*id).to_owned()).collect();
    let info = info.clone();
    let look = move || has_its_files(&info, &images.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(look).await.unwrap_or(false)
}

fn is_on(this: &HostIdentity, host: &EngineHost, info: &EngineInfo) -> bool {
    let engine = HostIdentity { name: info.name.clone(), kernel: info.kernel_version.clone() };
    host.socket().is_some() && (engine.name.is_empty() || engine == *this)
}

/// Whether files that the engine should have exist here. Unreadable paths count as present.
fn has_its_files(info: &EngineInfo, images: &[&str]) -> bool {
    if info.docker_root_dir.is_empty() {
        return true;
    }
    let root = Path::new(&info.docker_root_dir);
    match fs_err::read_to_string(root.join("engine-id")) {
        Ok(own) if !info.id.is_empty() => return own.trim() == info.id,
        _ => {}
    }
    let Some(files) = GraphDriverFiles::reported(info) else { return true };
    if is_missing(root) {
        return false;
    }
    // Podman stores its images in other files.
    if images.is_empty() || is_missing(&files.of_images()) {
        return true;
    }
    images.iter().any(|id| !is_missing(&files.config(id)))
}

fn is_missing(path: &Path) -> bool {
    fs_err::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// A directory of the engine. One on another machine must not be mistaken for that of the same name here: it gets
/// the engine's address as a prefix.
pub(crate) fn qualify_path(host: &EngineHost, info: &EngineInfo, is_here: bool, dir: PathBuf) -> PathBuf {
    if is_here {
        return dir;
    }
    PathBuf::from(match host {
        EngineHost::Tcp { address, .. } => format!("/tcp://{address}{}", dir.display()),
        EngineHost::Unix(_) => format!("/docker://{}{}", info.name, dir.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_behind_a_socket_is_here_if_it_names_this_machine() {
        let this = HostIdentity { name: "edge".into(), kernel: "6.1.0".into() };
        let unix = EngineHost::Unix("/d.sock".into());
        let tcp = EngineHost::Tcp { address: "h:1".into(), tls: false };
        let engine = |name: &str, kernel: &str| EngineInfo {
            name: name.into(),
            kernel_version: kernel.into(),
            ..EngineInfo::default()
        };
        assert!(is_on(&this, &unix, &engine("edge", "6.1.0")));
        assert!(is_on(&this, &unix, &EngineInfo::default()), "it does not say");
        assert!(!is_on(&this, &unix, &engine("build", "6.1.0")), "a socket that was forwarded");
        assert!(!is_on(&this, &unix, &engine("edge", "6.6.0-linuxkit")), "a machine inside this one");
        assert!(!is_on(&this, &tcp, &engine("edge", "6.1.0")));
    }

    #[test]
    fn a_remote_directory_is_not_the_local_one_of_the_same_path() {
        let data = || PathBuf::from("/var/lib/docker");
        let tcp = EngineHost::Tcp { address: "h:1".into(), tls: false };
        let of_tcp = qualify_path(&tcp, &EngineInfo::default(), false, data());
        assert_eq!(of_tcp, PathBuf::from("/tcp://h:1/var/lib/docker"));
        let unix = EngineHost::Unix("/d.sock".into());
        let desktop = EngineInfo { name: "docker-desktop".into(), ..EngineInfo::default() };
        let remote = qualify_path(&unix, &desktop, false, data());
        assert_eq!(remote, PathBuf::from("/docker://docker-desktop/var/lib/docker"));
        assert_eq!(qualify_path(&unix, &EngineInfo::default(), true, data()), data());
    }

    /// Returns the information of an engine that has its files below this directory.
    fn below(root: &Path) -> EngineInfo {
        let docker_root_dir = root.display().to_string();
        EngineInfo { docker_root_dir, driver: "overlay2".into(), id: "A:B".into(), ..EngineInfo::default() }
    }

    #[test]
    fn an_engine_without_local_images_is_remote_whatever_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let has = |info: &EngineInfo, images: &[&str]| has_its_files(info, images);
        let info = below(dir.path());
        assert!(has(&info, &["sha256:a"]), "podman has no such files");
        let configs = dir.path().join("image/overlay2/imagedb/content/sha256");
        fs_err::create_dir_all(&configs).unwrap();
        fs_err::write(configs.join("a"), "{}").unwrap();
        assert!(has(&info, &["sha256:gone", "sha256:a"]));
        assert!(has(&info, &[]), "it has none");
        assert!(!has(&info, &["sha256:b", "sha256:c"]), "another's images");
        assert!(
            !has(&EngineInfo { driver: "vfs".into(), ..info.clone() }, &["sha256:a"]),
            "another's driver"
        );
        assert!(!has(&below(&dir.path().join("missing")), &[]), "another's root");
        assert!(has(&EngineInfo::default(), &["sha256:b"]), "it does not say where");
        let status = vec![vec!["driver-type".into(), "io.containerd.snapshotter.v1".into()]];
        let store = EngineInfo { driver_status: status, ..below(&dir.path().join("missing")) };
        assert!(has(&store, &["sha256:b"]), "containerd's store has other files");
    }

    #[test]
    fn an_engine_with_an_id_is_the_one_that_wrote_it_down() {
        let dir = tempfile::tempdir().unwrap();
        let info = below(dir.path());
        fs_err::write(dir.path().join("engine-id"), "A:B\n").unwrap();
        fs_err::create_dir_all(dir.path().join("image/overlay2")).unwrap();
        assert!(has_its_files(&info, &["sha256:just-gone"]));
        let other = EngineInfo { id: "C:D".into(), ..info.clone() };
        assert!(!has_its_files(&other, &[]), "its name and kernel may be the same");
        let silent = EngineInfo { id: String::new(), ..info };
        assert!(has_its_files(&silent, &[]) && !has_its_files(&silent, &["sha256:a"]));
    }
}
