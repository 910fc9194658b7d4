//! From a `Secret` to what pulling can use of it. Nothing of its content gets into a message.

use std::collections::{BTreeMap, HashMap};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use larder::credentials::{PullSecret, SecretCoordinates, TokenPolicy, parse_config_json, parse_dockercfg};

use super::ObjectIdentity;
use super::problem::{InputPlace, InputProblem};
use super::tree::NodeCursor;

/// Types of secrets that pulling uses, and the one key that each must have.
const PULL_TYPES: [(&str, &str); 2] =
    [("kubernetes.io/dockerconfigjson", ".dockerconfigjson"), ("kubernetes.io/dockercfg", ".dockercfg")];

/// Next step for a pull secret that is not sound.
const RECREATE: &str = "create it with: kubectl create secret docker-registry NAME --docker-server=...";

/// Secrets, found by namespace and name. Broken ones are known by name, so that who names one is not served without.
#[derive(Debug, Default)]
pub struct SecretTable {
    all: Vec<(Option<PullSecret>, InputPlace)>,
    by_name: HashMap<(String, String), usize>,
}

/// State of the secret of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretEntry<'a> {
    /// A sound secret.
    Sound(&'a PullSecret),
    /// A secret that cannot be used, and where it is.
    Broken(&'a InputPlace),
}

impl SecretTable {
    /// Adds a secret and returns where an earlier one of the same name was, which it replaces.
    pub(super) fn add(&mut self, secret: PullSecret, place: InputPlace) -> Option<InputPlace> {
        let key = (secret.coordinates.namespace.clone(), secret.coordinates.name.clone());
        self.put(key, Some(secret), place)
    }

    /// Notes that the secret of this name is broken.
    pub(super) fn add_broken(
        &mut self,
        namespace: &str,
        name: &str,
        place: InputPlace,
    ) -> Option<InputPlace> {
        self.put((namespace.to_owned(), name.to_owned()), None, place)
    }

    fn put(
        &mut self,
        key: (String, String),
        secret: Option<PullSecret>,
        place: InputPlace,
    ) -> Option<InputPlace> {
        if let Some(index) = self.by_name.get(&key) {
            return Some(std::mem::replace(&mut self.all[*index], (secret, place)).1);
        }
        self.by_name.insert(key, self.all.len());
        self.all.push((secret, place));
        None
    }

    /// The secret of this name.
    pub fn get(&self, namespace: &str, name: &str) -> Option<SecretEntry<'_>> {
        let index = self.by_name.get(&(namespace.to_owned(), name.to_owned()))?;
        let (secret, place) = self.all.get(*index)?;
        Some(secret.as_ref().map_or(SecretEntry::Broken(place), SecretEntry::Sound))
    }

    /// All sound secrets in the order of the input, and where each was found.
    pub fn iter(&self) -> impl Iterator<Item = (&PullSecret, &InputPlace)> {
        self.all.iter().filter_map(|(secret, place)| Some((secret.as_ref()?, place)))
    }
}

/// Whether pulling can use secrets of this type.
pub fn is_pull_type(kind: &str) -> bool {
    key_of(kind).is_some()
}

fn key_of(kind: &str) -> Option<&'static str> {
    PULL_TYPES.iter().find(|(known, _)| *known == kind).map(|(_, key)| *key)
}

/// Reads a secret, which must be a [private](NodeCursor::private) place. Everything wrong with it is put into
/// `problems`.
pub(super) fn read(
    at: &NodeCursor<'_>,
    identity: &ObjectIdentity,
    problems: &mut Vec<InputProblem>,
) -> PullSecret {
    let before = problems.len();
    let kind = keep(at.text_of("type"), problems).flatten().unwrap_or("Opaque");
    let mut data = decoded_data(at, problems);
    data.extend(string_data(at, problems));
    if let Some(key) = key_of(kind)
        && problems.len() == before
    {
        problems.extend(content_problem(at, kind, key, &data));
    }
    PullSecret {
        kind: kind.to_owned(),
        coordinates: SecretCoordinates {
            // Anybody can write one into a file, and records believe it.
            uid: String::new(),
            namespace: identity.namespace.clone(),
            name: identity.name.clone(),
        },
        data,
    }
}

fn keep<T>(result: Result<T, InputProblem>, problems: &mut Vec<InputProblem>) -> Option<T> {
    result.map_err(|problem| problems.push(problem)).ok()
}

fn entries<'a>(
    at: &NodeCursor<'a>,
    field: &str,
    problems: &mut Vec<InputProblem>,
) -> Vec<(&'a str, NodeCursor<'a>)> {
    let found = keep(at.field(field), problems).flatten();
    found.and_then(|found| keep(found.entries(), problems)).unwrap_or_default()
}

fn decoded_data(at: &NodeCursor<'_>, problems: &mut Vec<InputProblem>) -> BTreeMap<String, Vec<u8>> {
    let mut data = BTreeMap::new();
    for (key, value) in entries(at, "data", problems) {
        if value.is_empty() {
            data.insert(key.to_owned(), Vec::new());
            continue;
        }
        let Some(text) = keep(value.text(), problems) else {
            continue;
        };
        // As Kubernetes reads it: line breaks do not count, padding does.
        let text: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
        match STANDARD.decode(text) {
            Ok(bytes) => {
                data.insert(key.to_owned(), bytes);
            }
            Err(_) => problems.push(value.problem("not valid base64").hint(
                "values under data are base64 with padding; write plain text under stringData instead",
            )),
        }
    }
    data
}

