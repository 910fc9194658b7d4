//! Artifacts in lists, in `inspect` and in keep rules: by their type, with their files.

use serde_json::{Value, json};

use super::artifacts::ArtifactWorld;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const WEIGHTS: &str = "application/vnd.cncf.model.weight.v1.raw";
const MODEL_CONFIG: &str = "application/vnd.cncf.model.config.v1+json";
const MODEL: &str = "application/vnd.cncf.model.manifest.v1+json";

/// Puts a manifest with these fields. Returns its name.
fn put_manifest(world: &ArtifactWorld, name: &str, fields: &Value) -> String {
    let mut document = fields.clone();
    document["schemaVersion"] = 2.into();
    document["mediaType"] = MANIFEST.into();
    let (repository, tag) = name.rsplit_once(':').unwrap();
    world.registry.put_manifest(repository, tag, MANIFEST, document.to_string());
    world.registry.image(name)
}

#[test]
fn inspect_shows_annotations_and_the_files_of_an_artifact() {
    let world = ArtifactWorld::new();
    let weights = b"weights".repeat(700);
    let layer = world.layer(
        WEIGHTS,
        &weights,
        &json!({
            "org.cncf.model.filepath": "model\u{1b}[2J.bin",
            "org.cncf.model.file.metadata+json": r#"{"mode": 416}"#,
        }),
    );
    let tar = larder_testkit::archive::TarBuilder::new().finish();
    let archive = world.layer("application/vnd.cncf.model.weight.config.v1.tar", &tar, &json!({}));
    let config = json!({
        "descriptor": { "name": "small", "family": "llama3" },
        "config": { "architecture": "transformer", "paramSize": "8b", "precision": "bf16" },
    });
    let config = world.layer(MODEL_CONFIG, config.to_string().as_bytes(), &json!({}));
    let name = put_manifest(
        &world,
        "models/small:v1",
        &json!({ "artifactType": MODEL, "config": config, "layers": [layer, archive],
            "annotations": { "org.opencontainers.image.vendor": "example" } }),
    );
    world.larder(&["pull", &name]).expect(0);
    let found = world.larder(&["inspect", &name]).expect(0).json();
    let info = &found[0]["info"];
    assert_eq!(info["annotations"], json!({ "org.opencontainers.image.vendor": "example" }));
    let expected = json!({ "type": MODEL, "files": [
        { "path": "model\u{1b}[2J.bin", "mode": "0640", "sizeBytes": weights.len(), "digest": layer["digest"],
            "mediaType": WEIGHTS },
        { "path": null, "mode": null, "sizeBytes": tar.len(), "digest": archive["digest"],
            "mediaType": archive["mediaType"] },
    ], "model": {
        "name": "small", "family": "llama3", "architecture": "transformer", "format": null, "paramSize": "8b",
        "precision": "bf16", "quantization": null,
    } });
    assert_eq!(info["artifact"], expected);
    let layers = world.larder(&["inspect", "--layers", &name]).expect(0).stdout;
    assert!(layers.contains("FILE") && layers.contains("model\\u{1b}[2J.bin"), "{layers}");

    // An image has annotations as well.
    let config = r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
    let config = world.layer("application/vnd.oci.image.config.v1+json", config.as_bytes(), &json!({}));
    let image = json!({ "config": config, "layers": [], "annotations": { "built-by": "hand" } });
    let name = put_manifest(&world, "library/app:1", &image);
    world.larder(&["pull", &name]).expect(0);
    let found = world.larder(&["inspect", &name]).expect(0).json();
    assert_eq!(found[0]["info"]["annotations"], json!({ "built-by": "hand" }));
    assert_eq!(found[0]["info"]["artifact"], Value::Null);
}

