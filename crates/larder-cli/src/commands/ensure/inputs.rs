//! Turns arguments and manifests into requests: images with their pods, policies and secrets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use larder::credentials::PullSecret;
use larder::go_format::quote;
use larder::hint::Hint;
use larder::pod::{ObjectRef, Pod, SandboxConfig};
use larder::pull::{EnsureRequest, PullPolicy, default_policy};
use larder::reference::ImageName;
use serde::Serialize;

use larder_agent::image_name;

use crate::args::EnsureArgs;
use crate::exit::CommandOutcome;
use crate::failure::Failure;
use crate::printer::Printer;
use larder_agent::manifest::{
    ImageRequirement, InputPlace, InputProblem, LocatedProblem, ManifestSource, Manifests, SecretEntry,
    SecretTable, Workload, is_pull_type,
};

/// The object in events about images given as arguments.
const ARGUMENT_LABEL: &str = "image";

/// The UID in events about an image that was requested by argument.
pub(in crate::commands) fn argument_uid(image: &ImageName) -> String {
    format!("{ARGUMENT_LABEL}/{image}")
}

/// One image to make present, with the names for its output.
#[derive(Debug, Clone)]
pub(in crate::commands) struct EnsureJob {
    /// The request for the image manager.
    pub(in crate::commands) request: EnsureRequest,
    /// The object that needs it, such as `pod/web`.
    pub(in crate::commands) label: String,
    /// The container or volume of the object; empty for arguments.
    pub(super) part: String,
}

/// A job in the fields that `ensure` and its dry run have in common with `-o json`.
#[derive(Debug, Serialize)]
pub(super) struct JobRecord {
    pub(super) image: ImageName,
    pub(super) policy: String,
    pub(super) object: String,
    namespace: String,
    #[serde(serialize_with = "larder_api::or_null")]
    pub(super) container: String,
}

impl EnsureJob {
    pub(super) fn record(&self) -> JobRecord {
        let request = &self.request;
        JobRecord {
            image: request.image.clone(),
            policy: request.policy.to_string(),
            object: self.label.clone(),
            namespace: request.pod.namespace.clone(),
            container: self.part.clone(),
        }
    }

    /// Whether the image name is invalid.
    pub(super) fn has_bad_name(&self) -> bool {
        image_name::check(self.request.image.as_str()).is_err()
    }
}

/// All requested images, and all invalid input.
#[derive(Debug, Default)]
pub(super) struct EnsureInputs {
    /// In the order of the input, arguments first.
    pub(super) jobs: Vec<EnsureJob>,
    /// Invalid input.
    pub(super) problems: Vec<LocatedProblem>,
    warnings: Vec<String>,
    /// Objects of kinds without images, by kind.
    pub(super) skipped: BTreeMap<String, usize>,
}

impl EnsureInputs {
    /// The outcome of the input alone.
    pub(super) fn outcome(&self) -> CommandOutcome {
        if self.problems.is_empty() { CommandOutcome::Done } else { CommandOutcome::BadInput }
    }

    /// Prints problems, warnings and skipped kinds.
    pub(super) fn print_problems(&self, out: &Printer) {
        for problem in &self.problems {
            out.error(problem, problem.hints());
        }
        for warning in &self.warnings {
            out.warning(warning);
        }
        if !self.skipped.is_empty() {
            let kinds = self.skipped.iter().map(|(kind, count)| match count {
                1 => kind.clone(),
                count => format!("{kind} ({count})"),
            });
            let kinds: Vec<_> = kinds.collect();
            out.info(format_args!("note: skipped kinds without images: {}", kinds.join(", ")));
        }
    }
}

