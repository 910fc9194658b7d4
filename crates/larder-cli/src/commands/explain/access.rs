//! `larder explain access`: which credentials there are for an image, and what the registry answers to each.

use std::collections::HashSet;

use larder::credentials::{Credential, Origin, SecretCoordinates, Source, Tokens};
use larder::pull::EnsureRequest;
use larder::reference::{self, ImageName, Reference};
use larder_agent::backend::{Target, target_of};
use larder_agent::image_name;
use larder_agent::registry::{Client, Trial};
use serde::Serialize;

use crate::args::{CredentialArgs, EnsureArgs, ExplainAccessArgs, Pulling};
use crate::candidates::Candidates;
use crate::commands::ensure::{Job, wishes_for};
use crate::credentials::{self, Credentials};
use crate::exit::Outcome;
use crate::failure::{Failure, chain};
use crate::out::Out;
use crate::output;
use crate::output::table::Table;
use crate::session::{Need, Session};

pub(super) async fn run(args: &ExplainAccessArgs, session: &Session) -> Result<Outcome, Failure> {
    let out = &session.out;
    let image = args.image.as_str();
    image_name::check(image).map_err(|bad| Failure::bad_input(bad.message).hints(bad.hints))?;
    let (mut jobs, mut outcome) = wishes_for(image, &wanted(args), out)?;
    let mut known = HashSet::new();
    jobs.retain(|job| known.insert(asked_as(job)));
    if jobs.is_empty() {
        return match outcome {
            Outcome::Done => Err(Failure::bad_input(format!("no pod in these files wants {image}"))
                .hint("write the image as the pod does, or leave -f out")),
            outcome => Ok(outcome),
        };
    }
    let credentials = credentials::gather(&args.credentials, Tokens::Keep, [image], out)?;
    let (_, config) = session.config(&Need::look().of_store())?;
    let client = Client::new(config.registry.clone());
    let mut access = Access { image: args.image.clone(), askers: Vec::new() };
    for job in &jobs {
        access.askers.push(asker(image, job, &credentials, &client).await?);
    }
    match args.output.data() {
        Some(format) => output::data(out, format, &access),
        None => tell(&access, out),
    }
    tell_who_asked(session);
    if access.askers.iter().any(|asker| !asker.accepted) {
        outcome = outcome.max(Outcome::Failed);
    }
    Ok(outcome)
}

/// Jobs with the same of these would get the same answers.
fn asked_as(job: &Job) -> (String, String, Vec<SecretCoordinates>) {
    let EnsureRequest { pod, secrets, .. } = &job.request;
    let secrets = secrets.iter().map(|secret| secret.coordinates.clone()).collect();
    (pod.namespace.clone(), job.label.clone(), secrets)
}

/// What `larder ensure` would be asked for.
fn wanted(args: &ExplainAccessArgs) -> EnsureArgs {
    let images = if args.filename.is_empty() { vec![args.image.clone()] } else { Vec::new() };
    EnsureArgs {
        images,
        filename: args.filename.clone(),
        secret: args.secret.clone(),
        namespace: args.namespace.clone(),
        credentials: CredentialArgs {
            password_stdin: args.credentials.password_stdin,
            ..CredentialArgs::default()
        },
        recursive: false,
        policy: None,
        retry_for: std::time::Duration::ZERO,
        verify: crate::access::VerifyArgs::default(),
        output: args.output,
        pulling: Pulling::default(),
    }
}

