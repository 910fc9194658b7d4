//! From a pod, or the template of pods, to the images it wants.

use std::collections::BTreeMap;

use larder::go_format::quote;
use larder::pod::Pod;
use larder::pull::PullPolicy;
use larder::reference::ImageName;

use super::ObjectIdentity;
use super::problem::{InputPlace, InputProblem};
use super::tree::NodeCursor;
use crate::image_name;

/// A pod, or the pods that a template stands for, and the images they want.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Name of the pod in events, such as `pod/web` or `deployment/api`.
    pub label: String,
    /// The pod as backend and back-off know it. For a template it bears the name of the object that holds it.
    pub pod: Pod,
    /// Its pull secrets, in its order.
    pub pull_secrets: Vec<SecretName>,
    /// The images, in the order of the manifest.
    pub wants: Vec<ImageRequirement>,
    /// Where it is.
    pub place: InputPlace,
}

/// A pull secret that a pod names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretName {
    /// The name.
    pub name: String,
    line: usize,
    field: String,
}

impl SecretName {
    /// A problem with the entry that names the secret.
    pub fn problem(&self, what: impl Into<String>) -> InputProblem {
        InputProblem::new(what).at_line(self.line).at_field(&self.field)
    }
}

/// One image that a pod wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRequirement {
    /// The image as written.
    pub image: ImageName,
    /// When to pull; `None` when the manifest leaves it to the tag.
    pub policy: Option<PullPolicy>,
    /// Field path for events, such as `spec.containers{web}`; empty for image volumes.
    pub field_path: String,
    /// Name of the container or volume.
    pub part: String,
}

/// The lists of containers of a pod spec, in the order in which kubelet needs their images.
const CONTAINER_LISTS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Reads a pod (`at` is the object that has `metadata` and `spec`). What keeps it from being a pod is put into
/// `problems`. Bad image names come back beside it: as in kubelet, they fail their container and not the pod.
pub(super) fn read(
    at: &NodeCursor<'_>,
    identity: &ObjectIdentity,
    place: &InputPlace,
    problems: &mut Vec<InputProblem>,
) -> (Workload, Vec<InputProblem>) {
    let mut reader = PodSpecReader { problems, bad_names: Vec::new(), nameless: identity.foreign };
    let label = format!("{}/{}", identity.kind.to_lowercase(), identity.name);
    let uid = match identity.uid.as_str() {
        "" => format!("{}/{}/{}", identity.kind.to_lowercase(), identity.namespace, identity.name),
        uid => uid.to_owned(),
    };
    let mut workload = Workload {
        label,
        pod: Pod {
            uid,
            namespace: identity.namespace.clone(),
            name: identity.name.clone(),
            annotations: reader.annotations(at),
            service_account: String::new(),
        },
        pull_secrets: Vec::new(),
        wants: Vec::new(),
        place: place.clone(),
    };
    match reader.keep(at.field("spec")).flatten() {
        Some(spec) => reader.spec(&spec, &mut workload),
        None => reader.problems.push(at.missing("spec")),
    }
    let bad_names = reader.bad_names;
    (workload, bad_names)
}

struct PodSpecReader<'p> {
    problems: &'p mut Vec<InputProblem>,
    bad_names: Vec<InputProblem>,
    /// Containers need no name, as in pods that some controllers complete.
    nameless: bool,
}

