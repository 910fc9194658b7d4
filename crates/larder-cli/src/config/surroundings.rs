//! Where things are when nobody says. Pure: who larder runs as, and the variables, are arguments.

use std::path::PathBuf;

/// Places that depend on who runs larder.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Places {
    /// The folder of the store; `None` where no variable leads to one.
    pub(crate) root: Option<PathBuf>,
    /// The socket; `None` where no variable leads to a place for it.
    pub(crate) socket: Option<PathBuf>,
    /// A folder with the configuration of registries that comes before those of the machine.
    pub(crate) certs: Option<PathBuf>,
    /// The file with the settings, read if it is there.
    pub(crate) file: Option<PathBuf>,
}

impl Places {
    /// Those of the machine for root, and of the user for others.
    pub(crate) fn of(is_root: bool, variable: impl Fn(&str) -> Option<String>) -> Places {
        if is_root {
            return Places {
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
        Places {
            socket: runtime.or_else(|| root.clone()).map(|folder| folder.join("larder.sock")),
            certs: config.as_ref().map(|config| config.join("certs.d")),
            file: config.map(|config| config.join("config.yaml")),
            root,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Places {
        Places::of(false, |name| {
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
        assert_eq!(nowhere, Places::default());
    }
}