/// The shape of `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Access {
    image: ImageName,
    /// Who wants it: pods, or `image` for the argument itself.
    askers: Vec<Asker>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Asker {
    who: String,
    /// `null` for an argument that no pod wants.
    namespace: Option<String>,
    /// Whether it can be had with one of them.
    accepted: bool,
    /// In the order in which they are shown.
    credentials: Vec<Candidate>,
    /// Places with credentials of which none is for this image.
    not_fitting: Vec<String>,
    /// Programs that were asked and gave no answer.
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
struct Candidate {
    /// `null`: there is none, and the image is asked for anonymously.
    found_in: Option<String>,
    /// `null` for a token, or where there is none.
    user: Option<String>,
    /// Empty: it was not tried, because one before it was taken.
    hosts: Vec<Answered>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Answered {
    host: String,
    /// Whether the credential was shown to it.
    shown: bool,
    accepted: bool,
    /// HTTP status; `null` when there was no answer.
    status: Option<u16>,
    answer: String,
}

async fn asker(image: &str, job: &Job, credentials: &Credentials, client: &Client) -> Result<Asker, Failure> {
    let request = &job.request;
    let found = credentials.sources.lookup(&job.request.image, &request.secrets, &request.pod).await;
    let found = found.map_err(|error| {
        let failure = Failure::bad_input(format!("{}: {error}", job.label));
        error.hint().map_or_else(|| failure.clone(), |hint| failure.clone().hint(hint))
    })?;
    let tagged = reference::apply_default_tag(image).and_then(|image| Reference::parse(&image));
    let name = tagged.map_err(|error| Failure::bad_input(error.to_string()))?;
    let mut asker = Asker {
        who: job.label.clone(),
        namespace: Some(request.pod.namespace.clone()).filter(|_| !request.pod.name.is_empty()),
        accepted: false,
        credentials: Vec::new(),
        not_fitting: credentials.candidates.not_fitting(image, &request.secrets),
        failed: failed(image, &credentials.candidates),
    };
    let attempts: Vec<_> = if found.is_empty() { vec![None] } else { found.iter().map(Some).collect() };
    for credential in attempts {
        let mut hosts = Vec::new();
        if !asker.accepted {
            let session = client
                .session(&name, credential)
                .map_err(|error| Failure::bad_input(chain(&error)).hints(error.hint()))?;
            hosts = session.try_hosts().await.into_iter().map(Answered::from).collect();
        }
        asker.accepted |= hosts.iter().any(|host: &Answered| host.accepted);
        asker.credentials.push(Candidate {
            found_in: credential.map(|credential| place(credential, &credentials.candidates)),
            user: credential.map(|credential| credential.username.clone()).filter(|user| !user.is_empty()),
            hosts,
        });
    }
    Ok(asker)
}

fn failed(image: &str, candidates: &Candidates) -> Vec<FailedProgram> {
    let failed = candidates.failed(image).into_iter();
    failed.map(|(program, error)| FailedProgram { program, error }).collect()
}

impl From<Trial> for Answered {
    fn from(trial: Trial) -> Answered {
        let Trial { host, shown, accepted, status, answer } = trial;
        Answered { host, shown, accepted, status, answer }
    }
}

fn place(credential: &Credential, candidates: &Candidates) -> String {
    match (&credential.origin, &credential.source) {
        (Origin::PullSecret, Some(Source::Secret(secret))) => format!("secret {secret}"),
        (Origin::Helper(name), _) => format!("docker-credential-{name}"),
        (Origin::Provider(name), Some(Source::ServiceAccount(account))) => {
            format!("credential provider {name} (for {}/{})", account.namespace, account.name)
        }
        (Origin::Provider(name), _) => format!("credential provider {name}"),
        _ => candidates.own_name().unwrap_or("the command line").to_owned(),
    }
}

fn tell(access: &Access, out: &Out) {
    for asker in &access.askers {
        let mut table = Table::new(["FOUND IN", "USER", "HOST", "SHOWN", "ANSWER"]);
        for found in &asker.credentials {
            let place = found.found_in.clone().unwrap_or_else(|| "nowhere: anonymous".to_owned());
            let user = found.user.clone().unwrap_or_default();
            for (number, host) in found.hosts.iter().enumerate() {
                let first = |text: &str| if number == 0 { text.to_owned() } else { String::new() };
                let shown = if host.shown { "yes" } else { "no" };
                table.row([
                    first(&place),
                    first(&user),
                    host.host.clone(),
                    shown.into(),
                    host.answer.clone(),
                ]);
            }
            if found.hosts.is_empty() {
                table.row([place, user, String::new(), String::new(), "not tried".into()]);
            }
        }
        let place = asker.namespace.as_ref().map(|namespace| format!(" in namespace {namespace}"));
        let who = format!("{}{}", asker.who, place.unwrap_or_default());
        out.line(format_args!("{} for {who}: {}", access.image, asker.verdict()));
        out.line(table);
        for place in &asker.not_fitting {
            out.line(format_args!("not for this image: {place}"));
        }
        for FailedProgram { program, error } in &asker.failed {
            out.line(format_args!("{program} gave no answer: {error}"));
        }
    }
}

impl Asker {
    /// Names the credential only if the host wanted to see it.
    fn verdict(&self) -> String {
        let taken = self.credentials.iter().find_map(|found| Some((found, found.taken_by()?)));
        match taken {
            Some((Candidate { found_in: Some(place), .. }, host)) if host.shown => {
                format!("it can be pulled with {place}")
            }
            Some((_, host)) => format!("it can be pulled anonymously from {}", host.host),
            None => "it cannot be pulled".to_owned(),
        }
    }
}

impl Candidate {
    fn taken_by(&self) -> Option<&Answered> {
        self.hosts.iter().find(|host| host.accepted)
    }
}

/// Notes which process asked, where another one will pull.
fn tell_who_asked(session: &Session) {
    if let Some(socket) = session.running_daemon().as_ref().and_then(|daemon| daemon.socket()) {
        session.out.note(format_args!(
            "note: asked by this command; the daemon at {} also has the docker config of its own user, and its own providers",
            socket.display()
        ));
    }
    let target = session.config(&Need::look()).ok().and_then(|(_, config)| target_of(&config).ok());
    if let Some(Target::Runtime(endpoint)) = target {
        session.out.note(format_args!(
            "note: asked by larder, with hosts from --certs-d or the usual folders; what pulls is {endpoint}, which may be configured otherwise"
        ));
    }
}