#[test]
fn types_are_words_in_lists_filters_and_keep_rules() {
    let world = ArtifactWorld::new();
    let empty = world.layer("application/vnd.oci.empty.v1+json", b"{}", &json!({}));
    let helm = world.layer("application/vnd.cncf.helm.config.v1+json", b"{\"name\":\"c\"}", &json!({}));
    let config = r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
    let config = world.layer("application/vnd.oci.image.config.v1+json", config.as_bytes(), &json!({}));
    let file = |text: &str| world.layer("application/octet-stream", text.as_bytes(), &json!({}));
    let put = |name: &str, fields: Value| put_manifest(&world, name, &fields);
    let model =
        put("models/small:v1", json!({ "artifactType": MODEL, "config": empty, "layers": [file("m")] }));
    let chart = put("charts/web:1", json!({ "config": helm, "layers": [file("c")] }));
    let other = put("other:1", json!({ "artifactType": "text/x", "config": empty, "layers": [file("o")] }));
    let image = put("app:1", json!({ "config": config, "layers": [] }));
    for name in [&model, &chart, &other, &image] {
        world.larder(&["pull", "-q", name]).expect(0);
    }
    let listed = world.larder(&["images", "-o", "json"]).expect(0).json();
    let types: Vec<_> = listed.as_array().unwrap().iter().map(|row| row["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["image", "chart", "model", "text/x"]);
    for (filter, expected) in
        [("model", vec![&*model]), ("image", vec![&*image]), ("text/*", vec![&*other]), ("sbom", vec![])]
    {
        let listed =
            world.larder(&["images", "-f", &format!("type={filter}"), "-o", "name"]).expect(0).stdout;
        assert_eq!(listed.lines().collect::<Vec<_>>(), expected, "{filter}");
    }
    let has_row = |output: &str, cells: &[&str]| {
        let is_row = |line: &str| cells.iter().all(|cell| line.split_whitespace().any(|word| word == *cell));
        assert!(output.lines().any(is_row), "{cells:?} in {output}");
    };
    let usage = world.larder(&["df", "-v"]).expect(0).stdout;
    has_row(&usage, &["IMAGE", "TYPE", "SIZE"]);
    has_row(&usage, &[&chart, "chart"]);
    let why = world.larder(&["explain", &model]).expect(0).stdout;
    assert!(why.contains(&format!("  type:       model ({MODEL})\n")), "{why}");
    assert!(!world.larder(&["explain", &image]).expect(0).stdout.contains("type:"));

    let added = world.larder(&["keep", "--type", "model", "--ttl", "1h"]).expect(0).stdout;
    assert!(added.contains("added keep rule: type model, for 1h0m0s after its last use"), "{added}");
    let plan = world.larder(&["prune", "-a", "-n"]).expect(0).stdout;
    has_row(&plan, &["REMOVE", "TYPE"]);
    has_row(&plan, &[&chart, "chart"]);
    world.larder(&["prune", "-a", "-f"]).expect(0);
    let left = world.larder(&["images", "-o", "name"]).expect(0).stdout;
    assert_eq!(left.trim(), model, "the rule keeps the model");
    world.larder(&["unkeep", "model"]).expect(0);
    world.larder(&["prune", "-a", "-f"]).expect(0);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout, "");
}

#[test]
fn inspect_lists_what_refers_to_an_image() {
    const SBOM: &str = "application/spdx+json";
    let world = ArtifactWorld::new();
    let empty = world.layer("application/vnd.oci.empty.v1+json", b"{}", &json!({}));
    let config = r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
    let config = world.layer("application/vnd.oci.image.config.v1+json", config.as_bytes(), &json!({}));
    let name = put_manifest(&world, "app:1", &json!({ "config": config, "layers": [] }));
    let none = world.larder(&["inspect", "--referrers", &name]).expect(0).stdout;
    assert!(none.contains("no referrers"), "{none}");

    let asked = world.larder(&["inspect", "--referrers", "-o", "json", &name]).expect(0).json();
    let subject = asked[0]["subjects"][0]["digest"].as_str().unwrap().to_owned();
    let refer = |tag: &str, fields: Value| {
        let mut fields = fields;
        fields["config"] = empty.clone();
        fields["layers"] = json!([]);
        fields["subject"] = json!({ "digest": subject });
        put_manifest(&world, &format!("app:{tag}"), &fields);
    };
    let long = "v".repeat(5000);
    let annotations = json!({ "org.opencontainers.image.created": "2020-01-01T00:00:00Z", "evil": "\u{1b}[2J", "long": long });
    refer("sbom", json!({ "artifactType": SBOM, "annotations": annotations }));
    refer("odd", json!({ "artifactType": "odd/\u{1b}[31m" }));
    let tag = format!("{}.sig", subject.replace(':', "-"));
    put_manifest(
        &world,
        &format!("app:{tag}"),
        &json!({ "config": empty, "layers": [], "annotations": { "a": "b" } }),
    );
    let table = world.larder(&["inspect", "--referrers", &name]).expect(0).stdout;
    assert!(table.contains(&format!("sha256-{}.sig", &subject[7..20])), "{table}");
    world.registry.serve_referrers(1);

    let table = world.larder(&["inspect", "--referrers", &name]).expect(0).stdout;
    assert!(table.contains("sbom") && table.contains("odd/\\u{1b}[31m"), "{table}");
    assert!(!table.contains('\u{1b}'), "{table:?}");
    let record = world
        .larder(&["inspect", "--referrers", "--artifact-type", "sbom", "-o", "json", &name])
        .expect(0)
        .json();
    let referrers = record[0]["subjects"][0]["referrers"].as_array().unwrap();
    assert_eq!(referrers.len(), 1, "{record}");
    assert_eq!(
        (
            &referrers[0]["type"],
            &referrers[0]["artifactType"],
            &referrers[0]["created"],
            &referrers[0]["tag"]
        ),
        (&json!("sbom"), &json!(SBOM), &json!("2020-01-01T00:00:00Z"), &Value::Null)
    );
    assert!(referrers[0]["annotations"]["long"].as_str().unwrap().len() < 1100);
    let exact = ["inspect", "--referrers", "--artifact-type", SBOM, "-o", "json", &name];
    assert_eq!(world.larder(&exact).expect(0).json(), record);

    let missing = world.larder(&["inspect", "--referrers", &world.registry.image("none:1"), &name]).expect(1);
    assert!(missing.stderr.contains("not found") && missing.stdout.contains("sbom"), "{missing:?}");
    let id = world.larder(&["inspect", "--referrers", &subject]).expect(2);
    assert!(id.stderr.contains("is an ID"), "{id:?}");
}
