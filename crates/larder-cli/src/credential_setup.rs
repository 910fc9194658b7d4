//! The user's own credentials: named on the command line, else from docker's and podman's config files.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::Arc;

use larder::credentials::helpers::HelperNames;
use larder::credentials::plugin::Plugins;
use larder::credentials::{
    ConfigFileError, CredentialProvider, CredentialSource, DockerConfig, DockerConfigEntry,
    DockerConfigFormat, NodeKeyring, ProgramResultLog, PullSecret, SearchPath, Secret, SecretCoordinates,
    TokenPolicy, encode_entry, read_config_file,
};
use larder::reference::Reference;
use larder_agent::backend::providers;
use zeroize::Zeroizing;

use crate::args::CredentialArgs;
use crate::failure::Failure;
use crate::printer::Printer;
use larder_agent::registry::UserCredentials;

/// The longest password that is read, in bytes. Tokens of cloud registries have a few thousand.
const MAX_PASSWORD_BYTES: u64 = 64 * 1024;
/// Capacity for one password, in bytes; more than the maximum.
const PASSWORD_CAPACITY: usize = 65 * 1024;

/// The user's own credentials.
pub(crate) struct CredentialSetup {
    /// All of them.
    pub(crate) sources: NodeKeyring,
    /// Credentials of programs alone, for a node in this process.
    pub(crate) programs: Arc<dyn Fn() -> NodeKeyring + Send + Sync>,
    /// Their names, without secrets.
    pub(crate) candidates: Arc<UserCredentials>,
    /// The others, which go with each request.
    pub(crate) secret: Option<PullSecret>,
}

/// Credentials for pulls of these images, beside the pull secrets of pods, and their names.
pub(crate) fn gather<'a>(
    args: &CredentialArgs,
    tokens: TokenPolicy,
    images: impl IntoIterator<Item = &'a str>,
    out: &Printer,
) -> Result<CredentialSetup, Failure> {
    let answers = ProgramResultLog::default();
    let plugins = match (&args.image_credential_provider_config, &args.image_credential_provider_bin_dir) {
        (Some(config), Some(programs)) => {
            Some(Arc::new(providers::plugins(config, programs, None)?.with_result_log(answers.clone())))
        }
        _ => None,
    };
    if let Some(username) = &args.username {
        let registry = only_registry(images)?;
        let password =
            read_password(io::stdin().lock(), "larder pull --username USER --password-stdin IMAGE")?;
        let entry =
            DockerConfigEntry { username: username.clone(), password, ..DockerConfigEntry::default() };
        let config = DockerConfig::with_entry(registry, entry);
        return Ok(joined(Some("--username".to_owned()), &config, plugins, tokens, answers));
    }
    let (name, config) = match &args.authfile {
        Some(file) => {
            let config = read_config_file(file, DockerConfigFormat::ConfigJson, tokens)
                .map_err(|error| unusable(&error))?;
            (Some(file.display().to_string()), config)
        }
        None => search(&SearchPath::user(), tokens, out),
    };
    Ok(joined(name, &config, plugins, tokens, answers))
}

/// The programs that a pull without flags asks.
pub(crate) fn usual_programs(tokens: TokenPolicy) -> NodeKeyring {
    let found = SearchPath::user().find(tokens);
    let name = found.path.map(|path| path.display().to_string());
    (joined(name, &found.config, None, tokens, ProgramResultLog::default()).programs)()
}

fn joined(
    name: Option<String>,
    config: &DockerConfig,
    plugins: Option<Arc<Plugins>>,
    tokens: TokenPolicy,
    answers: ProgramResultLog,
) -> CredentialSetup {
    let secret = name.as_ref().map(|name| as_secret(name, config, tokens));
    // What it pulls may be used by those who have the same login, and not by every pod.
    let owner = secret.as_ref().map(|secret| CredentialSource::Secret(secret.coordinates.clone()));
    let mut candidates = UserCredentials::new(name.map(|name| (name, config)), tokens);
    if tokens == TokenPolicy::Keep {
        candidates = candidates.with_helpers(HelperNames::from_config(config));
    }
    if let Some(plugins) = &plugins {
        candidates = candidates.with_plugins(Arc::clone(plugins));
    }
    let candidates = Arc::new(candidates.with_results(answers.clone()));
    let names_alone = DockerConfig { entries: BTreeMap::new(), ..config.clone() };
    let programs = CredentialPrograms { tokens, owner, plugins, answers };
    let sources = programs.with(config);
    CredentialSetup { sources, programs: Arc::new(move || programs.with(&names_alone)), candidates, secret }
}

/// Programs that give credentials.
struct CredentialPrograms {
    tokens: TokenPolicy,
    /// Who owns what they give.
    owner: Option<CredentialSource>,
    plugins: Option<Arc<Plugins>>,
    answers: ProgramResultLog,
}

impl CredentialPrograms {
    /// They and the entries of this configuration, which also names the helpers.
    fn with(&self, config: &DockerConfig) -> NodeKeyring {
        let mut sources = NodeKeyring::fixed(config).with_tokens(self.tokens);
        if let Some(owner) = &self.owner {
            sources = sources.owned_by(owner.clone());
        }
        if let Some(helpers) = providers::helpers(self.tokens) {
            sources = sources.with_helpers(helpers.with_result_log(self.answers.clone()));
        }
        if let Some(plugins) = &self.plugins {
            sources = sources.with_provider(Arc::clone(plugins) as Arc<dyn CredentialProvider>);
        }
        sources
    }
}

