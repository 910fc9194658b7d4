//! `larder ensure --dry-run`: what would be pulled, how much of it is present, and the credentials found.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use larder::credentials::Credential;
use larder::events::LogSink;
use larder::pull::{EnsurePlan, EnsureRequest};
use larder::reference::{Digest, ImageId, ImageName, Reference};
use larder_agent::NodeOpenError;
use larder_agent::backend::OpenMode;
use larder_agent::client::{Client, EnsureCalls};
use larder_agent::registry::{ImageDocuments, PlatformMatcher, RegistryClient};
use serde::Serialize;

use super::inputs::{EnsureInputs, EnsureJob, JobRecord};
use super::pull_settings;
use crate::args::EnsureArgs;
use crate::commands::explain::access::{find_credentials, note_pulling_process, place};
use crate::commands::pull_failure;
use crate::credential_setup::CredentialSetup;
use crate::exit::CommandOutcome;
use crate::failure::{Failure, error_chain};
use crate::output::table::TextTable;
use crate::output::{self, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};
use larder_agent::manifest::{InputProblemRecord, LocatedProblem};

/// The shape of `-o json`; documented in docs/output.md.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DryRunRecord {
    images: Vec<PlannedRow>,
    bad_input: Vec<InputProblemRecord>,
    summary: PlannedCounts,
}

/// Plan for one image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PlannedRow {
    #[serde(flatten)]
    job: JobRecord,
    result: PlannedResult,
    /// Why it is refused, or the registry's answer.
    message: Option<String>,
    /// Of the present image.
    id: Option<ImageId>,
    /// Whether the image is present, and its pull record requires that the registry accepts the credentials.
    pull_record_denies: bool,
    /// The credentials found for a pull; empty is anonymous.
    credentials: Vec<FoundCredential>,
    #[serde(flatten)]
    remote: Option<RemoteSizes>,
    #[serde(skip)]
    missing: Vec<(Digest, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum PlannedResult {
    Present,
    Pull,
    Refused,
    Failed,
}

#[derive(Debug, Clone, Serialize)]
struct FoundCredential {
    source: String,
    /// `null` for a token.
    user: Option<String>,
}

/// Compressed sizes of the layers, as the manifest has them.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct RemoteSizes {
    host: String,
    compressed_bytes: u64,
    present_bytes: u64,
    download_bytes: u64,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct PlannedCounts {
    present: usize,
    pull: usize,
    refused: usize,
    failed: usize,
    /// Layers that several images share count once.
    download_bytes: u64,
}

/// Prints the plan. Opens a store only if it exists, and changes nothing.
pub(super) async fn run(
    args: &EnsureArgs,
    gathered: &EnsureInputs,
    credentials: &CredentialSetup,
    session: &CommandSession,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let access = ImageAccess {
        store: OpenMode::Existing,
        backend_within: None,
        ..ImageAccess::pull(pull_settings(args, credentials), Duration::ZERO)
    };
    let client = match session.open(&access).await {
        Ok(client) => Some(client),
        Err(NodeOpenError::NoStore(_)) => None,
        Err(error) => return Err(error.into()),
    };
    let (_, config) = session.config(&ImageAccess::read().of_store())?;
    let registry = args.call.tls.client(config.registry.clone());
    let layers = match &client {
        Some(client) => present_layers(client).await?,
        None => HashSet::new(),
    };
    let own = credentials.secret.clone();
    let pulls = client.map(|client| EnsureCalls::new(client, own, Arc::new(LogSink), false));
    let mut planner = Planner { pulls, credentials, registry, layers, answers: HashMap::new() };
    let mut images = Vec::new();
    for job in &gathered.jobs {
        images.push(if job.has_bad_name() {
            PlannedRow::bad_name(job)
        } else {
            planner.row(job, out).await?
        });
    }
    let summary = PlannedCounts::of(&images);
    let bad_input = gathered.problems.iter().map(LocatedProblem::as_data).collect();
    let record = DryRunRecord { images, bad_input, summary };
    match args.output.data() {
        Some(format) => output::data(out, format, &record),
        None => record.print(out),
    }
    if record.summary.pull + record.summary.failed > 0 {
        note_pulling_process(session).await;
    }
    let blocked = record.summary.refused + record.summary.failed > 0;
    let outcome = if blocked { CommandOutcome::Failed } else { CommandOutcome::Done };
    Ok(outcome.max(gathered.outcome()))
}

/// Diff IDs and chain IDs of the layers that a pull does not fetch, in hexadecimal: backends list them with and without
/// the algorithm.
async fn present_layers(client: &Client) -> Result<HashSet<String>, Failure> {
    let listed = client.detailed_images(Vec::new()).await?;
    Ok(listed.layers.into_iter().map(|layer| layer.id.trim_start_matches("sha256:").to_owned()).collect())
}

/// Asks the backend and the registries, each image once for the same credentials.
struct Planner<'a> {
    /// `None` where the store does not exist.
    pulls: Option<EnsureCalls>,
    credentials: &'a CredentialSetup,
    registry: RegistryClient,
    layers: HashSet<String>,
    /// By name, whether it is for a container, and the hashes of the credentials.
    answers: HashMap<(ImageName, bool, Vec<String>), Result<ImageDocuments, String>>,
}

