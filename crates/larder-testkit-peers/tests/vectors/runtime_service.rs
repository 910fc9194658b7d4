//! `runtime_service.json`, the image manager's side: what reaches a runtime, and what its lists mean.
//!
//! Where a case has messages of CRI, they cross a real socket to a scripted runtime. Where it has only errors, a
//! backend in memory gives them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use larder::backend::{
    self, Backend as _, FilesystemUsage, Filesystems, ImageSpec, ProgressReporter, RemoveOptions,
};
use larder::credentials::{Credential, Secret};
use larder::image_service::{FsStats, ImageService, ImageStats};
use larder_cri::{CriBackend, CriConfig, proto};
use larder_testkit::fake_backend::{self, BackendOp, FakeBackend};
use larder_testkit_peers::fake_cri::{FakeCri, Rpc};
use serde::Deserialize;
use serde_json::{Value, json};
use tonic::Code;

use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "pull_with_credentials" => parse(input).map(pull_with_credentials),
        "image_ref" => parse(input).map(image_ref),
        "image_size" => parse(input).map(image_size),
        "image_stats" => parse(input).map(image_stats),
        "list_images" => parse(input).map(list_images),
        "remove_image" => parse(input).map(remove_image),
        "to_cri_spec" => parse(input).map(to_cri_spec),
        "container_image_id" => parse(input).map(container_image_id),
        "image_fs_stats" => parse(input).map(image_fs_stats),
        _ => return None,
    })
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime starts").block_on(future)
}

/// A client of the fake, with the gate `RuntimeClassInImageCriApi` as given.
pub(crate) fn client(fake: &FakeCri, runtime_class_in_image: bool) -> CriBackend {
    CriBackend::new(fake.endpoint(), CriConfig { runtime_class_in_image, ..CriConfig::default() })
}

