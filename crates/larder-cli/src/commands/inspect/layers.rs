//! `larder inspect --layers`: the layers of an image, their sizes, and the images that share them.

use std::collections::BTreeMap;

use larder_api::v1::{Image, ImagesResponse};
use serde::Serialize;
use serde_json::Value;

use crate::commands::images::short;
use crate::output::size;
use crate::output::table::TextTable;
use crate::printer::Printer;

/// How many sharing images are named.
const NAMED: usize = 2;

/// One layer. The shape of `layers` in `-o json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LayerRecord {
    id: String,
    size_bytes: u64,
    /// Whether the size is an estimate, because the runtime does not report it.
    estimated: bool,
    /// The other images that have it: a name of each, else its ID.
    shared_with: Vec<String>,
    /// The build step, if the image has a history.
    created_by: Option<String>,
    /// The file that the layer of an artifact is.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
}

/// The layers of the image with this ID, the lowest first. `None` if the backend does not report them.
pub(super) fn of(
    id: &str,
    listed: &ImagesResponse,
    info: &BTreeMap<String, Value>,
) -> Option<Vec<LayerRecord>> {
    let layers_of = |image: &Image| image.details.clone().unwrap_or_default().layers;
    let mine = layers_of(listed.images.iter().find(|image| image.id == id)?);
    let config = config(info);
    if mine.is_empty() && !config.is_some_and(has_no_layers) {
        return None;
    }
    let steps = config.map(build_steps).unwrap_or_default();
    let is_archive = |index: &&u32| {
        listed.layers.get(**index as usize).is_some_and(|layer| layer.id.starts_with("archive "))
    };
    let archives = mine.iter().filter(is_archive).count();
    let steps = if steps.len() + archives == mine.len() { steps } else { Vec::new() };
    // The paths of one blob follow each other.
    let mut files = info.get("artifact").and_then(|artifact| artifact["files"].as_array()).cloned();
    if let Some(files) = &mut files {
        files.dedup_by(|file, before| file["digest"] == before["digest"]);
    }
    let files = files.filter(|files| files.len() == mine.len());
    let others: Vec<_> =
        listed.images.iter().filter(|other| other.id != id).map(|other| (other, layers_of(other))).collect();
    let record = |(at, index): (usize, &u32)| {
        let layer = listed.layers.get(*index as usize)?;
        let sharing = others.iter().filter(|(_, layers)| layers.contains(index));
        let mut shared_with: Vec<_> = sharing.map(|(other, _)| name_of(other)).collect();
        shared_with.sort();
        Some(LayerRecord {
            id: layer.id.clone(),
            size_bytes: layer.size_bytes,
            estimated: layer.estimated,
            shared_with,
            created_by: steps.get(at).cloned(),
            path: files.as_ref().and_then(|files| files[at]["path"].as_str().map(str::to_owned)),
        })
    };
    Some(mine.iter().enumerate().filter_map(record).collect())
}

fn name_of(image: &Image) -> String {
    image.repo_tags.iter().chain(&image.repo_digests).next().unwrap_or(&image.id).clone()
}

/// The config of the image, if the backend has it.
fn config(info: &BTreeMap<String, Value>) -> Option<&Value> {
    info.get("info").map(|info| &info["imageSpec"]).or_else(|| info.get("config"))
}

/// Whether the config lists no layer, as that of an image of metadata alone does.
fn has_no_layers(config: &Value) -> bool {
    let rootfs = config["rootfs"].as_object();
    rootfs.is_some_and(|rootfs| rootfs.get("diff_ids").and_then(Value::as_array).is_none_or(Vec::is_empty))
}