/// A pull secret with the same credentials.
fn as_secret(name: &str, config: &DockerConfig, tokens: TokenPolicy) -> PullSecret {
    // An entry without a credential stands for what a helper has; kubelet, which asks no helper, sends it.
    let filled = config.entries.iter().filter(|(_, entry)| {
        let texts = [entry.password.reveal(), entry.identity_token.reveal(), entry.registry_token.reveal()];
        tokens == TokenPolicy::Ignore
            || !entry.username.is_empty()
            || texts.iter().any(|text| !text.is_empty())
    });
    let entries = filled.map(|(location, entry)| {
        (serde_json::Value::from(location.as_str()).to_string(), encode_entry(entry))
    });
    let entries: Vec<_> = entries.collect();
    // Sized up front: a growing text leaves copies in memory that are not wiped.
    let room =
        entries.iter().map(|(location, entry)| location.len() + entry.reveal().len() + 2).sum::<usize>();
    let mut document = String::with_capacity(room + 16);
    document.push_str("{\"auths\":{");
    for (number, (location, entry)) in entries.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        document.extend([comma, location, ":", entry.reveal()]);
    }
    document.push_str("}}");
    PullSecret {
        kind: "kubernetes.io/dockerconfigjson".to_owned(),
        coordinates: SecretCoordinates { name: name.to_owned(), ..SecretCoordinates::default() },
        data: BTreeMap::from([(".dockerconfigjson".to_owned(), document.into_bytes())]),
    }
}

/// The first usable file, by name, and what it holds.
fn search(path: &SearchPath, tokens: TokenPolicy, out: &Printer) -> (Option<String>, DockerConfig) {
    let found = path.find(tokens);
    for skipped in &found.skipped {
        out.warning(format_args!("skipped credentials: {skipped}"));
    }
    if let Some(path) = &found.path {
        tracing::info!("credentials from {}", path.display());
    }
    (found.path.map(|path| path.display().to_string()), found.config)
}

fn unusable(error: &ConfigFileError) -> Failure {
    Failure::bad_input(format!("--authfile: {error}")).hints(error.problem.hint())
}

/// The registry of the images. A password is sent to one registry only.
fn only_registry<'a>(images: impl IntoIterator<Item = &'a str>) -> Result<String, Failure> {
    let mut registries: Vec<String> = images
        .into_iter()
        .filter_map(|image| Reference::parse(image).ok())
        .map(|image| image.registry().to_owned())
        .collect();
    registries.sort();
    registries.dedup();
    match registries.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::bad_input("--username: no image to use it for")),
        several => Err(Failure::bad_input(format!(
            "--username: the images are in several registries ({})",
            several.join(", ")
        ))
        .hint("pull from one registry at a time, or use --authfile with an entry for each")),
    }
}

/// The password, without the line break after it. `example` is a command that reads one.
pub(crate) fn read_password(from: impl Read, example: &str) -> Result<Secret, Failure> {
    // Sized up front: a growing vector leaves copies in memory that are not wiped.
    let mut bytes = Zeroizing::new(Vec::with_capacity(PASSWORD_CAPACITY));
    let read = from.take(MAX_PASSWORD_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::bad_input(format!("--password-stdin: {error}")))?;
    if bytes.len() as u64 > MAX_PASSWORD_BYTES {
        return Err(Failure::bad_input("--password-stdin: larger than 64 KiB"));
    }
    let text =
        std::str::from_utf8(&bytes).map_err(|_| Failure::bad_input("--password-stdin: not valid UTF-8"))?;
    let line = text.strip_suffix('\n').unwrap_or(text);
    let password = line.strip_suffix('\r').unwrap_or(line);
    if password.is_empty() {
        return Err(Failure::bad_input("--password-stdin: standard input is empty")
            .hint(format!("pipe the password in: echo \"$TOKEN\" | {example}")));
    }
    Ok(Secret::new(password))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_break_after_a_password_is_not_part_of_it() {
        for text in ["pantry", "pantry\n", "pantry\r\n"] {
            assert_eq!(
                read_password(text.as_bytes(), "x").map(|password| password.reveal().to_owned()),
                Ok("pantry".into())
            );
        }
        let spaces = read_password(" a b \n".as_bytes(), "x").expect("spaces are part of it");
        assert_eq!(spaces.reveal(), " a b ");
    }

    #[test]
    fn the_archive_reaches_the_daemon_unchanged() {
        let entry = DockerConfigEntry {
            username: "b\"ob".into(),
            password: Secret::new("p\u{e9}:\\"),
            identity_token: Secret::new("t"),
            ..DockerConfigEntry::default()
        };
        let config = DockerConfig::with_entry("r.example/\"x\"", entry);
        let secret = joined(
            Some("/home/me/config.json".into()),
            &config,
            None,
            TokenPolicy::Keep,
            ProgramResultLog::default(),
        );
        let secret = secret.secret.unwrap();
        assert_eq!(secret.docker_config(TokenPolicy::Keep).unwrap().unwrap().entries, config.entries);
        assert!(!format!("{secret:?}").contains("ob"));
    }

    #[test]
    fn no_password_and_endless_passwords_are_refused() {
        let empty = read_password("\n".as_bytes(), "larder login").unwrap_err();
        assert!(empty.next_steps()[0].to_string().ends_with("| larder login"), "{:?}", empty.next_steps());
        assert!(read_password(io::repeat(b'x'), "x").is_err());
        assert!(read_password([0xff_u8].as_slice(), "x").is_err());
    }

    #[test]
    fn a_password_is_sent_to_one_registry() {
        assert_eq!(only_registry(["busybox", "docker.io/team/app:1"]), Ok("docker.io".into()));
        assert!(only_registry(["busybox", "registry.example/app"]).is_err());
        assert!(only_registry([]).is_err());
    }
}
