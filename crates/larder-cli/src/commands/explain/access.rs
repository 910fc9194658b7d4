//! `larder explain access`: the credentials for an image, and the registry's answer to each.

use std::collections::HashSet;

use larder::credentials::{Credential, CredentialLocation, CredentialSource, SecretCoordinates, TokenPolicy};
use larder::pull::EnsureRequest;
use larder::reference::{self, ImageName, Reference};
use larder_agent::backend::{BackendTarget, target_of};
use larder_agent::image_name;
use larder_agent::registry::{FetchAttempt, RegistryClient};
use serde::Serialize;

use crate::args::{CredentialArgs, EnsureArgs, ExplainAccessArgs, PlatformFlag, PullCallFlags, PullFlags};
use crate::commands::ensure::{EnsureJob, ensure_jobs};
use crate::credential_setup::{self, CredentialSetup};
use crate::exit::CommandOutcome;
use crate::failure::{Failure, error_chain};
use crate::output;
use crate::output::table::TextTable;
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};
use larder_agent::registry::UserCredentials;

pub(super) async fn run(
    args: &ExplainAccessArgs,
    session: &CommandSession,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let image = args.image.as_str();
    image_name::check(image).map_err(|bad| Failure::bad_input(bad.message).hints(bad.hints))?;
    let (mut jobs, mut outcome) = ensure_jobs(image, &ensure_args(args), out)?;
    let mut known = HashSet::new();
    jobs.retain(|job| known.insert(access_key(job)));
    if jobs.is_empty() {
        return match outcome {
            CommandOutcome::Done => Err(Failure::bad_input(format!("no pod in these files uses {image}"))
                .hint("write the image as the pod does, or omit -f")),
            outcome => Ok(outcome),
        };
    }
    let credentials = credential_setup::gather(&args.credentials, TokenPolicy::Keep, [image], out)?;
    let (_, config) = session.config(&ImageAccess::read().of_store())?;
    let client = args.tls.client(config.registry.clone());
    let mut access = AccessRecord { image: args.image.clone(), checks: Vec::new() };
    for job in &jobs {
        access.checks.push(check_access(image, job, &credentials, &client).await?);
    }
    match args.output.data() {
        Some(format) => output::data(out, format, &access),
        None => print(&access, out),
    }
    note_pulling_process(session).await;
    if access.checks.iter().any(|check| !check.accepted) {
        outcome = outcome.max(CommandOutcome::Failed);
    }
    Ok(outcome)
}

/// Jobs with the same key get the same answers.
fn access_key(job: &EnsureJob) -> (String, String, Vec<SecretCoordinates>) {
    let EnsureRequest { pod, secrets, .. } = &job.request;
    let secrets = secrets.iter().map(|secret| secret.coordinates.clone()).collect();
    (pod.namespace.clone(), job.label.clone(), secrets)
}

/// The request as arguments of `larder ensure`.
fn ensure_args(args: &ExplainAccessArgs) -> EnsureArgs {
    let images = if args.filename.is_empty() { vec![args.image.clone()] } else { Vec::new() };
    EnsureArgs {
        images,
        platform: PlatformFlag::default(),
        filename: args.filename.clone(),
        secret: args.secret.clone(),
        namespace: args.namespace.clone(),
        credentials: CredentialArgs {
            password_stdin: args.credentials.password_stdin,
            ..CredentialArgs::default()
        },
        recursive: false,
        policy: None,
        dry_run: false,
        retry_for: std::time::Duration::ZERO,
        verify: crate::args::VerifyArgs::default(),
        quiet: false,
        output: args.output,
        call: PullCallFlags::default(),
        pulling: PullFlags::default(),
    }
}

/// The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct AccessRecord {
    image: ImageName,
    /// Pods that use it, or `image` for the argument itself.
    checks: Vec<AccessCheck>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct AccessCheck {
    object: String,
    /// `null` without a pod.
    namespace: Option<String>,
    /// Whether a host accepts one of the credentials.
    accepted: bool,
    /// In the order in which they are tried.
    credentials: Vec<TriedCredential>,
    /// Sources without a credential for this image.
    other_registries: Vec<String>,
    /// Programs that failed.
    failed: Vec<FailedProgram>,
}

#[derive(Debug, Serialize)]
struct FailedProgram {
    program: String,
    error: String,
}

/// A credential, or the attempt without any.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct TriedCredential {
    /// `null` for the anonymous attempt.
    source: Option<String>,
    /// `null` for a token, or without a credential.
    user: Option<String>,
    /// Empty if an earlier credential was accepted.
    hosts: Vec<FetchAttempt>,
}