/// The build step of each layer, as the config has them.
fn build_steps(config: &Value) -> Vec<String> {
    let with_layer =
        config["history"].as_array().into_iter().flatten().filter(|step| step["empty_layer"] != true);
    with_layer.map(|step| step["created_by"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Prints the layers as a tree below the image.
pub(super) fn print(title: &str, layers: Option<&[LayerRecord]>, out: &Printer) {
    out.heading(title);
    let layers = match layers {
        None => return out.line("   layers unknown: the backend does not report them"),
        Some([]) => return out.line("   no layers"),
        Some(layers) => layers,
    };
    let is_artifact = layers.iter().any(|layer| layer.path.is_some());
    let origin = if is_artifact { "FILE" } else { "CREATED BY" };
    let mut table = TextTable::new(["LAYER", "SIZE", "SHARED WITH", origin]).optional(["CREATED BY"]);
    for (at, layer) in layers.iter().enumerate() {
        let mark = if at + 1 == layers.len() { "\u{2514}\u{2500} " } else { "\u{251c}\u{2500} " };
        let about = if layer.estimated { "~" } else { "" };
        table.row([
            format!("{mark}{}", short(&layer.id)),
            format!("{about}{}", size::bytes(layer.size_bytes)),
            shared(&layer.shared_with),
            match &layer.path {
                Some(path) => path.clone(),
                None => layer.created_by.as_deref().map(first_line).unwrap_or_default(),
            },
        ]);
    }
    out.table(&table);
}

fn shared(with: &[String]) -> String {
    match with {
        [] => "only this image".to_owned(),
        few if few.len() <= NAMED => few.join(", "),
        many => format!("{} and {} more", many[..NAMED].join(", "), many.len() - NAMED),
    }
}

/// A build step on one line of bounded length.
fn first_line(step: &str) -> String {
    const LENGTH: usize = 60;
    let step = step.split_whitespace().collect::<Vec<_>>().join(" ");
    let step = step.strip_prefix("/bin/sh -c #(nop) ").unwrap_or(&step);
    match step.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}\u{2026}", &step[..end]),
        None => step.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use larder_api::v1::{ImageLayer, ImageListDetails};

    use super::*;

    #[test]
    fn each_layer_has_its_size_its_build_step_and_the_images_that_share_it() {
        let image = |id: &str, tags: &[&str], layers: &[u32]| Image {
            id: id.to_owned(),
            repo_tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            details: Some(ImageListDetails { layers: layers.to_vec(), ..ImageListDetails::default() }),
            ..Image::default()
        };
        let layer = |id: &str, size_bytes| ImageLayer { id: id.to_owned(), size_bytes, estimated: false };
        let listed = ImagesResponse {
            images: vec![image("a", &["a:1"], &[1, 0]), image("b", &["b:1"], &[1]), image("c", &[], &[1])],
            layers: vec![layer("top", 5), layer("base", 10)],
            ..ImagesResponse::default()
        };
        let config = serde_json::json!({"history": [
            {"created_by": "/bin/sh -c #(nop) ADD file:1 in / "},
            {"created_by": "ENV A=1", "empty_layer": true},
            {"created_by": "RUN  make\n  install"},
        ]});
        for info in [("config", config.clone()), ("info", serde_json::json!({"imageSpec": config}))] {
            let found = of("a", &listed, &BTreeMap::from([(info.0.to_owned(), info.1)])).unwrap();
            assert_eq!(found.iter().map(|layer| layer.id.as_str()).collect::<Vec<_>>(), ["base", "top"]);
            assert_eq!(found[0].shared_with, ["b:1", "c"]);
            assert_eq!(found[1].shared_with, [""; 0]);
            assert_eq!(found[1].created_by.as_deref().map(first_line).unwrap(), "RUN make install");
            assert_eq!(found[0].created_by.as_deref().map(first_line).unwrap(), "ADD file:1 in /");
        }
        assert_eq!(of("a", &listed, &BTreeMap::new()).unwrap()[0].created_by, None);
        assert_eq!(of("nowhere", &listed, &BTreeMap::new()), None);
    }

    #[test]
    fn few_sharing_images_are_named() {
        let with = |names: &[&str]| shared(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(with(&[]), "only this image");
        assert_eq!(with(&["a:1", "b:1"]), "a:1, b:1");
        assert_eq!(with(&["a:1", "b:1", "c:1"]), "a:1, b:1 and 1 more");
    }
}
