//! The steps in which an image was built, from what a backend reports of it. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// A step of the build. The shape of `-o json`; in configs it has the names of OCI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all(serialize = "camelCase"))]
pub(crate) struct BuildStep {
    /// When, as the config says.
    #[serde(default)]
    pub(crate) created: Option<String>,
    /// The command.
    #[serde(default, deserialize_with = "null_as_default")]
    pub(crate) created_by: String,
    /// Comment of the builder.
    #[serde(default, deserialize_with = "null_as_default")]
    pub(crate) comment: String,
    /// True if the step made no layer.
    #[serde(default, deserialize_with = "null_as_default")]
    pub(crate) empty_layer: bool,
    /// Bytes that a pull fetches of its layer.
    #[serde(default)]
    pub(crate) size_bytes: Option<u64>,
}

/// Builders write `null` for a field without value.
fn null_as_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    value: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// The steps, newest first; `None` where the details of the backend have no config. Pure.
pub(crate) fn build_steps(info: &BTreeMap<String, String>) -> Option<Vec<BuildStep>> {
    if info.contains_key("docker") {
        return None; // the engine's answer has no history, and its config is made up
    }
    let parsed = |text: &String| serde_json::from_str::<Value>(text).ok();
    // larder's own store has the config, containerd a copy of it beside other data.
    let config = info.values().filter_map(parsed).find_map(|value| match value.get("imageSpec") {
        Some(config) => Some(config.clone()),
        None => value.get("rootfs").is_some().then_some(value),
    })?;
    let steps = config.get("history").cloned().unwrap_or_default();
    let steps: Option<Vec<BuildStep>> = serde_json::from_value(steps).ok()?;
    let mut steps = steps.unwrap_or_default();
    let layers = info.get("layers").and_then(parsed).unwrap_or_default();
    let mut sizes = layers.as_array().into_iter().flatten().map(|layer| layer.get("size")?.as_u64());
    for step in steps.iter_mut().filter(|step| !step.empty_layer) {
        step.size_bytes = sizes.next().flatten();
    }
    steps.reverse();
    Some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HISTORY: &str = r#"[
        {"created": "2026-01-01T00:00:00Z", "created_by": "COPY   a /a"},
        {"created_by": "ENV A=1", "empty_layer": true, "comment": "buildkit"}]"#;

    #[test]
    fn steps_are_read_from_each_backend_and_sizes_go_to_those_with_a_layer() {
        let config = format!(r#"{{"rootfs": {{}}, "history": {HISTORY}}}"#);
        let store = BTreeMap::from([
            ("config".to_owned(), config.clone()),
            ("layers".to_owned(), r#"[{"size": 7}]"#.to_owned()),
        ]);
        let containerd = BTreeMap::from([("info".to_owned(), format!(r#"{{"imageSpec": {config}}}"#))]);
        for (info, size) in [(store, Some(7)), (containerd, None)] {
            let steps = build_steps(&info).unwrap();
            assert_eq!(steps[0].created_by, "ENV A=1");
            assert_eq!((steps[0].size_bytes, steps[1].size_bytes), (None, size));
        }
        for key in ["info", "docker"] {
            assert_eq!(build_steps(&BTreeMap::from([(key.into(), "{}".into())])), None);
        }
        for config in [r#"{"rootfs": {}}"#, r#"{"rootfs": {}, "history": null}"#] {
            let none = BTreeMap::from([("config".into(), config.into())]);
            assert_eq!(build_steps(&none), Some(Vec::new()), "a config without history");
        }
    }

    #[test]
    fn null_is_a_field_without_value() {
        let step = r#"{"created": null, "created_by": null, "comment": null, "empty_layer": null}"#;
        let config = format!(r#"{{"rootfs": {{}}, "history": [{step}, {{"created_by": "ENV A=1"}}]}}"#);
        let steps = build_steps(&BTreeMap::from([("config".into(), config)])).unwrap();
        assert_eq!((steps[0].created_by.as_str(), steps[1].created_by.as_str()), ("ENV A=1", ""));
    }
}
