//! `pull_records.json`: the records on a disk of their own, one directory for each case.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder::backend::Image;
use larder::config::AllowlistPattern;
use larder::credentials::{PodCredentials, SecretCoordinates, ServiceAccountCoordinates};
use larder::records::{
    self, ImagePullCredentials, ImagePullIntent, ImagePulledRecord, PodCredentialLookup, PullRecordStore,
    PullRecords, RecordDirStep, RecordedSecret, RecordsError, Rfc3339Time, Verification,
};
use larder::reference::{ImageId, ImageName};
use larder_testkit::fake_backend::{FakeBackend, error as error_of};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::pull::simulated;
use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "must_attempt_pull" => parse(input).map(|input| simulated(must_attempt_pull(input))),
        "merge_credentials" => parse(input).map(merge_credentials),
        "record_sequence" => parse(input).map(|input| simulated(record_sequence(input))),
        "initialize" => parse(input).map(|input| simulated(initialize(input))),
        "migrate" => parse(input).map(|input| simulated(migrate(input))),
        "prune" => parse(input).map(|input| simulated(prune(input))),
        "allowlist_pattern" => {
            parse(input).map(|input: PatternCase| match AllowlistPattern::parse(&input.pattern) {
                Ok(AllowlistPattern::Exact(name)) => json!({"wildcard": false, "normalized": name}),
                Ok(AllowlistPattern::Prefix(name)) => json!({"wildcard": true, "normalized": name}),
                Err(error) => json!({"error": error.to_string()}),
            })
        }
        "policy_requires_verification" => parse(input).map(|input: PolicyCase| {
            match Verification::parse(&input.policy, input.allowlist.iter().map(String::as_str)) {
                Ok(policy) => json!({"verify": policy.required(&input.image, input.pulled_by_kubelet)}),
                Err(error) => json!({"error": error.to_string()}),
            }
        }),
        "record_file_name" => {
            parse(input).map(|input: FileNameCase| json!({"file": records::file_name(&input.key)}))
        }
        "encode_intent" => parse(input)
            .map(|input: PlainIntent| json!({"text": ImagePullIntent { image: input.image }.encode()})),
        "encode_record" => parse(input)
            .map(|input: EncodeCase| json!({"text": ImagePulledRecord::from(input.record).encode()})),
        "decode_intent" => {
            parse(input).map(|input: DecodeCase| match ImagePullIntent::decode(input.text.as_bytes()) {
                Ok(read) => json!({"image": read.document.image, "current_version": read.current_version}),
                Err(error) => json!({"error": error.to_string()}),
            })
        }
        "decode_record" => {
            parse(input).map(|input: DecodeCase| match ImagePulledRecord::decode(input.text.as_bytes()) {
                Ok(read) => json!({
                    "image_ref": read.document.image_ref,
                    "last_updated": read.document.last_updated.map(|time| time.to_string()),
                    "credential_mapping": mapping(&read.document),
                    "current_version": read.current_version,
                }),
                Err(error) => json!({"error": error.to_string()}),
            })
        }
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PatternCase {
    pattern: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyCase {
    policy: String,
    #[serde(default)]
    allowlist: Vec<String>,
    image: ImageName,
    #[serde(default)]
    pulled_by_kubelet: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileNameCase {
    key: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainIntent {
    image: ImageName,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EncodeCase {
    record: PlainRecord,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DecodeCase {
    text: String,
}

/// A record with the field names of its file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PlainRecord {
    image_ref: ImageId,
    last_updated_time: Option<String>,
    #[serde(default)]
    credential_mapping: Option<BTreeMap<String, PlainAccess>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct PlainAccess {
    kubernetes_secrets: Vec<RecordSecretInput>,
    kubernetes_service_accounts: Vec<RecordAccountInput>,
    node_pods_accessible: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct RecordSecretInput {
    uid: String,
    namespace: String,
    name: String,
    credential_hash: String,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RecordAccountInput {
    uid: String,
    namespace: String,
    name: String,
}

impl From<RecordSecretInput> for RecordedSecret {
    fn from(RecordSecretInput { uid, namespace, name, credential_hash }: RecordSecretInput) -> Self {
        RecordedSecret { at: SecretCoordinates { uid, namespace, name }, hash: credential_hash }
    }
}

impl From<RecordAccountInput> for ServiceAccountCoordinates {
    fn from(RecordAccountInput { uid, namespace, name }: RecordAccountInput) -> Self {
        ServiceAccountCoordinates { uid, namespace, name }
    }
}

impl From<PlainAccess> for ImagePullCredentials {
    fn from(plain: PlainAccess) -> Self {
        ImagePullCredentials {
            secrets: plain.kubernetes_secrets.into_iter().map(Into::into).collect(),
            service_accounts: plain.kubernetes_service_accounts.into_iter().map(Into::into).collect(),
            node_pods: plain.node_pods_accessible,
        }
    }
}

impl From<PlainRecord> for ImagePulledRecord {
    fn from(plain: PlainRecord) -> Self {
        let time = plain.last_updated_time.as_deref().unwrap_or("2024-10-21T12:26:40Z");
        let names = plain.credential_mapping.unwrap_or_default();
        ImagePulledRecord {
            last_updated: Rfc3339Time::parse(time),
            image_ref: plain.image_ref,
            names: names.into_iter().map(|(name, access)| (name, access.into())).collect(),
        }
    }
}

/// The mapping as the file has it.
fn mapping(record: &ImagePulledRecord) -> Value {
    let text: Value = serde_json::from_str(&record.encode()).expect("a record is JSON");
    text.get("credentialMapping").cloned().unwrap_or_else(|| json!({}))
}

/// A directory with these documents.
struct RecordFiles(TempDir);

impl RecordFiles {
    fn with(records: Vec<PlainRecord>, intents: Vec<ImageName>) -> RecordFiles {
        let disk = RecordFiles(tempfile::tempdir().expect("a directory"));
        for record in records {
            let record = ImagePulledRecord::from(record);
            disk.put("pulled", &records::file_name(record.image_ref.as_str()), &record.encode());
        }
        for image in intents {
            disk.put(
                "pulling",
                &records::file_name(image.as_str()),
                &ImagePullIntent { image: image.clone() }.encode(),
            );
        }
        disk
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn put(&self, dir: &str, file: &str, text: &str) {
        let dir = self.path().join(dir);
        fs_err::create_dir_all(&dir).expect("a directory");
        fs_err::write(dir.join(file), text).expect("a file");
    }

    fn files(&self, dir: &str) -> BTreeMap<String, String> {
        let read = fs_err::read_dir(self.path().join(dir)).expect("a directory").map(|entry| {
            let entry = entry.expect("an entry");
            let text = fs_err::read_to_string(entry.path()).expect("a text");
            (entry.file_name().into_string().expect("a name"), text)
        });
        read.collect()
    }

    fn intents(&self) -> Vec<ImageName> {
        let files = self.files("pulling").into_values();
        let images =
            files.map(|text| ImagePullIntent::decode(text.as_bytes()).expect("an intent").document.image);
        let mut images: Vec<_> = images.collect();
        images.sort();
        images
    }

    fn records(&self) -> BTreeMap<ImageId, ImagePulledRecord> {
        let files = self.files("pulled").into_values();
        let records =
            files.map(|text| ImagePulledRecord::decode(text.as_bytes()).expect("a record").document);
        records.map(|record| (record.image_ref.clone(), record)).collect()
    }

    fn mappings(&self) -> Value {
        self.records()
            .iter()
            .map(|(image_ref, record)| (image_ref.to_string(), mapping(record)))
            .collect::<Map<_, _>>()
            .into()
    }

    fn open(&self) -> PullRecordStore {
        PullRecordStore::open(self.path(), Verification::of_unconfigured_kubelet()).expect("records")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MustAttemptPullCase {
    policy: String,
    #[serde(default)]
    allowlist: Vec<String>,
    records: Vec<PlainRecord>,
    #[serde(default)]
    raw_pulled_files: BTreeMap<String, String>,
    #[serde(default)]
    intents: Vec<ImageName>,
    #[serde(default)]
    in_flight: BTreeMap<ImageName, usize>,
    image: ImageName,
    image_ref: ImageId,
    pod: RecordPodInput,
    #[serde(default)]
    fill_secrets_to: usize,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RecordPodInput {
    secrets: Vec<RecordSecretInput>,
    service_account: Option<RecordAccountInput>,
    error: Option<String>,
}

struct ScriptedPodLookup {
    answer: Result<PodCredentials, RecordsError>,
    asked: bool,
}

#[async_trait::async_trait]
impl PodCredentialLookup for ScriptedPodLookup {
    async fn pod_credentials(&mut self) -> Result<PodCredentials, RecordsError> {
        self.asked = true;
        self.answer.clone()
    }
}

async fn must_attempt_pull(mut input: MustAttemptPullCase) -> Value {
    for access in input.records.iter_mut().filter_map(|record| record.credential_mapping.as_mut()).flatten() {
        let secrets = &mut access.1.kubernetes_secrets;
        for number in secrets.len()..input.fill_secrets_to {
            let fill = format!("fill-{number}");
            secrets.push(RecordSecretInput {
                uid: fill.clone(),
                namespace: fill.clone(),
                name: fill.clone(),
                credential_hash: fill,
            });
        }
    }
    let disk = RecordFiles::with(input.records, input.intents);
    for (image_ref, text) in &input.raw_pulled_files {
        disk.put("pulled", &records::file_name(image_ref), text);
    }
    let policy = Verification::parse(&input.policy, input.allowlist.iter().map(String::as_str));
    let written = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&written);
    let witness: records::StepHook = Arc::new(move |step, path: &Path| {
        if step == RecordDirStep::Move && path.parent().is_some_and(|dir| dir.ends_with("pulled")) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let kept =
        PullRecordStore::watched(disk.path(), policy.expect("a policy"), Some(witness)).expect("records");
    for (image, count) in &input.in_flight {
        for _ in 0..*count {
            kept.record_pull_intent(image).await.expect("an intent");
        }
    }
    let RecordPodInput { secrets, service_account, error } = input.pod;
    let secrets = secrets.into_iter().map(|secret| {
        let RecordedSecret { at, hash } = secret.into();
        (at, hash)
    });
    let pod = PodCredentials { secrets: secrets.collect(), service_account: service_account.map(Into::into) };
    let mut lookup = ScriptedPodLookup {
        answer: error.map_or(Ok(pod), |text| Err(RecordsError::other(text))),
        asked: false,
    };
    // Once from the disk, and once more from memory, which has to say the same.
    let (result, error) = kept.check(&input.image, &input.image_ref, &mut lookup).await;
    kept.flush().await.expect("written");
    let record_written = written.load(Ordering::Relaxed) > 0;
    let (again, _) = kept.check(&input.image, &input.image_ref, &mut lookup).await;
    kept.flush().await.expect("written");
    assert_eq!(again, result, "memory and disk differ");
    let mut answer = json!({
        "pull_required": result.is_none_or(records::MustPullCheckResult::must_pull),
        "error": error.map(|error| error.to_string()),
        "credentials_looked_up": lookup.asked,
        "metric_result": result.map(records::MustPullCheckResult::name),
        "record_written": record_written,
    });
    if record_written && input.fill_secrets_to == 0 {
        answer["mapping_after"] = mapping(&disk.records()[&input.image_ref]);
    }
    answer
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MergeCase {
    record: PlainRecord,
    image: String,
    new: Option<PlainAccess>,
}

fn merge_credentials(input: MergeCase) -> Value {
    let mut record = ImagePulledRecord::from(input.record);
    let changed =
        records::merge(&mut record, &input.image, input.new.map(ImagePullCredentials::from).as_ref());
    json!({"changed": changed, "credentialMapping": mapping(&record)})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordSequence {
    records: Vec<PlainRecord>,
    intents: Vec<ImageName>,
    steps: Vec<SequenceStep>,
}

#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
enum SequenceStep {
    Intent { image: ImageName },
    Pulled { image: ImageName, image_ref: ImageId, credentials: Option<PlainAccess> },
    Failed { image: ImageName },
}

async fn record_sequence(input: RecordSequence) -> Value {
    let disk = RecordFiles::with(input.records, input.intents);
    let kept = disk.open();
    let mut steps = Vec::new();
    for step in input.steps {
        let image = match step {
            SequenceStep::Intent { image } => {
                kept.record_pull_intent(&image).await.expect("an intent");
                image
            }
            SequenceStep::Pulled { image, image_ref, credentials } => {
                let access = credentials.map(ImagePullCredentials::from);
                // Kubelet only logs that a record cannot be written.
                let _ = kept.pulled(&image, &image_ref, access, Rfc3339Time(1_800_000_000)).await;
                image
            }
            SequenceStep::Failed { image } => {
                kept.record_image_pull_failed(&image);
                image
            }
        };
        kept.flush().await.expect("written");
        steps.push(json!({
            "in_flight": kept.in_flight(&image),
            "intents_on_disk": disk.intents(),
            "records": disk.mappings(),
        }));
    }
    json!({"steps": steps})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Initialize {
    intents: Vec<ImageName>,
    records: Vec<PlainRecord>,
    images: Vec<PlainImage>,
    list_error: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainImage {
    id: ImageId,
    repo_tags: Vec<String>,
    repo_digests: Vec<String>,
}

async fn initialize(input: Initialize) -> Value {
    let disk = RecordFiles::with(input.records, input.intents);
    let backend = FakeBackend::new();
    if let Some(error) = input.list_error {
        backend.set_down(Some(error_of(&error)));
    }
    let image = |image: PlainImage| Image {
        id: image.id,
        repo_tags: image.repo_tags,
        repo_digests: image.repo_digests,
        ..Image::default()
    };
    backend.set_images(input.images.into_iter().map(image).collect());
    disk.open().recover(&backend).await;
    json!({"intents_on_disk": disk.intents(), "records": disk.mappings()})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Migrate {
    pulling_files: BTreeMap<String, String>,
    pulled_files: BTreeMap<String, String>,
}

async fn migrate(input: Migrate) -> Value {
    let disk = RecordFiles::with(Vec::new(), Vec::new());
    for (dir, files) in [("pulling", input.pulling_files), ("pulled", input.pulled_files)] {
        for (file, text) in files {
            disk.put(dir, &file, &text);
        }
    }
    disk.open().recover(&FakeBackend::new()).await;
    json!({"pulling_files": disk.files("pulling"), "pulled_files": disk.files("pulled")})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prune {
    records: Vec<PlainRecord>,
    image_list: Vec<ImageId>,
    until: String,
}

async fn prune(input: Prune) -> Value {
    let disk = RecordFiles::with(input.records, Vec::new());
    let until = Rfc3339Time::parse(&input.until).expect("a time");
    disk.open().prune(input.image_list, until).await.expect("pruned");
    json!({"records_left": disk.records().into_keys().collect::<Vec<_>>()})
}
