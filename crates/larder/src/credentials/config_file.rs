//! Reads one docker config file: bounded, and only a regular file.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::docker_config::{ConfigError, DockerConfig, TokenPolicy, parse_config_json, parse_dockercfg};

/// The largest config file that is read, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Which of the two formats a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DockerConfigFormat {
    /// `config.json`, `auth.json`: entries under `auths`.
    ConfigJson,
    /// `.dockercfg`: entries at the top.
    Dockercfg,
}

/// Why a config file could not be used. Names the file and the position of an error in it; never the content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", .path.display())]
pub struct ConfigFileError {
    /// The file.
    pub path: PathBuf,
    /// The error.
    pub problem: ConfigFileProblem,
}

/// An error of a config file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigFileProblem {
    /// The file does not exist.
    #[error("file not found")]
    Missing,
    /// It is a directory, as a container's bind mount of a missing file makes one.
    #[error("is a directory, not a file")]
    Directory,
    /// It is a pipe, a device or the like.
    #[error("not a regular file")]
    NotAFile,
    /// The system refused to read it.
    #[error("cannot read: {0}")]
    Unreadable(String),
    /// It is larger than [`MAX_CONFIG_BYTES`].
    #[error("larger than {} MiB", MAX_CONFIG_BYTES >> 20)]
    TooLarge,
    /// Its content is broken.
    #[error(transparent)]
    Broken(#[from] ConfigError),
}

impl ConfigFileProblem {
    /// The next step.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ConfigFileProblem::Missing | ConfigFileProblem::NotAFile | ConfigFileProblem::TooLarge => {
                Some("use a docker config file, such as $HOME/.docker/config.json")
            }
            ConfigFileProblem::Directory => Some("use the config.json in it, or remove the directory"),
            ConfigFileProblem::Unreadable(_) => Some("make it readable for this user, or use another file"),
            ConfigFileProblem::Broken(_) => Some("correct the file, or log in again to replace it"),
        }
    }
}

/// Reads and parses one file, at once and blocking. Anything but a valid file is an error.
pub fn read_config_file(
    path: &Path,
    format: DockerConfigFormat,
    tokens: TokenPolicy,
) -> Result<DockerConfig, ConfigFileError> {
    let parse = match format {
        DockerConfigFormat::ConfigJson => parse_config_json,
        DockerConfigFormat::Dockercfg => parse_dockercfg,
    };
    let config = read_bounded(path).and_then(|bytes| Ok(parse(&bytes, tokens)?));
    config.map_err(|problem| ConfigFileError { path: path.to_owned(), problem })
}

fn read_bounded(path: &Path) -> Result<Zeroizing<Vec<u8>>, ConfigFileProblem> {
    // Without NONBLOCK, opening a pipe would wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| problem(&error))?;
    let metadata = file.metadata().map_err(|error| problem(&error))?;
    if metadata.is_dir() {
        return Err(ConfigFileProblem::Directory);
    }
    if !metadata.is_file() {
        return Err(ConfigFileProblem::NotAFile);
    }
    // Allocated in full: a vector that grows leaves copies that are not overwritten.
    let room = usize::try_from(metadata.len().min(MAX_CONFIG_BYTES)).unwrap_or_default() + 64;
    let mut bytes = Zeroizing::new(Vec::with_capacity(room));
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(|error| problem(&error))?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        return Err(ConfigFileProblem::TooLarge);
    }
    Ok(bytes)
}

fn problem(error: &io::Error) -> ConfigFileProblem {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ConfigFileProblem::Missing,
        _ => ConfigFileProblem::Unreadable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem_of(path: &Path) -> ConfigFileProblem {
        read_config_file(path, DockerConfigFormat::ConfigJson, TokenPolicy::Keep)
            .expect_err("no sound file")
            .problem
    }

    #[test]
    fn an_unusable_file_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        assert_eq!(problem_of(&path), ConfigFileProblem::Missing);
        assert_eq!(problem_of(&path.join("below")), ConfigFileProblem::Missing);
        assert_eq!(problem_of(dir.path()), ConfigFileProblem::Directory);
        assert_eq!(problem_of(Path::new("/dev/null")), ConfigFileProblem::NotAFile);

        fs_err::write(&path, "{\n").expect("written");
        let error =
            read_config_file(&path, DockerConfigFormat::ConfigJson, TokenPolicy::Keep).expect_err("broken");
        assert_eq!(
            error.to_string(),
            format!("{}: line 2, column 1: unexpected end of input", path.display())
        );
        assert!(error.problem.hint().is_some());
    }

    #[test]
    fn a_pipe_does_not_hang_the_reader() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
        assert_eq!(problem_of(&path), ConfigFileProblem::NotAFile);
    }

    #[test]
    fn a_file_is_read_up_to_the_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        let limit = usize::try_from(MAX_CONFIG_BYTES).expect("fits");
        fs_err::write(&path, format!("{{}}{}", " ".repeat(limit - 2))).expect("written");
        assert!(read_config_file(&path, DockerConfigFormat::ConfigJson, TokenPolicy::Keep).is_ok());
        fs_err::write(&path, format!("{{}}{}", " ".repeat(limit - 1))).expect("written");
        assert_eq!(problem_of(&path), ConfigFileProblem::TooLarge);
    }
}
