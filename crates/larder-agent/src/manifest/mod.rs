//! Reads Kubernetes manifests: which pods want which images, with which pull secrets.
//!
//! ```text
//! files -> split into documents -> tree -> kinds -> pods, secrets
//! ```
//!
//! Promises: no input panics; a bad document is named with file, line and field and takes no other with it; what a
//! secret holds is in no message; no file larger than 16 MiB is read.

mod files;
mod kinds;
mod pods;
mod problem;
mod secrets;
mod split;
pub mod tree;

pub use files::ManifestSource;
pub use pods::{ImageRequirement, Workload};
pub use problem::{InputPlace, InputProblem, InputProblemRecord, LocatedProblem};
pub use secrets::{SecretEntry, SecretTable, is_pull_type};

use std::collections::BTreeMap;

use kinds::{ManifestKind, item_kind, kind_of};
use larder::go_format;
use larder::hint::Hint;
use tree::NodeCursor;

/// Everything that was read.
#[derive(Debug, Default)]
pub struct Manifests {
    /// Pods and pod templates, in the order of the input.
    pub workloads: Vec<Workload>,
    /// Secrets, of whatever type.
    pub secrets: SecretTable,
    /// Problems of objects and files that could not be used.
    pub problems: Vec<LocatedProblem>,
    /// Warnings about accepted settings.
    pub warnings: Vec<String>,
    /// Objects of kinds that want no images, by kind.
    pub skipped: BTreeMap<String, usize>,
}

/// Who an object is.
#[derive(Debug, Clone, Default)]
struct ObjectIdentity {
    kind: String,
    namespace: String,
    name: String,
    uid: String,
    /// Of a kind that larder only knows by its pod template.
    foreign: bool,
}

impl Manifests {
    /// Reads everything that a source names. Objects without a namespace are in `namespace`.
    pub fn read(&mut self, source: &ManifestSource, namespace: &str) {
        for file in source.files(&mut self.warnings) {
            match file {
                Ok(file) => self.read_text(&file.name, &file.text, namespace),
                Err(problem) => self.problems.push(problem),
            }
        }
    }

    /// Reads one file's text.
    fn read_text(&mut self, name: &str, text: &str, namespace: &str) {
        let pieces = split::split(text);
        if pieces.is_empty() {
            self.problems.push(InputPlace::file(name).locate(InputProblem::new("no document in it")));
        }
        let texts: Vec<_> = pieces.iter().map(|piece| piece.text).collect();
        for (index, (piece, parsed)) in pieces.iter().zip(tree::parse_all(&texts)).enumerate() {
            let place = InputPlace {
                file: name.to_owned(),
                document: index + 1,
                lines_before: piece.lines_before,
                what: String::new(),
            };
            match parsed {
                Ok(node) => self.read_object(&NodeCursor::root(&node), None, &place, namespace),
                Err(problem) => self.problems.push(place.locate(problem)),
            }
        }
    }

    /// Reads one object. `inherited` is the `apiVersion` and `kind` that the list around it implies.
    fn read_object(
        &mut self,
        at: &NodeCursor<'_>,
        inherited: Option<(&str, &str)>,
        place: &InputPlace,
        namespace: &str,
    ) {
        let (api_version, kind) = match type_of(at, inherited) {
            Ok(found) => found,
            Err(problem) => return self.problems.push(place.locate(problem)),
        };
        let place = InputPlace { what: kind.to_owned(), ..place.clone() };
        let found = match kind_of(api_version, kind) {
            ManifestKind::Other if has_template(at) => ManifestKind::Foreign,
            known => known,
        };
        match found {
            ManifestKind::Unknown => {
                let problem = at.problem(format!("{api_version} has no kind {}", go_format::quote(kind)));
                let meant = kinds::meant(api_version, kind);
                return self.problems.push(place.locate(problem.hints(meant)));
            }
            ManifestKind::List => return self.read_list(at, api_version, kind, &place, namespace),
            ManifestKind::Other => return self.skip(api_version, kind, &place),
            ManifestKind::Pod | ManifestKind::Template(_) | ManifestKind::Foreign | ManifestKind::Secret => {}
        }
        let at = &if found == ManifestKind::Secret { at.clone().private() } else { at.clone() };
        let mut problems = Vec::new();
        let mut identity = identity_of(at, kind, namespace, &mut problems);
        identity.foreign = found == ManifestKind::Foreign;
        let place = match identity.name.as_str() {
            "" => place,
            name => InputPlace { what: format!("{kind} {}/{name}", identity.namespace), ..place },
        };
        match found {
            ManifestKind::Secret => self.take_secret(at, &identity, &place, &mut problems),
            ManifestKind::Template(_) | ManifestKind::Foreign => match at.descend(found.template()) {
                Ok(Some(template)) => self.take_pod(&template, &identity, &place, &mut problems),
                Ok(None) => problems.push(at.missing(&found.template().join("."))),
                Err(problem) => problems.push(problem),
            },
            _ => self.take_pod(at, &identity, &place, &mut problems),
        }
        self.problems.extend(problems.into_iter().map(|problem| place.locate(problem)));
    }

