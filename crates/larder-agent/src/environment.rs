//! Default paths of the store, the socket, the settings file and registry configuration. Pure: the user and the
//! environment variables are arguments.

use std::path::PathBuf;

/// Default paths, which depend on the user that larder runs as.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DefaultPaths {
    /// Directory of the store; `None` where no variable leads to one.
    pub root: Option<PathBuf>,
    /// The daemon's socket; `None` where no variable leads to a directory for it.
    pub socket: Option<PathBuf>,
    /// Directory with registry configuration that overrides the machine's.
    pub certs: Option<PathBuf>,
    /// The settings file, read if it exists.
    pub file: Option<PathBuf>,
}

impl DefaultPaths {
    /// The paths of this process.
    pub fn current() -> DefaultPaths {
        DefaultPaths::of(rustix::process::geteuid().is_root(), variable)
    }

    /// The machine's for root, the user's for others.
    pub fn of(is_root: bool, variable: impl Fn(&str) -> Option<String>) -> DefaultPaths {
        if is_root {
            return DefaultPaths {
                root: Some("/var/lib/larder".into()),
                socket: Some("/run/larder/larder.sock".into()),
                certs: None,
                file: Some("/etc/larder/config.yaml".into()),
            };
        }
        let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let below = |name: &str, home: &str| absolute(name).or_else(|| Some(absolute("HOME")?.join(home)));
        let root = below("XDG_DATA_HOME", ".local/share").map(|data| data.join("larder"));
        let runtime = absolute("XDG_RUNTIME_DIR").map(|runtime| runtime.join("larder"));
        let config = below("XDG_CONFIG_HOME", ".config").map(|config| config.join("larder"));
        DefaultPaths {
            socket: runtime.or_else(|| root.clone()).map(|dir| dir.join("larder.sock")),
            certs: config.as_ref().map(|config| config.join("certs.d")),
            file: config.map(|config| config.join("config.yaml")),
            root,
        }
    }
}

/// The value of an environment variable. An empty one counts as unset.
pub fn variable(name: &str) -> Option<String> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    value.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> DefaultPaths {
        DefaultPaths::of(false, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_user_has_places_of_their_own() {
        let home = of(&[("HOME", "/home/u")]);
        assert_eq!(home.root, Some("/home/u/.local/share/larder".into()));
        assert_eq!(home.socket, Some("/home/u/.local/share/larder/larder.sock".into()));
        assert_eq!(home.certs, Some("/home/u/.config/larder/certs.d".into()));
        assert_eq!(home.file, Some("/home/u/.config/larder/config.yaml".into()));
        let xdg = of(&[("XDG_DATA_HOME", "/d"), ("XDG_RUNTIME_DIR", "/r"), ("XDG_CONFIG_HOME", "/c")]);
        assert_eq!(xdg.root, Some("/d/larder".into()));
        assert_eq!(xdg.socket, Some("/r/larder/larder.sock".into()));
        assert_eq!(xdg.file, Some("/c/larder/config.yaml".into()));
    }

    #[test]
    fn a_relative_variable_leads_nowhere() {
        let nowhere = of(&[("HOME", "home"), ("XDG_DATA_HOME", "data")]);
        assert_eq!(nowhere, DefaultPaths::default());
    }
}
