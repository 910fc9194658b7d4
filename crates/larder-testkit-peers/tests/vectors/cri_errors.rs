//! `cri_errors.json`: from the error of a failed pull to the reason and message that a pod shows.

use larder::image_service::PullAttemptsError;
use larder::internals::evaluate_pull_error;
use larder_testkit::fake_backend;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "eval_pull_error" => parse(input).map(|input: SingleError| eval_pull_error(&input)),
        "eval_pull_error_many" => parse(input).map(eval_pull_error_many),
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SingleError {
    image: String,
    error: String,
}

fn eval_pull_error(input: &SingleError) -> Value {
    let (reason, message) = evaluate_pull_error(&input.image, &input.error);
    json!({"message": message, "reason": reason.to_string()})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ErrorList {
    image: String,
    errors: Vec<String>,
}

fn eval_pull_error_many(input: ErrorList) -> Value {
    let failed: PullAttemptsError = input.errors.into_iter().map(fake_backend::error).collect();
    let error_text = failed.to_string();
    let mut answer = eval_pull_error(&SingleError { image: input.image, error: error_text.clone() });
    answer["error_text"] = error_text.into();
    answer
}