    fn skip(&mut self, api_version: &str, kind: &str, place: &InputPlace) {
        tracing::info!("{place}: skipped: {api_version} {kind} has no images that larder knows");
        *self.skipped.entry(kind.to_owned()).or_default() += 1;
    }

    /// Takes a secret over, if only to say of those who name it that something is wrong with it.
    fn take_secret(
        &mut self,
        at: &NodeCursor<'_>,
        identity: &ObjectIdentity,
        place: &InputPlace,
        problems: &mut Vec<InputProblem>,
    ) {
        let secret = secrets::read(at, identity, problems);
        if let Some(oddity) = secrets::warning(&secret) {
            self.warnings.push(format!("{place}: {oddity}"));
        }
        let earlier = if problems.is_empty() {
            self.secrets.add(secret, place.clone())
        } else {
            self.secrets.add_broken(&identity.namespace, &identity.name, place.clone())
        };
        if let Some(earlier) = earlier {
            self.warnings.push(format!("{place}: used instead of the one in {earlier}"));
        }
    }

    /// Takes a pod over if nothing is wrong with it.
    fn take_pod(
        &mut self,
        at: &NodeCursor<'_>,
        identity: &ObjectIdentity,
        place: &InputPlace,
        problems: &mut Vec<InputProblem>,
    ) {
        let (workload, bad_names) = pods::read(at, identity, place, problems);
        if problems.is_empty() {
            self.workloads.push(workload);
        }
        problems.extend(bad_names);
        problems.sort_by_key(InputProblem::line);
    }

    fn read_list(
        &mut self,
        at: &NodeCursor<'_>,
        api_version: &str,
        kind: &str,
        place: &InputPlace,
        namespace: &str,
    ) {
        let items = at.field("items").and_then(|items| items.map_or(Ok(Vec::new()), |items| items.items()));
        let items = match items {
            Ok(items) => items,
            Err(problem) => return self.problems.push(place.locate(problem)),
        };
        let inherited = item_kind(kind).map(|item| (api_version, item));
        for item in items {
            self.read_object(&item, inherited, place, namespace);
        }
    }
}

/// Whether an object of an unknown kind holds a pod template where most controllers have it.
fn has_template(at: &NodeCursor<'_>) -> bool {
    let spec = at.descend(kinds::USUAL_TEMPLATE).ok().flatten();
    let spec = spec.and_then(|template| template.field("spec").ok().flatten());
    let containers = spec.and_then(|spec| spec.field("containers").ok().flatten());
    containers.is_some_and(|containers| containers.items().is_ok_and(|items| !items.is_empty()))
}

/// The `apiVersion` and `kind` of an object.
fn type_of<'a>(
    at: &NodeCursor<'a>,
    inherited: Option<(&'a str, &'a str)>,
) -> Result<(&'a str, &'a str), InputProblem> {
    let not_kubernetes = |what: &str| {
        at.problem(format!("not a Kubernetes object: {what}"))
            .hint(Hint::from("give images as arguments: ").command(["ensure", "IMAGE..."]))
    };
    let (api_version, kind) = match (at.text_of("apiVersion"), at.text_of("kind")) {
        (Ok(api_version), Ok(kind)) => (api_version, kind),
        (Err(problem), _) | (_, Err(problem)) => {
            return Err(if at.is_mapping() { problem } else { not_kubernetes(&problem.to_string()) });
        }
    };
    match (api_version.filter(|text| !text.is_empty()), kind.filter(|text| !text.is_empty()), inherited) {
        (Some(api_version), Some(kind), _) => Ok((api_version, kind)),
        (None, None, Some(inherited)) => Ok(inherited),
        (None, None, None) => Err(not_kubernetes("apiVersion and kind are missing")),
        (None, Some(_), _) => Err(not_kubernetes("apiVersion is missing")),
        (Some(_), None, _) => Err(not_kubernetes("kind is missing")),
    }
}

fn identity_of(
    at: &NodeCursor<'_>,
    kind: &str,
    namespace: &str,
    problems: &mut Vec<InputProblem>,
) -> ObjectIdentity {
    let mut text = |field: &str| match at
        .descend(&["metadata"])
        .and_then(|metadata| metadata.map_or(Ok(None), |metadata| metadata.text_of(field)))
    {
        Ok(text) => text.unwrap_or_default().to_owned(),
        Err(problem) => {
            // A `metadata` that is not a mapping would be reported once per field.
            if !problems.contains(&problem) {
                problems.push(problem);
            }
            String::new()
        }
    };
    let (name, generate_name) = (text("name"), text("generateName"));
    let (own_namespace, uid) = (text("namespace"), text("uid"));
    if name.is_empty() && generate_name.is_empty() && problems.is_empty() {
        problems.push(at.missing("metadata.name"));
    }
    ObjectIdentity {
        kind: kind.to_owned(),
        namespace: if own_namespace.is_empty() { namespace.to_owned() } else { own_namespace },
        name: if name.is_empty() { generate_name } else { name },
        uid,
        foreign: false,
    }
}

#[cfg(test)]
mod tests;