/// Checks that the flags agree.
fn check(args: &EnsureArgs) -> Result<(), Failure> {
    if args.recursive && args.filename.is_empty() {
        return Err(Failure::bad_input("-R requires -f DIR"));
    }
    if args.images.is_empty() && args.filename.is_empty() {
        return Err(Failure::bad_input("nothing to ensure: name images or give -f FILE")
            .hint(Hint::new().command(["ensure"]).text(" busybox:1.36, or larder ensure -f pod.yaml")));
    }
    let namespace = &args.namespace;
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if namespace.is_empty()
        || namespace.len() > 63
        || !namespace.bytes().all(fits)
        || namespace.starts_with('-')
        || namespace.ends_with('-')
    {
        return Err(Failure::bad_input(format!(
            "--namespace {}: not a valid namespace name",
            quote(namespace)
        ))
        .hint("use 1 to 63 lower case letters, digits and dashes, and no dash at either end"));
    }
    Ok(())
}

/// The jobs for one image, of pods in files or of the arguments. Prints input that is invalid.
pub(in crate::commands) fn ensure_jobs(
    image: &str,
    args: &EnsureArgs,
    out: &Printer,
) -> Result<(Vec<EnsureJob>, CommandOutcome), Failure> {
    let mut gathered = gather(args)?;
    gathered.print_problems(out);
    gathered.jobs.retain(|job| job.request.image == image);
    let outcome = gathered.outcome();
    Ok((gathered.jobs, outcome))
}

/// Reads everything that the arguments name.
pub(super) fn gather(args: &EnsureArgs) -> Result<EnsureInputs, Failure> {
    check(args)?;
    let stdin_readers =
        args.filename.iter().chain(&args.secret).filter(|file| file.as_os_str() == "-").count()
            + usize::from(args.credentials.password_stdin);
    if stdin_readers > 1 {
        return Err(Failure::bad_input(
            "standard input can be read only once: -f -, --secret -, --password-stdin",
        )
        .hint("put one of them into a file"));
    }
    let mut given = Manifests::default();
    for file in &args.secret {
        given.read(&ManifestSource::of(file, args.recursive), &args.namespace);
    }
    let mut manifests = Manifests::default();
    for file in &args.filename {
        manifests.read(&ManifestSource::of(file, args.recursive), &args.namespace);
    }
    let mut gathered = EnsureInputs::default();
    gathered.take_secrets(args, &mut given);
    gathered.take_arguments(args, &given.secrets);
    gathered.problems.append(&mut manifests.problems);
    gathered.warnings.append(&mut manifests.warnings);
    for workload in &manifests.workloads {
        match secrets_of(workload, &manifests.secrets, &given.secrets) {
            Ok((secrets, warnings)) => {
                for warning in warnings {
                    gathered.warn(warning);
                }
                gathered.jobs.extend(workload.wants.iter().map(|want| job(workload, want, &secrets, args)));
            }
            Err(mut problems) => gathered.problems.append(&mut problems),
        }
    }
    gathered.skipped = manifests.skipped;
    args.platform.apply(gathered.jobs.iter_mut().map(|job| &mut job.request.image))?;
    Ok(gathered)
}

impl EnsureInputs {
    /// Checks that what `--secret` names is secrets that pulling can use.
    fn take_secrets(&mut self, args: &EnsureArgs, given: &mut Manifests) {
        self.problems.append(&mut given.problems);
        self.warnings.append(&mut given.warnings);
        for (secret, place) in given.secrets.iter().filter(|(secret, _)| !is_pull_type(&secret.kind)) {
            let problem =
                InputProblem::new(format!("type {} is not a pull secret", secret.kind)).at_field("type");
            let wanted = "use type kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg";
            self.problems.push(place.locate(problem.hint(wanted)));
        }
        if !args.secret.is_empty() && given.secrets.iter().next().is_none() && self.problems.is_empty() {
            let files: Vec<_> = args.secret.iter().map(|file| file.display().to_string()).collect();
            self.problems
                .push(InputPlace::file(files.join(", ")).locate(InputProblem::new("contains no Secret")));
        }
    }

