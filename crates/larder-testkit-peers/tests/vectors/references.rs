//! `references.json`.

use larder::reference::{self, ImageName, Reference};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{CaseResult, parse};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReferenceInput {
    #[serde(default)]
    image: String,
}

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    let answer: fn(&str) -> Value = match op {
        "parse_normalized" => parse_normalized,
        "parse_image_name" => parse_image_name,
        "apply_default_tag" => apply_default_tag,
        "trim_tag_digest" => trim_tag_digest,
        _ => return None,
    };
    Some(parse::<ReferenceInput>(input).map(|input| answer(&input.image)))
}

fn parse_normalized(image: &str) -> Value {
    match Reference::parse(image) {
        Ok(parsed) => json!({
            "name": parsed.name(),
            "domain": parsed.registry(),
            "path": parsed.path(),
            "tag": parsed.tag(),
            "digest": parsed.digest().map(reference::Digest::as_str),
        }),
        Err(error) => json!({"error": error.to_string()}),
    }
}

fn parse_image_name(image: &str) -> Value {
    match ImageName::from(image).reference() {
        Ok(name) => json!({
            "repo": name.name(),
            "tag": name.tag_or_default(),
            "digest": name.digest().map(reference::Digest::as_str),
        }),
        Err(error) => json!({"error": error.to_string()}),
    }
}

fn apply_default_tag(image: &str) -> Value {
    match reference::apply_default_tag(image) {
        Ok(image) => json!({"image": image}),
        Err(error) => json!({"error": error.to_string()}),
    }
}

fn trim_tag_digest(image: &str) -> Value {
    match reference::trim_tag_and_digest(image) {
        Ok(image) => json!({"image": image}),
        Err(error) => json!({"error": error.to_string()}),
    }
}
