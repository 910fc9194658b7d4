//! `config_defaults.json` and `config_validation.json`.

use larder::config::{FeatureGates, ImageSettings, KubeletImageConfig};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{CaseResult, parse};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigurationCase {
    /// Image settings as written, and feature gates among them.
    config: serde_json::Map<String, Value>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct GatesInput {
    #[serde(rename = "KubeletEnsureSecretPulledImages")]
    ensure_secret_pulled_images: Option<bool>,
}

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    let answer: fn(&ImageSettings, FeatureGates) -> Value = match op {
        "config_defaults" => |config, _| effective(config),
        "config_validation" => errors,
        _ => return None,
    };
    Some(read(input).map(|(config, gates)| answer(&config.defaulted(gates), gates)))
}

fn read(input: &Value) -> Result<(KubeletImageConfig, FeatureGates), String> {
    let ConfigurationCase { mut config } = parse(input)?;
    let written: GatesInput =
        config.remove("featureGates").map_or(Ok(GatesInput::default()), |g| parse(&g))?;
    let mut gates = FeatureGates::default();
    if let Some(on) = written.ensure_secret_pulled_images {
        gates.ensure_secret_pulled_images = on;
    }
    Ok((parse(&Value::Object(config))?, gates))
}

fn errors(config: &ImageSettings, gates: FeatureGates) -> Value {
    let errors: Vec<String> = config.problems(gates).iter().map(ToString::to_string).collect();
    json!({ "errors": errors })
}

fn effective(config: &ImageSettings) -> Value {
    json!({
        "containerRuntimeEndpoint": config.container_runtime_endpoint,
        "imageGCHighThresholdPercent": config.image_gc_high_threshold_percent,
        "imageGCLowThresholdPercent": config.image_gc_low_threshold_percent,
        "imageMaximumGCAge": config.image_maximum_gc_age.to_string(),
        "imageMinimumGCAge": config.image_minimum_gc_age.to_string(),
        "imagePullCredentialsVerificationPolicy": config.image_pull_credentials_verification_policy,
        "imageServiceEndpoint": config.image_service_endpoint,
        "maxParallelImagePulls": config.max_parallel_image_pulls,
        "nodeStatusMaxImages": config.node_status_max_images,
        "preloadedImagesVerificationAllowlist": config.preloaded_images_verification_allowlist,
        "registryBurst": config.registry_burst,
        "registryPullQPS": config.registry_pull_qps,
        "runtimeRequestTimeout": config.runtime_request_timeout.to_string(),
        "serializeImagePulls": config.serialize_image_pulls,
    })
}