impl Planner<'_> {
    async fn row(&mut self, job: &EnsureJob, out: &Printer) -> Result<PlannedRow, Failure> {
        let request = &job.request;
        let plan = match &self.pulls {
            Some(pulls) => pulls.plan(request).await?,
            None => EnsurePlan::of(request, None),
        };
        match plan {
            EnsurePlan::Present(id) => {
                Ok(PlannedRow { id: Some(id), ..PlannedRow::new(job, PlannedResult::Present) })
            }
            EnsurePlan::Refused(error) => {
                if let Some(hint) = pull_failure::access_denied_hint(&request.image, &error) {
                    out.hint(hint);
                }
                let row = PlannedRow::new(job, PlannedResult::Refused);
                Ok(PlannedRow {
                    message: Some(error.message),
                    pull_record_denies: error.access_denied,
                    ..row
                })
            }
            EnsurePlan::Pull { access_denied } => {
                let row = self.pull_row(job).await?;
                Ok(PlannedRow { pull_record_denies: access_denied, ..row })
            }
        }
    }

    async fn pull_row(&mut self, job: &EnsureJob) -> Result<PlannedRow, Failure> {
        let found = find_credentials(job, self.credentials).await?;
        let hashes = found.iter().map(|found| found.hash.clone()).collect();
        let key = (job.request.image.clone(), job.request.is_for_container(), hashes);
        let answer = if let Some(answer) = self.answers.get(&key) {
            answer.clone()
        } else {
            let answer = fetch_documents(&self.registry, &job.request, &found).await;
            self.answers.entry(key).or_insert(answer).clone()
        };
        let credentials = found.iter().map(|credential| FoundCredential {
            source: place(credential, &self.credentials.candidates),
            user: Some(credential.username.clone()).filter(|user| !user.is_empty()),
        });
        let row =
            PlannedRow { credentials: credentials.collect(), ..PlannedRow::new(job, PlannedResult::Pull) };
        Ok(match answer {
            Ok(documents) => row.with_sizes(&documents, &self.layers),
            Err(message) => PlannedRow { result: PlannedResult::Failed, message: Some(message), ..row },
        })
    }
}

/// Fetches manifest and config with each credential in turn, as a pull does, until one succeeds.
async fn fetch_documents(
    client: &RegistryClient,
    request: &EnsureRequest,
    found: &[Credential],
) -> Result<ImageDocuments, String> {
    let name = request.image.with_default_tag().and_then(|image| Reference::parse(image.as_str()));
    let name = name.map_err(|error| error.to_string())?;
    let platform = name.platform().map_or_else(PlatformMatcher::host, PlatformMatcher::requested);
    let attempts: Vec<_> = if found.is_empty() { vec![None] } else { found.iter().map(Some).collect() };
    let mut failure = String::new();
    for credential in attempts {
        let mut session = client.session(&name, credential).map_err(|error| error_chain(&error))?;
        if request.is_for_container() {
            session = session.without_artifacts();
        }
        match session.documents(&platform).await {
            Ok(documents) => return Ok(documents),
            Err(error) => failure = error_chain(&error),
        }
    }
    Err(failure)
}