async fn check_access(
    image: &str,
    job: &EnsureJob,
    credentials: &CredentialSetup,
    client: &RegistryClient,
) -> Result<AccessCheck, Failure> {
    let request = &job.request;
    let found = find_credentials(job, credentials).await?;
    let tagged = reference::apply_default_tag(image).and_then(|image| Reference::parse(&image));
    let name = tagged.map_err(|error| Failure::bad_input(error.to_string()))?;
    let mut check = AccessCheck {
        object: job.label.clone(),
        namespace: Some(request.pod.namespace.clone()).filter(|_| !request.pod.name.is_empty()),
        accepted: false,
        credentials: Vec::new(),
        other_registries: credentials.candidates.other_registries(image, &request.secrets),
        failed: failed(image, &credentials.candidates),
    };
    let attempts: Vec<_> = if found.is_empty() { vec![None] } else { found.iter().map(Some).collect() };
    for credential in attempts {
        let mut hosts = Vec::new();
        if !check.accepted {
            let session = client
                .session(&name, credential)
                .map_err(|error| Failure::bad_input(error_chain(&error)).hints(error.hint()))?;
            hosts = session.try_hosts().await;
        }
        check.accepted |= hosts.iter().any(|host| host.accepted);
        check.credentials.push(TriedCredential {
            source: credential.map(|credential| place(credential, &credentials.candidates)),
            user: credential.map(|credential| credential.username.clone()).filter(|user| !user.is_empty()),
            hosts,
        });
    }
    Ok(check)
}

/// The credentials for a job, in the order in which a pull tries them.
pub(in crate::commands) async fn find_credentials(
    job: &EnsureJob,
    credentials: &CredentialSetup,
) -> Result<Vec<Credential>, Failure> {
    let EnsureRequest { image, secrets, pod, .. } = &job.request;
    let found = credentials.sources.lookup(image, secrets, pod).await;
    found.map_err(|error| Failure::bad_input(format!("{}: {error}", job.label)).hints(error.hint()))
}

fn failed(image: &str, candidates: &UserCredentials) -> Vec<FailedProgram> {
    let failed = candidates.failed(image).into_iter();
    failed.map(|(program, error)| FailedProgram { program, error }).collect()
}

/// Where a credential was found.
pub(in crate::commands) fn place(credential: &Credential, candidates: &UserCredentials) -> String {
    match (&credential.origin, &credential.source) {
        (CredentialLocation::PullSecret, Some(CredentialSource::Secret(secret))) => {
            format!("secret {secret}")
        }
        (CredentialLocation::Helper(name), _) => format!("docker-credential-{name}"),
        (CredentialLocation::Provider(name), Some(CredentialSource::ServiceAccount(account))) => {
            format!("credential provider {name} (for {}/{})", account.namespace, account.name)
        }
        (CredentialLocation::Provider(name), _) => format!("credential provider {name}"),
        _ => candidates.own_name().unwrap_or("the command line").to_owned(),
    }
}

fn print(access: &AccessRecord, out: &Printer) {
    for check in &access.checks {
        let mut table = TextTable::new(["SOURCE", "USER", "HOST", "SENT", "ANSWER"]);
        for found in &check.credentials {
            let place = found.source.clone().unwrap_or_else(|| "anonymous".to_owned());
            let user = found.user.clone().unwrap_or_default();
            for (number, host) in found.hosts.iter().enumerate() {
                let first = |text: &str| if number == 0 { text.to_owned() } else { String::new() };
                let sent = if host.authenticated { "yes" } else { "no" };
                table.row([first(&place), first(&user), host.host.clone(), sent.into(), host.answer.clone()]);
            }
            if found.hosts.is_empty() {
                table.row([place, user, String::new(), String::new(), "not tried".into()]);
            }
        }
        let place = check.namespace.as_ref().map(|namespace| format!(" in namespace {namespace}"));
        let place = place.unwrap_or_default();
        out.line(format_args!("{} for {}{place}: {}", access.image, check.object, check.conclusion()));
        out.table(&table);
        for place in &check.other_registries {
            out.line(format_args!("no credential for this image: {place}"));
        }
        for FailedProgram { program, error } in &check.failed {
            out.line(format_args!("no credential from {program}: {error}"));
        }
    }
}

impl AccessCheck {
    /// Names the credential only if the host asked for one.
    fn conclusion(&self) -> String {
        let accepted = self.credentials.iter().find_map(|found| Some((found, found.accepting_host()?)));
        match accepted {
            Some((TriedCredential { source: Some(place), .. }, host)) if host.authenticated => {
                format!("accessible with {place}")
            }
            Some((_, host)) => format!("accessible anonymously from {}", host.host),
            None => "not accessible".to_owned(),
        }
    }
}

impl TriedCredential {
    fn accepting_host(&self) -> Option<&FetchAttempt> {
        self.hosts.iter().find(|host| host.accepted)
    }
}

/// Notes that another process pulls, with credentials and hosts of its own.
pub(in crate::commands) async fn note_pulling_process(session: &CommandSession) {
    if let Some(socket) = session.daemon_socket().await {
        session.out.info(format_args!(
            "note: tested with the credentials of this user; the daemon at {} also uses the docker config of its own user and its own providers",
            socket.display()
        ));
    }
    let target = session.config(&ImageAccess::read()).ok().and_then(|(_, config)| target_of(&config).ok());
    if let Some(BackendTarget::Runtime(endpoint)) = target {
        session.out.info(format_args!(
            "note: tested by larder with the hosts of --certs-d; pulls run in {endpoint}, whose configuration may differ"
        ));
    }
}