fn string_data(at: &NodeCursor<'_>, problems: &mut Vec<InputProblem>) -> BTreeMap<String, Vec<u8>> {
    let mut data = BTreeMap::new();
    for (key, value) in entries(at, "stringData", problems) {
        if let Some(text) = if value.is_empty() { Some("") } else { keep(value.text(), problems) } {
            data.insert(key.to_owned(), text.as_bytes().to_vec());
        }
    }
    data
}

/// Problem with the content of a secret of a pull type.
fn content_problem(
    at: &NodeCursor<'_>,
    kind: &str,
    key: &str,
    data: &BTreeMap<String, Vec<u8>>,
) -> Option<InputProblem> {
    let Some(content) = data.get(key) else {
        let problem = at.problem(format!("a secret of type {kind} needs the key {key}"));
        return Some(problem.hint(RECREATE));
    };
    let place = ["stringData", "data"].into_iter().find_map(|field| {
        let found = at.field(field).ok()??.entries().ok()?;
        found.into_iter().find(|(found, _)| *found == key).map(|(_, value)| value)
    });
    let place = place.unwrap_or_else(|| at.clone());
    if content.is_empty() {
        return Some(place.problem("is empty"));
    }
    let parsed = match key {
        ".dockercfg" => parse_dockercfg(content, TokenPolicy::Keep),
        _ => parse_config_json(content, TokenPolicy::Keep),
    };
    let error = parsed.err()?;
    Some(place.problem(format!("not a docker config: {error}")).hint(RECREATE))
}

/// Warning about a sound secret of a pull type. Lookups skip such entries without one.
pub(super) fn warning(secret: &PullSecret) -> Option<String> {
    match secret.docker_config(TokenPolicy::Keep).ok().flatten()?.unusable_entries() {
        0 => None,
        1 => Some("one entry ignored: its location is not a URL".to_owned()),
        several => Some(format!("{several} entries ignored: their locations are not URLs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tree::tests::parse;

    fn read_secret(text: &str) -> (PullSecret, Vec<String>) {
        let node = parse(text).unwrap();
        let mut problems = Vec::new();
        let secret = read(&NodeCursor::root(&node).private(), &ObjectIdentity::default(), &mut problems);
        (secret, problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn string_data_wins_over_data() {
        let (secret, problems) = read_secret("data: {a: b25l, b: dHdv}\nstringData: {c: three}\n");
        assert_eq!(problems, [""; 0]);
        assert_eq!(secret.data["a"], b"one");
        let (secret, _) = read_secret("data: {b: dHdv}\nstringData: {b: three}\n");
        assert_eq!(secret.data["b"], b"three");
        assert_eq!(secret.kind, "Opaque");
    }

    #[test]
    fn a_value_that_is_no_string_is_named_only_by_its_type() {
        for (text, problem) in [
            ("stringData: {password: 80443921}", "stringData.password: must be a string, is a number"),
            ("data: {password: 80443921}", "data.password: must be a string, is a number"),
            ("stringData: {password: true}", "stringData.password: must be a string, is a boolean"),
            ("stringData: {password: {80443921: x}}", "stringData.password: must be a string, is a mapping"),
            ("stringData: {password: [80443921]}", "stringData.password: must be a string, is a list"),
            ("stringData: 80443921", "stringData: must be a mapping, is a number"),
            ("stringData: {'password 80443921': 1}", "stringData[...]: must be a string, is a number"),
        ] {
            assert_eq!(read_secret(text).1, [problem], "{text}");
        }
    }

    #[test]
    fn broken_base64_is_named_by_its_key_and_never_shown() {
        let (_, problems) = read_secret("data:\n  .dockerconfigjson: 'hunter2!'\n");
        assert_eq!(problems, ["data[.dockerconfigjson]: not valid base64"]);
    }

    #[test]
    fn a_pull_secret_needs_its_key() {
        let (_, problems) = read_secret("type: kubernetes.io/dockerconfigjson\ndata: {.dockercfg: e30=}\n");
        assert_eq!(problems.len(), 1);
        assert!(problems[0].contains("needs the key .dockerconfigjson"), "{problems:?}");
        let (_, problems) = read_secret("type: kubernetes.io/dockercfg\ndata: {.dockercfg: ''}\n");
        assert_eq!(problems, ["data[.dockercfg]: is empty"]);
    }

    #[test]
    fn a_broken_docker_config_is_named_and_never_shown() {
        let (_, problems) = read_secret(
            "type: kubernetes.io/dockerconfigjson\nstringData:\n  .dockerconfigjson: '{\"auths\": hunter2}'\n",
        );
        assert_eq!(problems.len(), 1);
        assert!(
            problems[0].starts_with("stringData[.dockerconfigjson]: not a docker config: line 1"),
            "{problems:?}"
        );
        assert!(!problems[0].contains("hunter2"), "{problems:?}");
    }
}
