//! Docker contexts: named engines, in files below `~/.docker`.

use std::path::{Path, PathBuf};

use larder::reference::Digest;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::host::{DockerCliEnvironment, EngineHost, HostError};

/// The TLS files of a context.
const TLS_FILES: [&str; 3] = ["ca.pem", "cert.pem", "key.pem"];

/// The name of the context that means no context.
const DEFAULT: &str = "default";

/// The configuration file of the Docker CLI.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DockerCliConfig {
    current_context: Option<String>,
}

/// `meta.json` of a context.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ContextMetadata {
    endpoints: Endpoints,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Endpoints {
    docker: EngineEndpoint,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct EngineEndpoint {
    host: String,
}

/// The engine of the selected context, if any: `DOCKER_CONTEXT`, else `currentContext` of the CLI's configuration.
pub(crate) fn chosen(around: &DockerCliEnvironment<'_>) -> Result<Option<EngineHost>, HostError> {
    let home = around.set("HOME").map(|home| Path::new(&home).join(".docker"));
    let Some(dir) = around.set("DOCKER_CONFIG").map(PathBuf::from).or(home) else {
        return match around.set("DOCKER_CONTEXT").filter(|name| name != DEFAULT) {
            Some(name) => Err(unknown(&name, "DOCKER_CONFIG and HOME are not set")),
            None => Ok(None),
        };
    };
    let name = match around.set("DOCKER_CONTEXT") {
        Some(name) => Some(name),
        None => {
            read::<DockerCliConfig>(around, &dir.join("config.json"))?.and_then(|file| file.current_context)
        }
    };
    match name.filter(|name| !name.is_empty() && name != DEFAULT) {
        Some(name) => host_of(around, &name, &dir.join("contexts")).map(Some),
        None => Ok(None),
    }
}

fn host_of(around: &DockerCliEnvironment<'_>, name: &str, contexts: &Path) -> Result<EngineHost, HostError> {
    let id = id_of(name);
    let file = contexts.join("meta").join(&id).join("meta.json");
    let Some(meta) = read::<ContextMetadata>(around, &file)? else {
        return Err(unknown(name, &format!("{} not found", file.display())));
    };
    let address = meta.endpoints.docker.host;
    if address.is_empty() {
        return Ok(EngineHost::default_socket(around));
    }
    let host = EngineHost::parse(&address, false)?;
    let certificates = contexts.join("tls").join(&id).join("docker");
    // An unreadable TLS file counts as present: the engine must not be contacted without TLS then.
    let has_tls =
        || TLS_FILES.iter().any(|file| !matches!((around.read)(&certificates.join(file)), Ok(None)));
    if matches!(host, EngineHost::Tcp { .. }) && has_tls() {
        return Err(HostError::ContextTls { name: name.to_owned(), address, certificates });
    }
    Ok(host)
}

/// Name of the directories of a context.
fn id_of(name: &str) -> String {
    Digest::sha256(name).hex().to_owned()
}

fn unknown(name: &str, problem: &str) -> HostError {
    HostError::Context { name: name.to_owned(), problem: problem.to_owned() }
}

/// A file as JSON, if there is one.
fn read<T: DeserializeOwned>(around: &DockerCliEnvironment<'_>, path: &Path) -> Result<Option<T>, HostError> {
    let unreadable = |problem: String| HostError::ClientFile { path: path.to_owned(), problem };
    match (around.read)(path) {
        Ok(None) => Ok(None),
        // The parser's message would quote the file, which may hold passwords: the line number is enough.
        Ok(Some(text)) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| unreadable(format!("line {}: invalid JSON", error.line()))),
        Err(error) => Err(unreadable(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(set: &[(&str, &str)], files: &[(String, &str)]) -> Result<String, String> {
        let variable = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned()).or_else(|| (name == "HOME").then(|| "/h".to_owned()))
        };
        // Nothing here may be written.
        let is_usable = |_: &Path| false;
        let read = |path: &Path| {
            if path.ends_with("docker/key.pem") && files.iter().any(|(file, _)| file.ends_with("key.pem")) {
                return Err(std::io::ErrorKind::PermissionDenied.into());
            }
            Ok(files
                .iter()
                .find(|(file, _)| Path::new(file) == path)
                .map(|(_, text)| text.as_bytes().to_vec()))
        };
        let around = DockerCliEnvironment { variable: &variable, is_usable: &is_usable, read: &read };
        EngineHost::from_environment(&around).map(|host| host.to_string()).map_err(|error| error.to_string())
    }

    fn meta(name: &str) -> String {
        format!("/h/.docker/contexts/meta/{}/meta.json", id_of(name))
    }

    const HOST: &str = r#"{"Name":"rootless","Metadata":{},"Endpoints":{"docker":{"Host":"unix:///run/user/1/docker.sock","SkipTLSVerify":false}}}"#;

    #[test]
    fn the_chosen_context_names_the_engine_unless_docker_s_variable_does() {
        let config = ("/h/.docker/config.json".to_owned(), r#"{"auths":{},"currentContext":"rootless"}"#);
        let files = [config, (meta("rootless"), HOST)];
        assert_eq!(resolved(&[], &files).as_deref(), Ok("unix:///run/user/1/docker.sock"));
        assert_eq!(resolved(&[("DOCKER_HOST", "unix:///a")], &files).as_deref(), Ok("unix:///a"));
        assert_eq!(
            resolved(&[("DOCKER_CONTEXT", "default")], &files).as_deref(),
            Ok("unix:///var/run/docker.sock")
        );
        assert_eq!(
            resolved(&[("DOCKER_CONTEXT", "rootless")], &files[1..]).as_deref(),
            Ok("unix:///run/user/1/docker.sock")
        );
        assert_eq!(resolved(&[], &[]).as_deref(), Ok("unix:///var/run/docker.sock"));
    }

    #[test]
    fn a_context_that_cannot_be_used_is_an_error_and_selects_no_other_engine() {
        let far = (meta("far"), r#"{"Endpoints":{"docker":{"Host":"tcp://h:2376"}}}"#);
        let id = far.0.split('/').nth(5).unwrap();
        let files = [far.clone(), (format!("/h/.docker/contexts/tls/{id}/docker/ca.pem"), "")];
        let chosen = [("DOCKER_CONTEXT", "far")];
        let error = resolved(&chosen, &files).unwrap_err();
        assert!(error.contains("DOCKER_HOST=tcp://h:2376") && error.contains("/tls/"), "{error}");
        let secret = [far.clone(), (format!("/h/.docker/contexts/tls/{id}/docker/key.pem"), "")];
        let error = resolved(&chosen, &secret).unwrap_err();
        assert!(error.contains("DOCKER_TLS_VERIFY=1"), "a file that may not be read is one: {error}");
        assert_eq!(resolved(&chosen, &files[..1]).as_deref(), Ok("tcp://h:2376"));
        let error = resolved(&chosen, &[]).unwrap_err();
        assert!(error.contains("docker context ls"), "{error}");
        let broken = [("/h/.docker/config.json".to_owned(), "{\"auths\": {\"r\": {\"auth\": \"c2VjcmV0\"")];
        let error = resolved(&[], &broken).unwrap_err();
        assert!(error.contains("config.json") && !error.contains("c2VjcmV0"), "{error}");
        let far = [(meta("far"), r#"{"Endpoints":{"docker":{"Host":"ssh://u@h"}}}"#)];
        assert!(resolved(&chosen, &far).unwrap_err().contains("ssh is not supported"));
    }
}
