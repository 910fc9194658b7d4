//! Search paths of docker config files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::config_file::{ConfigFileError, ConfigFileProblem, DockerConfigFormat, read_config_file};
use super::docker_config::{DockerConfig, TokenPolicy};

/// Files to try, in order. The first valid one is used, even if it is empty; files are not merged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SearchPath {
    files: Vec<(PathBuf, DockerConfigFormat)>,
}

/// The result of a search.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfigSearchResult {
    /// The file that is used; `None` if there is none.
    pub path: Option<PathBuf>,
    /// Its content; empty if there is none.
    pub config: DockerConfig,
    /// The files that exist and could not be used, in the order in which they were tried.
    pub skipped: Vec<ConfigFileError>,
}

impl SearchPath {
    /// Tries the given files.
    pub fn new(files: impl IntoIterator<Item = (PathBuf, DockerConfigFormat)>) -> Self {
        SearchPath { files: files.into_iter().collect() }
    }

    /// Kubelet's order: `config.json` in its root directory, the working directory, `$HOME/.docker` and `/.docker`,
    /// then `.dockercfg` in its root directory, the working directory, `$HOME` and `/`.
    pub fn kubelet(root_dir: &Path) -> Self {
        Self::kubelet_from(root_dir, |name| std::env::var_os(name))
    }

    /// As `kubelet`, with the environment as an argument.
    fn kubelet_from(root_dir: &Path, env: impl Fn(&str) -> Option<OsString>) -> Self {
        let home = directory(&env, "HOME");
        let places = |below_home: &str, file: &str| {
            let dirs = [
                Some(root_dir.to_owned()),
                Some(PathBuf::new()),
                home.as_ref().map(|home| home.join(below_home)),
                Some(Path::new("/").join(below_home)),
            ];
            dirs.into_iter().flatten().map(|dir| dir.join(file)).collect::<Vec<_>>()
        };
        let config_json =
            places(".docker", "config.json").into_iter().map(|path| (path, DockerConfigFormat::ConfigJson));
        let dockercfg =
            places("", ".dockercfg").into_iter().map(|path| (path, DockerConfigFormat::Dockercfg));
        SearchPath::new(config_json.chain(dockercfg))
    }

    /// The places of a user of docker or podman: `config.json` in `$DOCKER_CONFIG`, `$HOME/.docker` and `/.docker`,
    /// then `$XDG_RUNTIME_DIR/containers/auth.json`, `$HOME/.config/containers/auth.json` and
    /// `/etc/containers/auth.json`. Not the working directory: a `config.json` there is another program's.
    pub fn user() -> Self {
        Self::user_from(|name| std::env::var_os(name))
    }

    /// As `user`, with the environment as an argument.
    fn user_from(env: impl Fn(&str) -> Option<OsString>) -> Self {
        let below = |variable, file| directory(&env, variable).map(|dir| dir.join(file));
        let files = [
            below("DOCKER_CONFIG", "config.json"),
            below("HOME", ".docker/config.json"),
            Some(PathBuf::from("/.docker/config.json")),
            below("XDG_RUNTIME_DIR", "containers/auth.json"),
            below("HOME", ".config/containers/auth.json"),
            Some(PathBuf::from("/etc/containers/auth.json")),
        ];
        SearchPath::new(files.into_iter().flatten().map(|path| (path, DockerConfigFormat::ConfigJson)))
    }

    /// Reads the files until one is valid. Blocking.
    pub fn find(&self, tokens: TokenPolicy) -> ConfigSearchResult {
        let mut skipped = Vec::new();
        for (path, format) in &self.files {
            match read_config_file(path, *format, tokens) {
                Ok(config) => return ConfigSearchResult { path: Some(path.clone()), config, skipped },
                Err(ConfigFileError { problem: ConfigFileProblem::Missing, .. }) => {}
                Err(error) => skipped.push(error),
            }
        }
        ConfigSearchResult { path: None, config: DockerConfig::default(), skipped }
    }
}

/// A directory from the environment; `None` if the variable is unset or empty.
fn directory(env: &impl Fn(&str) -> Option<OsString>, variable: &str) -> Option<PathBuf> {
    env(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<OsString> {
        let value = match name {
            "HOME" => "/home/ann",
            "XDG_RUNTIME_DIR" => "/run/user/1",
            "DOCKER_CONFIG" => "/conf",
            _ => return None,
        };
        Some(value.into())
    }

    fn texts(path: &SearchPath) -> Vec<String> {
        path.files.iter().map(|(path, _)| path.display().to_string()).collect()
    }

    #[test]
    fn kubelet_looks_in_its_own_places() {
        assert_eq!(
            texts(&SearchPath::kubelet_from(Path::new("/var/lib/kubelet"), env)),
            [
                "/var/lib/kubelet/config.json",
                "config.json",
                "/home/ann/.docker/config.json",
                "/.docker/config.json",
                "/var/lib/kubelet/.dockercfg",
                ".dockercfg",
                "/home/ann/.dockercfg",
                "/.dockercfg",
            ]
        );
    }

    #[test]
    fn a_user_has_the_places_of_docker_and_podman() {
        assert_eq!(
            texts(&SearchPath::user_from(env)),
            [
                "/conf/config.json",
                "/home/ann/.docker/config.json",
                "/.docker/config.json",
                "/run/user/1/containers/auth.json",
                "/home/ann/.config/containers/auth.json",
                "/etc/containers/auth.json",
            ]
        );
        let bare = SearchPath::user_from(|name| (name == "HOME").then(OsString::new));
        assert_eq!(texts(&bare), ["/.docker/config.json", "/etc/containers/auth.json"]);
    }

    #[test]
    fn skipped_files_are_reported_and_missing_ones_are_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = |name: &str| (dir.path().join(name), DockerConfigFormat::ConfigJson);
        fs_err::create_dir(dir.path().join("directory")).expect("a directory");
        fs_err::write(dir.path().join("broken"), "{\"auths\": 1}").expect("written");
        fs_err::write(dir.path().join("sound"), "{}").expect("written");
        fs_err::write(dir.path().join("later"), "{\"auths\": {\"r.example\": {}}}").expect("written");

        let found = SearchPath::new(["missing", "directory", "broken", "sound", "later"].map(file))
            .find(TokenPolicy::Keep);
        assert_eq!(found.path, Some(dir.path().join("sound")));
        assert!(found.config.entries.is_empty(), "the first sound file wins although it is empty");
        let problems: Vec<_> = found.skipped.iter().map(|error| error.problem.to_string()).collect();
        assert_eq!(
            problems,
            ["is a directory, not a file", "line 1, column 11: \"auths\" must be an object"]
        );
    }
}