impl PodSpecReader<'_> {
    /// The value, or `None` after recording the problem. A field that is read twice is reported once.
    fn keep<T>(&mut self, result: Result<T, InputProblem>) -> Option<T> {
        let problem = match result {
            Ok(value) => return Some(value),
            Err(problem) => problem,
        };
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
        None
    }

    fn annotations(&mut self, at: &NodeCursor<'_>) -> BTreeMap<String, String> {
        let found = self.keep(at.descend(&["metadata", "annotations"])).flatten();
        let entries = found.and_then(|found| self.keep(found.entries())).unwrap_or_default();
        let texts = entries.into_iter().filter_map(|(key, value)| {
            // `key:` with nothing after it is an empty annotation.
            let text = if value.is_empty() { "" } else { self.keep(value.text())? };
            Some((key.to_owned(), text.to_owned()))
        });
        texts.collect()
    }

    fn spec(&mut self, spec: &NodeCursor<'_>, workload: &mut Workload) {
        if let Some(Some(name)) = self.keep(spec.text_of("serviceAccountName")) {
            name.clone_into(&mut workload.pod.service_account);
        }
        for list in CONTAINER_LISTS {
            let containers = self.list(spec, list);
            if list == "containers" && containers.as_ref().is_some_and(Vec::is_empty) {
                let place = self.keep(spec.field(list)).flatten().unwrap_or_else(|| spec.clone());
                self.problems.push(
                    InputProblem::new("a pod must have at least one container")
                        .at_line(place.line())
                        .at_field(&spec.path_of(list))
                        .hints(spec.misspelt(list)),
                );
            }
            for (index, container) in containers.unwrap_or_default().iter().enumerate() {
                workload.wants.extend(self.container(list, index, container));
            }
        }
        for volume in self.list(spec, "volumes").unwrap_or_default() {
            workload.wants.extend(self.image_volume(&volume));
        }
        for secret in self.list(spec, "imagePullSecrets").unwrap_or_default() {
            let name = self.keep(secret.text_of("name")).flatten().filter(|name| !name.is_empty());
            workload.pull_secrets.extend(name.map(|name| SecretName {
                name: name.to_owned(),
                line: secret.line(),
                field: secret.path().to_owned(),
            }));
        }
    }

    /// The items of a list; none when it is absent, `None` when it is no list.
    fn list<'a>(&mut self, at: &NodeCursor<'a>, field: &str) -> Option<Vec<NodeCursor<'a>>> {
        match self.keep(at.field(field))? {
            Some(list) => self.keep(list.items()),
            None => Some(Vec::new()),
        }
    }

    fn container(&mut self, list: &str, index: usize, at: &NodeCursor<'_>) -> Option<ImageRequirement> {
        let name = if self.nameless {
            Some(self.keep(at.text_of("name")).flatten().unwrap_or_default())
        } else {
            self.required(at, "name")
        };
        let image = self.image(at, "image");
        let policy = self.policy(at, "imagePullPolicy");
        let part = name?.to_owned();
        let field_path = match part.as_str() {
            "" => format!("spec.{list}[{index}]"),
            part => format!("spec.{list}{{{part}}}"),
        };
        Some(ImageRequirement { image: image?, policy, field_path, part })
    }

    fn image_volume(&mut self, volume: &NodeCursor<'_>) -> Option<ImageRequirement> {
        let source = self.keep(volume.field("image")).flatten()?;
        let name = self.required(volume, "name");
        let image = self.image(&source, "reference");
        let policy = self.policy(&source, "pullPolicy");
        Some(ImageRequirement { image: image?, policy, field_path: String::new(), part: name?.to_owned() })
    }

    fn required<'a>(&mut self, at: &NodeCursor<'a>, field: &str) -> Option<&'a str> {
        let text = self.keep(at.text_of(field))?;
        if text.is_none() {
            self.problems.push(at.missing(field));
        }
        text
    }

    fn image(&mut self, at: &NodeCursor<'_>, field: &str) -> Option<ImageName> {
        let image = self.required(at, field)?;
        if let Err(bad) = image_name::check(image) {
            let field = self.keep(at.field(field)).flatten()?;
            self.bad_names.push(field.problem(bad.message).hints(bad.hints));
        }
        Some(image.into())
    }

    /// The policy, `None` where the manifest leaves it to the tag (or has a problem, now noted).
    fn policy(&mut self, at: &NodeCursor<'_>, field: &str) -> Option<PullPolicy> {
        let place = self.keep(at.field(field))??;
        // The API server fills in the default where the text is empty.
        let text = self.keep(place.text())?;
        match PullPolicy::parse(text) {
            PullPolicy::Other(text) if text.is_empty() => None,
            PullPolicy::Other(text) => {
                let problem =
                    place.problem(format!("{}: must be Always, IfNotPresent or Never", quote(&text)));
                self.problems.push(problem.hints(meant_policy(&text).map(|meant| format!("write {meant}"))));
                None
            }
            known => Some(known),
        }
    }
}

/// The policy that differs from a text in case, dashes or underscores only.
fn meant_policy(text: &str) -> Option<PullPolicy> {
    let plain: String = text.chars().filter(char::is_ascii_alphabetic).collect();
    [PullPolicy::Always, PullPolicy::IfNotPresent, PullPolicy::Never]
        .into_iter()
        .find(|policy| policy.as_str().eq_ignore_ascii_case(&plain))
}
