//! Whether an engine's files are on this machine.

use std::path::PathBuf;

use crate::answers::Info;
use crate::host::EngineHost;

/// A machine, as it tells others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Machine {
    pub(crate) name: String,
    pub(crate) kernel: String,
}

impl Machine {
    /// This one.
    fn this() -> Machine {
        let told = rustix::system::uname();
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        Machine { name: text(told.nodename()), kernel: text(told.release()) }
    }
}

/// Whether the engine's folders are those of the same name here. A socket may lead to a machine elsewhere, or to one that
/// runs inside this one; an engine that does not say where it is, is believed.
pub(crate) fn is_here(host: &EngineHost, info: &Info) -> bool {
    is_on(&Machine::this(), host, info)
}

fn is_on(this: &Machine, host: &EngineHost, info: &Info) -> bool {
    let engine = Machine { name: info.name.clone(), kernel: info.kernel_version.clone() };
    host.socket().is_some() && (engine.name.is_empty() || engine == *this)
}

/// A folder of the engine's. One that is elsewhere must not be mistaken for that of the same name here: it is named with
/// the engine's address.
pub(crate) fn folder(host: &EngineHost, info: &Info, folder: PathBuf) -> PathBuf {
    if is_here(host, info) {
        return folder;
    }
    PathBuf::from(match host {
        EngineHost::Tcp { address, .. } => format!("/tcp://{address}{}", folder.display()),
        EngineHost::Unix(_) => format!("/docker://{}{}", info.name, folder.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_behind_a_socket_is_here_if_it_names_this_machine() {
        let this = Machine { name: "edge".into(), kernel: "6.1.0".into() };
        let unix = EngineHost::Unix("/d.sock".into());
        let tcp = EngineHost::Tcp { address: "h:1".into(), tls: false };
        let engine = |name: &str, kernel: &str| Info {
            name: name.into(),
            kernel_version: kernel.into(),
            ..Info::default()
        };
        assert!(is_on(&this, &unix, &engine("edge", "6.1.0")));
        assert!(is_on(&this, &unix, &Info::default()), "it does not say");
        assert!(!is_on(&this, &unix, &engine("build", "6.1.0")), "a socket that was forwarded");
        assert!(!is_on(&this, &unix, &engine("edge", "6.6.0-linuxkit")), "a machine inside this one");
        assert!(!is_on(&this, &tcp, &engine("edge", "6.1.0")));
    }

    #[test]
    fn a_folder_elsewhere_is_not_that_of_the_same_name_here() {
        let data = || PathBuf::from("/var/lib/docker");
        let tcp = EngineHost::Tcp { address: "h:1".into(), tls: false };
        assert_eq!(folder(&tcp, &Info::default(), data()), PathBuf::from("/tcp://h:1/var/lib/docker"));
        let unix = EngineHost::Unix("/d.sock".into());
        let desktop = Info { name: "docker-desktop".into(), ..Info::default() };
        let elsewhere = folder(&unix, &desktop, data());
        assert_eq!(elsewhere, PathBuf::from("/docker://docker-desktop/var/lib/docker"));
        assert_eq!(folder(&unix, &Info::default(), data()), data());
    }
}
