//! `runtime_service.json`, the client's side, and the statuses of `cri_errors.json`: endpoints, replies, streams and
//! the texts of errors.

use larder::backend::{self, Backend as _, ImageSpec, ProgressReporter};
use larder::internals::evaluate_pull_error;
use larder::reference::ImageId;
use larder_cri::{CriBackend, CriConfig, Endpoint, proto};
use larder_testkit_peers::fake_cri::{FakeCri, Rpc};
use serde::Deserialize;
use serde_json::{Value, json};
use tonic::Code;

use crate::runtime_service::{CriImage, block_on, client, error_of};
use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "status_reply" => parse(input).map(status_reply),
        "pull_reply" => parse(input).map(pull_reply),
        "endpoint" => parse(input).map(|input| endpoint(&input)),
        "image_endpoint" => parse(input).and_then(|input| image_endpoint(&input)),
        "list_streaming" => parse(input).and_then(list_streaming),
        "grpc_status_text" => parse(input).and_then(|input| grpc_status_text(&input)),
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusReply {
    image: String,
    reply_image: Option<CriImage>,
}

fn status_reply(input: StatusReply) -> Value {
    let fake = FakeCri::start();
    fake.answer_status(input.reply_image.map(CriImage::message));
    json!({"error": error_of(&block_on(client(&fake, false).status(&ImageSpec::named(input.image))))})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PullReply {
    image: String,
    #[serde(default)]
    reply_ref: String,
}

fn pull_reply(input: PullReply) -> Value {
    let fake = FakeCri::start();
    fake.answer_pull(&input.reply_ref);
    let pulled = pull(&client(&fake, false), input.image);
    json!({"error": error_of(&pulled), "image_ref": pulled.unwrap_or_default()})
}

fn pull(client: &CriBackend, image: String) -> Result<ImageId, backend::BackendError> {
    block_on(client.pull(&ImageSpec::named(image), None, None, &ProgressReporter::unwatched()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointText {
    #[serde(default)]
    endpoint: String,
}

fn endpoint(input: &EndpointText) -> Value {
    match Endpoint::parse(&input.endpoint) {
        Ok(endpoint) => json!({"path": endpoint.path()}),
        Err(error) => json!({"error": error.to_string()}),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageEndpoint {
    #[serde(rename = "containerRuntimeEndpoint")]
    runtime: String,
    #[serde(default, rename = "imageServiceEndpoint")]
    image: String,
}

fn image_endpoint(input: &ImageEndpoint) -> CaseResult {
    let read = |text: &str| Endpoint::parse(text).map_err(|error| error.to_string());
    let image_endpoint = if input.image.is_empty() { None } else { Some(read(&input.image)?) };
    let backend =
        CriBackend::new(read(&input.runtime)?, CriConfig { image_endpoint, ..CriConfig::default() });
    Ok(json!({"endpoint": backend.image_endpoint().to_string()}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListStreaming {
    #[serde(default)]
    streaming: bool,
    calls: Vec<ListCall>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListCall {
    #[serde(default)]
    stream: StreamedList,
    #[serde(default)]
    list: UnaryList,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct StreamedList {
    #[serde(default)]
    parts: Vec<Vec<String>>,
    #[serde(default)]
    error: String,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct UnaryList {
    #[serde(default)]
    images: Vec<String>,
    #[serde(default)]
    error: String,
}

fn list_streaming(input: ListStreaming) -> CaseResult {
    let fake = FakeCri::start();
    fake.change(|contents| contents.streaming = true);
    let config = CriConfig { list_streaming: input.streaming, ..CriConfig::default() };
    let client = CriBackend::new(fake.endpoint(), config);
    let images = |ids: Vec<String>| -> Vec<_> {
        ids.into_iter().map(|id| proto::Image { id, size: 1, ..proto::Image::default() }).collect()
    };
    let calls: Result<Vec<_>, String> = block_on(async {
        let mut answers = Vec::new();
        for call in input.calls {
            let stream_error = error_named(&call.stream.error)?;
            if let Some((code, message)) = error_named(&call.list.error)? {
                fake.fail_next(Rpc::ListImages, code, &message);
            }
            fake.change(|contents| {
                contents.image_parts = Some(call.stream.parts.into_iter().map(images).collect());
                contents.stream_errors =
                    stream_error.map(|error| (Rpc::StreamImages, error)).into_iter().collect();
                contents.images = images(call.list.images);
            });
            let listed = client.list().await;
            let rpcs: Vec<_> = fake.take_rpcs().into_iter().map(|rpc| format!("{rpc:?}")).collect();
            answers.push(match listed {
                Ok(images) => {
                    let ids: Vec<_> = images.into_iter().map(|image| image.id).collect();
                    json!({"images": ids, "rpcs": rpcs})
                }
                Err(error) => json!({"error": error.to_string(), "rpcs": rpcs}),
            });
        }
        Ok(answers)
    });
    Ok(json!({"calls": calls?}))
}

/// The error that a case names by its code; `None` for no error.
fn error_named(code: &str) -> Result<Option<(Code, String)>, String> {
    if code.is_empty() { Ok(None) } else { Ok(Some((code_named(code)?, code.to_owned()))) }
}

/// A status code by its name in the gRPC specification.
fn code_named(name: &str) -> Result<Code, String> {
    Ok(match name {
        "CANCELLED" => Code::Cancelled,
        "UNKNOWN" => Code::Unknown,
        "INVALID_ARGUMENT" => Code::InvalidArgument,
        "DEADLINE_EXCEEDED" => Code::DeadlineExceeded,
        "NOT_FOUND" => Code::NotFound,
        "ALREADY_EXISTS" => Code::AlreadyExists,
        "PERMISSION_DENIED" => Code::PermissionDenied,
        "RESOURCE_EXHAUSTED" => Code::ResourceExhausted,
        "FAILED_PRECONDITION" => Code::FailedPrecondition,
        "ABORTED" => Code::Aborted,
        "OUT_OF_RANGE" => Code::OutOfRange,
        "UNIMPLEMENTED" => Code::Unimplemented,
        "INTERNAL" => Code::Internal,
        "UNAVAILABLE" => Code::Unavailable,
        "DATA_LOSS" => Code::DataLoss,
        "UNAUTHENTICATED" => Code::Unauthenticated,
        other => return Err(format!("no gRPC code is called {other}")),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrpcStatus {
    code: String,
    #[serde(default)]
    message: String,
}

fn grpc_status_text(input: &GrpcStatus) -> CaseResult {
    const IMAGE: &str = "registry.example/app:v1";
    let fake = FakeCri::start();
    fake.fail_next(Rpc::PullImage, code_named(&input.code)?, &input.message);
    let text = match pull(&client(&fake, false), IMAGE.to_owned()) {
        Ok(image_ref) => return Err(format!("the pull succeeded: {image_ref}")),
        Err(error) => error.to_string(),
    };
    let (reason, message) = evaluate_pull_error(IMAGE, &text);
    Ok(json!({
        "error_text": text,
        "message": message,
        "reason": reason.to_string(),
    }))
}