    /// Arguments use all secrets of `--secret`, and are not served while some of them cannot be used.
    fn take_arguments(&mut self, args: &EnsureArgs, given: &SecretTable) {
        let unusable = !self.problems.is_empty();
        let secrets: Vec<_> = given.iter().map(|(secret, _)| secret.clone()).collect();
        let mut known = BTreeSet::new();
        for image in args.images.iter().filter(|image| known.insert(image.as_str())) {
            if let Err(problem) = check_argument(image.as_str()) {
                self.problems.push(problem);
                continue;
            }
            if unusable {
                let problem = InputProblem::new(format!("skipped {image}: --secret is invalid, see above"));
                self.problems.push(InputPlace::file("argument").locate(problem));
                continue;
            }
            let pod = Pod { uid: argument_uid(image), namespace: args.namespace.clone(), ..Pod::default() };
            let request = EnsureRequest {
                target: Some(ObjectRef::new(&pod, "")),
                secrets: secrets.clone(),
                ..EnsureRequest::new(image, policy(args, None, image), pod)
            };
            self.jobs.push(EnsureJob { request, label: ARGUMENT_LABEL.to_owned(), part: String::new() });
        }
    }

    fn warn(&mut self, warning: String) {
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }
}

/// The pull secrets that a pod names, in its order, as kubelet takes them: those of other types are passed over, with
/// a warning. A broken one is a problem of the pod: without it, its images would be pulled as if it had none.
fn secrets_of(
    workload: &Workload,
    found: &SecretTable,
    given: &SecretTable,
) -> Result<(Vec<PullSecret>, Vec<String>), Vec<LocatedProblem>> {
    let namespace = &workload.pod.namespace;
    let (mut secrets, mut warnings, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for wanted in &workload.pull_secrets {
        let name = &wanted.name;
        let subject = format!("pull secret {name} of {} in namespace {namespace}", workload.label);
        match found.get(namespace, name).or_else(|| given.get(namespace, name)) {
            Some(SecretEntry::Sound(secret)) if is_pull_type(&secret.kind) => secrets.push(secret.clone()),
            Some(SecretEntry::Sound(secret)) => warnings.push(format!(
                "skipped {subject}: type {} is not a pull secret (kubelet skips it, too)",
                secret.kind
            )),
            Some(SecretEntry::Broken(place)) => {
                let problem = wanted.problem(format!("the pull secret {name} is invalid ({place})"));
                problems
                    .push(workload.place.locate(problem.hint("fix the secret, or remove it from the pod")));
            }
            None => {
                warnings.push(format!("{subject} not found, pulling without it; add it with --secret FILE"));
            }
        }
    }
    if problems.is_empty() { Ok((secrets, warnings)) } else { Err(problems) }
}

/// Checks an image that was given as an argument.
pub(in crate::commands) fn check_argument(image: &str) -> Result<(), LocatedProblem> {
    image_name::check(image).map_err(|bad| {
        let problem = InputProblem::new(bad.message).hints(bad.hints).hints(hint_at_file(image));
        InputPlace::file("argument").locate(problem)
    })
}

/// The command that reads a file which was given as an image.
pub(in crate::commands) fn hint_at_file(image: &str) -> Option<Hint> {
    let path = Path::new(image);
    let is_manifest = path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
    let read = if is_manifest { &["ensure", "-f", image][..] } else { &["load", image] };
    path.is_file().then(|| {
        Hint::from(format!("{image} is a file here: ")).command(read.iter().map(|word| (*word).to_owned()))
    })
}

fn job(workload: &Workload, want: &ImageRequirement, secrets: &[PullSecret], args: &EnsureArgs) -> EnsureJob {
    let pod = workload.pod.clone();
    let request = EnsureRequest {
        target: Some(ObjectRef::new(&pod, &want.field_path)),
        secrets: secrets.to_vec(),
        sandbox: Some(SandboxConfig::of(&pod)),
        ..EnsureRequest::new(&want.image, policy(args, want.policy.as_ref(), &want.image), pod)
    };
    EnsureJob { request, label: workload.label.clone(), part: want.part.clone() }
}

/// Returns the policy of the command line, else that of the manifest, else the one that the tag implies.
fn policy(args: &EnsureArgs, manifest: Option<&PullPolicy>, image: &ImageName) -> PullPolicy {
    match (args.policy, manifest) {
        (Some(asked), _) => asked.into(),
        (None, Some(written)) => written.clone(),
        (None, None) => default_policy(image),
    }
}