impl PlannedRow {
    fn new(job: &EnsureJob, result: PlannedResult) -> PlannedRow {
        PlannedRow {
            job: job.record(),
            result,
            message: None,
            id: None,
            pull_record_denies: false,
            credentials: Vec::new(),
            remote: None,
            missing: Vec::new(),
        }
    }

    /// Returns the row of a bad name, whose problem is reported as bad input.
    fn bad_name(job: &EnsureJob) -> PlannedRow {
        let message = Some("invalid image name".to_owned());
        PlannedRow { message, ..PlannedRow::new(job, PlannedResult::Refused) }
    }

    fn with_sizes(self, documents: &ImageDocuments, present: &HashSet<String>) -> PlannedRow {
        let mut chain: Option<Digest> = None;
        let (mut compressed_bytes, mut missing) = (0_u64, Vec::new());
        for (layer, diff_id) in documents.layers.layers.iter().zip(&documents.config.diff_ids) {
            let chain_id = match chain {
                None => diff_id.clone(),
                Some(below) => Digest::sha256(format!("{below} {diff_id}")),
            };
            compressed_bytes = compressed_bytes.saturating_add(layer.size);
            if ![diff_id, &chain_id].into_iter().any(|id| present.contains(id.hex())) {
                missing.push((layer.digest.clone(), layer.size));
            }
            chain = Some(chain_id);
        }
        missing.sort();
        missing.dedup();
        let download_bytes = missing.iter().fold(0_u64, |sum, (_, size)| sum.saturating_add(*size));
        let remote = RemoteSizes {
            host: documents.target.host.clone(),
            compressed_bytes,
            present_bytes: compressed_bytes.saturating_sub(download_bytes),
            download_bytes,
        };
        PlannedRow { remote: Some(remote), missing, ..self }
    }
}

impl PlannedCounts {
    fn of(images: &[PlannedRow]) -> PlannedCounts {
        let count = |result| images.iter().filter(|row| row.result == result).count();
        let missing: HashMap<_, _> =
            images.iter().flat_map(|row| &row.missing).map(|(layer, size)| (layer, *size)).collect();
        PlannedCounts {
            present: count(PlannedResult::Present),
            pull: count(PlannedResult::Pull),
            refused: count(PlannedResult::Refused),
            failed: count(PlannedResult::Failed),
            download_bytes: missing.values().fold(0, |sum, size| sum.saturating_add(*size)),
        }
    }
}

impl DryRunRecord {
    fn print(&self, out: &Printer) {
        let mut table =
            TextTable::new(["IMAGE", "OBJECT", "RESULT", "COMPRESSED", "PRESENT", "DOWNLOAD", "CREDENTIALS"]);
        for row in &self.images {
            let bytes = |of: fn(&RemoteSizes) -> u64| {
                row.remote.as_ref().map(of).map(size::bytes).unwrap_or_default()
            };
            let sources: Vec<_> = row.credentials.iter().map(|found| found.source.as_str()).collect();
            let tried = matches!(row.result, PlannedResult::Pull | PlannedResult::Failed);
            table.row([
                row.job.image.to_string(),
                row.job.object.clone(),
                row.cell().to_owned(),
                bytes(|sizes| sizes.compressed_bytes),
                bytes(|sizes| sizes.present_bytes),
                bytes(|sizes| sizes.download_bytes),
                if tried && sources.is_empty() { "anonymous".to_owned() } else { sources.join(", ") },
            ]);
        }
        out.table(&table);
        for row in &self.images {
            if let Some(message) = &row.message {
                out.line(format_args!("{}: {message}", row.job.image));
            }
        }
        let PlannedCounts { present, pull, refused, failed, download_bytes } = &self.summary;
        let download = size::bytes(*download_bytes);
        out.line(format_args!(
            "\n{present} present, {pull} to pull ({download}), {refused} refused, {failed} failed"
        ));
    }
}

impl PlannedRow {
    fn cell(&self) -> &'static str {
        match (self.result, self.pull_record_denies) {
            (PlannedResult::Present, _) => "Present",
            (PlannedResult::Pull, false) => "Pull",
            (PlannedResult::Pull, true) => "Pull (pull record)",
            (PlannedResult::Refused, _) => "Refused",
            (PlannedResult::Failed, _) => "Failed",
        }
    }
}
