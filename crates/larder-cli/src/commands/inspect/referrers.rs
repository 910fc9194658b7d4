//! `larder inspect --referrers`: signatures, SBOMs and attestations of images, as their registries list them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use larder::age;
use larder::artifact_type::{type_matches, type_word};
use larder::credentials::{Credential, TokenPolicy};
use larder::hint::Hint;
use larder::pod::Pod;
use larder::reference::{Digest, ImageName, Reference};
use larder_agent::image_name;
use larder_agent::registry::{FetchError, PlatformMatcher, Referrer, Referrers, RegistryClient};
use serde::Serialize;

use super::checked_names;
use crate::args::{InspectArgs, is_id};
use crate::commands::images::short;
use crate::credential_setup;
use crate::exit::CommandOutcome;
use crate::failure::{ExitReport as _, Failure, error_chain};
use crate::output::table::TextTable;
use crate::output::{self, size};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};

/// Longest value of an annotation that is printed, in characters.
const MAX_VALUE: usize = 1024;
/// Annotation with the time of creation.
const CREATED: &str = "org.opencontainers.image.created";

/// Asks the registries of the images; the images need not be present.
pub(super) async fn run(args: &InspectArgs, session: &CommandSession) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    if let Some(id) = args.images.iter().find(|image| is_id(image.as_str())) {
        return Err(Failure::bad_input(format!("{id} is an ID, which registries do not have"))
            .hint(Hint::from("write a name of the image: ").command(["images"]).text(" lists them")));
    }
    let (names, mut outcome) = checked_names(&args.images, image_name::check, out);
    let credentials =
        credential_setup::gather(&args.credentials, TokenPolicy::Keep, names.iter().copied(), out)?;
    let (_, config) = session.config(&ImageAccess::read().of_store())?;
    let client = args.tls.client(config.registry.clone());
    let artifact_type = args.artifact_type.as_deref();
    let mut records = Vec::new();
    for name in names {
        let found = credentials.sources.lookup(&ImageName::from(name), &[], &Pod::default()).await;
        let found =
            found.map_err(|error| Failure::bad_input(format!("{name}: {error}")).hints(error.hint()))?;
        match referrers_of(&client, name, &found, artifact_type).await {
            Ok(subjects) => records.push(ImageReferrers { image: name.into(), subjects }),
            Err(failure) => outcome = outcome.max(failure.print(out)),
        }
    }
    match args.output {
        None => records.iter().for_each(|image| image.print(out)),
        Some(format) => output::data(out, format, &records),
    }
    for SubjectRecord { digest, .. } in
        records.iter().flat_map(|image| &image.subjects).filter(|subject| !subject.is_complete)
    {
        out.warning(format_args!(
            "the registry lists more referrers of {digest} than are read; the rest is left out"
        ));
    }
    Ok(outcome)
}

/// Lists referrers with each credential in turn, as a pull tries them, until one succeeds.
async fn referrers_of(
    client: &RegistryClient,
    image: &str,
    found: &[Credential],
    artifact_type: Option<&str>,
) -> Result<Vec<SubjectRecord>, Failure> {
    let name = ImageName::from(image).with_default_tag().and_then(|name| Reference::parse(name.as_str()));
    let name = name.map_err(|error| Failure::bad_input(format!("{image}: {error}")))?;
    let platform = name.platform().map_or_else(PlatformMatcher::host, PlatformMatcher::requested);
    let attempts: Vec<_> = if found.is_empty() { vec![None] } else { found.iter().map(Some).collect() };
    let mut failure = Failure::failed(format!("{image}: no credential to try"));
    for credential in attempts {
        match listed(client, &name, credential, &platform, artifact_type).await {
            Ok(subjects) => return Ok(subjects),
            Err(error) => failure = Failure::failed(error_chain(&error)).hints(error.hint()),
        }
    }
    Err(failure)
}

async fn listed(
    client: &RegistryClient,
    name: &Reference,
    credential: Option<&Credential>,
    platform: &PlatformMatcher,
    artifact_type: Option<&str>,
) -> Result<Vec<SubjectRecord>, FetchError> {
    let session = client.session(name, credential)?;
    // A registry compares whole types. Words and patterns are compared here, as is what it did not leave out.
    let exact = artifact_type.filter(|of| of.contains('/') && !of.contains(['*', '?']));
    let mut records = Vec::new();
    for digest in session.subjects(platform).await? {
        let Referrers { found, is_complete } = session.referrers(&digest, exact).await?;
        let mut referrers: Vec<_> = found.into_iter().map(ReferrerRecord::from).collect();
        referrers.retain(|record| artifact_type.is_none_or(|of| type_matches(of, &record.artifact_type)));
        records.push(SubjectRecord { digest, is_complete, referrers });
    }
    Ok(records)
}

/// The referrers of an image. The shape of `-o json`.
#[derive(Debug, Serialize)]
struct ImageReferrers {
    image: ImageName,
    /// Its index, if it has one, and its manifest for the platform.
    subjects: Vec<SubjectRecord>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SubjectRecord {
    digest: Digest,
    is_complete: bool,
    referrers: Vec<ReferrerRecord>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ReferrerRecord {
    /// In a word.
    r#type: String,
    artifact_type: String,
    media_type: String,
    digest: Digest,
    size_bytes: u64,
    created: Option<String>,
    /// The tag by which it refers to the image; `null` if the registry lists it.
    tag: Option<String>,
    annotations: BTreeMap<String, String>,
}

impl From<Referrer> for ReferrerRecord {
    fn from(Referrer { descriptor, tag }: Referrer) -> ReferrerRecord {
        let artifact_type = if descriptor.artifact_type.is_empty() {
            descriptor.media_type.clone()
        } else {
            descriptor.artifact_type
        };
        let annotations = descriptor.annotations.into_iter().map(|(key, value)| (cut(key), cut(value)));
        let annotations: BTreeMap<_, _> = annotations.collect();
        ReferrerRecord {
            r#type: type_word(&artifact_type).to_owned(),
            artifact_type: cut(artifact_type),
            media_type: cut(descriptor.media_type),
            digest: descriptor.digest,
            size_bytes: descriptor.size,
            created: annotations.get(CREATED).cloned(),
            tag,
            annotations,
        }
    }
}

/// A text of a registry, of a length that fits a table.
fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MAX_VALUE) {
        text.truncate(end);
        text.push('\u{2026}');
    }
    text
}

impl ImageReferrers {
    fn print(&self, out: &Printer) {
        out.heading(&self.image);
        let now = Timestamp::now();
        let mut table =
            TextTable::new(["TYPE", "DIGEST", "SIZE", "CREATED", "SUBJECT", "TAG"]).optional(["TAG"]);
        for SubjectRecord { digest: subject, referrers, .. } in &self.subjects {
            let of = short(subject.as_str());
            for found in referrers {
                table.row([
                    found.r#type.clone(),
                    short(found.digest.as_str()).to_owned(),
                    size::bytes(found.size_bytes),
                    found.created.as_ref().map(|created| age::ago(created, now)).unwrap_or_default(),
                    of.to_owned(),
                    found.tag.as_ref().map(|tag| tag.replace(subject.hex(), of)).unwrap_or_default(),
                ]);
            }
        }
        if self.subjects.iter().all(|subject| subject.referrers.is_empty()) {
            out.line("   no referrers");
        } else {
            out.table(&table);
        }
    }
}