/// `null`, or the text of an error.
pub(crate) fn error_of<T, E: fmt::Display>(result: &Result<T, E>) -> Value {
    match result {
        Ok(_) => Value::Null,
        Err(error) => error.to_string().into(),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CriImage {
    id: String,
    size: u64,
    #[serde(default)]
    repo_tags: Vec<String>,
    #[serde(default)]
    repo_digests: Vec<String>,
    #[serde(default)]
    pinned: bool,
    annotations: Option<BTreeMap<String, String>>,
    runtime_handler: Option<String>,
}

impl CriImage {
    /// CRI's message; a spec is present if any part of it is.
    pub(crate) fn message(self) -> proto::Image {
        let has_spec = self.annotations.is_some() || self.runtime_handler.is_some();
        let spec = proto::ImageSpec {
            annotations: self.annotations.unwrap_or_default(),
            runtime_handler: self.runtime_handler.unwrap_or_default(),
            ..proto::ImageSpec::default()
        };
        proto::Image {
            id: self.id,
            size: self.size,
            repo_tags: self.repo_tags,
            repo_digests: self.repo_digests,
            pinned: self.pinned,
            spec: has_spec.then_some(spec),
            ..proto::Image::default()
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullWithCredentials {
    image: String,
    #[serde(default)]
    credentials: Vec<CredentialInput>,
    pull_results: Vec<PullReplyInput>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CredentialInput {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    email: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullReplyInput {
    #[serde(default)]
    image_ref: String,
    #[serde(default)]
    error: String,
}

fn pull_with_credentials(input: PullWithCredentials) -> Value {
    let fake = FakeCri::start();
    for result in input.pull_results {
        if result.error.is_empty() {
            fake.answer_pull(&result.image_ref);
        } else {
            fake.fail_next(Rpc::PullImage, Code::Unknown, &result.error);
        }
    }
    let login = |login: CredentialInput| Credential {
        username: login.username,
        password: Secret::new(login.password),
        email: login.email,
        ..Credential::default()
    };
    let credentials: Vec<_> = input.credentials.into_iter().map(login).collect();
    let service = ImageService::new(Arc::new(client(&fake, false)));
    let spec = ImageSpec::named(input.image);
    let pulled = block_on(service.pull(&spec, &credentials, None, &ProgressReporter::unwatched()));
    let auth = |username: &str, password: &str| json!({"username": username, "password": password});
    let used = pulled.as_ref().ok().and_then(|pulled| pulled.credential.as_ref());
    json!({
        "image_ref": pulled.as_ref().map_or("", |pulled| pulled.image_ref.as_str()),
        "credentials_used": used.map(|used| auth(&used.username, used.password.reveal())),
        "error": error_of(&pulled),
        "calls": fake.received().into_iter().map(|received| json!({
            "call": format!("{:?}", received.rpc),
            "image": received.image.map(|image| image.image),
            "auth": received.auth.map(|sent| auth(&sent.username, &sent.password)),
        })).collect::<Vec<_>>(),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusOrError {
    status: Option<CriImage>,
    #[serde(default)]
    error: String,
}

impl StatusOrError {
    /// A backend that answers a status call for `image` like this.
    fn backend(self) -> Arc<FakeBackend> {
        let fake = FakeBackend::new();
        if !self.error.is_empty() {
            fake.fail_next(BackendOp::Status, fake_backend::error(self.error));
        }
        if let Some(image) = self.status {
            fake.add_image("image", fake_backend::image(image.id, image.size));
        }
        Arc::new(fake)
    }
}

fn image_ref(input: StatusOrError) -> Value {
    let found = block_on(input.backend().usable_status(&ImageSpec::named("image")));
    let error = error_of(&found);
    json!({"error": error, "image_ref": found.ok().flatten().map(|image| image.id).unwrap_or_default()})
}

fn image_size(input: StatusOrError) -> Value {
    let size = block_on(ImageService::new(input.backend()).image_size(&ImageSpec::named("image")));
    json!({"error": error_of(&size), "size": size.unwrap_or_default().0})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImagesOrError {
    #[serde(default)]
    images: Vec<CriImage>,
    #[serde(default)]
    error: String,
}

fn image_stats(input: ImagesOrError) -> Value {
    let fake = FakeBackend::new();
    if !input.error.is_empty() {
        fake.fail_next(BackendOp::List, fake_backend::error(input.error));
    }
    fake.set_images(
        input.images.into_iter().map(|image| fake_backend::image(image.id, image.size)).collect(),
    );
    match block_on(fake.list()) {
        Ok(images) => json!({"total_storage_bytes": ImageStats::of(&images).total_storage_bytes}),
        Err(error) => json!({"error": error.to_string()}),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListImages {
    images: Vec<CriImage>,
    #[serde(default)]
    runtime_class_in_image_cri_api: bool,
}

fn list_images(input: ListImages) -> Value {
    let fake = FakeCri::start();
    fake.change(|contents| contents.images = input.images.into_iter().map(CriImage::message).collect());
    match block_on(client(&fake, input.runtime_class_in_image_cri_api).list()) {
        Ok(images) => json!({"images": images.into_iter().map(image_answer).collect::<Vec<_>>()}),
        Err(error) => json!({"error": error.to_string()}),
    }
}

fn image_answer(image: backend::Image) -> Value {
    let spec = image.spec.unwrap_or_default();
    let annotations: Vec<_> =
        spec.annotations.into_iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
    json!({
        "id": image.id,
        "size": image.size,
        "repo_tags": image.repo_tags,
        "repo_digests": image.repo_digests,
        "pinned": image.pinned,
        "spec_image": spec.image,
        "runtime_handler": spec.runtime_handler,
        "annotations": annotations,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveImage {
    image: String,
    #[serde(default)]
    runtime_handler: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    runtime_class_in_image_cri_api: bool,
    #[serde(default)]
    error: String,
}

fn remove_image(input: RemoveImage) -> Value {
    let fake = FakeCri::start();
    if !input.error.is_empty() {
        fake.fail_next(Rpc::RemoveImage, Code::Unknown, &input.error);
    }
    let spec = ImageSpec {
        image: input.image.into(),
        annotations: input.annotations,
        runtime_handler: input.runtime_handler,
        ..ImageSpec::default()
    };
    let removed = block_on(
        client(&fake, input.runtime_class_in_image_cri_api).remove(&spec, &RemoveOptions::default()),
    );
    // The runtime of the case is faked above gRPC, so its error lacks the prefix that gRPC adds.
    let bare = |error: backend::BackendError| {
        let text = error.to_string();
        text.strip_prefix("rpc error: code = Unknown desc = ").map(str::to_owned).unwrap_or(text)
    };
    let call = |received: larder_testkit_peers::fake_cri::ReceivedCall| {
        let image = received.image.unwrap_or_default();
        json!({
            "call": format!("{:?}", received.rpc),
            "image": image.image,
            "annotations": image.annotations.len(),
            "runtime_handler": image.runtime_handler,
        })
    };
    json!({
        "calls": fake.received().into_iter().map(call).collect::<Vec<_>>(),
        "error": error_of(&removed.map_err(bare)),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToCriSpec {
    image: String,
    #[serde(default)]
    runtime_handler: String,
    #[serde(default)]
    annotations: Vec<Annotation>,
    #[serde(default)]
    user_specified_image: String,
    #[serde(default)]
    runtime_class_in_image_cri_api: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Annotation {
    name: String,
    value: String,
}

fn to_cri_spec(input: ToCriSpec) -> Value {
    let fake = FakeCri::start();
    let spec = ImageSpec {
        image: input.image.into(),
        annotations: input.annotations.into_iter().map(|one| (one.name, one.value)).collect(),
        runtime_handler: input.runtime_handler,
        user_specified_image: input.user_specified_image.into(),
        ..ImageSpec::default()
    };
    let asked = block_on(client(&fake, input.runtime_class_in_image_cri_api).status(&spec));
    let sent = fake.received().into_iter().find_map(|received| received.image).unwrap_or_default();
    if let Err(error) = asked {
        return json!({"error": error.to_string()});
    }
    json!({
        "image": sent.image,
        "annotations": sent.annotations,
        "runtime_handler": sent.runtime_handler,
        "user_specified_image": sent.user_specified_image,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContainerImageId {
    #[serde(default)]
    image_id: String,
    #[serde(default)]
    image_ref: String,
}

fn container_image_id(input: ContainerImageId) -> Value {
    let fake = FakeCri::start();
    let container = proto::Container {
        id: "c".into(),
        image_id: input.image_id,
        image_ref: input.image_ref,
        ..proto::Container::default()
    };
    fake.change(|contents| contents.containers = vec![container]);
    match block_on(client(&fake, false).container_inventory()) {
        Ok(in_use) => json!({"image_id": in_use.containers[0].image_id}),
        Err(error) => json!({"error": error.to_string()}),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageFsStats {
    #[serde(default)]
    image_filesystems: Vec<ReportedFilesystem>,
    #[serde(default)]
    local: BTreeMap<String, LocalFilesystem>,
    #[serde(default)]
    error: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportedFilesystem {
    mountpoint: Option<String>,
    used_bytes: Option<u64>,
    inodes_used: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LocalFilesystem {
    capacity: u64,
    available: u64,
}

fn image_fs_stats(input: ImageFsStats) -> Value {
    let fake = FakeBackend::new();
    if !input.error.is_empty() {
        fake.fail_next(BackendOp::Filesystems, fake_backend::error(input.error));
    }
    let reported = |usage: ReportedFilesystem| FilesystemUsage {
        mountpoint: usage.mountpoint.unwrap_or_default().into(),
        timestamp_ns: 1,
        used_bytes: usage.used_bytes,
        inodes_used: usage.inodes_used,
    };
    fake.set_filesystems(Filesystems {
        image: input.image_filesystems.into_iter().map(reported).collect(),
        container: Vec::new(),
    });
    let local = move |path: &std::path::Path| {
        let found = path.to_str().and_then(|path| input.local.get(path));
        Ok(found.map(|found| FsStats {
            capacity: found.capacity,
            available: found.available,
            ..FsStats::default()
        }))
    };
    match block_on(ImageService::new(Arc::new(fake)).image_filesystem(local)) {
        Ok(found) => json!({
            "used_bytes": found.usage.used_bytes,
            "inodes_used": found.usage.inodes_used,
            "capacity": found.disk.map(|disk| disk.capacity),
            "available": found.disk.map(|disk| disk.available),
        }),
        Err(error) => json!({"error": error.to_string()}),
    }
}
